//! Kernel `append`: single tokens into open pages.

use half::f16;

use super::centre_keys::centre_row;
use super::dense::read_row;
use super::store::{CpuStore, TensorStore};
use crate::format::{AffineFormat, CodeRange, Direction, KeyOrValue, TILE_TOKENS, TensorFormat};
use crate::plan::{Elements, RowLayout, TokenWrite};
use crate::{Error, Result};

/// Writes tokens of dense keys and values into slots of pages, in a format that [takes single
/// tokens](crate::SegmentFormat::takes_single_tokens), as `quantize` would store them, bit for bit.
/// Keys are centred with the centre that the write names. Elements that are not finite, or too large for the format,
/// are stored as zeros.
///
/// # Errors
/// [`Error::Plan`] when the format does not take single tokens, or a token, page or slot does not exist,
/// [`Error::Elements`] when keys or values are shorter than their layout requires. On an error the store is unchanged.
pub fn append(
    store: &mut CpuStore,
    keys: Elements<'_>,
    values: Elements<'_>,
    rows: RowLayout,
    writes: &[TokenWrite],
) -> Result<()> {
    check(store, keys, values, &rows, writes)?;
    for (which, elements) in [(KeyOrValue::Key, keys), (KeyOrValue::Value, values)] {
        let largest = store.largest_element(which);
        put_tokens(store, which, &TokenRows { elements, rows, largest, flag: &|_| () }, writes);
    }
    Ok(())
}

/// Dense rows to be stored in slots.
pub(super) struct TokenRows<'a> {
    pub(super) elements: Elements<'a>,
    pub(super) rows: RowLayout,
    /// NaN and elements beyond ± this are stored as zero.
    pub(super) largest: f32,
    /// Called with the token of every such element.
    pub(super) flag: &'a dyn Fn(usize),
}

impl TokenRows<'_> {
    fn read(&self, token: usize, head: usize, row: &mut [f32]) {
        read_row(self.elements, self.rows.row(token, head), row);
        // False for NaN.
        let storable = |x: f32| x.abs() <= self.largest;
        row.iter_mut().filter(|x| !storable(**x)).for_each(|x| {
            *x = 0.0;
            (self.flag)(token);
        });
    }
}

/// Writes keys or values of tokens into slots. Both were checked to exist.
pub(super) fn put_tokens(store: &mut CpuStore, which: KeyOrValue, source: &TokenRows<'_>, writes: &[TokenWrite]) {
    let (kv_heads, head_dim) = (store.shape().kv_heads(), store.shape().head_dim());
    let (tensor, centres) = store.tensor_and_centres(which);
    let mut row = vec![0.0; head_dim];
    for write in writes {
        for head in 0..kv_heads {
            source.read(write.token, head, &mut row);
            if let Some(slot) = write.centre.filter(|_| which == KeyOrValue::Key) {
                centre_row(&mut row, &centres[(slot * kv_heads + head) * head_dim..]);
            }
            if let Some(rotation) = tensor.format.rotation() {
                rotation.turn_checked(Direction::Forward, &mut row);
            }
            put_row(tensor, write, head, &row);
        }
    }
}

/// Writes the row of one token of one KV head, already rotated, into its slot.
fn put_row(tensor: &mut TensorStore, write: &TokenWrite, head: usize, row: &[f32]) {
    let (which, layout, format) = (tensor.which, tensor.layout, tensor.format);
    let fields: Vec<u32> = match &format {
        TensorFormat::F16 => row.iter().map(|&x| f16::from_f32(x).to_bits().into()).collect(),
        TensorFormat::Affine(affine) => {
            let ranges = row_ranges(affine, &format, row);
            let beside = tensor.ranges_mut(write.page, head);
            for (group, range) in ranges.iter().enumerate() {
                let channel = group * (row.len() / ranges.len());
                beside[format.range_index(row.len(), write.slot, channel)] = range.to_word();
            }
            let sign = 1 << (affine.bits.count() - 1);
            let range_of = |channel: usize| ranges[channel * ranges.len() / row.len()];
            let code = |(channel, &x): (usize, &f32)| range_of(channel).encode(x, affine.bits) ^ sign;
            row.iter().enumerate().map(code).collect()
        }
        TensorFormat::Codebook(codebook) => {
            let coded = codebook.encode_checked_row(row);
            tensor.ranges_mut(write.page, head)[write.slot] = coded.range.to_word();
            coded.fields
        }
    };
    let codes = tensor.codes_mut(write.page, head);
    for (channel, bits) in fields.into_iter().enumerate() {
        let field = match which {
            KeyOrValue::Key => layout.key_field(write.slot, channel),
            KeyOrValue::Value => layout.value_field(write.slot, channel),
        };
        field.set(codes, bits);
    }
}

/// The ranges of a row, one for each of its groups of channels.
fn row_ranges(affine: &AffineFormat, format: &TensorFormat, row: &[f32]) -> Vec<CodeRange> {
    let groups = format.ranges_per_tile(row.len()) / TILE_TOKENS;
    let range = |group: &[f32]| {
        let min = group.iter().copied().fold(f32::INFINITY, f32::min);
        let max = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        affine.tile_range(min, max)
    };
    row.chunks_exact(row.len() / groups).map(range).collect()
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
    if !store.format().takes_single_tokens() {
        return reject(store.format().why_no_single_tokens());
    }
    for write in writes {
        if write.token >= rows.tokens || write.slot >= TILE_TOKENS {
            return reject(format!(
                "token {} of {} goes into slot {} of {TILE_TOKENS}",
                write.token, rows.tokens, write.slot
            ));
        }
        store.check_pages("append", &[write.page])?;
        store.check_centre("append", write.centre)?;
        if write.centre.is_none() && store.centre_slots() > 0 {
            return reject("a token without a centre goes into a store whose keys are centred".into());
        }
    }
    Ok(())
}
