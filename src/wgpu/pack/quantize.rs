//! Kernel `quantize`; the kernels `ranges_span`, `ranges_tile` and `norms_tile`, which compute the ranges that it
//! needs; and `renormalize`, which needs its codes.

use super::append;
use super::centre_keys;
use super::hadamard::{self, DirectedRotation};
use super::levels::with_level_fields;
use super::tile_call::{self, BoundRows, Place, PlacedPage, RowsKind, ShardPlaces, TileCall};
use crate::Result;
use crate::backend::SpanWrite;
use crate::format::{
    AttentionShape, Direction, KeyOrValue, NormRule, Rotation, SegmentFormat, TILE_TOKENS, TensorFormat,
};
use crate::plan::{ElementType, RowLayout, Rows, TokenIndices, TokenRange};
use crate::wgpu::device::launch::{FLAT_WORKGROUP, Launch, Launches, flat_grid};
use crate::wgpu::device::{ElementBinding, Indices, Kernels, Store, StoreBuffer, Tensor, Variant, buffers};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;

/// Tokens of one channel that one invocation of `ranges_span_extremes` reads.
const CHUNK: usize = 64;

/// Writes tokens of dense keys and values into pages as one span. The plan decides everything except the buffers.
///
/// The dispatches are: first, where rows are rotated, `hadamard`, and where keys are centred, `centre_keys`, which also
/// rotates them. Both write into scratch memory of up to 16 MiB, as often as needed; it is freed with the bound
/// launches. Then three of `ranges_span` for each of keys and values that has span ranges. Then, for every shard that
/// the span touches, `ranges_tile` or `norms_tile` if there are tile ranges, `quantize`, and `renormalize` if norms are
/// renormalised. Keys with sketches take one dispatch of `append` for every shard instead.
#[derive(Clone, Debug)]
pub struct QuantizePlan {
    shape: AttentionShape,
    format: SegmentFormat,
    rows: RowLayout,
    /// The consecutive tokens, or the places among the indices.
    tokens: TokenRange,
    indices: Option<Indices>,
    pages: Vec<PlacedPage>,
    /// Slot of the centre that is subtracted from keys.
    centre: Option<usize>,
}

impl QuantizePlan {
    /// Plans `write` for a store of this shape and format.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) when the format does not fit the shape;
    /// [`Error::Plan`](crate::Error::Plan) when the number of pages does not match the tokens, or the tokens lie beyond
    /// the rows.
    pub fn new(shape: &AttentionShape, format: &SegmentFormat, write: &SpanWrite<'_, Indices>) -> Result<Self> {
        format.check(shape)?;
        tile_call::check_span("quantize", write.tokens.len(), write.pages)?;
        write.tokens.check("quantize", &write.rows, shape)?;
        let (tokens, indices) = match write.tokens {
            Rows::Run(run) => (run, None),
            Rows::Gather(indices) => (TokenRange::new(0, write.tokens.len())?, Some(indices.clone())),
        };
        Ok(Self {
            shape: *shape,
            format: *format,
            rows: write.rows,
            tokens,
            indices,
            pages: PlacedPage::of_span(write.pages, write.range_slot),
            centre: write.centre,
        })
    }

    /// The kernel variants for keys and values of these types, for [`Kernels::prepare`].
    pub fn variants(&self, keys: ElementType, values: ElementType) -> Vec<Variant> {
        let head_dim = self.shape.head_dim();
        let of = |which, element_type| {
            let format = self.format.tensor(which);
            let rows = RowsKind { element_type, gathered: self.indices.is_some() };
            let first = First::of(format, self.centre_of(which));
            let packed = if first.is_some() { ElementType::F32.into() } else { rows };
            let tiles = match format.sketched() {
                Some(_) => vec![append::variant_of(&self.shape, format, which, packed)],
                None => variants_of(format, which, packed, head_dim),
            };
            first.map(|first| first.variant(head_dim, rows)).into_iter().chain(tiles).collect::<Vec<_>>()
        };
        [of(KeyOrValue::Key, keys), of(KeyOrValue::Value, values)].concat()
    }

    /// Binds the store and the tensors to read.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when the store does not have the planned shape and format, or lacks a page
    /// or the range slot; [`Error::Elements`](crate::Error::Elements) when a tensor is shorter than its rows;
    /// [`Error::Limit`](crate::Error::Limit) when it is too large for a binding.
    pub fn bind(&self, kernels: &Kernels, store: &Store, keys: &Tensor, values: &Tensor) -> Result<Launches> {
        store.check_planned("quantize", &self.shape, &self.format)?;
        store.check_pages("quantize", self.pages.iter().map(|placed| &placed.page))?;
        self.pages.iter().try_for_each(|placed| store.check_slot("quantize", placed.range_slot))?;
        store.check_centre("quantize", self.centre)?;
        self.rows.check("keys", keys.elements(), &self.shape)?;
        self.rows.check("values", values.elements(), &self.shape)?;
        let keys = self.bind_tensor(kernels, store, keys, KeyOrValue::Key)?;
        let values = self.bind_tensor(kernels, store, values, KeyOrValue::Value)?;
        Ok(keys.into_iter().chain(values).collect())
    }

    fn bind_tensor(&self, kernels: &Kernels, store: &Store, tensor: &Tensor, which: KeyOrValue) -> Result<Vec<Launch>> {
        let rows = BoundRows::new(tensor, self.indices.as_ref(), &kernels.device().limits())?;
        let call = TileCall {
            first_element: rows.elements.first_element,
            first_token: self.tokens.start() as u32,
            tokens: self.tokens.len() as u32,
            range_slot: self.pages.first().map_or(0, |placed| placed.range_slot as u32),
            ..TileCall::new(&self.shape, self.format.tensor(which), which).with_rows(&self.rows, &self.shape)?
        };
        let call = self.indices.as_ref().map_or(call, |indices| call.with_indices(indices.shape()));
        let source = Source { kernels, store, which, rows, call };
        let format = self.format.tensor(which);
        match First::of(format, self.centre_of(which)) {
            Some(first) => source.pack_rewritten(&self.pages, first),
            None if format.sketched().is_some() => source.pack_rows(&self.pages),
            None => source.pack(&self.pages),
        }
    }

    fn centre_of(&self, which: KeyOrValue) -> Option<usize> {
        self.centre.filter(|_| which == KeyOrValue::Key)
    }
}

/// How rows are rewritten into scratch memory before they are packed: rotated, centred, or both.
#[derive(Clone, Copy, Debug)]
enum First {
    Rotate(Rotation),
    Centre(usize, Option<Rotation>),
}

impl First {
    /// `None` if rows are packed directly. The kernel that packs rows with sketches also rotates them.
    fn of(format: &TensorFormat, centre: Option<usize>) -> Option<Self> {
        let rotation = format.rotation().filter(|_| format.sketched().is_none());
        match centre {
            Some(slot) => Some(Self::Centre(slot, rotation)),
            None => rotation.map(Self::Rotate),
        }
    }

    fn variant(self, head_dim: usize, rows: RowsKind) -> Variant {
        match self {
            Self::Rotate(rotation) => {
                hadamard::from_rows(head_dim, DirectedRotation { rotation, direction: Direction::Forward }, rows)
            }
            Self::Centre(_, rotation) => centre_keys::variant_of(head_dim, rotation, rows),
        }
    }
}

/// Maximum bytes of the rewritten rows that wait to be packed. Rows are rewritten piece by piece.
const PIECE_BYTES: usize = 16 << 20;

/// Keys or values that are being packed into a store.
struct Source<'a> {
    kernels: &'a Kernels,
    store: &'a Store,
    which: KeyOrValue,
    rows: BoundRows<'a>,
    call: TileCall,
}

impl Source<'_> {
    /// Ranges, codes and tiles of the rows.
    fn pack(&self, pages: &[PlacedPage]) -> Result<Vec<Launch>> {
        let mut launches = Vec::new();
        if self.format().has_span_ranges() {
            for entry in SpanRangesEntry::ALL {
                launches.push(self.span_ranges(entry)?);
            }
        }
        launches.extend(self.tiles(pages)?);
        Ok(launches)
    }

    /// Packs rows one by one, as `append` stores them, because a sketch needs the whole row.
    fn pack_rows(&self, pages: &[PlacedPage]) -> Result<Vec<Launch>> {
        let shape = self.store.shape();
        let variant = append::variant_of(shape, self.format(), self.which, self.rows.kind());
        let launch = |shard: ShardPlaces| {
            // All slots of the pages, including those beyond the span.
            let slots = |place: &Place| (0..TILE_TOKENS as u32).map(|slot| place.at(slot)).collect::<Vec<_>>();
            let places: Vec<Place> = shard.places.iter().flat_map(slots).collect();
            let total = places.len() as u64 * u64::from(self.call.kv_heads);
            let call = TileCall { total: u32::try_from(total).unwrap_or(u32::MAX), ..self.call };
            let call = call.upload(self.kernels.device(), &places)?;
            let buffers = [
                ("call", call.as_entire_buffer_binding()),
                ("tiles", self.store.shard_binding(shard.shard, StoreBuffer::tiles(self.which))?),
                ("ranges", self.store.shard_binding(shard.shard, StoreBuffer::ranges(self.which))?),
            ];
            self.launch(&variant, &buffers, total * u64::from(FLAT_WORKGROUP))
        };
        tile_call::places_by_shard(pages).into_iter().map(launch).collect()
    }

    /// Packs rows that are first rewritten into scratch memory, a few pages of tokens at a time. If ranges span all
    /// pieces, the pieces are rewritten once for the ranges and once more for the codes.
    fn pack_rewritten(&self, pages: &[PlacedPage], first: First) -> Result<Vec<Launch>> {
        let token_bytes = (self.call.kv_heads * self.call.head_dim) as usize * size_of::<f32>();
        let piece_pages = (PIECE_BYTES / (token_bytes * TILE_TOKENS)).clamp(1, pages.len());
        let bytes = (piece_pages * TILE_TOKENS * token_bytes) as u64;
        let usage = wgpu::BufferUsages::STORAGE;
        let scratch = buffers::create_now(self.kernels.device(), "rewritten rows", bytes, usage)?;
        let pieces: Vec<(Launch, Source<'_>, &[PlacedPage])> = pages
            .chunks(piece_pages)
            .enumerate()
            .map(|(piece, pages)| {
                let (rewrite, rewritten) =
                    self.rewritten_piece((piece * piece_pages * TILE_TOKENS) as u32, pages, first, &scratch)?;
                Ok((rewrite, rewritten, pages))
            })
            .collect::<Result<_>>()?;

        let mut launches = Vec::new();
        if let Some((_, any, _)) = pieces.first().filter(|_| self.format().has_span_ranges()) {
            launches.push(any.span_ranges(SpanRangesEntry::Clear)?);
            for (rewrite, rewritten, _) in &pieces {
                launches.push(rewrite.clone());
                launches.push(rewritten.span_ranges(SpanRangesEntry::Extremes)?);
            }
            launches.push(any.span_ranges(SpanRangesEntry::Ranges)?);
        }
        for (rewrite, rewritten, pages) in pieces {
            launches.push(rewrite);
            launches.extend(match self.format().sketched() {
                Some(_) => rewritten.pack_rows(pages)?,
                None => rewritten.tiles(pages)?,
            });
        }
        Ok(launches)
    }

    /// The rewriting of the tokens of some pages, beginning at token `start`, and the rewritten rows as a source.
    fn rewritten_piece<'s>(
        &'s self,
        start: u32,
        pages: &[PlacedPage],
        first: First,
        scratch: &'s wgpu::Buffer,
    ) -> Result<(Launch, Source<'s>)> {
        let tokens = (self.call.tokens - start).min((pages.len() * TILE_TOKENS) as u32);
        let call = TileCall { first_token: self.call.first_token + start, tokens, ..self.call };
        let scratch = scratch.as_entire_buffer_binding();
        let rewrite = match first {
            First::Rotate(rotation) => {
                let turn = DirectedRotation { rotation, direction: Direction::Forward };
                hadamard::rotate(self.kernels, turn, call, &self.rows, scratch.clone())?
            }
            First::Centre(slot, rotation) => {
                let centre = (self.store, slot);
                centre_keys::centre(self.kernels, centre, rotation, call, &self.rows, scratch.clone())?
            }
        };
        let call = TileCall {
            first_element: 0,
            first_token: 0,
            token_stride: call.kv_heads * call.head_dim,
            head_stride: call.head_dim,
            ..call
        };
        let elements = ElementBinding { buffer: scratch, first_element: 0 };
        let rows = BoundRows { element_type: ElementType::F32, elements, indices: None };
        Ok((rewrite, Source { rows, call, ..*self }))
    }

    /// Tile ranges and codes of the source's tokens, which lie in `pages`.
    fn tiles(&self, pages: &[PlacedPage]) -> Result<Vec<Launch>> {
        let mut launches = Vec::new();
        for shard in tile_call::places_by_shard(pages) {
            launches.extend(self.tile_ranges(&shard)?);
            launches.push(self.quantize(&shard)?);
            launches.extend(self.renormalize(&shard)?);
        }
        Ok(launches)
    }

    fn span_ranges(&self, entry: SpanRangesEntry) -> Result<Launch> {
        let channels = u64::from(self.call.kv_heads * self.call.head_dim);
        let chunks = u64::from(self.call.tokens).div_ceil(CHUNK as u64) * channels;
        let call = TileCall { total: u32::try_from(chunks).unwrap_or(u32::MAX), ..self.call };
        let call = call.upload(self.kernels.device(), &[])?;
        let buffers =
            [("call", call.as_entire_buffer_binding()), ("ranges", self.store.span_ranges_binding(self.which)?)];
        let size = if entry == SpanRangesEntry::Extremes { chunks } else { channels };
        self.launch(&ranges_span(self.format(), self.rows.kind(), entry), &buffers, size)
    }

    fn tile_ranges(&self, shard: &ShardPlaces) -> Result<Option<Launch>> {
        let Some(variant) = tile_ranges(self.format(), self.rows.kind()) else { return Ok(None) };
        let (call, total) = self.upload_call(shard, self.call.ranges_per_tile)?;
        let buffers = [
            ("call", call.as_entire_buffer_binding()),
            ("ranges", self.store.shard_binding(shard.shard, StoreBuffer::ranges(self.which))?),
        ];
        self.launch(&variant, &buffers, total).map(Some)
    }

    fn quantize(&self, shard: &ShardPlaces) -> Result<Launch> {
        let (call, total) = self.upload_call(shard, self.call.tile_words)?;
        let mut buffers = vec![
            ("call", call.as_entire_buffer_binding()),
            ("tiles", self.store.shard_binding(shard.shard, StoreBuffer::tiles(self.which))?),
        ];
        buffers.extend(self.store.ranges_binding(shard.shard, self.which)?.map(|ranges| ("ranges", ranges)));
        let variant = quantize(self.format(), self.which, self.rows.kind(), self.call.head_dim as usize);
        self.launch(&variant, &buffers, total)
    }

    fn renormalize(&self, shard: &ShardPlaces) -> Result<Option<Launch>> {
        let Some(variant) = renormalize(self.format(), self.which, self.call.head_dim as usize) else {
            return Ok(None);
        };
        let (call, total) = self.upload_call(shard, TILE_TOKENS as u32)?;
        let buffers = [
            ("call", call.as_entire_buffer_binding()),
            ("tiles", self.store.shard_binding(shard.shard, StoreBuffer::tiles(self.which))?),
            ("ranges", self.store.shard_binding(shard.shard, StoreBuffer::ranges(self.which))?),
        ];
        self.launch(&variant, &buffers, total).map(Some)
    }

    /// The arguments of a kernel that gives every tile of a shard `per_tile` invocations, and their number.
    fn upload_call(&self, shard: &ShardPlaces, per_tile: u32) -> Result<(wgpu::Buffer, u64)> {
        let total = shard.places.len() as u64 * u64::from(self.call.kv_heads) * u64::from(per_tile);
        let call = TileCall { total: u32::try_from(total).unwrap_or(u32::MAX), ..self.call };
        Ok((call.upload(self.kernels.device(), &shard.places)?, total))
    }

    /// Binds a kernel to `buffers` and to the rows, if it reads them.
    fn launch(&self, variant: &Variant, buffers: &[(&str, wgpu::BufferBinding<'_>)], size: u64) -> Result<Launch> {
        let grid = flat_grid(size, &self.kernels.device().limits())?;
        let mut buffers = buffers.to_vec();
        for rows in self.rows.bindings() {
            buffers.push(rows);
        }
        planned(self.kernels, variant, &buffers, grid)
    }

    fn format(&self) -> &TensorFormat {
        self.store.format().tensor(self.which)
    }
}

pub(super) fn quantize(format: &TensorFormat, which: KeyOrValue, rows: RowsKind, head_dim: usize) -> Variant {
    let variant = tile_call::with_layout(Variant::new(&SHADERS, "quantize"), format.element_bits(), which);
    tile_call::with_rows(tile_call::with_fields(variant, format, head_dim), rows)
}

/// The kernel that computes the tile ranges, if there are any.
pub(super) fn tile_ranges(format: &TensorFormat, rows: RowsKind) -> Option<Variant> {
    let variant = match format {
        TensorFormat::F16 => return None,
        TensorFormat::Affine(_) if format.has_span_ranges() => return None,
        TensorFormat::Affine(affine) => tile_call::with_range_rule(Variant::new(&SHADERS, "ranges_tile"), format)
            .constant("BITS", affine.bits.count() as usize)
            .constant("GROUPING", tile_call::grouping_constant(affine.grouping)),
        TensorFormat::Codebook(_) => Variant::new(&SHADERS, "norms_tile"),
    };
    Some(tile_call::with_rows(variant, rows))
}

/// The kernel that divides norms by those of the levels, if the format renormalises.
fn renormalize(format: &TensorFormat, which: KeyOrValue, head_dim: usize) -> Option<Variant> {
    let TensorFormat::Codebook(codebook) = format else { return None };
    let variant = tile_call::with_layout(Variant::new(&SHADERS, "renormalize"), format.element_bits(), which);
    (codebook.norms == NormRule::Renormalized).then(|| with_level_fields(variant, codebook, head_dim))
}

/// The entry points of `ranges_span`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpanRangesEntry {
    Clear,
    Extremes,
    Ranges,
}

impl SpanRangesEntry {
    /// In the order in which they run.
    const ALL: [Self; 3] = [Self::Clear, Self::Extremes, Self::Ranges];

    const fn name(self) -> &'static str {
        match self {
            Self::Clear => "ranges_span_clear",
            Self::Extremes => "ranges_span_extremes",
            Self::Ranges => "ranges_span",
        }
    }
}

fn ranges_span(format: &TensorFormat, rows: RowsKind, entry: SpanRangesEntry) -> Variant {
    let variant = Variant::new(&SHADERS, "ranges_span").entry(entry.name()).constant("BITS", format.element_bits());
    tile_call::with_rows(tile_call::with_range_rule(variant.constant("CHUNK", CHUNK), format), rows)
}

/// The kernel that computes the ranges of pages that are spans of their own.
pub(super) fn ranges_window(format: &TensorFormat, rows: RowsKind) -> Variant {
    let variant = Variant::new(&SHADERS, "ranges_window").constant("BITS", format.element_bits());
    tile_call::with_rows(tile_call::with_range_rule(variant, format), rows)
}

/// The variants that pack rows of a type, except for the rotation.
fn variants_of(format: &TensorFormat, which: KeyOrValue, rows: RowsKind, head_dim: usize) -> Vec<Variant> {
    let mut variants = Vec::new();
    if format.has_span_ranges() {
        variants.extend(SpanRangesEntry::ALL.map(|entry| ranges_span(format, rows, entry)));
    }
    variants.extend(tile_ranges(format, rows));
    variants.push(quantize(format, which, rows, head_dim));
    variants.extend(renormalize(format, which, head_dim));
    variants
}

/// Every variant that a plan uses.
pub(crate) fn variants() -> Vec<Variant> {
    let formats = tile_call::distinct_formats(128);
    let of = |format: &TensorFormat| {
        let each = [KeyOrValue::Key, KeyOrValue::Value];
        each.map(|which| RowsKind::all().flat_map(|rows| variants_of(format, which, rows, 128)).collect::<Vec<_>>())
            .concat()
    };
    formats.iter().flat_map(of).collect()
}
