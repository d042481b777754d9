//! Tables of calls that are a part of a step alone: tokens that are appended, a page that is copied, windows that are
//! packed.

use std::sync::Arc;

use super::layout::{StoreCapacity, WindowCapacity, WriteLayout};
use super::table::WriteTable;
use super::writes::{LayerWrites, PageCopy, TokenWrite, WindowMove};
use crate::format::AttentionShape;
use crate::{Error, Result};

/// The table of a step that appends tokens of dense tensors with `rows` tokens to one store.
///
/// # Errors
/// [`Error::NoTokens`] for none, and those of [`WriteLayout::new`] and [`WriteTable::set`].
pub(crate) fn append_table(
    shape: &AttentionShape,
    store: StoreCapacity,
    rows: usize,
    writes: &[TokenWrite],
) -> Result<WriteTable> {
    if writes.is_empty() {
        return Err(Error::NoTokens { what: "append", hint: "pass at least one token" });
    }
    let layout = Arc::new(WriteLayout::new(*shape, rows, vec![store], vec![])?);
    filled(&layout, |step| step.stores[0].tokens.extend_from_slice(writes))
}

/// The table of a step that copies a page of one store.
///
/// # Errors
/// Those of [`WriteLayout::new`] and [`WriteTable::set`].
pub(crate) fn copy_table(shape: &AttentionShape, store: StoreCapacity, copy: PageCopy) -> Result<WriteTable> {
    let layout = Arc::new(WriteLayout::new(*shape, 0, vec![store], vec![])?);
    filled(&layout, |step| step.stores[0].copies.push(copy))
}

/// The layout of a step that packs windows of the first store into the second.
///
/// # Errors
/// Those of [`WriteLayout::new`].
pub(crate) fn windows_layout(
    shape: &AttentionShape,
    stores: [StoreCapacity; 2],
    windows: usize,
) -> Result<Arc<WriteLayout>> {
    let pair = WindowCapacity { from: 0, to: 1, windows, newer: 0 };
    WriteLayout::new(*shape, 0, stores.into(), vec![pair]).map(Arc::new)
}

/// The table of such a step.
///
/// # Errors
/// Those of [`windows_layout`] and [`WriteTable::set`].
pub(crate) fn windows_table(
    shape: &AttentionShape,
    stores: [StoreCapacity; 2],
    windows: &[WindowMove],
) -> Result<WriteTable> {
    filled(&windows_layout(shape, stores, windows.len())?, |step| step.windows[0].extend_from_slice(windows))
}

fn filled(layout: &Arc<WriteLayout>, write: impl FnOnce(&mut LayerWrites)) -> Result<WriteTable> {
    let (mut table, mut step) = (WriteTable::new(layout), LayerWrites::of(layout));
    write(&mut step);
    table.set(&step)?;
    Ok(table)
}
