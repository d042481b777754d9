//! Kernel `pack_windows`: full pages of f16, packed into pages of another store.

use super::store::CpuStore;
use super::{dequantize, quantize};
use crate::backend::{SpanRead, SpanWrite};
use crate::format::{KeyOrValue, SegmentFormat, TILE_TOKENS};
use crate::plan::{Elements, RowLayout, TokenRange, WindowMove};
use crate::{Error, Result};

/// Packs full pages of a store of f16, each as a span of its own in another store: what
/// [`dequantize`](super::dequantize()) and [`quantize`](super::quantize()) do one page after the other.
///
/// # Errors
/// [`Error::Plan`] when the first store is not f16 or of another shape than the second, or pages or slots do not exist;
/// both stores are as they were.
pub fn pack_windows(from: &CpuStore, to: &mut CpuStore, windows: &[WindowMove]) -> Result<()> {
    let shape = *to.shape();
    if from.format() != &SegmentFormat::F16 || from.shape() != &shape {
        let reason =
            format!("windows of {} in {:?} for a store of {shape:?}; they are f16", from.format(), from.shape());
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
