//! Pages and quantisation ranges of one format in host memory.

use super::memory::MemoryShare;
use crate::counts::{filled, grow};
use crate::format::{AttentionShape, CodeRange, KeyOrValue, SegmentFormat, TensorFormat, TileLayout};
use crate::plan::{BackendStore, LargerShard, Page, StoreCapacity, WriteLayout, check_larger};
use crate::{Error, Result};

/// Pages and quantisation ranges of one segment format in host memory, in shards.
///
/// The tile of KV head `h` in page `p` of a shard begins at word `(p · kv_heads + h) · tile words`. Its ranges have the
/// same order in an array of their own. Span ranges are `[slot][kv_head][head_dim]`, and so are the centres of the
/// sequences' keys.
#[derive(Debug)]
pub struct CpuStore {
    shape: AttentionShape,
    format: SegmentFormat,
    shard_pages: Vec<u32>,
    range_slots: usize,
    keys: TensorStore,
    values: TensorStore,
    /// `[slot][kv_head][head_dim]`.
    centres: Vec<f32>,
    memory: MemoryShare,
}

/// The keys or the values of a store.
#[derive(Debug)]
pub(super) struct TensorStore {
    pub(super) which: KeyOrValue,
    pub(super) format: TensorFormat,
    pub(super) layout: TileLayout,
    pub(super) shape: AttentionShape,
    shards: Vec<Shard>,
    span_ranges: Vec<CodeRange>,
}

#[derive(Debug)]
struct Shard {
    codes: Vec<u32>,
    ranges: Vec<u32>,
}

impl Shard {
    /// Copies the pages of a shard that has no more.
    fn begin_with(&mut self, other: &Self) {
        self.codes[..other.codes.len()].copy_from_slice(&other.codes);
        self.ranges[..other.ranges.len()].copy_from_slice(&other.ranges);
    }
}

/// The memory of a shard that no store has yet.
#[derive(Debug)]
pub struct ShardMemory {
    keys: Shard,
    values: Shard,
    memory: MemoryShare,
}

/// One tile and its ranges.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile<'a> {
    /// Code words, see [`TileLayout`].
    pub(super) codes: &'a [u32],
    /// Tile ranges, see [`TensorFormat::ranges_per_tile`].
    pub(super) ranges: &'a [u32],
}

impl CpuStore {
    /// An empty store: no shards, no range slots.
    ///
    /// # Errors
    /// [`Error::Format`] when the format does not fit the shape.
    pub fn new(shape: AttentionShape, format: SegmentFormat) -> Result<Self> {
        Self::within(shape, format, MemoryShare::unlimited())
    }

    /// An empty store whose bytes count against a limit.
    pub(super) fn within(shape: AttentionShape, format: SegmentFormat, memory: MemoryShare) -> Result<Self> {
        format.check(&shape)?;
        let tensor = |which| TensorStore {
            which,
            format: *format.tensor(which),
            layout: TileLayout::of(format.tensor(which), shape.head_dim()),
            shape,
            shards: Vec::new(),
            span_ranges: Vec::new(),
        };
        let (keys, values) = (tensor(KeyOrValue::Key), tensor(KeyOrValue::Value));
        let (shard_pages, centres) = (Vec::new(), Vec::new());
        Ok(Self { shape, format, shard_pages, range_slots: 0, keys, values, centres, memory })
    }

    /// Shape of the layer.
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// Format of keys and values.
    pub fn format(&self) -> &SegmentFormat {
        &self.format
    }

    /// The store's entry in a [layout of steps](crate::plan::WriteLayout), for steps that put up to `tokens` tokens
    /// into the store and copy up to `copies` of its pages.
    pub fn step_capacity(&self, tokens: usize, copies: usize) -> StoreCapacity {
        let shard_pages = self.shard_pages.clone();
        let (range_slots, centre_slots) = (self.range_slots, self.centre_slots());
        StoreCapacity { format: self.format, shard_pages, range_slots, tokens, copies, centres: 0, centre_slots }
    }

    /// Checks that it is a store of a step's layout.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub(super) fn check_step(&self, layout: &WriteLayout, index: usize) -> Result<()> {
        let found = BackendStore {
            shape: &self.shape,
            format: &self.format,
            shard_pages: &|shard| self.shard_pages(shard),
            range_slots: self.range_slots,
            centre_slots: self.centre_slots(),
        };
        layout.check_store(index, &found)
    }

    /// Number of shards.
    pub fn shards(&self) -> usize {
        self.shard_pages.len()
    }

    /// Slots of span ranges.
    pub fn range_slots(&self) -> usize {
        self.range_slots
    }

    /// Slots of centres; 0 where keys are not centred.
    pub fn centre_slots(&self) -> usize {
        self.centres.len() / (self.shape.kv_heads() * self.shape.head_dim())
    }

    /// Bytes of tiles, tile ranges, span ranges and centres.
    pub fn bytes(&self) -> u64 {
        let pages: u64 = self.shard_pages.iter().map(|&pages| u64::from(pages)).sum();
        pages * self.format.page_bytes(&self.shape) as u64
            + (self.range_slots * self.format.range_slot_bytes(&self.shape)) as u64
            + (self.centre_slots() * SegmentFormat::centre_bytes(&self.shape)) as u64
    }

    /// Adds a shard of `pages` zeroed pages.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; the store is unchanged.
    pub fn add_shard(&mut self, pages: u32) -> Result<()> {
        let shard = self.new_shard(pages)?;
        self.put_shard(pages, shard);
        Ok(())
    }

    /// A shard of `pages` pages for the place of the newest one. It begins with that shard's pages, and the others are
    /// zeroed.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no shard or the newest one has as many pages, [`Error::OutOfMemory`].
    pub fn larger_shard(&self, pages: u32) -> Result<LargerShard<ShardMemory>> {
        check_larger(self.shard_pages.last().copied(), pages)?;
        let mut larger = self.new_shard(pages)?;
        self.keys.shards.last().into_iter().for_each(|newest| larger.keys.begin_with(newest));
        self.values.shards.last().into_iter().for_each(|newest| larger.values.begin_with(newest));
        Ok(LargerShard::new((self.shape, self.format), pages, larger))
    }

    /// Puts such a shard in the place of the newest one.
    ///
    /// # Errors
    /// [`Error::Plan`] when it was made for another shape or format, or has fewer pages than the newest one.
    pub fn replace_shard(&mut self, shard: LargerShard<ShardMemory>) -> Result<()> {
        let newest = self.shard_pages.last().copied();
        let (pages, shard) = shard.replacing((&self.shape, &self.format), newest)?;
        self.drop_shard();
        self.put_shard(pages, shard);
        Ok(())
    }

    fn new_shard(&self, pages: u32) -> Result<ShardMemory> {
        let mut memory = self.memory.another();
        memory.take("pages", u64::from(pages).saturating_mul(self.format.page_bytes(&self.shape) as u64))?;
        Ok(ShardMemory { keys: self.keys.shard(pages)?, values: self.values.shard(pages)?, memory })
    }

    fn put_shard(&mut self, pages: u32, shard: ShardMemory) {
        self.memory.take_over(shard.memory);
        self.keys.shards.push(shard.keys);
        self.values.shards.push(shard.values);
        self.shard_pages.push(pages);
    }

    /// Drops the newest shard, if there is one.
    pub fn drop_shard(&mut self) {
        let Some(pages) = self.shard_pages.pop() else { return };
        self.keys.shards.pop();
        self.values.shards.pop();
        self.memory.give_back(u64::from(pages) * self.format.page_bytes(&self.shape) as u64);
    }

    /// Grows the span ranges to at least `slots` slots. A format without span ranges needs none and gets none.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; the store is unchanged.
    pub fn reserve_ranges(&mut self, slots: usize) -> Result<()> {
        if !self.format.has_span_ranges() || slots <= self.range_slots {
            return Ok(());
        }
        let bytes =
            ((slots - self.range_slots) as u64).saturating_mul(self.format.range_slot_bytes(&self.shape) as u64);
        self.memory.take("span ranges", bytes)?;
        let grown = self.keys.grow_ranges(slots).and_then(|()| self.values.grow_ranges(slots));
        grown.inspect_err(|_| self.memory.give_back(bytes))?;
        self.range_slots = slots;
        Ok(())
    }

    /// Grows the centres of the sequences' keys to at least `slots` slots. New slots are zeroed.
    ///
    /// # Errors
    /// [`Error::Format`] when keys have a range for every channel, [`Error::OutOfMemory`]; the store is unchanged.
    pub fn reserve_centres(&mut self, slots: usize) -> Result<()> {
        if !self.format.key.takes_centre() {
            return Err(Error::Format { format: self.format.to_string(), reason: self.format.why_no_centre() });
        }
        let more = slots.saturating_sub(self.centre_slots());
        let bytes = (more as u64).saturating_mul(SegmentFormat::centre_bytes(&self.shape) as u64);
        self.memory.take("centres", bytes)?;
        let elements = more.saturating_mul(self.shape.kv_heads() * self.shape.head_dim());
        let length = self.centres.len().saturating_add(elements);
        grow("centres", &mut self.centres, length, 0.0).inspect_err(|_| self.memory.give_back(bytes))
    }

    /// The centre in a slot, `[kv_head][head_dim]`.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such slot.
    pub fn centre(&self, slot: usize) -> Result<&[f32]> {
        self.check_centre("centre", Some(slot))?;
        let length = self.shape.kv_heads() * self.shape.head_dim();
        Ok(&self.centres[slot * length..][..length])
    }

    pub(super) fn centre_mut(&mut self, slot: usize) -> Result<&mut [f32]> {
        self.check_centre("centre", Some(slot))?;
        let length = self.shape.kv_heads() * self.shape.head_dim();
        Ok(&mut self.centres[slot * length..][..length])
    }

    /// Words of a tile's codes and of its ranges.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such page or head.
    pub fn tile_words(&self, which: KeyOrValue, page: Page, kv_head: usize) -> Result<(&[u32], &[u32])> {
        self.check_pages("tile", &[page])?;
        self.check_head(kv_head)?;
        let tile = self.tensor(which).tile(page, kv_head);
        Ok((tile.codes, tile.ranges))
    }

    /// Overwrites the codes and the ranges of a tile with data that were packed elsewhere.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such page or head, [`Error::Elements`] when the lengths are not those of a
    /// tile.
    pub fn write_tile(
        &mut self,
        which: KeyOrValue,
        page: Page,
        kv_head: usize,
        codes: &[u32],
        ranges: &[u32],
    ) -> Result<()> {
        self.check_pages("tile", &[page])?;
        self.check_head(kv_head)?;
        let tile = self.tensor(which).tile(page, kv_head);
        check_length("tile codes in words", codes.len(), tile.codes.len(), &self.format)?;
        check_length("tile ranges in words", ranges.len(), tile.ranges.len(), &self.format)?;
        self.tensor_mut(which).put_tile(page, kv_head, codes, ranges);
        Ok(())
    }

    /// Kernel `copy_page`: copies a page to another, bit for bit, with its tiles and tile ranges.
    ///
    /// # Errors
    /// [`Error::Plan`] when a page does not exist.
    pub fn copy_page(&mut self, from: Page, to: Page) -> Result<()> {
        self.check_pages("copy of a page", &[from, to])?;
        for kv_head in 0..self.shape.kv_heads() {
            for tensor in [&mut self.keys, &mut self.values] {
                let tile = tensor.tile(from, kv_head);
                let (codes, ranges) = (tile.codes.to_vec(), tile.ranges.to_vec());
                tensor.put_tile(to, kv_head, &codes, &ranges);
            }
        }
        Ok(())
    }

    /// The span ranges of a slot, `[kv_head][head_dim]`; empty if the format has none.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such slot.
    pub fn span_ranges(&self, which: KeyOrValue, slot: usize) -> Result<&[CodeRange]> {
        self.check_slot("span ranges", slot)?;
        Ok(self.tensor(which).slot(slot))
    }

    /// Overwrites the span ranges of a slot, `[kv_head][head_dim]`, with data that were packed elsewhere.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such slot, [`Error::Elements`] when the length is wrong.
    pub fn write_span_ranges(&mut self, which: KeyOrValue, slot: usize, ranges: &[CodeRange]) -> Result<()> {
        let expected = self.span_ranges(which, slot)?.len();
        check_length("span ranges", ranges.len(), expected, &self.format)?;
        self.tensor_mut(which).put_slot(slot, ranges);
        Ok(())
    }

    pub(super) fn tensor(&self, which: KeyOrValue) -> &TensorStore {
        match which {
            KeyOrValue::Key => &self.keys,
            KeyOrValue::Value => &self.values,
        }
    }

    /// Keys or values, and the centres of keys, `[slot][kv_head][head_dim]`.
    pub(super) fn tensor_and_centres(&mut self, which: KeyOrValue) -> (&mut TensorStore, &[f32]) {
        match which {
            KeyOrValue::Key => (&mut self.keys, &self.centres),
            KeyOrValue::Value => (&mut self.values, &[]),
        }
    }

    pub(super) fn tensor_mut(&mut self, which: KeyOrValue) -> &mut TensorStore {
        match which {
            KeyOrValue::Key => &mut self.keys,
            KeyOrValue::Value => &mut self.values,
        }
    }

    /// Checks that all pages exist.
    pub(super) fn check_pages(&self, what: &'static str, pages: &[Page]) -> Result<()> {
        match pages.iter().find(|page| !self.has_page(page)) {
            None => Ok(()),
            Some(page) => Err(Error::Plan {
                what,
                reason: format!(
                    "there is no page {} in shard {}; the shards hold {:?} pages",
                    page.index, page.shard, self.shard_pages
                ),
            }),
        }
    }

    /// Checks that a slot of span ranges exists, where the format needs one.
    pub(super) fn check_slot(&self, what: &'static str, slot: usize) -> Result<()> {
        if self.format.has_span_ranges() && slot >= self.range_slots {
            let reason = format!("there is no range slot {slot}; the store has {}, reserve more", self.range_slots);
            return Err(Error::Plan { what, reason });
        }
        Ok(())
    }

    /// Checks that a centre exists, where one is named.
    pub(super) fn check_centre(&self, what: &'static str, slot: Option<usize>) -> Result<()> {
        match slot.filter(|&slot| slot >= self.centre_slots()) {
            None => Ok(()),
            Some(slot) => {
                let reason = format!("there is no centre {slot}; the store has {}, reserve more", self.centre_slots());
                Err(Error::Plan { what, reason })
            }
        }
    }

    fn check_head(&self, kv_head: usize) -> Result<()> {
        if kv_head < self.shape.kv_heads() {
            return Ok(());
        }
        Err(Error::Plan { what: "tile", reason: format!("KV head {kv_head} of {}", self.shape.kv_heads()) })
    }

    /// Pages of a shard, 0 if there is no such shard.
    pub(super) fn shard_pages(&self, shard: u32) -> u32 {
        self.shard_pages.get(shard as usize).copied().unwrap_or(0)
    }

    fn has_page(&self, page: &Page) -> bool {
        page.index < self.shard_pages(page.shard)
    }
}

impl TensorStore {
    pub(super) fn tile_words(&self) -> usize {
        match self.which {
            KeyOrValue::Key => self.layout.key_tile_words(),
            KeyOrValue::Value => self.layout.value_tile_words(),
        }
    }

    pub(super) fn ranges_per_tile(&self) -> usize {
        self.format.ranges_per_tile(self.shape.head_dim())
    }

    /// The tile of a page that was checked to exist.
    pub(super) fn tile(&self, page: Page, kv_head: usize) -> Tile<'_> {
        let shard = &self.shards[page.shard as usize];
        let tile = page.index as usize * self.shape.kv_heads() + kv_head;
        Tile {
            codes: &shard.codes[tile * self.tile_words()..][..self.tile_words()],
            ranges: &shard.ranges[tile * self.ranges_per_tile()..][..self.ranges_per_tile()],
        }
    }

    /// The code words of a tile of a page that was checked to exist.
    pub(super) fn codes_mut(&mut self, page: Page, kv_head: usize) -> &mut [u32] {
        let words = self.tile_words();
        let tile = page.index as usize * self.shape.kv_heads() + kv_head;
        &mut self.shards[page.shard as usize].codes[tile * words..][..words]
    }

    /// The range words of a tile of a page that was checked to exist.
    pub(super) fn ranges_mut(&mut self, page: Page, kv_head: usize) -> &mut [u32] {
        let count = self.ranges_per_tile();
        let tile = page.index as usize * self.shape.kv_heads() + kv_head;
        &mut self.shards[page.shard as usize].ranges[tile * count..][..count]
    }

    pub(super) fn put_tile(&mut self, page: Page, kv_head: usize, codes: &[u32], ranges: &[u32]) {
        self.codes_mut(page, kv_head).copy_from_slice(codes);
        self.ranges_mut(page, kv_head).copy_from_slice(ranges);
    }

    /// Span ranges of one KV head, by channel; empty if the format has none. The slot was checked to exist.
    pub(super) fn head_ranges(&self, slot: usize, kv_head: usize) -> &[CodeRange] {
        let ranges = self.slot(slot);
        if ranges.is_empty() { ranges } else { &ranges[kv_head * self.shape.head_dim()..][..self.shape.head_dim()] }
    }

    pub(super) fn put_slot(&mut self, slot: usize, ranges: &[CodeRange]) {
        let length = self.slot_length();
        self.span_ranges[slot * length..][..length].copy_from_slice(ranges);
    }

    fn slot(&self, slot: usize) -> &[CodeRange] {
        let length = self.slot_length();
        if length == 0 { &[] } else { &self.span_ranges[slot * length..][..length] }
    }

    fn slot_length(&self) -> usize {
        if self.format.has_span_ranges() { self.shape.kv_heads() * self.shape.head_dim() } else { 0 }
    }

    fn shard(&self, pages: u32) -> Result<Shard> {
        let tiles = (pages as usize).saturating_mul(self.shape.kv_heads());
        Ok(Shard {
            codes: filled("pages", tiles.saturating_mul(self.tile_words()), 0)?,
            ranges: filled("tile ranges", tiles.saturating_mul(self.ranges_per_tile()), 0)?,
        })
    }

    /// Grows the ranges to `slots` slots. A second call with the same number changes nothing.
    fn grow_ranges(&mut self, slots: usize) -> Result<()> {
        let length = slots.saturating_mul(self.slot_length());
        grow("span ranges", &mut self.span_ranges, length, CodeRange::default())
    }
}

fn check_length(what: &'static str, given: usize, expected: usize, format: &SegmentFormat) -> Result<()> {
    if given == expected {
        return Ok(());
    }
    Err(Error::Elements { what, given, expected, shape: format!("format {format}") })
}
