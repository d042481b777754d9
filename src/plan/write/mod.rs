//! What a step stores, as a table of words that serves all layers of a model.
//!
//! The page tables of all layers are the same: the same pages, slots and rows. So what a step stores is decided once,
//! and every layer's kernels read the same small table:
//!
//! - a [`WriteLayout`] says how much a step may write at most, and which pages, slots and rows there are: made when the
//!   cache is, and again when it grows;
//! - a [`LayerWrites`] says what one step writes: copies of shared open pages, then centres of sequences that begin,
//!   then tokens, then full windows that are packed;
//! - a [`WriteTable`] holds the words of both, checked: whatever is bound to the layout stays in bounds for
//!   every table of it.

mod entry;
mod layout;
mod table;
mod writes;

pub use entry::WriteEntry;
pub(crate) use layout::BackendStore;
pub use layout::{MOST_MEAN_TOKENS, StoreCapacity, TableSection, WindowCapacity, WriteLayout};
pub use table::WriteTable;
pub use writes::{KeyMean, LayerWrites, PageCopy, StoreWrites, TokenWrite, WindowMove};
