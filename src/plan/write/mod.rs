//! What a step stores, as a table of words that all layers of a model share.
//!
//! All layers have the same page tables: the same pages, slots and rows. A step's writes are therefore decided once,
//! and every layer's kernels read the same small table:
//!
//! - a [`WriteLayout`] sets the limits of what a step may write, and lists the pages, slots and rows that exist. It is
//!   created with the cache, and again when the cache grows;
//! - a [`LayerWrites`] lists the writes of one step: copies of shared open pages, then centres of sequences that begin,
//!   then tokens, then full windows that are packed;
//! - a [`WriteTable`] holds these writes as words, checked against the layout: kernels bound to the layout stay in
//!   bounds for every table of it.

mod check;
mod entry;
#[cfg(test)]
mod examples;
mod layout;
mod moved_on;
mod single;
mod table;
mod writes;

pub use entry::WriteEntry;
pub(crate) use layout::BackendStore;
pub use layout::{MOST_MEAN_TOKENS, StoreCapacity, TableSection, WindowCapacity, WriteLayout};
#[cfg(feature = "wgpu")]
pub(crate) use single::windows_layout;
pub(crate) use single::{append_table, copy_table, windows_table};
pub use table::WriteTable;
pub use writes::{KeyMean, LayerWrites, PageCopy, StoreWrites, TokenWrite, WindowMove};
