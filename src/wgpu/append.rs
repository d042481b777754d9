//! Kernel `append`.

use std::collections::{BTreeMap, HashMap};

use super::launch::{Launch, Launches, flat_grid};
use super::tile_call::{self, Place, TileCall};
use super::{Kernels, Store, StorePart, Tensor, Variant};
use crate::backend::TokenWrite;
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat, TILE_TOKENS, TensorFormat};
use crate::plan::{ElementType, Page, RowLayout};
use crate::{Error, Result};

/// Puts single tokens into pages of an f16 store: decided, but for the buffers.
///
/// Two tokens of a page may share words of values, and a word has one owner per dispatch: such tokens go into
/// dispatches one after the other. One dispatch each for keys and values is enough for one token per sequence.
#[derive(Clone, Debug)]
pub struct AppendPlan {
    shape: AttentionShape,
    rows: RowLayout,
    pages: Vec<Page>,
    /// By shard and turn.
    places: BTreeMap<(u32, usize), Vec<Place>>,
}

impl AppendPlan {
    /// Plans writes of tokens of dense rows.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when there is nothing to write, [`Error::Plan`] when a token or slot does not exist.
    pub fn new(shape: &AttentionShape, rows: RowLayout, writes: &[TokenWrite]) -> Result<Self> {
        if writes.is_empty() {
            return Err(Error::NoTokens { what: "append", hint: "pass at least one token" });
        }
        let mut places: BTreeMap<(u32, usize), Vec<Place>> = BTreeMap::new();
        let mut turns: HashMap<(Page, usize, usize), usize> = HashMap::new();
        for write in writes {
            if write.token >= rows.tokens || write.slot >= TILE_TOKENS {
                let (token, slot) = (write.token, write.slot);
                let reason = format!("token {token} of {} into slot {slot} of {TILE_TOKENS}", rows.tokens);
                return Err(Error::Plan { what: "append", reason });
            }
            // Tokens t, t + 32 share a word of values, as do t + 64, t + 96.
            let turn = turns.entry((write.page, write.slot % 32, write.slot / 64)).or_default();
            let place = Place { token: write.token as u32, page: write.page.index, slot: write.slot as u32 };
            places.entry((write.page.shard, *turn)).or_default().push(place);
            *turn += 1;
        }
        Ok(Self { shape: *shape, rows, pages: writes.iter().map(|write| write.page).collect(), places })
    }

    /// The kernel variants for keys and values of these types, for [`Kernels::prepare`].
    pub fn variants(&self, keys: ElementType, values: ElementType) -> Vec<Variant> {
        vec![variant_of(KeyOrValue::Key, keys), variant_of(KeyOrValue::Value, values)]
    }

    /// Binds the store and the tensors to read.
    ///
    /// # Errors
    /// [`Error::Plan`] when the store is not f16, of another shape, or lacks a page; [`Error::Elements`] when a tensor
    /// is shorter than its rows; [`Error::Limit`] when it is too large for a binding.
    pub fn bind(&self, kernels: &Kernels, store: &Store, keys: &Tensor, values: &Tensor) -> Result<Launches> {
        store.check_planned("append", &self.shape, &SegmentFormat::F16)?;
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
        let call = TileCall::new(&self.shape, &TensorFormat::F16, which).with_rows(&self.rows, &self.shape)?;
        let call = TileCall { first_element: rows.first_element, ..call };
        let words = match which {
            KeyOrValue::Key => self.shape.head_dim() / 2,
            KeyOrValue::Value => self.shape.head_dim(),
        };
        let launch = |(&(shard, _), places): (&(u32, usize), &Vec<Place>)| {
            let total = (places.len() * self.shape.kv_heads() * words) as u64;
            let grid = flat_grid(total, &limits)?;
            let call = TileCall { total: total as u32, ..call }.upload(kernels.device(), places)?;
            let buffers = [
                ("call", call.as_entire_buffer_binding()),
                ("rows", rows.buffer.clone()),
                ("tiles", store.shard_binding(shard, StorePart::tiles(which))?),
            ];
            Launch::new(kernels, &variant_of(which, tensor.element_type()), &buffers, grid)
        };
        self.places.iter().map(launch).collect()
    }
}

fn variant_of(which: KeyOrValue, element_type: ElementType) -> Variant {
    let variant = tile_call::with_layout(Variant::new("append"), 16, which);
    tile_call::with_rows(variant, element_type)
}

/// Every variant that a plan can ask for.
pub(crate) fn variants() -> Vec<Variant> {
    let types = [ElementType::F32, ElementType::F16];
    let each = [KeyOrValue::Key, KeyOrValue::Value];
    each.into_iter().flat_map(|which| types.map(|element_type| variant_of(which, element_type))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_share_a_word_take_turns() {
        let shape = AttentionShape::new(1, 1, 64).unwrap();
        let rows = RowLayout::token_major(4, &shape);
        let page = Page { shard: 0, index: 3 };
        let write = |token, slot| TokenWrite { token, page, slot };
        let plan = AppendPlan::new(&shape, rows, &[write(0, 0), write(1, 1), write(2, 32), write(3, 64)]).unwrap();
        let slots = |turn| plan.places[&(0, turn)].iter().map(|place| place.slot).collect::<Vec<_>>();
        assert_eq!((slots(0), slots(1)), (vec![0, 1, 64], vec![32]));
    }

    #[test]
    fn slots_beyond_the_page_are_refused() {
        let shape = AttentionShape::new(1, 1, 64).unwrap();
        let rows = RowLayout::token_major(1, &shape);
        let page = Page { shard: 0, index: 0 };
        assert!(AppendPlan::new(&shape, rows, &[TokenWrite { token: 0, page, slot: 128 }]).is_err());
        assert!(AppendPlan::new(&shape, rows, &[TokenWrite { token: 1, page, slot: 0 }]).is_err());
        assert!(AppendPlan::new(&shape, rows, &[]).is_err());
    }
}
