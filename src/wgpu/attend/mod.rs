//! The kernels of a decode step: they prepare a query, attend to segments, and merge their states.

mod arithmetic;
#[expect(clippy::module_inception, reason = "the file of a kernel has the kernel's name")]
mod attend;
mod attend_buffers;
mod attend_launches;
mod attend_matrix;
mod attend_run;
mod attend_step;
mod attend_values;
mod block_queries;
mod code_bytes;
mod decided_launches;
mod group_ranges;
mod merge_pair;
mod merge_parts;
mod merge_states;
mod parts;
mod prepare_query;
mod recipe;
mod scratch;
mod shorter_items;
mod specialisation;
mod state_buffers;
mod uncentre_lse;

pub(super) use arithmetic::arithmetic;
pub use attend_buffers::AttendTensors;
pub(super) use attend_run::full_runs;
pub use attend_step::AttendStep;
pub(super) use attend_step::StepOptions;
pub(super) use block_queries::LEAST_SPREAD;
pub(super) use decided_launches::RecentLaunches;
pub use merge_pair::MergePairPlan;
pub use merge_parts::MergePartsPlan;
pub(super) use recipe::LseOutput;
pub(super) use scratch::Sizing;
pub use scratch::{Scratch, ScratchBytes};
pub use state_buffers::STATE_BUFFERS;
pub use uncentre_lse::UncentreLsePlan;

use super::device::Variant;

/// Kernel variants that depend only on the head dimension.
pub(super) fn variants() -> Vec<Variant> {
    [merge_pair::variants(), merge_parts::variants(), uncentre_lse::variants()].concat()
}
