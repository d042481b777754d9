//! A swapped sequence as bytes: for conversations that outlive a process, prefix caches on disk, and prefill and
//! decoding on different machines.
//!
//! All numbers are little-endian. `texts` are their length in 32 bits and UTF-8.
//!
//! | part | holds |
//! | --- | --- |
//! | [`MAGIC`], version (u32) | what follows, [`VERSION`] |
//! | checksum (u64) | of all that follows |
//! | layout (text) | whose pages these are: [`Storage::span_layout`](crate::backend::Storage::span_layout) |
//! | groups (u32) | layers that share spans; for each: |
//! | kind (text), layers (u32), their numbers (u32) | shape and stores of the layers |
//! | length (u64), released (u64), centre (u8), spans (u32) | the sequence; for each span: |
//! | store (u8), window (u8), tokens (u64), tag (u8) | where its tokens are from |
//! | tag 0: start (u64) | consecutive positions |
//! | tag 1: base (u64), bound (u32), tensors (u32) | and these tensors, `[kv_heads, tokens]` of u32 |
//! | for each layer | the bytes of each span, and of each store's centre, each after its length (u64) |

use super::Recipe;
use super::layers::LayerGroup;
use super::room::Lease;
use super::sequence::{Positions, Sequence, Span, SpanKind};
use super::swap::{SwappedGroup, SwappedLayer, SwappedSequence};
use super::{Appended, KvCache, ModelCache, StoreId};
use crate::backend::{Backend, SpanBytes};
use crate::counts::{TokenCount, reserved, saturated};
use crate::format::{AttentionShape, SegmentFormat, TILE_TOKENS, TensorFormat};
use crate::plan::TokenIndices;
use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"kvpackSQ";

/// Version of the layout of these bytes. Stored pages have a version of their own, which is part of it.
const VERSION: u32 = 1;

/// Bytes before those that the checksum covers.
const HEADER: usize = MAGIC.len() + 4 + 8;

impl<B: Backend> ModelCache<B> {
    /// The bytes of a sequence that was swapped out of this cache, or of one of the same layers:
    /// [`ModelCache::swapped_from_bytes`] makes a sequence of them again, in this process or another, on a backend
    /// whose pages have the same layout. They have a version and a checksum. Where positions of kept tokens lie on the
    /// device, it waits for them.
    ///
    /// ```
    /// use kvpack::cache::{ModelCache, Recipe, TokenRun};
    /// use kvpack::cpu::{Cpu, CpuTensor};
    /// use kvpack::plan::RowLayout;
    /// use kvpack::{AttentionShape, SegmentFormat};
    ///
    /// # futures::executor::block_on(async {
    /// let shape = AttentionShape::new(4, 2, 64)?;
    /// let new = || ModelCache::new(&Cpu::new(), &vec![(shape, Recipe::pack_all(SegmentFormat::saw_int4())); 2], 1);
    /// let mut cache = new()?;
    /// let runs = [TokenRun::chunk(0, 9)];
    /// cache.reserve_for_append(&runs).await?;
    /// cache.begin_append(&runs)?;
    /// for layer in 0..2 {
    ///     let rows = CpuTensor::F32(vec![0.5; 9 * 2 * 64]);
    ///     cache.store(layer, RowLayout::token_major(9, &shape), &rows, &rows).await?;
    /// }
    /// cache.commit()?;
    /// let swapped = cache.swap_out(0).await?;
    /// let bytes = cache.swapped_to_bytes(&swapped).await?;
    ///
    /// // Elsewhere:
    /// let mut other = new()?;
    /// let swapped = other.swapped_from_bytes(&bytes).await?;
    /// other.swap_in(0, &swapped).await?;
    /// assert_eq!(other.length(0)?, 9);
    /// # Ok::<(), kvpack::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] on a rank that holds none of the tokens that others gathered; [`Error::DeviceLost`];
    /// [`Error::OutOfMemory`] when the host has no room for them.
    pub async fn swapped_to_bytes(&self, swapped: &SwappedSequence<B::Indices>) -> Result<Vec<u8>> {
        to_bytes(self.backend(), swapped).await
    }

    /// A swapped sequence from the bytes of [`ModelCache::swapped_to_bytes`], for [`ModelCache::swap_in`].
    ///
    /// # Errors
    /// [`Error::Buffer`] when these are no such bytes, were damaged, or are of another version, layout of pages or
    /// kind of layers; [`Error::OutOfMemory`].
    pub async fn swapped_from_bytes(&self, bytes: &[u8]) -> Result<SwappedSequence<B::Indices>> {
        from_bytes(&self.groups, bytes).await
    }
}

impl<B: Backend> KvCache<B> {
    /// The bytes of a swapped sequence: see [`ModelCache::swapped_to_bytes`].
    ///
    /// # Errors
    /// As [`ModelCache::swapped_to_bytes`].
    pub async fn swapped_to_bytes(&self, swapped: &SwappedSequence<B::Indices>) -> Result<Vec<u8>> {
        to_bytes(self.backend(), swapped).await
    }

    /// A swapped sequence from its bytes: see [`ModelCache::swapped_from_bytes`].
    ///
    /// # Errors
    /// As [`ModelCache::swapped_from_bytes`].
    pub async fn swapped_from_bytes(&self, bytes: &[u8]) -> Result<SwappedSequence<B::Indices>> {
        from_bytes(std::slice::from_ref(&self.group), bytes).await
    }
}

// --- writing ---------------------------------------------------------------------------------------------------------

async fn to_bytes<B: Backend>(backend: &B, swapped: &SwappedSequence<B::Indices>) -> Result<Vec<u8>> {
    if swapped.groups.iter().any(|group| !group.sequence.elsewhere.is_empty()) {
        // A rank that read them would take cuts that the others refuse.
        let what = "bytes of a sequence of which other ranks gathered tokens, and this one none".into();
        let hint = "keep it swapped out, or clear it on all ranks and compute the prompt again".into();
        return Err(Error::Unsupported { what, hint });
    }
    let mut out = Writer(reserved("bytes of a sequence", swapped.bytes().saturating_add(4096))?);
    out.0.extend(MAGIC);
    out.u32(VERSION);
    out.u64(0);
    out.text(&layout_of(backend));
    out.count(swapped.groups.len());
    for group in &swapped.groups {
        out.text(&kind(&group.shape, &group.recipe));
        out.count(group.numbers.len());
        group.numbers.iter().for_each(|&number| out.count(number));
        out.sequence(backend, &group.sequence).await?;
        for layer in &group.layers {
            layer.spans.iter().chain(&layer.centres).for_each(|held| out.held(held));
        }
    }
    write_checksum(&mut out.0);
    Ok(out.0)
}

/// Writes the checksum that the bytes should have, for tests of what it does not find. Does nothing to bytes without
/// room for it.
pub fn write_checksum(bytes: &mut [u8]) {
    let Some((header, covered)) = bytes.split_at_mut_checked(HEADER) else { return };
    header[HEADER - 8..].copy_from_slice(&checksum(covered).to_le_bytes());
}

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, number: u8) {
        self.0.push(number);
    }

    fn u32(&mut self, number: u32) {
        self.0.extend(number.to_le_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.0.extend(number.to_le_bytes());
    }

    /// A count, which always fits 32 bits.
    fn count(&mut self, number: usize) {
        self.u32(saturated(number));
    }

    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.0.extend(text.as_bytes());
    }

    fn held(&mut self, held: &SpanBytes) {
        self.u64(held.bytes().len() as u64);
        self.0.extend(held.bytes());
    }

    async fn sequence<B: Backend>(&mut self, backend: &B, sequence: &Sequence<B::Indices>) -> Result<()> {
        self.u64(sequence.length as u64);
        self.u64(sequence.released as u64);
        self.u8(sequence.centre.is_some().into());
        self.count(sequence.spans.len());
        for span in &sequence.spans {
            self.u8(span.store.0);
            self.u8((span.kind == SpanKind::Appended).into());
            self.u64(span.tokens as u64);
            match &span.positions {
                Positions::From(start) => {
                    self.u8(0);
                    self.u64(*start as u64);
                }
                Positions::Gathered { base, indices } => {
                    self.u8(1);
                    self.u64(*base as u64);
                    self.u32(indices.shape().below());
                    let tensors =
                        if span.of_layers.is_empty() { std::slice::from_ref(indices) } else { &span.of_layers };
                    self.count(tensors.len());
                    for tensor in tensors {
                        backend.download_indices(tensor).await?.into_iter().for_each(|index| self.u32(index));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Whose pages these are: their layout on the backend, its version, and the order of bytes of a number.
fn layout_of<B: Backend>(backend: &B) -> String {
    let order = if cfg!(target_endian = "little") { "little" } else { "big" };
    format!("{} {} {order}", backend.span_layout(), crate::format::tile::LAYOUT_VERSION)
}

/// What of a layer decides on its pages and spans. The name of a format does not tell the seeds of its signs.
fn kind(shape: &AttentionShape, recipe: &Recipe) -> String {
    let store = |of: &SegmentFormat| format!("{of}{}{}", seeds("keys", &of.key), seeds("values", &of.value));
    let stores: Vec<String> = recipe.stores().iter().map(|of| store(&of.format)).collect();
    let centred = if recipe.is_centred() { ", centred" } else { "" };
    let (heads, channels) = (shape.kv_heads(), shape.head_dim());
    format!("{heads} KV heads of {channels}{centred}: {}", stores.join("; "))
}

/// The seeds of a tensor's rotation and sketch, if it has any.
fn seeds(tensor: &str, format: &TensorFormat) -> String {
    let sketch = format.sketched().and_then(|codebook| codebook.sketch);
    let seeds = [format.rotation().and_then(|rotation| rotation.seed()), sketch.map(|sketch| sketch.seed)];
    let seeds: Vec<String> = seeds.iter().flatten().map(u32::to_string).collect();
    if seeds.is_empty() { String::new() } else { format!(", seeds of {tensor} {}", seeds.join(" and ")) }
}

/// It changes with every change of a single word, and finds damage; it does not keep anybody from forging bytes.
fn checksum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let mix = |sum: u64, word: &[u8; 8]| {
        (sum.rotate_left(23) ^ u64::from_le_bytes(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    mix(words.iter().fold(bytes.len() as u64, mix), &last)
}

// --- reading ---------------------------------------------------------------------------------------------------------

async fn from_bytes<B: Backend>(groups: &[LayerGroup<B>], bytes: &[u8]) -> Result<SwappedSequence<B::Indices>> {
    let mut reader = Reader(bytes);
    if reader.take(MAGIC.len())? != MAGIC {
        return Err(refusal("they are not those of a swapped sequence".into()));
    }
    let version = reader.u32()?;
    if version != VERSION {
        return Err(refusal(format!("they have version {version}; this kvpack reads version {VERSION}")));
    }
    let sum = reader.u64()?;
    if sum != checksum(reader.0) {
        return Err(refusal("they are damaged: their checksum is another".into()));
    }
    let (layout, own) = (reader.text()?, layout_of(&groups[0].backend));
    if layout != own {
        let reason = format!("their pages have the layout '{layout}', and this backend's are '{own}'");
        return Err(refusal(reason));
    }
    let count = reader.count(1)?;
    let mut read = reserved("groups of a sequence", count)?;
    for _ in 0..count {
        read.push(reader.group(groups).await?);
    }
    if !reader.0.is_empty() {
        return Err(refusal(format!("{} bytes follow them", reader.0.len())));
    }
    let mut numbers: Vec<usize> = read.iter().flat_map(|group| group.numbers.iter().copied()).collect();
    numbers.sort_unstable();
    let layers: usize = groups.iter().map(LayerGroup::layers).sum();
    if !numbers.into_iter().eq(0..layers) {
        return Err(refusal(format!("they are not of each of {layers} layers once")));
    }
    if read.iter().any(|group| group.sequence.length != read[0].sequence.length) {
        return Err(refusal("layers differ in the length of the sequence".into()));
    }
    Ok(SwappedSequence { groups: read })
}

fn refusal(reason: String) -> Error {
    Error::Buffer { what: "the bytes of a sequence", reason }
}

/// What is left of the bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.0.split_at_checked(count) else {
            return Err(refusal(format!("they end {} bytes early", count - self.0.len())));
        };
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn flag(&mut self) -> Result<bool> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(refusal(format!("{other} stands where 0 or 1 should"))),
        }
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn size(&mut self) -> Result<usize> {
        let size = self.u64()?;
        usize::try_from(size).map_err(|_| refusal(format!("{size} is more than this machine counts")))
    }

    /// The number of entries that follow. Each has at least `bytes` bytes. A number that the rest of the bytes cannot
    /// hold is refused.
    fn count(&mut self, bytes: usize) -> Result<usize> {
        let count = self.u32()? as usize;
        match self.0.len() / bytes.max(1) {
            most if count > most => Err(refusal(format!("{count} things follow, with bytes for {most}"))),
            _ => Ok(count),
        }
    }

    fn text(&mut self) -> Result<&'a str> {
        let length = self.count(1)?;
        std::str::from_utf8(self.take(length)?).map_err(|error| refusal(error.to_string()))
    }

    fn held(&mut self, expected: usize) -> Result<SpanBytes> {
        let length = self.size()?;
        if length != expected {
            return Err(refusal(format!("a span has {length} bytes; it needs {expected}")));
        }
        let bytes = self.take(length)?;
        let mut held = reserved("bytes of a span", length)?;
        held.extend_from_slice(bytes);
        Ok(SpanBytes::new(held))
    }

    async fn group<B: Backend>(&mut self, groups: &[LayerGroup<B>]) -> Result<SwappedGroup<B::Indices>> {
        let stored = self.text()?;
        let layers = self.count(4)?;
        let mut numbers = reserved("layers of a sequence", layers)?;
        for _ in 0..layers {
            numbers.push(self.u32()? as usize);
        }
        let of = |number: &usize| groups.iter().find(|group| group.numbers().contains(number));
        let Some(group) = numbers.first().and_then(of) else {
            return Err(refusal("they name a layer that the cache does not have".into()));
        };
        let (shape, recipe) = (group.shape, group.recipe());
        let same = |number: &usize| of(number).is_some_and(|other| (other.shape, other.recipe()) == (shape, recipe));
        let own = kind(&shape, recipe);
        if stored != own || !numbers.iter().all(same) {
            let reason = format!("layer {} was stored as '{stored}', and the cache has '{own}'", numbers[0]);
            return Err(refusal(reason));
        }
        let sequence = self.sequence(group, numbers.len()).await?;
        let mut contents = reserved("layers of a sequence", layers)?;
        for _ in 0..layers {
            contents.push(self.layer(&sequence, &shape, recipe)?);
        }
        Ok(SwappedGroup { shape, recipe: recipe.clone(), sequence, numbers, layers: contents })
    }

    async fn sequence<B: Backend>(&mut self, group: &LayerGroup<B>, layers: usize) -> Result<Sequence<B::Indices>> {
        let length = TokenCount::new(self.size()?)?.get();
        let released = self.size()?;
        // The next query sees the window of this cache, which may be wider than that of the bytes.
        let unseen = group.recipe().attention().window().map_or(0, |left| length.saturating_sub(left));
        if released > unseen {
            let reason =
                format!("{released} of {length} tokens were released behind a window; at most {unseen} may be");
            return Err(refusal(reason));
        }
        let centre = self.flag()?;
        let count = self.count(19)?;
        let centred = group.recipe().is_centred();
        if (centre && !centred) || (centred && !centre && count > 0) {
            return Err(refusal("a centre is there where the recipe has none, or is missing where it has one".into()));
        }
        let mut spans = reserved("spans of a sequence", count)?;
        for _ in 0..count {
            spans.push(self.span(group, length, layers).await?);
        }
        // The slot is another one where the sequence enters.
        let elsewhere = Vec::new();
        Ok(Sequence { spans, length, centre: centre.then_some(0), released, elsewhere })
    }

    async fn span<B: Backend>(
        &mut self,
        group: &LayerGroup<B>,
        length: usize,
        layers: usize,
    ) -> Result<Span<B::Indices>> {
        let [store] = self.array()?;
        let (store, window, tokens) = (StoreId(store), self.flag()?, self.size()?);
        let recipe = group.recipe();
        let packed_later = window && store == StoreId::F16 && matches!(recipe.appended(), Appended::Tiles { .. });
        let most = if packed_later { TILE_TOKENS } else { length };
        if store.index() >= recipe.stores().len() || tokens == 0 || tokens > most {
            return Err(refusal(format!("{tokens} tokens in {store} of a sequence of {length}")));
        }
        let outside = |start: usize, end: Option<usize>| match end {
            Some(end) if end <= length => Ok(()),
            _ => Err(refusal(format!("a span begins at {start} and ends beyond the sequence of {length} tokens"))),
        };
        let (positions, of_layers) = if self.flag()? {
            let (base, below) = (self.size()?, self.u32()?);
            outside(base, base.checked_add(below as usize))?;
            let mut tensors = self.indices(group, (tokens, below), layers).await?;
            let indices = tensors[0].clone();
            if tensors.len() == 1 {
                tensors.clear();
            }
            (Positions::Gathered { base, indices }, tensors)
        } else {
            let start = self.size()?;
            outside(start, start.checked_add(tokens))?;
            (Positions::From(start), Vec::new())
        };
        let kind = if window { SpanKind::Appended } else { SpanKind::Stored };
        Ok(Span { store, tokens, positions, of_layers, lease: Lease::default(), kind })
    }

    /// The index tensors of a gathered span: one for all layers, or one for each.
    async fn indices<B: Backend>(
        &mut self,
        group: &LayerGroup<B>,
        (tokens, below): (usize, u32),
        layers: usize,
    ) -> Result<Vec<B::Indices>> {
        let kv_heads = group.shape.kv_heads();
        let bytes = tokens.saturating_mul(kv_heads).saturating_mul(4);
        let count = self.count(bytes)?;
        if count != 1 && count != layers || count == 0 {
            return Err(refusal(format!("{count} tensors of positions for {layers} layers")));
        }
        let mut tensors = reserved("positions of a sequence", count)?;
        for _ in 0..count {
            let mut indices = reserved("positions of a sequence", bytes / 4)?;
            indices.extend(self.take(bytes)?.as_chunks::<4>().0.iter().map(|index| u32::from_le_bytes(*index)));
            let uploaded = group.backend.upload_indices(&indices, kv_heads, below).await;
            tensors.push(uploaded.map_err(|error| match error {
                Error::Plan { reason, .. } => refusal(reason),
                other => other,
            })?);
        }
        Ok(tensors)
    }

    fn layer<I>(&mut self, sequence: &Sequence<I>, shape: &AttentionShape, recipe: &Recipe) -> Result<SwappedLayer> {
        let mut spans = reserved("spans of a layer", sequence.spans.len())?;
        for span in &sequence.spans {
            let format = recipe.stores()[span.store.index()].format;
            let pages = span.tokens.div_ceil(TILE_TOKENS).saturating_mul(format.page_bytes(shape));
            let slot = if format.has_span_ranges() { format.range_slot_bytes(shape) } else { 0 };
            spans.push(self.held(pages.saturating_add(slot))?);
        }
        let centres = if sequence.centre.is_some() { recipe.stores().len() } else { 0 };
        let centres = (0..centres).map(|_| self.held(SegmentFormat::centre_bytes(shape))).collect::<Result<_>>()?;
        Ok(SwappedLayer { spans, centres })
    }
}
