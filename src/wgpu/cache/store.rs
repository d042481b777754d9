//! Packed keys and values on the device: pages in shards, and the ranges of spans.

use super::shard::{PagePart, Shard, StoreBuffer, largest_page_part, max_shard_pages};
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat};
use crate::plan::{LargerShard, Page, StoreCapacity, check_larger};
use crate::wgpu::device::buffers::{self, ARRAY_USAGES};
use crate::wgpu::device::capabilities::KernelLimits;
use crate::wgpu::device::encoded::Encoders;
use crate::wgpu::device::guard;
use crate::{Error, Result};

/// Pages and quantisation ranges of one segment format.
///
/// | buffer | holds |
/// | --- | --- |
/// | tiles of a shard, keys and values apart | `[page][kv_head]` of tiles, see [`crate::format::tile`] |
/// | tile ranges of a shard, where the format has them | `[page][kv_head][ranges per tile]` of one word each |
/// | span ranges, where the format has them | `[slot][kv_head][head_dim]` of [`CodeRange`](crate::format::CodeRange) |
/// | centres, where keys are stored less one | `[slot][kv_head][head_dim]` of f32 |
///
/// All buffers have the usages `STORAGE | COPY_SRC | COPY_DST`.
#[derive(Clone, Debug)]
pub struct Store {
    shape: AttentionShape,
    format: SegmentFormat,
    shards: Vec<Shard>,
    max_shard_pages: u32,
    range_slots: usize,
    key_ranges: Option<wgpu::Buffer>,
    value_ranges: Option<wgpu::Buffer>,
    centres: Option<wgpu::Buffer>,
    encoders: Encoders,
}

impl Store {
    /// An empty store whose shards stay within `limits`.
    ///
    /// # Errors
    /// [`Error::Format`] when the format does not fit the shape, [`Error::Limit`] when not even one page fits a
    /// binding.
    pub fn new(shape: AttentionShape, format: SegmentFormat, limits: &KernelLimits) -> Result<Self> {
        format.check(&shape)?;
        let max_shard_pages = max_shard_pages(&shape, &format, limits);
        if max_shard_pages == 0 {
            return Err(Error::Limit {
                what: format!("one page of {} KV heads of {format} in bytes", shape.kv_heads()),
                needed: largest_page_part(&shape, &format),
                allowed: limits.binding_bytes,
                hint: "create the device with larger storage bindings, or split the KV heads over several caches",
            });
        }
        Ok(Self {
            shape,
            format,
            shards: Vec::new(),
            max_shard_pages,
            range_slots: 0,
            key_ranges: None,
            value_ranges: None,
            centres: None,
            encoders: Encoders::default(),
        })
    }

    /// Who encodes steps over the store.
    pub(in crate::wgpu) const fn encoders(&self) -> &Encoders {
        &self.encoders
    }

    /// Shape of the layer.
    pub const fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// Format of keys and values.
    pub const fn format(&self) -> &SegmentFormat {
        &self.format
    }

    /// The store's entry in a [layout of steps](crate::plan::WriteLayout), for steps that put up to `tokens` tokens
    /// into the store and copy up to `copies` of its pages.
    pub fn step_capacity(&self, tokens: usize, copies: usize) -> StoreCapacity {
        let shard_pages = self.shards.iter().map(Shard::pages).collect();
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

    /// Number of shards.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Pages that a shard holds, or 0 if there is no such shard.
    pub fn shard_pages(&self, shard: u32) -> u32 {
        self.shards.get(shard as usize).map_or(0, Shard::pages)
    }

    /// A buffer of a shard.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such shard, or the format has no such ranges.
    pub fn shard_buffer(&self, shard: u32, part: StoreBuffer) -> Result<&wgpu::Buffer> {
        self.shards.get(shard as usize).and_then(|shard| shard.part(part)).ok_or_else(|| Error::Plan {
            what: "store",
            reason: format!(
                "there is no {part:?} in shard {shard} of a store of {} shards of {}",
                self.shards.len(),
                self.format
            ),
        })
    }

    /// [`Store::shard_buffer`] as a binding for kernels.
    ///
    /// # Errors
    /// As [`Store::shard_buffer`].
    pub fn shard_binding(&self, shard: u32, part: StoreBuffer) -> Result<wgpu::BufferBinding<'_>> {
        self.shard_buffer(shard, part).map(wgpu::Buffer::as_entire_buffer_binding)
    }

    /// Largest number of pages in one shard.
    pub const fn max_shard_pages(&self) -> u32 {
        self.max_shard_pages
    }

    /// Slots of span ranges; 0 where the format has none.
    pub const fn range_slots(&self) -> usize {
        self.range_slots
    }

    /// Span ranges of keys or of values.
    ///
    /// # Errors
    /// [`Error::Plan`] when the format has none, or no slots were reserved.
    pub fn span_ranges_buffer(&self, which: KeyOrValue) -> Result<&wgpu::Buffer> {
        let ranges = match which {
            KeyOrValue::Key => &self.key_ranges,
            KeyOrValue::Value => &self.value_ranges,
        };
        ranges.as_ref().ok_or_else(|| Error::Plan {
            what: "store",
            reason: format!("a store of {} has no span ranges of {which}; reserve slots", self.format),
        })
    }

    /// [`Store::span_ranges_buffer`] as a binding for kernels.
    ///
    /// # Errors
    /// As [`Store::span_ranges_buffer`].
    pub fn span_ranges_binding(&self, which: KeyOrValue) -> Result<wgpu::BufferBinding<'_>> {
        self.span_ranges_buffer(which).map(wgpu::Buffer::as_entire_buffer_binding)
    }

    /// Slots of centres; 0 where keys are not centred.
    pub fn centre_slots(&self) -> usize {
        self.centres.as_ref().map_or(0, |centres| centres.size() as usize / SegmentFormat::centre_bytes(&self.shape))
    }

    /// Centres as a binding for kernels.
    ///
    /// # Errors
    /// [`Error::Plan`] when no slots were reserved.
    pub(crate) fn centres_binding(&self) -> Result<wgpu::BufferBinding<'_>> {
        self.centres_buffer().map(wgpu::Buffer::as_entire_buffer_binding)
    }

    /// Centres, `[slot][kv_head][head_dim]`.
    ///
    /// # Errors
    /// [`Error::Plan`] when no slots were reserved.
    pub(crate) fn centres_buffer(&self) -> Result<&wgpu::Buffer> {
        let missing = || Error::Plan { what: "store", reason: "it has no centres; reserve slots".into() };
        self.centres.as_ref().ok_or_else(missing)
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        let ranges =
            [&self.key_ranges, &self.value_ranges, &self.centres].into_iter().flatten().map(wgpu::Buffer::size);
        self.shards.iter().map(Shard::bytes).chain(ranges).sum()
    }

    /// Adds a shard of `pages` zeroed pages.
    ///
    /// # Errors
    /// [`Error::Limit`] for no pages, or more than [`Store::max_shard_pages`]; [`Error::OutOfMemory`],
    /// [`Error::DeviceLost`]. On an error the store is unchanged.
    pub async fn add_shard(&mut self, device: &wgpu::Device, pages: u32) -> Result<()> {
        let shard = self.create_shard(device, pages).await?;
        self.shards.push(shard);
        Ok(())
    }

    async fn create_shard(&self, device: &wgpu::Device, pages: u32) -> Result<Shard> {
        if pages == 0 || pages > self.max_shard_pages {
            return Err(Error::Limit {
                what: "the pages of a shard".into(),
                needed: pages.into(),
                allowed: self.max_shard_pages.into(),
                hint: "add several smaller shards of at least one page",
            });
        }
        Shard::create(device, (&self.shape, &self.format), pages).await
    }

    /// A shard of `pages` pages for the place of the newest one. It begins with that shard's pages, as they are after
    /// all submitted work, and the others are zeroed.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no shard or the newest one has as many pages, [`Error::Limit`] for more than
    /// [`Store::max_shard_pages`], [`Error::NotSubmitted`], [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub async fn larger_shard(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        pages: u32,
    ) -> Result<LargerShard<Shard>> {
        let newest = self.shards.last();
        check_larger(newest.map(Shard::pages), pages)?;
        self.encoders.check_submitted(device, "growth of a shard")?;
        let larger = self.create_shard(device, pages).await?;
        guard::submit(device, queue, "kvpack larger shard", |encoder| {
            for (old, new) in newest.into_iter().flat_map(Shard::buffers).zip(larger.buffers()) {
                encoder.copy_buffer_to_buffer(old, 0, new, 0, old.size());
            }
        })?;
        guard::settled(device).await?;
        Ok(LargerShard::new((self.shape, self.format), pages, larger))
    }

    /// Puts such a shard in the place of the newest one. Earlier bindings stay bound to the old buffers.
    ///
    /// # Errors
    /// [`Error::Plan`] when it was made for another shape or format, or has fewer pages than the newest one.
    pub fn replace_shard(&mut self, shard: LargerShard<Shard>) -> Result<()> {
        let newest = self.shards.last().map(Shard::pages);
        let (_, shard) = shard.replacing((&self.shape, &self.format), newest)?;
        self.shards.pop();
        self.shards.push(shard);
        Ok(())
    }

    /// Drops the newest shard, if there is one. Bindings made before keep it on the device.
    pub fn drop_shard(&mut self) {
        self.shards.pop();
    }

    /// Grows the span ranges to at least `slots` slots. Existing slots keep their contents, and new ones are zeroed.
    /// Earlier bindings stay bound to the old buffers. A format without span ranges needs no slots and gets none.
    ///
    /// # Errors
    /// [`Error::Limit`] when the slots do not fit a binding, [`Error::OutOfMemory`], [`Error::DeviceLost`]. On an error
    /// the store is unchanged.
    pub async fn reserve_ranges(&mut self, device: &wgpu::Device, queue: &wgpu::Queue, slots: usize) -> Result<()> {
        let has_ranges = |which| self.format.tensor(which).has_span_ranges();
        if slots <= self.range_slots || !(has_ranges(KeyOrValue::Key) || has_ranges(KeyOrValue::Value)) {
            return Ok(());
        }
        let limits = KernelLimits::new(&device.limits());
        let size = (slots as u64).saturating_mul(self.slot_bytes());
        if size > limits.binding_bytes {
            return Err(Error::Limit {
                what: "span ranges in bytes".into(),
                needed: size,
                allowed: limits.binding_bytes,
                hint: "use fewer spans per store",
            });
        }
        self.encoders.check_submitted(device, "growth of span ranges")?;
        let key_ranges = match has_ranges(KeyOrValue::Key) {
            true => Some(buffers::create(device, "span ranges of keys", size, ARRAY_USAGES).await?),
            false => None,
        };
        let value_ranges = match has_ranges(KeyOrValue::Value) {
            true => Some(buffers::create(device, "span ranges of values", size, ARRAY_USAGES).await?),
            false => None,
        };
        guard::submit(device, queue, "kvpack span ranges", |encoder| {
            for (old, new) in [(&self.key_ranges, &key_ranges), (&self.value_ranges, &value_ranges)] {
                if let (Some(old), Some(new)) = (old, new) {
                    encoder.copy_buffer_to_buffer(old, 0, new, 0, old.size());
                }
            }
        })?;
        guard::settled(device).await?;
        (self.key_ranges, self.value_ranges, self.range_slots) = (key_ranges, value_ranges, slots);
        Ok(())
    }

    /// Grows the centres of the sequences' keys to at least `slots` slots. Existing slots keep their contents, and new
    /// ones are zeroed. Earlier bindings stay bound to the old buffer.
    ///
    /// # Errors
    /// [`Error::Format`] when keys have a range for every channel, [`Error::Limit`] when the slots do not fit a
    /// binding, [`Error::NotSubmitted`], [`Error::OutOfMemory`], [`Error::DeviceLost`]. On an error the store is
    /// unchanged.
    pub async fn reserve_centres(&mut self, device: &wgpu::Device, queue: &wgpu::Queue, slots: usize) -> Result<()> {
        if !self.format.key.takes_centre() {
            return Err(Error::Format { format: self.format.to_string(), reason: self.format.why_no_centre() });
        }
        if slots <= self.centre_slots() {
            return Ok(());
        }
        let needed = (slots as u64).saturating_mul(SegmentFormat::centre_bytes(&self.shape) as u64);
        let allowed = KernelLimits::new(&device.limits()).binding_bytes;
        if needed > allowed {
            let hint = "use fewer sequences per cache";
            return Err(Error::Limit { what: "centres in bytes".into(), needed, allowed, hint });
        }
        self.encoders.check_submitted(device, "growth of centres")?;
        let grown = buffers::create(device, "centres", needed, ARRAY_USAGES).await?;
        if let Some(old) = &self.centres {
            guard::submit(device, queue, "kvpack centres", |encoder| {
                encoder.copy_buffer_to_buffer(old, 0, &grown, 0, old.size());
            })?;
            guard::settled(device).await?;
        }
        self.centres = Some(grown);
        Ok(())
    }

    /// The ranges that kernels read for the tiles of a shard: span ranges or tile ranges, if the format has any.
    pub(crate) fn ranges_binding(&self, shard: u32, which: KeyOrValue) -> Result<Option<wgpu::BufferBinding<'_>>> {
        let format = self.format.tensor(which);
        if format.has_span_ranges() {
            self.span_ranges_binding(which).map(Some)
        } else if format.grouping().is_some() {
            self.shard_binding(shard, StoreBuffer::ranges(which)).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Checks that the store has the shape and format of a plan.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub fn check_planned(&self, what: &'static str, shape: &AttentionShape, format: &SegmentFormat) -> Result<()> {
        if (&self.shape, &self.format) == (shape, format) {
            return Ok(());
        }
        let of = |shape: &AttentionShape, format: &SegmentFormat| {
            format!("{} KV heads of {} channels as {format}", shape.kv_heads(), shape.head_dim())
        };
        Err(Error::Plan {
            what,
            reason: format!("planned for {}, the store holds {}", of(shape, format), of(&self.shape, &self.format)),
        })
    }

    /// Checks that all pages exist.
    ///
    /// # Errors
    /// [`Error::Plan`] names the first that does not.
    pub fn check_pages<'a>(&self, what: &'static str, pages: impl IntoIterator<Item = &'a Page>) -> Result<()> {
        let exists = |page: &Page| page.index < self.shard_pages(page.shard);
        match pages.into_iter().find(|page| !exists(page)) {
            None => Ok(()),
            Some(page) => Err(Error::Plan {
                what,
                reason: format!(
                    "there is no page {} in shard {}; the shards hold {:?} pages",
                    page.index,
                    page.shard,
                    self.shards.iter().map(Shard::pages).collect::<Vec<_>>()
                ),
            }),
        }
    }

    /// Checks that a slot of span ranges exists, where the format needs one.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub fn check_slot(&self, what: &'static str, slot: usize) -> Result<()> {
        let needed = [KeyOrValue::Key, KeyOrValue::Value].map(|which| self.format.tensor(which).has_span_ranges());
        if needed.contains(&true) && slot >= self.range_slots {
            let reason = format!("there is no range slot {slot}; the store has {}, reserve more", self.range_slots);
            return Err(Error::Plan { what, reason });
        }
        Ok(())
    }

    /// Checks that a centre exists, where one is named.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub fn check_centre(&self, what: &'static str, slot: Option<usize>) -> Result<()> {
        match slot.filter(|&slot| slot >= self.centre_slots()) {
            None => Ok(()),
            Some(slot) => {
                let reason = format!("there is no centre {slot}; the store has {}, reserve more", self.centre_slots());
                Err(Error::Plan { what, reason })
            }
        }
    }

    /// Bytes of a part of one page.
    pub(crate) fn page_part_bytes(&self, part: StoreBuffer) -> u64 {
        let of = |which| PagePart::new(&self.shape, &self.format, which);
        match part {
            StoreBuffer::Keys => of(KeyOrValue::Key).tiles,
            StoreBuffer::KeyRanges => of(KeyOrValue::Key).ranges,
            StoreBuffer::Values => of(KeyOrValue::Value).tiles,
            StoreBuffer::ValueRanges => of(KeyOrValue::Value).ranges,
        }
    }

    /// Bytes of the span ranges of keys, or of values, of one slot.
    pub(crate) fn slot_bytes(&self) -> u64 {
        (self.shape.kv_heads() * self.shape.head_dim() * size_of::<crate::format::CodeRange>()) as u64
    }
}
