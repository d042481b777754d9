//! Packed keys and values on the device: pages in shards, and the ranges of spans.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::page_format::PageFormat;
use crate::cuda::device::memory::{Memory, same_stream};
use crate::format::{AttentionShape, CodeRange, KeyOrValue, SegmentFormat};
use crate::plan::{LargerShard, Page, StoreCapacity, check_larger};
use crate::{Error, Result};

/// Maximum bytes of one shard. Shards only bound the size of a single allocation: a step reads all shards alike.
const SHARD_BYTES: u64 = 8 << 30;

/// Maximum number of shards of a store that a step reads or writes: `MOST_STEP_SHARDS` of `cuda/common/step_call.cuh`.
pub(crate) const MOST_SHARDS: usize = 16;

/// Pages and quantisation ranges of one segment format.
///
/// A page holds the tiles of its KV heads one after the other, each with its ranges (see this module). Span ranges are
/// `[slot][kv_head][channel]` of [`CodeRange`], for the channels as stored.
///
/// A store belongs to the stream of the backend that created it. Backends on other streams refuse it, because its pages
/// are freed in the order of that stream.
#[derive(Debug)]
pub struct Store {
    stream: Arc<CudaStream>,
    shape: AttentionShape,
    format: SegmentFormat,
    pages: PageFormat,
    shards: Vec<Shard>,
    range_slots: usize,
    key_ranges: Option<Arc<Memory>>,
    value_ranges: Option<Arc<Memory>>,
    /// `[slot][kv_head][channel]` of f32, for the channels of the tensors.
    centres: Option<Arc<Memory>>,
}

#[derive(Debug)]
struct Shard {
    pages: u32,
    memory: Arc<Memory>,
}

/// Maximum number of pages in one shard.
pub(crate) fn max_shard_pages(shape: &AttentionShape, format: &SegmentFormat) -> u32 {
    (SHARD_BYTES / format.page_bytes(shape) as u64).try_into().unwrap_or(u32::MAX)
}

impl Store {
    /// An empty store.
    ///
    /// # Errors
    /// [`Error::Format`] when the format does not fit the shape, [`Error::Unsupported`] when it has no CUDA kernel.
    pub(crate) fn new(stream: &Arc<CudaStream>, shape: AttentionShape, format: SegmentFormat) -> Result<Self> {
        format.check(&shape)?;
        let pages = PageFormat::new(&shape, &format)?;
        let page_bytes = (pages.head_bytes() * shape.kv_heads()) as u64;
        if page_bytes > SHARD_BYTES {
            return Err(Error::Limit {
                what: format!("one page of {} KV heads of {format} in bytes", shape.kv_heads()),
                needed: page_bytes,
                allowed: SHARD_BYTES,
                hint: "split the KV heads over several caches",
            });
        }
        let stream = stream.clone();
        Ok(Self {
            stream,
            shape,
            format,
            pages,
            shards: Vec::new(),
            range_slots: 0,
            key_ranges: None,
            value_ranges: None,
            centres: None,
        })
    }

    /// Checks that the store belongs to this stream.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub(crate) fn check_stream(&self, what: &'static str, stream: &CudaStream) -> Result<()> {
        if same_stream(&self.stream, stream) {
            return Ok(());
        }
        let reason = "the store was made by a backend on another stream; use that backend, or a cache of this one";
        Err(Error::Plan { what, reason: reason.into() })
    }

    /// Shape of the layer.
    pub const fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// Format of keys and values.
    pub const fn format(&self) -> &SegmentFormat {
        &self.format
    }

    pub(crate) const fn pages(&self) -> &PageFormat {
        &self.pages
    }

    /// Bytes of tiles, tile ranges, span ranges and centres.
    pub fn bytes(&self) -> u64 {
        let page_bytes = self.page_bytes() as u64;
        let pages: u64 = self.shards.iter().map(|shard| u64::from(shard.pages) * page_bytes).sum();
        let range_slots = self.key_ranges.iter().chain(&self.value_ranges).count() * self.range_slots;
        let centres = self.centre_slots() * SegmentFormat::centre_bytes(&self.shape);
        pages + (range_slots * self.slot_bytes() + centres) as u64
    }

    pub(crate) const fn page_bytes(&self) -> usize {
        self.pages.head_bytes() * self.shape.kv_heads()
    }

    /// Adds a shard of `pages` zeroed pages.
    pub(crate) fn add_shard(&mut self, stream: &Arc<CudaStream>, pages: u32) -> Result<()> {
        let bytes = self.shard_bytes(pages)?;
        let memory = Memory::zeroed(stream, "pages", bytes)?;
        self.shards.push(Shard { pages, memory });
        Ok(())
    }

    fn shard_bytes(&self, pages: u32) -> Result<usize> {
        let most = max_shard_pages(&self.shape, &self.format);
        if pages == 0 || pages > most {
            let (needed, allowed) = (pages.into(), most.into());
            let hint = "add several smaller shards of at least one page";
            return Err(Error::Limit { what: "the pages of a shard".into(), needed, allowed, hint });
        }
        Ok(pages as usize * self.page_bytes())
    }

    /// A shard of `pages` pages for the place of the newest one. It begins with that shard's pages, and the others are
    /// zeroed.
    pub(crate) fn larger_shard(&self, stream: &Arc<CudaStream>, pages: u32) -> Result<LargerShard<Arc<Memory>>> {
        let newest = self.shards.last();
        check_larger(newest.map(|shard| shard.pages), pages)?;
        let bytes = self.shard_bytes(pages)?;
        let memory = match newest {
            Some(newest) => newest.memory.grown(stream, "pages", bytes)?,
            None => Memory::zeroed(stream, "pages", bytes)?,
        };
        Ok(LargerShard::new((self.shape, self.format), pages, memory))
    }

    /// Puts such a shard in the place of the newest one. Steps that were bound before keep the old one.
    pub(crate) fn replace_shard(&mut self, shard: LargerShard<Arc<Memory>>) -> Result<()> {
        let newest = self.shards.last().map(|shard| shard.pages);
        let (pages, memory) = shard.replacing((&self.shape, &self.format), newest)?;
        memory.check_stream("a shard", &self.stream)?;
        self.shards.pop();
        self.shards.push(Shard { pages, memory });
        Ok(())
    }

    /// Drops the newest shard, if there is one. Steps that were bound before keep it.
    pub(crate) fn drop_shard(&mut self) {
        self.shards.pop();
    }

    /// Grows the span ranges to at least `slots` slots. Steps that were bound before still read the old ones.
    pub(crate) fn reserve_ranges(&mut self, stream: &Arc<CudaStream>, slots: usize) -> Result<()> {
        if !self.format.has_span_ranges() || slots <= self.range_slots {
            return Ok(());
        }
        let bytes = slots.saturating_mul(self.slot_bytes());
        let grow = |which, old: &Option<Arc<Memory>>| match (self.format.tensor(which).has_span_ranges(), old) {
            (false, _) => Ok(None),
            (true, None) => Memory::zeroed(stream, "span ranges", bytes).map(Some),
            (true, Some(old)) => old.grown(stream, "span ranges", bytes).map(Some),
        };
        let keys = grow(KeyOrValue::Key, &self.key_ranges)?;
        let values = grow(KeyOrValue::Value, &self.value_ranges)?;
        (self.key_ranges, self.value_ranges, self.range_slots) = (keys, values, slots);
        Ok(())
    }

    /// Grows the centres to at least `slots` slots. Steps that were bound before still read the old ones.
    pub(crate) fn reserve_centres(&mut self, stream: &Arc<CudaStream>, slots: usize) -> Result<()> {
        if !self.format.key.takes_centre() {
            return Err(Error::Format { format: self.format.to_string(), reason: self.format.why_no_centre() });
        }
        if slots <= self.centre_slots() {
            return Ok(());
        }
        let bytes = slots.saturating_mul(SegmentFormat::centre_bytes(&self.shape));
        self.centres = Some(match &self.centres {
            None => Memory::zeroed(stream, "centres", bytes)?,
            Some(old) => old.grown(stream, "centres", bytes)?,
        });
        Ok(())
    }

    /// Slots of centres; 0 where keys are not centred.
    pub fn centre_slots(&self) -> usize {
        self.centres.as_ref().map_or(0, |centres| centres.bytes() / SegmentFormat::centre_bytes(&self.shape))
    }

    /// Memory of the centres.
    pub(crate) const fn centres(&self) -> Option<&Arc<Memory>> {
        self.centres.as_ref()
    }

    /// Address of a centre that was checked to exist, or of the first one; 0 without centres.
    pub(crate) fn centre_address(&self, slot: usize) -> u64 {
        let bytes = slot * SegmentFormat::centre_bytes(&self.shape);
        self.centres.as_ref().map_or(0, |centres| centres.address() + bytes as u64)
    }

    /// Checks that a centre exists, where one is named.
    pub(crate) fn check_centre(&self, what: &'static str, slot: Option<usize>) -> Result<()> {
        match slot.filter(|&slot| slot >= self.centre_slots()) {
            None => Ok(()),
            Some(slot) => {
                let reason = format!("there is no centre {slot}; the store has {}, reserve more", self.centre_slots());
                Err(Error::Plan { what, reason })
            }
        }
    }

    /// Ranges of one slot.
    const fn slot_ranges(&self) -> usize {
        self.shape.kv_heads() * self.pages.head_dim
    }

    /// Address of a slot's ranges; 0 if the format has none.
    pub(crate) fn slot_address(&self, which: KeyOrValue, slot: usize) -> u64 {
        self.ranges(which)
            .map_or(0, |ranges| ranges.address() + (slot * self.slot_ranges() * size_of::<CodeRange>()) as u64)
    }

    /// Bytes of a slot's ranges.
    pub(crate) const fn slot_bytes(&self) -> usize {
        self.slot_ranges() * size_of::<CodeRange>()
    }

    pub(crate) const fn ranges(&self, which: KeyOrValue) -> Option<&Arc<Memory>> {
        match which {
            KeyOrValue::Key => self.key_ranges.as_ref(),
            KeyOrValue::Value => self.value_ranges.as_ref(),
        }
    }

    /// All memory of the store that a step reads.
    pub(crate) fn memory(&self) -> Vec<Arc<Memory>> {
        let shards = self.shards.iter().map(|shard| shard.memory.clone());
        shards.chain(self.key_ranges.clone()).chain(self.value_ranges.clone()).chain(self.centres.clone()).collect()
    }

    /// Address of a page.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such page.
    pub(crate) fn page_address(&self, what: &'static str, page: Page) -> Result<u64> {
        let shard = self.shards.get(page.shard as usize).filter(|shard| page.index < shard.pages);
        let shard = shard.ok_or_else(|| Error::Plan {
            what,
            reason: format!(
                "there is no page {} in shard {}; the shards hold {:?} pages",
                page.index,
                page.shard,
                self.shards.iter().map(|shard| shard.pages).collect::<Vec<_>>()
            ),
        })?;
        Ok(shard.memory.address() + u64::from(page.index) * self.page_bytes() as u64)
    }

    /// Memory of a shard.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such shard.
    pub(crate) fn shard_memory(&self, shard: u32) -> Result<&Arc<Memory>> {
        let missing = || Error::Plan { what: "store", reason: format!("there is no shard {shard}") };
        self.shards.get(shard as usize).map(|shard| &shard.memory).ok_or_else(missing)
    }

    /// Number of shards.
    pub(crate) const fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Addresses of the first `shards` shards, for kernels.
    ///
    /// # Errors
    /// [`Error::Limit`] when there are more shards than kernels take.
    pub(crate) fn shard_addresses(&self, shards: usize) -> Result<[u64; MOST_SHARDS]> {
        if shards > MOST_SHARDS {
            let (needed, allowed) = (shards as u64, MOST_SHARDS as u64);
            let hint = "reserve all pages in one call; that takes fewer shards";
            return Err(Error::Limit { what: "the shards of a store".into(), needed, allowed, hint });
        }
        let mut addresses = [0; MOST_SHARDS];
        let of_store = self.shards.iter().take(shards).map(|shard| shard.memory.address());
        addresses.iter_mut().zip(of_store).for_each(|(address, of_shard)| *address = of_shard);
        Ok(addresses)
    }

    /// Pages of a shard, or 0 if there is no such shard.
    pub fn shard_pages(&self, shard: u32) -> u32 {
        self.shards.get(shard as usize).map_or(0, |shard| shard.pages)
    }

    /// Slots of span ranges; 0 where the format has none.
    pub const fn range_slots(&self) -> usize {
        self.range_slots
    }

    /// The store's entry in a [layout of steps](crate::plan::WriteLayout), for steps that put up to `tokens` tokens
    /// into the store and copy up to `copies` of its pages.
    pub fn step_capacity(&self, tokens: usize, copies: usize) -> StoreCapacity {
        let shard_pages = self.shards.iter().map(|shard| shard.pages).collect();
        StoreCapacity {
            format: self.format,
            shard_pages,
            range_slots: self.range_slots,
            tokens,
            copies,
            centres: 0,
            centre_slots: self.centre_slots(),
        }
    }

    /// Checks that a slot of span ranges exists, where the format needs one.
    pub(crate) fn check_slot(&self, what: &'static str, slot: usize) -> Result<()> {
        if self.format.has_span_ranges() && slot >= self.range_slots {
            let reason = format!("there is no range slot {slot}; the store has {}, reserve more", self.range_slots);
            return Err(Error::Plan { what, reason });
        }
        Ok(())
    }

    /// The words of a tile, in [`TileOrder::MmaFragment`](crate::format::TileOrder::MmaFragment). Reads them after all
    /// work queued on the stream.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such page or head, or on another stream than that of the store;
    /// [`Error::DeviceLost`].
    pub fn tile_words(
        &self,
        stream: &Arc<CudaStream>,
        which: KeyOrValue,
        page: Page,
        kv_head: usize,
    ) -> Result<Vec<u32>> {
        self.page_address("tile", page)?;
        if kv_head >= self.shape.kv_heads() {
            let reason = format!("KV head {kv_head} of {}", self.shape.kv_heads());
            return Err(Error::Plan { what: "tile", reason });
        }
        let offset =
            page.index as usize * self.page_bytes() + kv_head * self.pages.head_bytes() + self.pages.tile_offset(which);
        let memory = &self.shards[page.shard as usize].memory;
        let bytes = memory.download_part(stream, "tile", offset, self.pages.tile_bytes(which))?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }
}
