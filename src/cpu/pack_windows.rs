//! Kernel `pack_windows`: packs full f16 pages into pages of another store.

use super::store::CpuStore;
use super::{dequantize, quantize};
use crate::backend::{SpanRead, SpanWrite};
use crate::format::{KeyOrValue, SegmentFormat, TILE_TOKENS};
use crate::plan::{Elements, RowLayout, TokenRange, WindowMove};
use crate::{Error, Result};

/// Packs full pages of an f16 store into another store, each as a span of its own. The result is that of
/// [`dequantize`](super::dequantize()) and [`quantize`](super::quantize()), page by page.
///
/// # Errors
/// [`Error::Plan`] when the first store is not f16 or its shape differs from the second, or pages or slots do not
/// exist. On an error both stores are unchanged.
pub fn pack_windows(from: &CpuStore, to: &mut CpuStore, windows: &[WindowMove]) -> Result<()> {
    let shape = *to.shape();
    if from.format() != &SegmentFormat::F16 || from.shape() != &shape {
        let reason =
            format!("windows of {} in {:?} for a store of {shape:?}; pass f16 windows", from.format(), from.shape());
        return Err(Error::Plan { what: "pack windows", reason });
    }
    for window in windows {
        from.check_pages("pack windows", &[window.from])?;
        to.check_pages("pack windows", &[window.to])?;
        to.check_slot("pack windows", window.range_slot)?;
    }
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
