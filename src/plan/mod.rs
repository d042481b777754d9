//! Plans: what an attention call computes, decided on the CPU from lengths alone, before any kernel runs.
//!
//! Plans are pure data. An [`AttendPlan`] says which queries see which spans. The CPU and wgpu cut it into a [`Work`]:
//! runs of tokens of about equal size for some neighbouring queries, each with rows of attention states to write, and
//! which rows the merge joins for a query. CUDA cuts the same plan for itself.
//!
//! What a step stores is a [`WriteTable`]: tokens, copies of pages and full windows, in a [`WriteLayout`] that says how
//! much of each there may be.

use crate::{Error, Result};

mod attend;
mod blocks;
mod cut;
mod grown;
#[cfg(feature = "wgpu")]
mod grown_work;
mod larger_shard;
mod layer_attention;
mod pages;
mod placement;
mod rows;
mod runs;
mod scoring;
mod split;
mod spread;
mod state_rows;
mod tokens;
mod visible;
mod work;
mod write;

pub use crate::counts::{MOST_LAYERS, MOST_TOKENS};
pub use attend::{AttendPlan, PlannedSpan, SpanView, StoreFormat, StorePart, StoreView};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use blocks::BlockQueries;
#[cfg(feature = "wgpu")]
pub(crate) use blocks::OnlyStates;
pub(crate) use grown::SpanIndex;
#[cfg(feature = "wgpu")]
pub(crate) use grown_work::GrowingWork;
pub use kvpack_device::{ElementType, Elements};
pub use larger_shard::LargerShard;
pub(crate) use larger_shard::check_larger;
pub use layer_attention::LayerAttention;
pub use pages::{Page, PageAllocator};
pub use placement::{MOST_RANKS, Placement, RankShare};
pub use rows::{QueryLayout, RowLayout, TokenRange};
pub use runs::{PlannedRun, QueryRun};
pub use scoring::Scoring;
pub use split::Split;
pub use tokens::{IndexShape, Rows, TokenIndices};
pub use visible::{TreeMask, Visible};
pub(crate) use write::BackendStore;
#[cfg(feature = "wgpu")]
pub(crate) use write::windows_layout;
pub use write::{
    KeyMean, LayerWrites, MOST_MEAN_TOKENS, PageCopy, StoreCapacity, StoreWrites, TokenWrite, WindowCapacity,
    WindowMove, WriteLayout, WriteTable,
};
pub(crate) use write::{append_table, copy_table, windows_table};
#[cfg(feature = "cuda")]
pub(crate) use {
    blocks::{Block, Part, Spread, blocks},
    state_rows::StateCounts,
};
// How kernels take a plan, word by word. Public for tests of the backends.
#[doc(hidden)]
pub use {
    state_rows::StateRows,
    visible::{RowLimits, Seen},
    work::{Dispatch, ItemMask, PreparedRow, StoreWork, Work, WorkItem},
    write::{TableSection, WriteEntry},
};

fn reject<T>(what: &'static str, reason: String) -> Result<T> {
    Err(Error::Plan { what, reason })
}

fn limit(what: &str, needed: u64, hint: &'static str) -> Result<()> {
    let allowed = u64::from(u32::MAX);
    if needed <= allowed { Ok(()) } else { Err(Error::Limit { what: what.into(), needed, allowed, hint }) }
}
