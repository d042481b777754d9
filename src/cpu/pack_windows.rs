//! Kernel `pack_windows`: packs full f16 pages into pages of another store.

use super::store::CpuStore;
use super::{dequantize, quantize};
use crate::Result;
use crate::backend::{SpanRead, SpanWrite};
use crate::format::{KeyOrValue, TILE_TOKENS};
use crate::plan::{Elements, RowLayout, TokenRange, WindowMove, windows_table};

/// Packs full pages of an f16 store into another store, each as a span of its own. The result is that of
/// [`dequantize`](super::dequantize()) and [`quantize`](super::quantize()), page by page.
///
/// # Errors
/// [`Error::Plan`] when the first store is not f16 or its shape differs from the second, pages or slots do not exist,
/// or two windows go to one place, [`Error::Limit`] when there are more than a step counts. On an error both stores are
/// unchanged.
///
/// [`Error::Plan`]: crate::Error::Plan
/// [`Error::Limit`]: crate::Error::Limit
pub fn pack_windows(from: &CpuStore, to: &mut CpuStore, windows: &[WindowMove]) -> Result<()> {
    let stores = [from.step_capacity(0, 0), to.step_capacity(0, 0)];
    let table = windows_table(to.shape(), stores, windows)?;
    from.check_step(table.layout(), 0)?;
    to.check_step(table.layout(), 1)?;
    pack_pages(from, to, windows)
}

/// Packs pages that were checked to exist.
pub(super) fn pack_pages(from: &CpuStore, to: &mut CpuStore, windows: &[WindowMove]) -> Result<()> {
    let shape = *to.shape();
    let (rows, tokens) = (RowLayout::head_major(TILE_TOKENS, &shape), TokenRange::new(0, TILE_TOKENS)?);
    for window in windows {
        let read = SpanRead { pages: &[window.from], tokens: TILE_TOKENS, range_slot: 0, centre: None };
        let keys = dequantize(from, KeyOrValue::Key, read)?;
        let values = dequantize(from, KeyOrValue::Value, read)?;
        let write =
            SpanWrite { rows, tokens: tokens.into(), pages: &[window.to], range_slot: window.range_slot, centre: None };
        quantize(to, Elements::F32(&keys), Elements::F32(&values), write)?;
    }
    Ok(())
}
