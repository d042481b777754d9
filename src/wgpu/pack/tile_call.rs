//! What the kernels that move rows into tiles and back have in common: their arguments.

use std::collections::BTreeMap;

use super::levels::with_codebook_fields;
use crate::format::{
    AffineFormat, AttentionShape, Bits, CodebookFormat, Grouping, KeyOrValue, RangeRule, Rotation, TensorFormat,
    TileLayout,
};
use crate::plan::{ElementType, IndexShape, Page, RowLayout};
use crate::wgpu::device::shader::Variant;
use crate::wgpu::device::{ElementBinding, Indices, Tensor, buffers};
use crate::{Error, Result, TILE_TOKENS};

/// The head of the arguments; the places follow it. The layout is that of `pack/call.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct TileCall {
    /// Index of the dense tensor's first element within its binding.
    pub first_element: u32,
    pub token_stride: u32,
    pub head_stride: u32,
    /// First token of the span in the dense tensor.
    pub first_token: u32,
    /// Tokens of the span.
    pub tokens: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub range_slot: u32,
    pub tile_words: u32,
    /// Words of one load of a tile.
    pub vector: u32,
    /// Tokens or channels of a range.
    pub group: u32,
    pub ranges_per_tile: u32,
    /// Invocations that have work, or rows, where places do not say so.
    pub total: u32,
    pub shrink: f32,
    /// 0, where the compiler cannot know it.
    pub zero: u32,
    pub places: u32,
    /// Indices of a KV head, where tokens are gathered, and what they are below.
    pub index_stride: u32,
    pub below: u32,
    /// The largest element that is in order, where elements are looked at.
    pub largest: f32,
    /// Where a step's table counts and lists the places, and the shards of those that the dispatch takes.
    pub section: u32,
    pub shards: u32,
}

/// Where tokens lie: the layout is that of `pack/call.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Place {
    /// First token, counted from the first of the span.
    pub token: u32,
    /// The page within its shard.
    pub page: u32,
    /// Slot of the token in the page, for single tokens.
    pub slot: u32,
    /// Slot of the ranges of the span that the page belongs to.
    pub range_slot: u32,
}

impl Place {
    /// A slot of a page whose first slot this is.
    pub fn at(self, slot: u32) -> Self {
        Self { token: self.token + slot, slot: self.slot + slot, ..self }
    }
}

/// The places of one shard: what one dispatch can reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShardPlaces {
    pub shard: u32,
    pub places: Vec<Place>,
}

/// A page and the slot of the ranges of its span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedPage {
    pub page: Page,
    pub range_slot: usize,
}

impl PlacedPage {
    /// The pages of one span.
    pub fn of_span(pages: &[Page], range_slot: usize) -> Vec<Self> {
        pages.iter().map(|&page| Self { page, range_slot }).collect()
    }

    /// Where the tokens of the tile of this number go.
    pub fn place(self, tile: usize) -> Place {
        let token = (tile * TILE_TOKENS) as u32;
        Place { token, page: self.page.index, slot: 0, range_slot: self.range_slot as u32 }
    }
}

/// Pages by shard, in the order of the shards. Tokens follow each other through the pages.
pub(crate) fn places_by_shard(pages: &[PlacedPage]) -> Vec<ShardPlaces> {
    let mut by_shard: BTreeMap<u32, Vec<Place>> = BTreeMap::new();
    for (tile, placed) in pages.iter().enumerate() {
        by_shard.entry(placed.page.shard).or_default().push(placed.place(tile));
    }
    by_shard.into_iter().map(|(shard, places)| ShardPlaces { shard, places }).collect()
}

/// Checks that a span has tokens, few enough to count, and exactly the pages they need.
pub(crate) fn check_span(what: &'static str, tokens: usize, pages: &[Page]) -> Result<()> {
    if tokens == 0 {
        return Err(Error::NoTokens { what, hint: "pass at least one token" });
    }
    let needed = tokens.div_ceil(TILE_TOKENS);
    if pages.len() != needed {
        let reason = format!("{tokens} tokens need {needed} pages; {} were given", pages.len());
        return Err(Error::Plan { what, reason });
    }
    Ok(())
}

impl TileCall {
    /// The arguments that follow from the shape and the format alone.
    pub fn new(shape: &AttentionShape, format: &TensorFormat, which: KeyOrValue) -> Self {
        let layout = TileLayout::of(format, shape.head_dim());
        let (tile_words, vector) = match which {
            KeyOrValue::Key => (layout.key_tile_words(), layout.key_vector()),
            KeyOrValue::Value => (layout.value_tile_words(), layout.value_vector()),
        };
        let group = match format.grouping() {
            Some(Grouping::ChannelTokens(count) | Grouping::TokenChannels(count)) => count,
            Some(Grouping::Token) => shape.head_dim(),
            Some(Grouping::Channel) | None => 1,
        };
        Self {
            first_element: 0,
            token_stride: 0,
            head_stride: 0,
            first_token: 0,
            tokens: 0,
            kv_heads: shape.kv_heads() as u32,
            head_dim: shape.head_dim() as u32,
            range_slot: 0,
            tile_words: tile_words as u32,
            vector: vector as u32,
            group: group as u32,
            ranges_per_tile: format.ranges_per_tile(shape.head_dim()) as u32,
            total: 0,
            shrink: format.affine().map_or(1.0, |affine| affine.shrink),
            zero: 0,
            places: 0,
            index_stride: 0,
            below: 0,
            largest: 0.0,
            section: 0,
            shards: 0,
        }
    }

    /// With the rows of the dense tensor, whose elements begin at `first_element` of its binding.
    ///
    /// # Errors
    /// [`Error::Limit`] when a row lies beyond what a 32-bit index reaches.
    pub fn with_rows(self, rows: &RowLayout, shape: &AttentionShape) -> Result<Self> {
        let reach = rows.elements_needed(shape).max(rows.token_stride).max(rows.head_stride) as u64;
        if reach > u64::from(u32::MAX) {
            return Err(Error::Limit {
                what: "the elements of a tensor".into(),
                needed: reach,
                allowed: u32::MAX.into(),
                hint: "pass fewer tokens at once",
            });
        }
        Ok(Self { token_stride: rows.token_stride as u32, head_stride: rows.head_stride as u32, ..self })
    }

    /// With what indices name, of each KV head.
    pub fn with_indices(self, indices: IndexShape) -> Self {
        Self { index_stride: indices.count() as u32, below: indices.below(), ..self }
    }

    /// A buffer of these arguments and places.
    pub fn upload(self, device: &wgpu::Device, places: &[Place]) -> Result<wgpu::Buffer> {
        let call = Self { places: places.len() as u32, ..self };
        let mut bytes = bytemuck::bytes_of(&call).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(places));
        if places.is_empty() {
            // A runtime-sized array of a binding has at least one element.
            bytes.extend_from_slice(&[0; size_of::<Place>()]);
        }
        buffers::create_filled(device, "arguments", &bytes, wgpu::BufferUsages::STORAGE)
    }
}

/// Chooses the code width, and keys or values.
pub(crate) fn with_layout(variant: Variant, bits: usize, which: KeyOrValue) -> Variant {
    variant.constant("BITS", bits).constant("KEYS", usize::from(which == KeyOrValue::Key))
}

/// What a kernel must know of the dense rows that it reads to be compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowsKind {
    pub element_type: ElementType,
    /// Tokens are named by indices.
    pub gathered: bool,
}

impl RowsKind {
    /// One of each that the shaders tell apart: how tokens are found has nothing to do with what elements are.
    pub fn all() -> impl Iterator<Item = Self> {
        ElementType::ALL.into_iter().map(Self::from).chain([Self { element_type: ElementType::F32, gathered: true }])
    }
}

impl From<ElementType> for RowsKind {
    fn from(element_type: ElementType) -> Self {
        Self { element_type, gathered: false }
    }
}

/// Dense rows as kernels bind them, and the indices of those to read, if not all follow each other.
#[derive(Clone, Debug)]
pub(crate) struct BoundRows<'a> {
    pub element_type: ElementType,
    pub elements: ElementBinding<'a>,
    pub indices: Option<&'a Indices>,
}

impl<'a> BoundRows<'a> {
    /// The rows of a tensor.
    pub fn new(tensor: &'a Tensor, indices: Option<&'a Indices>, limits: &wgpu::Limits) -> Result<Self> {
        Ok(Self { element_type: tensor.element_type(), elements: tensor.element_binding(limits)?, indices })
    }

    pub fn kind(&self) -> RowsKind {
        RowsKind { element_type: self.element_type, gathered: self.indices.is_some() }
    }

    /// The bindings by name.
    pub fn bindings(&self) -> impl Iterator<Item = (&'static str, wgpu::BufferBinding<'a>)> {
        let indices = self.indices.map(|indices| ("indices", indices.binding()));
        std::iter::once(("rows", self.elements.buffer.clone())).chain(indices)
    }
}

/// Chooses the type of the dense tensor's elements, and how tokens are found.
pub(crate) fn with_rows(variant: Variant, rows: RowsKind) -> Variant {
    let variant = variant.import("rows", rows_file(rows.element_type));
    if rows.gathered { variant.import("tokens", "pack/tokens/gather.wgsl") } else { variant }
}

/// Rows of tiles of f16 in place of a dense tensor's.
pub(crate) fn with_f16_tiles(variant: Variant, which: KeyOrValue) -> Variant {
    match which {
        KeyOrValue::Key => variant.import("rows", "pack/rows/key_tile.wgsl"),
        KeyOrValue::Value => variant.import("rows", "pack/rows/value_tile.wgsl"),
    }
}

/// The shader file that reads elements of this type.
pub(crate) fn rows_file(element_type: ElementType) -> &'static str {
    match element_type {
        ElementType::F32 => "pack/rows/f32.wgsl",
        ElementType::F16 => "pack/rows/f16.wgsl",
        ElementType::Bf16 => "pack/rows/bf16.wgsl",
    }
}

/// Chooses what the fields of tiles are, and where their ranges lie.
pub(crate) fn with_fields(variant: Variant, format: &TensorFormat, head_dim: usize) -> Variant {
    if let TensorFormat::Codebook(codebook) = format {
        return with_codebook_fields(variant, codebook, head_dim);
    }
    match format.grouping() {
        None => variant.import("field", "pack/field/f16.wgsl"),
        Some(Grouping::Channel) => variant,
        Some(grouping) => {
            variant.import("ranges", "pack/ranges/of_tile.wgsl").constant("GROUPING", grouping_constant(grouping))
        }
    }
}

/// Chooses how ranges follow from extremes.
pub(crate) fn with_range_rule(variant: Variant, format: &TensorFormat) -> Variant {
    let symmetric = format.affine().is_some_and(|affine| affine.ranges == RangeRule::Symmetric);
    variant.constant("SYMMETRIC", usize::from(symmetric))
}

/// `GROUPING` of `pack/grouping.wgsl`.
pub(crate) fn grouping_constant(grouping: Grouping) -> usize {
    match grouping {
        Grouping::Channel => 0,
        Grouping::ChannelTokens(_) => 1,
        Grouping::Token => 2,
        Grouping::TokenChannels(_) => 3,
    }
}

/// The formats with sketches, which are for keys.
pub(crate) fn sketched_formats(head_dim: usize) -> [TensorFormat; 4] {
    [Bits::One, Bits::Two, Bits::Three, Bits::Four]
        .map(|bits| TensorFormat::Codebook(CodebookFormat::turboquant_prod(bits, head_dim)))
}

/// One format of each that the shaders tell apart at a head dimension, for tests of all variants.
pub(crate) fn distinct_formats(head_dim: usize) -> Vec<TensorFormat> {
    let groupings = [Grouping::Channel, Grouping::ChannelTokens(32), Grouping::Token, Grouping::TokenChannels(16)];
    let affine = |bits| groupings.map(|grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping)));
    let rotated = AffineFormat::new(Bits::Four, Grouping::Token).rotated(Rotation::hadamard(16));
    let symmetric =
        groupings.map(|grouping| TensorFormat::Affine(AffineFormat::new(Bits::Eight, grouping).symmetric()));
    let all = std::iter::once(TensorFormat::F16).chain(Bits::ALL.into_iter().flat_map(affine));
    let codebooks =
        [Bits::One, Bits::Two, Bits::Three, Bits::Four].map(|bits| CodebookFormat::turboquant(bits, head_dim));
    let renormalized = codebooks.map(CodebookFormat::renormalized);
    let codebooks = codebooks.into_iter().chain(renormalized).map(TensorFormat::Codebook);
    all.chain([TensorFormat::Affine(rotated)]).chain(symmetric).chain(codebooks).collect()
}
