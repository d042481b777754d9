//! Kernel `append`.

use std::collections::{BTreeMap, HashMap};

use super::hadamard::{Turn, with_sketch, with_turn};
use super::levels::{with_codebook_fields, with_level_fields};
use super::tile_call::{self, Place, RowsKind, TileCall};
use crate::backend::TokenWrite;
use crate::format::{
    AttentionShape, Direction, HEAD_DIMS, KeyOrValue, NormRule, SegmentFormat, TILE_TOKENS, TensorFormat, TileLayout,
};
use crate::plan::{ElementType, Page, RowLayout};
use crate::wgpu::device::launch::{FLAT_WORKGROUP, Launch, Launches, flat_grid};
use crate::wgpu::device::{Kernels, Store, StorePart, Tensor, Variant};
use crate::{Error, Result};

/// Puts single tokens into pages of a store whose format [takes them](SegmentFormat::takes_single_tokens): decided, but
/// for the buffers.
///
/// Two tokens of a page may share words of values, and a word has one owner per dispatch: such tokens go into
/// dispatches one after the other. One dispatch each for keys and values is enough for one token per sequence.
#[derive(Clone, Debug)]
pub struct AppendPlan {
    shape: AttentionShape,
    format: SegmentFormat,
    rows: RowLayout,
    pages: Vec<Page>,
    /// By shard and turn.
    places: BTreeMap<(u32, usize), Vec<Place>>,
}

impl AppendPlan {
    /// Plans writes of tokens of dense rows into a store of this shape and format.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when there is nothing to write; [`Error::Format`] when the format does not fit the shape;
    /// [`Error::Plan`] when it takes no single tokens, or a token or slot does not exist.
    pub fn new(shape: &AttentionShape, format: &SegmentFormat, rows: RowLayout, writes: &[TokenWrite]) -> Result<Self> {
        format.check(shape)?;
        if !format.takes_single_tokens() {
            return Err(Error::Plan { what: "append", reason: format.why_no_single_tokens() });
        }
        let values = TileLayout::new(&format.value, shape.head_dim());
        if writes.is_empty() {
            return Err(Error::NoTokens { what: "append", hint: "pass at least one token" });
        }
        let mut places: BTreeMap<(u32, usize), Vec<Place>> = BTreeMap::new();
        let mut turns: HashMap<(Page, usize), usize> = HashMap::new();
        for write in writes {
            if write.token >= rows.tokens || write.slot >= TILE_TOKENS {
                let (token, slot) = (write.token, write.slot);
                let reason = format!("token {token} of {} into slot {slot} of {TILE_TOKENS}", rows.tokens);
                return Err(Error::Plan { what: "append", reason });
            }
            // Tokens whose values of a channel lie in one word: of three bits the word of the top bits has more of them.
            let field = values.value_field(write.slot, 0);
            let shared = field.top.map_or(field.word, |top| top.word);
            let turn = turns.entry((write.page, shared)).or_default();
            let place =
                Place { token: write.token as u32, page: write.page.index, slot: write.slot as u32, range_slot: 0 };
            places.entry((write.page.shard, *turn)).or_default().push(place);
            *turn += 1;
        }
        Ok(Self {
            shape: *shape,
            format: *format,
            rows,
            pages: writes.iter().map(|write| write.page).collect(),
            places,
        })
    }

    /// The kernel variants for keys and values of these types, for [`Kernels::prepare`].
    pub fn variants(&self, keys: ElementType, values: ElementType) -> Vec<Variant> {
        let of = |which, rows: ElementType| variant_of(&self.shape, self.format.tensor(which), which, rows.into());
        vec![of(KeyOrValue::Key, keys), of(KeyOrValue::Value, values)]
    }

    /// Binds the store and the tensors to read.
    ///
    /// # Errors
    /// [`Error::Plan`] when the store is not of the planned shape and format, or lacks a page; [`Error::Elements`] when a tensor
    /// is shorter than its rows; [`Error::Limit`] when it is too large for a binding.
    pub fn bind(&self, kernels: &Kernels, store: &Store, keys: &Tensor, values: &Tensor) -> Result<Launches> {
        store.check_planned("append", &self.shape, &self.format)?;
        store.check_pages("append", &self.pages)?;
        self.rows.check("keys", keys.elements(), &self.shape)?;
        self.rows.check("values", values.elements(), &self.shape)?;
        let keys = self.bind_tensor(kernels, store, keys, KeyOrValue::Key)?;
        let values = self.bind_tensor(kernels, store, values, KeyOrValue::Value)?;
        Ok(keys.into_iter().chain(values).collect())
    }

    fn bind_tensor(&self, kernels: &Kernels, store: &Store, tensor: &Tensor, which: KeyOrValue) -> Result<Vec<Launch>> {
        let limits = kernels.device().limits();
        let rows = tensor.element_binding(&limits)?;
        let format = self.format.tensor(which);
        let call = TileCall::new(&self.shape, format, which).with_rows(&self.rows, &self.shape)?;
        let call = TileCall { first_element: rows.first_element, tokens: self.rows.tokens as u32, ..call };
        let variant = variant_of(&self.shape, format, which, tensor.element_type().into());
        let launch = |(&(shard, _), places): (&(u32, usize), &Vec<Place>)| {
            let total = (places.len() * self.shape.kv_heads()) as u64;
            let grid = flat_grid(total * u64::from(FLAT_WORKGROUP), &limits)?;
            let call = TileCall { total: total as u32, ..call }.upload(kernels.device(), places)?;
            let mut buffers = vec![
                ("call", call.as_entire_buffer_binding()),
                ("rows", rows.buffer.clone()),
                ("tiles", store.shard_binding(shard, StorePart::tiles(which))?),
            ];
            buffers.extend(store.ranges_binding(shard, which)?.map(|ranges| ("ranges", ranges)));
            Launch::new(kernels, &variant, &buffers, grid)
        };
        self.places.iter().map(launch).collect()
    }
}

pub(super) fn variant_of(shape: &AttentionShape, format: &TensorFormat, which: KeyOrValue, rows: RowsKind) -> Variant {
    let variant = Variant::new("append").constant("HEAD_DIM", shape.head_dim());
    let variant = tile_call::with_rows(tile_call::with_layout(variant, format.element_bits(), which), rows);
    let variant = match format.rotation() {
        None => variant,
        Some(rotation) => {
            let turn = Turn { rotation, direction: Direction::Forth };
            with_turn(variant.import("row", "pack/row/rotated.wgsl"), turn, shape.head_dim())
        }
    };
    match format {
        TensorFormat::F16 => variant,
        TensorFormat::Affine(affine) => tile_call::with_range_rule(variant, format)
            .import("field", "pack/field/codes.wgsl")
            .import("ranges", ROW_RANGES)
            .import("row_ranges", ROW_RANGES)
            .constant("GROUPING", tile_call::grouping_constant(affine.grouping)),
        TensorFormat::Codebook(codebook) => match codebook.sketch {
            None => {
                let row_norm = match codebook.norms {
                    NormRule::Row => "pack/row_ranges/norm.wgsl",
                    NormRule::Renormalized => "pack/row_ranges/renormalized.wgsl",
                };
                let variant = with_codebook_fields(variant, codebook, shape.head_dim());
                variant.import("norms", row_norm).import("row_ranges", row_norm)
            }
            Some(sketch) => {
                let variant = with_level_fields(variant, codebook, shape.head_dim());
                with_sketch(variant, sketch, codebook.rotation.order(), shape.head_dim())
                    .import("field", ROW_SKETCH)
                    .import("row_ranges", ROW_SKETCH)
            }
        },
    }
}

/// Ranges made for a row and used by its codes.
const ROW_RANGES: &str = "pack/row_ranges/affine.wgsl";

/// The norms, codes and sketch of a row.
const ROW_SKETCH: &str = "pack/row_ranges/sketch.wgsl";

/// Every variant that a plan can ask for.
pub(crate) fn variants() -> Vec<Variant> {
    let mut found = Vec::new();
    for head_dim in HEAD_DIMS {
        let Ok(shape) = AttentionShape::new(1, 1, head_dim) else { continue };
        let formats = tile_call::distinct_formats(head_dim).into_iter().chain(tile_call::sketched_formats(head_dim));
        for format in formats.filter(TensorFormat::takes_single_tokens) {
            let each = [KeyOrValue::Key, KeyOrValue::Value].into_iter();
            for which in each.filter(|which| *which == KeyOrValue::Key || format.sketched().is_none()) {
                found.extend(RowsKind::all().map(|rows| variant_of(&shape, &format, which, rows)));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bits;

    #[test]
    fn tokens_that_share_a_word_take_turns() {
        let shape = AttentionShape::new(1, 1, 64).unwrap();
        let rows = RowLayout::token_major(4, &shape);
        let page = Page { shard: 0, index: 3 };
        let write = |token, slot| TokenWrite { token, page, slot };
        let plan =
            AppendPlan::new(&shape, &SegmentFormat::F16, rows, &[write(0, 0), write(1, 1), write(2, 32), write(3, 64)])
                .unwrap();
        let slots = |turn| plan.places[&(0, turn)].iter().map(|place| place.slot).collect::<Vec<_>>();
        assert_eq!((slots(0), slots(1)), (vec![0, 1, 64], vec![32]));
    }

    /// Low pairs of 16 tokens share a word, top bits of 32.
    #[test]
    fn top_bits_that_share_a_word_take_turns() {
        let shape = AttentionShape::new(1, 1, 64).unwrap();
        let rows = RowLayout::token_major(4, &shape);
        let page = Page { shard: 0, index: 0 };
        let write = |token, slot| TokenWrite { token, page, slot };
        let format = SegmentFormat::turboquant(Bits::Three, 64);
        let plan =
            AppendPlan::new(&shape, &format, rows, &[write(0, 0), write(1, 4), write(2, 8), write(3, 39)]).unwrap();
        let slots = |turn| plan.places[&(0, turn)].iter().map(|place| place.slot).collect::<Vec<_>>();
        assert_eq!((slots(0), slots(1), slots(2)), (vec![0, 8], vec![4], vec![39]));
    }

    #[test]
    fn slots_beyond_the_page_are_refused() {
        let shape = AttentionShape::new(1, 1, 64).unwrap();
        let rows = RowLayout::token_major(1, &shape);
        let page = Page { shard: 0, index: 0 };
        assert!(
            AppendPlan::new(&shape, &SegmentFormat::F16, rows, &[TokenWrite { token: 0, page, slot: 128 }]).is_err()
        );
        assert!(AppendPlan::new(&shape, &SegmentFormat::F16, rows, &[TokenWrite { token: 1, page, slot: 0 }]).is_err());
        assert!(AppendPlan::new(&shape, &SegmentFormat::F16, rows, &[]).is_err());
    }
}
