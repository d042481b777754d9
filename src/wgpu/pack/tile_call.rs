//! The arguments that the kernels between rows and tiles share.

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
    /// Tokens or channels that share a range.
    pub group: u32,
    pub ranges_per_tile: u32,
    /// Number of invocations with work, or of rows, unless the places determine it.
    pub total: u32,
    pub shrink: f32,
    /// 0, in a form that the compiler cannot know.
    pub zero: u32,
    pub places: u32,
    /// Indices per KV head of gathered tokens, and their exclusive upper bound.
    pub index_stride: u32,
    pub below: u32,
    /// The largest valid element, for kernels that check elements.
    pub largest: f32,
    /// The section of a step's table that counts and lists the places, and the shards that the dispatch takes from it.
    pub section: u32,
    pub shards: u32,
}

/// The place of tokens. The layout is that of `pack/call.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Place {
    /// First token, relative to the first of the span.
    pub token: u32,
    /// The page within its shard.
    pub page: u32,
    /// Slot of the token in the page, if the place is a single token's.
    pub slot: u32,
    /// Range slot of the span that the page belongs to.
    pub range_slot: u32,
}

impl Place {
    /// A slot of a page. This is the place of the page's first slot.
    pub fn at(self, slot: u32) -> Self {
        Self { token: self.token + slot, slot: self.slot + slot, ..self }
    }
}

/// The places of one shard, which one dispatch can reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShardPlaces {
    pub shard: u32,
    pub places: Vec<Place>,
}

/// A page and the range slot of its span.
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

    /// The place of the tokens of a tile, by its number.
    pub fn place(self, tile: usize) -> Place {
        let token = (tile * TILE_TOKENS) as u32;
        Place { token, page: self.page.index, slot: 0, range_slot: self.range_slot as u32 }
    }
}

/// Pages by shard, in the order of the shards. Tokens are consecutive through the pages.
pub(crate) fn places_by_shard(pages: &[PlacedPage]) -> Vec<ShardPlaces> {
    let mut by_shard: BTreeMap<u32, Vec<Place>> = BTreeMap::new();
    for (tile, placed) in pages.iter().enumerate() {
        by_shard.entry(placed.page.shard).or_default().push(placed.place(tile));
    }
    by_shard.into_iter().map(|(shard, places)| ShardPlaces { shard, places }).collect()
}

/// Checks that a span has tokens, few enough to count, and exactly the pages that they need.
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
    /// The arguments that depend on the shape and the format alone.
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

    /// Adds the rows of the dense tensor, whose elements begin at `first_element` of its binding.
    ///
    /// # Errors
    /// [`Error::Limit`] when a row lies beyond the reach of a 32-bit index.
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

    /// Adds the indices of each KV head.
    pub fn with_indices(self, indices: IndexShape) -> Self {
        Self { index_stride: indices.count() as u32, below: indices.below(), ..self }
    }

    /// A buffer with these arguments and places.
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

/// The properties of dense rows that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowsKind {
    pub element_type: ElementType,
    /// Tokens are named by indices.
    pub gathered: bool,
}

impl RowsKind {
    /// One of each kind that the shaders distinguish. How tokens are found is independent of the element type.
    pub fn all() -> impl Iterator<Item = Self> {
        ElementType::ALL.into_iter().map(Self::from).chain([Self { element_type: ElementType::F32, gathered: true }])
    }
}

impl From<ElementType> for RowsKind {
    fn from(element_type: ElementType) -> Self {
        Self { element_type, gathered: false }
    }
}

/// Dense rows as bound by kernels, with the indices of the rows to read unless they are consecutive.
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
    if rows.gathered { variant.import("tokens", "pack/tokens.wgsl#gather") } else { variant }
}

/// Rows of f16 tiles instead of a dense tensor's.
pub(crate) fn with_f16_tiles(variant: Variant, which: KeyOrValue) -> Variant {
    match which {
        KeyOrValue::Key => variant.import("rows", "pack/rows.wgsl#key_tile"),
        KeyOrValue::Value => variant.import("rows", "pack/rows.wgsl#value_tile"),
    }
}

/// The shader file that reads elements of this type.
pub(crate) fn rows_file(element_type: ElementType) -> &'static str {
    match element_type {
        ElementType::F32 => "pack/rows.wgsl#f32",
        ElementType::F16 => "pack/rows.wgsl#f16",
        ElementType::Bf16 => "pack/rows.wgsl#bf16",
    }
}

/// Chooses the kind of fields in tiles, and the place of their ranges.
pub(crate) fn with_fields(variant: Variant, format: &TensorFormat, head_dim: usize) -> Variant {
    if let TensorFormat::Codebook(codebook) = format {
        return with_codebook_fields(variant, codebook, head_dim);
    }
    match format.grouping() {
        None => variant.import("field", "pack/field.wgsl#f16"),
        Some(Grouping::Channel) => variant,
        Some(grouping) => {
            variant.import("ranges", "pack/ranges.wgsl#of_tile").constant("GROUPING", grouping_constant(grouping))
        }
    }
}

/// Chooses how ranges are computed from extremes.
pub(crate) fn with_range_rule(variant: Variant, format: &TensorFormat) -> Variant {
    let symmetric = format.affine().is_some_and(|affine| affine.ranges == RangeRule::Symmetric);
    variant.constant("SYMMETRIC", usize::from(symmetric))
}

/// `GROUPING` of `pack/tile.wgsl`.
pub(crate) fn grouping_constant(grouping: Grouping) -> usize {
    match grouping {
        Grouping::Channel => 0,
        Grouping::ChannelTokens(_) => 1,
        Grouping::Token => 2,
        Grouping::TokenChannels(_) => 3,
    }
}

/// The formats with sketches, which only keys have.
pub(crate) fn sketched_formats(head_dim: usize) -> [TensorFormat; 4] {
    [Bits::One, Bits::Two, Bits::Three, Bits::Four]
        .map(|bits| TensorFormat::Codebook(CodebookFormat::turboquant_prod(bits, head_dim)))
}

/// One format of each kind that the shaders distinguish at a head dimension, for tests of all variants.
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
