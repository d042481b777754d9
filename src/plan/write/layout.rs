//! The limits of what a step may write, and the place of each part in its table.

use crate::format::{AttentionShape, KeyOrValue, SegmentFormat, TensorFormat};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use crate::plan::AttendPlan;
use crate::plan::Page;
use crate::{Error, Result};

/// Words of an entry of the table, and of the count that precedes the entries of a section.
pub(super) const ENTRY_WORDS: usize = 4;

/// A store, and the limits of what a step may write to it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreCapacity {
    /// Its format.
    pub format: SegmentFormat,
    /// Pages of each of its shards.
    pub shard_pages: Vec<u32>,
    /// Its slots of span ranges; 0 if the format has none.
    pub range_slots: usize,
    /// Maximum number of tokens that a step puts into it.
    pub tokens: usize,
    /// Maximum number of its pages that a step copies.
    pub copies: usize,
    /// Maximum number of centres that a step computes in it, for sequences that begin.
    pub centres: usize,
    /// Its slots of centres; 0 where keys are not centred.
    pub centre_slots: usize,
}

/// A pair of stores, and the maximum number of windows that a step moves from one to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowCapacity {
    /// The f16 store that holds the windows, by its place in the layout.
    pub from: usize,
    /// The store that they are packed into.
    pub to: usize,
    /// Maximum number of windows in a step.
    pub windows: usize,
    /// Minimum number of newer tokens in the residual window when a full window is packed. If it is 0, a step may pack
    /// a window that it fills itself. Otherwise the window was full before the step.
    pub newer: usize,
}

/// A part of a step's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TableSection {
    /// Copies of pages of a store.
    Copies(usize),
    /// Centres of a store.
    Centres(usize),
    /// Tokens for a store.
    Tokens(usize),
    /// Windows of a pair of stores.
    Windows(usize),
}

/// The limits of what a step may write, and the pages, slots and rows that exist. The same for all layers.
///
/// It is created from the stores of any layer. After a store has grown, create another one and bind again.
///
/// ```
/// use std::sync::Arc;
/// use kvpack::plan::{Page, WriteLayout, WriteTable, LayerWrites, StoreCapacity, TokenWrite, WindowCapacity, WindowMove};
/// use kvpack::{AttentionShape, Bits, SegmentFormat};
/// // 64 sequences, each with an open page of f16 and packed pages of 4 bits behind it.
/// let shape = AttentionShape::new(32, 8, 128)?;
/// let of = |format, tokens| {
///     let shard_pages = vec![4096];
///     StoreCapacity { format, shard_pages, range_slots: 4096, tokens, copies: 64, centres: 0, centre_slots: 0 }
/// };
/// let stores = vec![of(SegmentFormat::F16, 64), of(SegmentFormat::per_channel(Bits::Four), 0)];
/// let windows = vec![WindowCapacity { from: 0, to: 1, windows: 64, newer: 0 }];
/// let layout = Arc::new(WriteLayout::new(shape, 64, stores, windows)?);
///
/// // A step: row 0 of the input completes page 7, which is then packed into page 9.
/// let (open, packed) = (Page { shard: 0, index: 7 }, Page { shard: 0, index: 9 });
/// let mut writes = LayerWrites::of(&layout);
/// writes.stores[0].tokens.push(TokenWrite { token: 0, page: open, slot: 127, centre: None });
/// writes.windows[0].push(WindowMove { from: open, to: packed, range_slot: 3 });
/// let mut table = WriteTable::new(&layout);
/// table.set(&writes)?;
/// assert_eq!(table.words().len(), layout.words());
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct WriteLayout {
    shape: AttentionShape,
    rows: usize,
    stores: Vec<StoreCapacity>,
    windows: Vec<WindowCapacity>,
    /// Stores that tokens of the first store may be packed into by other calls than steps.
    packed_later: Vec<usize>,
}

/// A shard's number takes half a word.
const MOST_SHARDS: usize = 1 << 16;

/// Maximum number of entries of a section. It keeps the counts in kernels below 2³².
const MOST_ENTRIES: usize = 1 << 20;

/// A centre's slot takes the bits of a word that a token's slot leaves free.
const MOST_CENTRES: usize = 1 << 24;

/// Maximum number of tokens whose mean becomes a centre within a step. Their number takes the other bits of such a
/// word.
pub const MOST_MEAN_TOKENS: usize = (1 << 8) - 1;

impl WriteLayout {
    /// A layout for steps whose dense keys and values have at most `rows` tokens.
    ///
    /// # Errors
    /// [`Error::Format`] when a format does not fit the shape, [`Error::Plan`] when a store with tokens does not take
    /// single tokens, one with centres has no slots for them, or windows are not moved from an f16 store to another
    /// store, [`Error::Limit`] when a number is too large.
    pub fn new(
        shape: AttentionShape,
        rows: usize,
        stores: Vec<StoreCapacity>,
        windows: Vec<WindowCapacity>,
    ) -> Result<Self> {
        let reject = |reason: String| Err(Error::Plan { what: "layout of a step", reason });
        for (index, store) in stores.iter().enumerate() {
            store.format.check(&shape)?;
            if store.tokens > 0 && !store.format.takes_single_tokens() {
                return reject(format!("store {index}: {}", store.format.why_no_single_tokens()));
            }
            at_most("the shards of a store", store.shard_pages.len(), MOST_SHARDS)?;
            at_most("the tokens of a step", store.tokens, MOST_ENTRIES)?;
            at_most("the pages that a step copies", store.copies, MOST_ENTRIES)?;
            at_most("the centres of a store", store.centre_slots, MOST_CENTRES)?;
            at_most("the centres that a step makes", store.centres, MOST_ENTRIES)?;
            if store.centres > 0 && store.centre_slots == 0 {
                return reject(format!("store {index} has no slots for the centres that steps make"));
            }
        }
        for pair in &windows {
            let (from, to, count) = (pair.from, pair.to, stores.len());
            if from >= count || to >= count || from == to {
                return reject(format!("windows from store {from} to store {to}: name two of the {count} stores"));
            }
            if stores[from].format != SegmentFormat::F16 {
                let format = &stores[from].format;
                return reject(format!("windows from a store of {format}; only f16 windows can be packed"));
            }
            at_most("the windows of a step", pair.windows, MOST_ENTRIES)?;
        }
        at_most("the tokens of a step's keys and values", rows, u32::MAX as usize)?;
        Ok(Self { shape, rows, stores, windows, packed_later: Vec::new() })
    }

    /// The same for a first store whose tokens may be packed into these stores later, by other calls than steps, so
    /// that no element may be too large for them.
    pub(crate) fn with_packed_later(self, stores: impl Iterator<Item = usize>) -> Self {
        Self { packed_later: stores.collect(), ..self }
    }

    /// Shape of the layers.
    pub const fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// Maximum number of tokens in a step's dense keys and values.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// The stores.
    pub fn stores(&self) -> &[StoreCapacity] {
        &self.stores
    }

    /// The pairs of stores between which windows are moved.
    pub fn windows(&self) -> &[WindowCapacity] {
        &self.windows
    }

    /// All sections, in the order in which a step writes them.
    pub fn sections(&self) -> impl Iterator<Item = TableSection> + use<> {
        let (stores, windows) = (self.stores.len(), self.windows.len());
        let before = (0..stores).map(TableSection::Copies).chain((0..stores).map(TableSection::Centres));
        before.chain((0..stores).map(TableSection::Tokens)).chain((0..windows).map(TableSection::Windows))
    }

    /// Maximum number of entries of a section; 0 if the section does not exist.
    pub fn capacity(&self, section: TableSection) -> usize {
        match section {
            TableSection::Copies(store) => self.stores.get(store).map_or(0, |store| store.copies),
            TableSection::Centres(store) => self.stores.get(store).map_or(0, |store| store.centres),
            TableSection::Tokens(store) => self.stores.get(store).map_or(0, |store| store.tokens),
            TableSection::Windows(pair) => self.windows.get(pair).map_or(0, |pair| pair.windows),
        }
    }

    /// The place where a section begins in the table, in entries of four words. Its first entry holds the number of the
    /// entries that follow in its first word.
    pub(crate) fn first_entry(&self, section: TableSection) -> usize {
        self.sections().take_while(|before| *before != section).map(|before| 1 + self.capacity(before)).sum()
    }

    /// Words of a table.
    pub fn words(&self) -> usize {
        ENTRY_WORDS * self.sections().map(|section| 1 + self.capacity(section)).sum::<usize>()
    }

    /// The largest key or value that a store takes, including the stores that its tokens are packed into later. Larger
    /// elements count as not finite. The limit is half as large for centred keys, because the centre may be as large.
    pub fn largest_element(&self, store: usize, which: KeyOrValue) -> f32 {
        let of = |store: &StoreCapacity| largest_element(store.format.tensor(which), &self.shape);
        let moved = self.windows.iter().filter(|pair| pair.from == store).map(|pair| pair.to);
        let later = self.packed_later.iter().filter(|_| store == 0).copied();
        let moved = moved.chain(later).filter_map(|to| self.stores.get(to)).map(of);
        let largest = moved.fold(self.stores.get(store).map_or(0.0, of), f32::min);
        if which == KeyOrValue::Key && self.has_centres(store) { largest / 2.0 } else { largest }
    }

    /// The largest key that counts in a centre, which all stores share. Larger ones are flagged and stored as 0.
    pub fn largest_centred(&self) -> f32 {
        let of_stores = (0..self.stores.len()).map(|store| self.largest_element(store, KeyOrValue::Key));
        of_stores.fold(f32::MAX, f32::min)
    }

    /// Whether its keys are centred.
    pub(crate) fn has_centres(&self, store: usize) -> bool {
        self.stores.get(store).is_some_and(|store| store.centre_slots > 0)
    }

    /// Whether only sequences that begin, and prompts, write to a section: centres, and tokens for the f16 store where
    /// another store takes appended tokens.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_of_prompts(&self, section: TableSection) -> bool {
        match section {
            TableSection::Centres(_) => true,
            TableSection::Tokens(0) => self.stores.iter().skip(1).any(|store| store.tokens > 0),
            TableSection::Copies(_) | TableSection::Tokens(_) | TableSection::Windows(_) => false,
        }
    }

    /// Checks that a store matches the layout: its shape, its format, and the pages and slots that tables may name.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub(crate) fn check_store(&self, index: usize, found: &BackendStore<'_>) -> Result<()> {
        let reject = |reason: String| Err(Error::Plan { what: "step", reason });
        let Some(store) = self.stores.get(index) else {
            return reject(format!("store {index} of a layout with {} stores", self.stores.len()));
        };
        if (found.shape, found.format) != (&self.shape, &store.format) {
            let of = |shape: &AttentionShape, format: &SegmentFormat| {
                format!("{} KV heads of {} channels as {format}", shape.kv_heads(), shape.head_dim())
            };
            let (planned, given) = (of(&self.shape, &store.format), of(found.shape, found.format));
            return reject(format!("the layout expects {planned} in store {index}, which holds {given}"));
        }
        let lacks = |(shard, pages): (u32, &u32)| (found.shard_pages)(shard) < *pages;
        if let Some((shard, pages)) = (0..).zip(&store.shard_pages).find(|&shard| lacks(shard)) {
            let has = (found.shard_pages)(shard);
            return reject(format!("shard {shard} of store {index} has {has} pages, the layout has {pages}"));
        }
        if store.format.has_span_ranges() && found.range_slots < store.range_slots {
            let (has, needs) = (found.range_slots, store.range_slots);
            return reject(format!("store {index} has {has} range slots, the layout has {needs}"));
        }
        let (has, needs) = (found.centre_slots, store.centre_slots);
        if has < needs || (has > 0) != (needs > 0) {
            return reject(format!("store {index} has {has} centres, the layout has {needs}"));
        }
        Ok(())
    }

    /// Checks that attention reads only pages and slots that the layout's stores have. Resources bound to stores that
    /// were checked against the layout may then run the plan.
    ///
    /// # Errors
    /// [`Error::Plan`].
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) fn check_plan(&self, plan: &AttendPlan) -> Result<()> {
        let reject = |reason: String| Err(Error::Plan { what: "attention of a step", reason });
        if plan.shape() != &self.shape {
            return reject(format!("the plan is for {:?}, the layout for {:?}", plan.shape(), self.shape));
        }
        for segment in plan.segments() {
            let (index, format) = (segment.store(), segment.format());
            let Some(store) = self.stores.get(index).filter(|store| store.format == *format) else {
                return reject(format!("the plan reads {format} in store {index}, which the layout does not have"));
            };
            segment.pages().iter().try_for_each(|&page| self.check_page(index, page))?;
            let slots = segment.spans().iter().map(|span| span.range_slot + 1).max().unwrap_or(0);
            if format.has_span_ranges() && slots > store.range_slots {
                let (slot, has) = (slots - 1, store.range_slots);
                return reject(format!("range slot {slot} of store {index}, which has {has} slots"));
            }
        }
        Ok(())
    }

    /// Checks that the number of stores is that of the layout.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub(crate) fn check_store_count(&self, given: usize) -> Result<()> {
        if given == self.stores.len() {
            return Ok(());
        }
        let reason = format!("{given} stores were given; the layout has {}", self.stores.len());
        Err(Error::Plan { what: "step", reason })
    }

    /// Checks that a store has a page.
    pub(super) fn check_page(&self, store: usize, page: Page) -> Result<()> {
        let shards = &self.stores[store].shard_pages;
        if shards.get(page.shard as usize).is_some_and(|&pages| page.index < pages) {
            return Ok(());
        }
        let (index, shard) = (page.index, page.shard);
        let reason =
            format!("there is no page {index} in shard {shard} of store {store}; the shards hold {shards:?} pages");
        Err(Error::Plan { what: "step", reason })
    }
}

/// A backend's store, for comparison with a layout.
pub(crate) struct BackendStore<'a> {
    pub(crate) shape: &'a AttentionShape,
    pub(crate) format: &'a SegmentFormat,
    /// Pages of a shard, 0 if there is no such shard.
    pub(crate) shard_pages: &'a dyn Fn(u32) -> u32,
    pub(crate) range_slots: usize,
    pub(crate) centre_slots: usize,
}

fn largest_element(format: &TensorFormat, shape: &AttentionShape) -> f32 {
    format.largest_element(shape.head_dim())
}

/// Checks that an amount in a step does not exceed its limit.
pub(super) fn at_most(what: &str, needed: usize, allowed: usize) -> Result<()> {
    if needed <= allowed {
        return Ok(());
    }
    let hint = "write less per step, or create a layout with higher limits";
    Err(Error::Limit { what: what.into(), needed: needed as u64, allowed: allowed as u64, hint })
}

#[cfg(test)]
mod tests {
    use super::super::examples::layout as example;
    use super::*;
    use crate::Bits;

    /// A store serves steps of a layout that names no more than it has.
    #[test]
    fn stores_have_what_their_layout_names() {
        let shape = AttentionShape::new(2, 2, 64).unwrap();
        let format = SegmentFormat::per_channel(Bits::Four);
        let layout = |shard_pages: u32, range_slots, centre_slots| {
            let shard_pages = vec![4, shard_pages];
            let of = StoreCapacity { format, shard_pages, range_slots, tokens: 0, copies: 1, centres: 0, centre_slots };
            WriteLayout::new(shape, 1, vec![of], vec![]).unwrap()
        };
        let found = |layout: WriteLayout, centre_slots| {
            let shard_pages = |shard: u32| if shard < 2 { 4 } else { 0 };
            let found = BackendStore {
                shape: &shape,
                format: &format,
                shard_pages: &shard_pages,
                range_slots: 3,
                centre_slots,
            };
            layout.check_store(0, &found).is_ok()
        };
        for (pages, slots, centres, has, fits) in [
            (4, 3, 0, 0, true),
            (2, 1, 2, 5, true),
            (5, 3, 0, 0, false),
            (4, 4, 0, 0, false),
            (4, 3, 3, 2, false),
            (4, 3, 0, 2, false),
        ] {
            assert_eq!(found(layout(pages, slots, centres), has), fits, "{pages} {slots} {centres} {has}");
        }
    }

    #[test]
    fn sections_do_not_overlap() {
        let layout = example();
        let firsts: Vec<usize> = layout.sections().map(|section| layout.first_entry(section)).collect();
        assert_eq!(firsts, [0, 3, 6, 7, 8, 12, 13]);
    }

    #[test]
    fn layouts_that_no_kernel_can_serve_are_refused() {
        let shape = AttentionShape::new(2, 2, 64).unwrap();
        let of = |format, tokens| StoreCapacity {
            format,
            shard_pages: vec![1],
            range_slots: 1,
            tokens,
            copies: 0,
            centres: 0,
            centre_slots: 0,
        };
        let channels = SegmentFormat::per_channel(Bits::Four);
        let new = |stores: Vec<StoreCapacity>, from, to| {
            WriteLayout::new(shape, 1, stores, vec![WindowCapacity { from, to, windows: 1, newer: 0 }])
        };
        let f16 = SegmentFormat::F16;
        assert!(new(vec![of(f16, 1), of(channels, 0)], 0, 1).is_ok());
        assert!(new(vec![of(f16, 1), of(channels, 1)], 0, 1).is_err(), "ranges over tokens take no single ones");
        assert!(new(vec![of(channels, 0), of(f16, 0)], 0, 1).is_err(), "windows are f16");
        assert!(new(vec![of(f16, 1)], 0, 0).is_err() && new(vec![of(f16, 1)], 0, 1).is_err());
    }

    /// A window must not hold anything that its packed form cannot.
    #[test]
    fn the_largest_element_is_that_of_all_stores_on_the_way() {
        let layout = example();
        assert_eq!(layout.largest_element(0, KeyOrValue::Key), 32752.0);
        assert_eq!(layout.largest_element(1, KeyOrValue::Value), 32752.0);
    }
}
