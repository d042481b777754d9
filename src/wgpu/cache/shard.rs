//! The buffers of a number of pages.

use crate::Result;
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat, TileLayout};
use crate::wgpu::device::buffers::{self, ARRAY_USAGES};
use crate::wgpu::device::capabilities::KernelLimits;

/// A buffer of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreBuffer {
    /// Tiles of keys.
    Keys,
    /// Tile ranges of keys.
    KeyRanges,
    /// Tiles of values.
    Values,
    /// Tile ranges of values.
    ValueRanges,
}

impl StoreBuffer {
    /// The tiles of keys or of values.
    pub const fn tiles(which: KeyOrValue) -> Self {
        match which {
            KeyOrValue::Key => Self::Keys,
            KeyOrValue::Value => Self::Values,
        }
    }

    /// The tile ranges of keys or of values.
    pub const fn ranges(which: KeyOrValue) -> Self {
        match which {
            KeyOrValue::Key => Self::KeyRanges,
            KeyOrValue::Value => Self::ValueRanges,
        }
    }
}

/// The buffers of a number of pages.
#[derive(Clone, Debug)]
pub struct Shard {
    pages: u32,
    keys: ShardTensor,
    values: ShardTensor,
}

#[derive(Clone, Debug)]
struct ShardTensor {
    tiles: wgpu::Buffer,
    ranges: Option<wgpu::Buffer>,
}

impl Shard {
    /// Zeroed pages of a format.
    pub(super) async fn create(
        device: &wgpu::Device,
        (shape, format): (&AttentionShape, &SegmentFormat),
        pages: u32,
    ) -> Result<Self> {
        let tensor = |which| ShardTensor::create(device, PagePart::new(shape, format, which), which, pages);
        Ok(Self { pages, keys: tensor(KeyOrValue::Key).await?, values: tensor(KeyOrValue::Value).await? })
    }

    /// Number of pages.
    pub(super) const fn pages(&self) -> u32 {
        self.pages
    }

    pub(super) const fn part(&self, part: StoreBuffer) -> Option<&wgpu::Buffer> {
        match part {
            StoreBuffer::Keys => Some(&self.keys.tiles),
            StoreBuffer::KeyRanges => self.keys.ranges.as_ref(),
            StoreBuffer::Values => Some(&self.values.tiles),
            StoreBuffer::ValueRanges => self.values.ranges.as_ref(),
        }
    }

    pub(super) fn buffers(&self) -> impl Iterator<Item = &wgpu::Buffer> {
        [&self.keys, &self.values].into_iter().flat_map(|tensor| std::iter::once(&tensor.tiles).chain(&tensor.ranges))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.buffers().map(wgpu::Buffer::size).sum()
    }
}

impl ShardTensor {
    async fn create(device: &wgpu::Device, part: PagePart, which: KeyOrValue, pages: u32) -> Result<Self> {
        let (tiles, ranges) = match which {
            KeyOrValue::Key => ("tiles of keys", "tile ranges of keys"),
            KeyOrValue::Value => ("tiles of values", "tile ranges of values"),
        };
        let bytes = |of_page: u64| of_page * u64::from(pages);
        let tiles = buffers::create(device, tiles, bytes(part.tiles), ARRAY_USAGES).await?;
        let ranges = match part.ranges {
            0 => None,
            of_page => Some(buffers::create(device, ranges, bytes(of_page), ARRAY_USAGES).await?),
        };
        Ok(Self { tiles, ranges })
    }
}

/// Largest number of pages that one shard of such a store can hold within `limits`; 0 if not even one page fits.
pub fn max_shard_pages(shape: &AttentionShape, format: &SegmentFormat, limits: &KernelLimits) -> u32 {
    u32::try_from(limits.binding_bytes / largest_page_part(shape, format)).unwrap_or(u32::MAX)
}

/// Bytes of the largest part of a page. Each part lies in a buffer of its own.
pub(super) fn largest_page_part(shape: &AttentionShape, format: &SegmentFormat) -> u64 {
    let parts = [KeyOrValue::Key, KeyOrValue::Value].map(|which| PagePart::new(shape, format, which));
    parts.into_iter().flat_map(|part| [part.tiles, part.ranges]).fold(1, u64::max)
}

/// Bytes of keys or of values in one page.
pub(super) struct PagePart {
    pub(super) tiles: u64,
    pub(super) ranges: u64,
}

impl PagePart {
    pub(super) fn new(shape: &AttentionShape, format: &SegmentFormat, which: KeyOrValue) -> Self {
        let tensor = format.tensor(which);
        let layout = TileLayout::of(tensor, shape.head_dim());
        let tile_words = match which {
            KeyOrValue::Key => layout.key_tile_words(),
            KeyOrValue::Value => layout.value_tile_words(),
        };
        let bytes = |words_of_tile: usize| (words_of_tile * shape.kv_heads() * 4) as u64;
        Self { tiles: bytes(tile_words), ranges: bytes(tensor.ranges_per_tile(shape.head_dim())) }
    }
}
