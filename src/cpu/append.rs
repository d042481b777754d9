//! Kernel `append`: single tokens into open pages.

use half::f16;

use super::centre_keys::centre_row;
use super::dense::read_row;
use super::non_finite_flags::NonFiniteFlags;
use super::store::{CpuStore, TensorStore};
use super::write_step::write_step;
use crate::Result;
use crate::backend::WriteInput;
use crate::format::{AffineFormat, CodeRange, Direction, KeyOrValue, TILE_TOKENS, TensorFormat};
use crate::plan::{Elements, RowLayout, TokenWrite, append_table};

/// Writes tokens of dense keys and values into slots of pages, in a format that [takes single
/// tokens](crate::SegmentFormat::takes_single_tokens), as `quantize` would store them, bit for bit.
/// Keys are centred with the centre that the write names. Elements that are not finite, or too large for the format,
/// are stored as zeros.
///
/// # Errors
/// [`Error::NoTokens`] for none, [`Error::Plan`] when the format does not take single tokens, a token, page or slot
/// does not exist, or two tokens go into one slot, [`Error::Limit`] when there are more than a step counts,
/// [`Error::Elements`] when keys or values are shorter than their layout requires. On an error the store is unchanged.
///
/// [`Error::NoTokens`]: crate::Error::NoTokens
/// [`Error::Plan`]: crate::Error::Plan
/// [`Error::Limit`]: crate::Error::Limit
/// [`Error::Elements`]: crate::Error::Elements
pub fn append(
    store: &mut CpuStore,
    keys: Elements<'_>,
    values: Elements<'_>,
    rows: RowLayout,
    writes: &[TokenWrite],
) -> Result<()> {
    let table = append_table(store.shape(), store.step_capacity(writes.len(), 0), rows.tokens, writes)?;
    let flags = NonFiniteFlags::new(1)?;
    write_step(&mut [store], Some(WriteInput { keys: &keys, values: &values, rows, flags: &flags, layer: 0 }), &table)
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
