//! The resources of a step's kernels, and a dispatch of one of them.

use super::non_finite_flags::NonFiniteFlags;
use super::tile_call::TileCall;
use super::write_memory::WriteMemory;
use crate::backend::WriteInput;
use crate::plan::{TableSection, WriteLayout, WriteTable};
use crate::wgpu::device::launch::{FLAT_WORKGROUP, Launch, flat_grid, folded_grid};
use crate::wgpu::device::{Kernels, Store, Tensor, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// The resources that launches of a step are bound to.
pub(super) struct Binder<'a> {
    pub kernels: &'a Kernels,
    pub layout: &'a WriteLayout,
    pub stores: &'a [&'a Store],
    pub memory: &'a WriteMemory,
    pub input: Option<WriteInput<'a, Tensor, NonFiniteFlags>>,
    pub limits: wgpu::Limits,
}

impl<'a> Binder<'a> {
    /// The keys and values of kernels that read tokens.
    pub fn input(&self) -> Result<WriteInput<'a, Tensor, NonFiniteFlags>> {
        let missing =
            || Error::Plan { what: "step", reason: "it reads tokens, but no keys and values were given".into() };
        self.input.ok_or_else(missing)
    }

    /// Binds a kernel that takes `per_entry` invocations for every entry of a section.
    pub fn launch(&self, kernel: WriteKernel<'_>, of: (TableSection, u64)) -> Result<WriteLaunch> {
        let WriteKernel { variant, call, mut buffers } = kernel;
        let arguments = call.upload(self.kernels.device(), &[])?;
        buffers.push(("call", arguments.as_entire_buffer_binding()));
        self.bind(&variant, call.shards, &buffers, 1, of)
    }

    /// Binds two kernels that take the same number of invocations per entry, in one dispatch.
    pub fn launch_beside(
        &self,
        kernel: WriteKernel<'_>,
        other: WriteKernel<'_>,
        of: (TableSection, u64),
    ) -> Result<WriteLaunch> {
        let device = self.kernels.device();
        let arguments = [kernel.call.upload(device, &[])?, other.call.upload(device, &[])?];
        let [call, other_call] = arguments.each_ref().map(|buffer| ("call", buffer.as_entire_buffer_binding()));
        let others = other.buffers.into_iter().chain([other_call]);
        let others: Vec<_> = others.map(|(name, buffer)| (SHADERS.other_buffer(name), buffer)).collect();
        let others = others.iter().map(|(name, buffer)| (name.as_str(), buffer.clone()));
        let buffers: Vec<_> = kernel.buffers.into_iter().chain([call]).chain(others).collect();
        self.bind(&kernel.variant.beside(other.variant), kernel.call.shards, &buffers, 2, of)
    }

    fn bind(
        &self,
        variant: &Variant,
        shards: u32,
        buffers: &[(&str, wgpu::BufferBinding<'_>)],
        kernel_count: u32,
        (section, per_entry): (TableSection, u64),
    ) -> Result<WriteLaunch> {
        let [x, y, _] = flat_grid(self.layout.capacity(section) as u64 * per_entry, &self.limits)?;
        let launch = planned(self.kernels, variant, buffers, [x, y, kernel_count])?;
        Ok(WriteLaunch { launch, section, shards, per_entry, kernel_count })
    }
}

/// A kernel of a step, its arguments and its buffers.
pub(super) struct WriteKernel<'a> {
    pub variant: Variant,
    pub call: TileCall,
    pub buffers: Vec<(&'static str, wgpu::BufferBinding<'a>)>,
}

/// A dispatch over the entries of a section that name certain shards.
#[derive(Clone, Debug)]
pub(super) struct WriteLaunch {
    launch: Launch,
    section: TableSection,
    shards: u32,
    per_entry: u64,
    /// Number of kernels in the dispatch. Each has a grid of its own.
    kernel_count: u32,
}

impl WriteLaunch {
    /// Encodes the dispatch for the entries of a table, if there are any. The table begins `offset` bytes after the one
    /// that is bound. A grid has no more than `most` workgroups in a dimension.
    pub fn encode(&self, (table, offset): (&WriteTable, u32), most: u64, pass: &mut wgpu::ComputePass<'_>) {
        if table.names_shards(self.section, self.shards) {
            let invocations = table.count(self.section) as u64 * self.per_entry;
            let [x, y, _] = folded_grid(invocations.div_ceil(u64::from(FLAT_WORKGROUP)), most);
            // SAFETY: The kernels compare their number with the entries of the table, and keep all checks, because they
            // bind the table of a step (docs/in-bounds.md, A3).
            unsafe { self.launch.encode_grid(pass, [x, y, self.kernel_count], offset) };
        }
    }
}
