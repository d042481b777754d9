//! What the kernels of a step are bound to, and a dispatch of one of them.

use super::non_finite_flags::NonFiniteFlags;
use super::step_memory::StepMemory;
use super::tile_call::TileCall;
use crate::backend::StepInput;
use crate::plan::{Section, StepLayout, StepTable};
use crate::wgpu::device::launch::{FLAT_WORKGROUP, Launch, flat_grid, folded_grid};
use crate::wgpu::device::{Kernels, Store, Tensor, Variant};
use crate::{Error, Result};

/// What launches of a step are bound to.
pub(super) struct Binder<'a> {
    pub kernels: &'a Kernels,
    pub layout: &'a StepLayout,
    pub stores: &'a [&'a Store],
    pub memory: &'a StepMemory,
    pub input: Option<StepInput<'a, Tensor, NonFiniteFlags>>,
    pub limits: wgpu::Limits,
}

impl<'a> Binder<'a> {
    /// The keys and values of kernels that read tokens.
    pub fn input(&self) -> Result<StepInput<'a, Tensor, NonFiniteFlags>> {
        let missing =
            || Error::Plan { what: "step", reason: "it reads tokens, and was given no keys and values".into() };
        self.input.ok_or_else(missing)
    }

    /// Binds a kernel that takes `per_entry` invocations for every entry of a section.
    pub fn launch(
        &self,
        variant: &Variant,
        call: TileCall,
        buffers: &[(&str, wgpu::BufferBinding<'_>)],
        (section, per_entry): (Section, u64),
    ) -> Result<StepLaunch> {
        let grid = flat_grid(self.layout.capacity(section) as u64 * per_entry, &self.limits)?;
        let shards = call.shards;
        let call = call.upload(self.kernels.device(), &[])?;
        let mut buffers = buffers.to_vec();
        buffers.push(("call", call.as_entire_buffer_binding()));
        let launch = Launch::new(self.kernels, variant, &buffers, grid)?;
        Ok(StepLaunch { launch, section, shards, per_entry })
    }
}

/// A dispatch over the entries of a section that name certain shards.
#[derive(Clone, Debug)]
pub(super) struct StepLaunch {
    launch: Launch,
    section: Section,
    shards: u32,
    per_entry: u64,
}

impl StepLaunch {
    /// Encodes it for the entries that a table has, if there are such. A grid has at most `most` workgroups
    /// in a dimension.
    pub fn encode(&self, table: &StepTable, most: u64, pass: &mut wgpu::ComputePass<'_>) {
        if table.names_shards(self.section, self.shards) {
            let invocations = table.count(self.section) as u64 * self.per_entry;
            self.launch.encode_grid(pass, folded_grid(invocations.div_ceil(u64::from(FLAT_WORKGROUP)), most));
        }
    }
}
