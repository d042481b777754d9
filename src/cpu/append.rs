//! Kernel `append`: single tokens into open pages of an f16 store.

use half::f16;

use super::dense::read_row;
use super::store::CpuStore;
use crate::backend::TokenWrite;
use crate::format::{KeyOrValue, SegmentFormat, TILE_TOKENS};
use crate::plan::{Elements, RowLayout};
use crate::{Error, Result};

/// Puts tokens of dense keys and values into slots of pages, rounded to f16. The input must be finite.
///
/// # Errors
/// [`Error::Plan`] when the store is not f16 or a token, page or slot does not exist, [`Error::Elements`] when keys
/// or values are shorter than their layout says; the store is as it was.
pub fn append(
    store: &mut CpuStore,
    keys: Elements<'_>,
    values: Elements<'_>,
    rows: RowLayout,
    writes: &[TokenWrite],
) -> Result<()> {
    check(store, keys, values, &rows, writes)?;
    let shape = *store.shape();
    let mut row = vec![0.0; shape.head_dim()];
    for (which, elements) in [(KeyOrValue::Key, keys), (KeyOrValue::Value, values)] {
        let tensor = store.tensor_mut(which);
        let layout = tensor.layout;
        for write in writes {
            for head in 0..shape.kv_heads() {
                read_row(elements, rows.row(write.token, head), &mut row);
                let codes = tensor.codes_mut(write.page, head);
                for (channel, &value) in row.iter().enumerate() {
                    let field = match which {
                        KeyOrValue::Key => layout.key_field(write.slot, channel),
                        KeyOrValue::Value => layout.value_field(write.slot, channel),
                    };
                    let bits = u32::from(f16::from_f32(value).to_bits());
                    codes[field.word] = (codes[field.word] & !(0xffff << field.shift)) | (bits << field.shift);
                }
            }
        }
    }
    Ok(())
}

fn check(
    store: &CpuStore,
    keys: Elements<'_>,
    values: Elements<'_>,
    rows: &RowLayout,
    writes: &[TokenWrite],
) -> Result<()> {
    rows.check("keys", keys.len(), store.shape())?;
    rows.check("values", values.len(), store.shape())?;
    let reject = |reason: String| Err(Error::Plan { what: "append", reason });
    if *store.format() != SegmentFormat::F16 {
        return reject(format!("single tokens go into an f16 store, this one holds {}", store.format()));
    }
    for write in writes {
        if write.token >= rows.tokens || write.slot >= TILE_TOKENS {
            return reject(format!(
                "token {} of {} into slot {} of {TILE_TOKENS}",
                write.token, rows.tokens, write.slot
            ));
        }
        store.check_pages("append", &[write.page])?;
    }
    Ok(())
}
