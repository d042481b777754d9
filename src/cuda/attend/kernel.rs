//! The kernel of a segment's items.

use cudarc::driver::LaunchConfig;

use super::run_variant::RunVariant;
use super::variant::{AttendVariant, ScorePass};
use crate::Result;
use crate::cuda::Cuda;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::launch::KernelLaunch;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SegmentKernel {
    /// `attend`: single queries, or a few of a run.
    Attend(AttendVariant),
    /// `attend_run` or `attend_run_pipelined`: many queries of a run.
    Run(RunVariant),
}

impl SegmentKernel {
    /// Its name.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Attend(_) => "attend",
            Self::Run(variant) => variant.name(),
        }
    }

    /// Number of blocks that share the query heads of a KV head, of which there are `group` per query.
    pub(super) const fn chunks(&self, group: usize) -> usize {
        match self {
            Self::Attend(variant) => (group * variant.queries).div_ceil(variant.block_heads()),
            Self::Run(_) => 1,
        }
    }

    /// Maximum number of queries of an item.
    pub(super) const fn most_queries(&self, group: usize) -> usize {
        match self {
            Self::Attend(variant) => variant.queries,
            Self::Run(variant) => variant.item_rows() / group,
        }
    }

    /// Parts that a block takes the rows of an item in.
    pub(super) const fn row_parts(&self, group: usize) -> usize {
        match self {
            Self::Attend(_) => 1,
            Self::Run(variant) => variant.row_parts(group),
        }
    }

    /// The kernel whose blocks also store the tokens of the step, if there is one.
    pub(super) fn storing(&self, group: usize, facts: &DeviceFacts) -> Option<Self> {
        match self {
            Self::Attend(variant) => variant.storing(group, facts).map(Self::Attend),
            Self::Run(_) => None,
        }
    }

    /// Whether its blocks take works from a counter.
    pub(super) const fn takes_works(&self) -> bool {
        matches!(self, Self::Run(variant) if variant.takes_works())
    }

    /// The variant whose tiles are unpacked by a launch of its own.
    pub(super) fn unpacked(&self) -> Option<&RunVariant> {
        match self {
            Self::Run(variant) if variant.unpacks_first() => Some(variant),
            _ => None,
        }
    }

    /// True if the items of a query, or of queries that move, may form clusters.
    pub(super) const fn forms_clusters(&self) -> bool {
        matches!(self, Self::Attend(variant) if variant.queries == 1 || variant.moving)
    }

    /// The number of blocks for `blocks` times the work of one: where they take one work after the other, one for each
    /// multiprocessor.
    pub(super) fn blocks(&self, blocks: usize, multiprocessors: usize) -> usize {
        match self {
            Self::Run(variant) if variant.takes_works() => blocks.min(multiprocessors.max(1)),
            _ => blocks,
        }
    }

    /// The kernel for `blocks` blocks, compiled unless it was compiled before.
    pub(super) fn launch(&self, backend: &Cuda, pass: ScorePass, blocks: usize, cluster: u32) -> Result<KernelLaunch> {
        let (function, threads, shared, overlaps) = match self {
            Self::Attend(of) => (of.function(backend, pass)?, of.warps * 32, of.shared_bytes(), of.bulk_copies),
            Self::Run(of) => (of.function(backend, pass)?, of.threads(), of.shared_bytes(), of.overlaps()),
        };
        let config = LaunchConfig {
            grid_dim: (blocks as u32, 1, 1),
            block_dim: (threads as u32, 1, 1),
            shared_mem_bytes: shared as u32,
        };
        Ok(KernelLaunch { name: self.name(), function, config, cluster, overlaps })
    }

    /// The kernel that merges the states of `items` items of up to `queries` queries, if the items do not do so themselves.
    pub(super) fn merge(
        &self,
        backend: &Cuda,
        pass: ScorePass,
        items: usize,
        kv_heads: usize,
        queries: usize,
    ) -> Result<Option<KernelLaunch>> {
        let Self::Run(variant) = self else { return Ok(None) };
        let config = LaunchConfig {
            grid_dim: (items as u32, queries as u32, kv_heads as u32),
            block_dim: (variant.merging_threads() as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        let (function, overlaps) = (variant.merge_function(backend, pass)?, variant.overlaps());
        Ok(Some(KernelLaunch { name: "merge_run", function, config, cluster: 1, overlaps }))
    }
}
