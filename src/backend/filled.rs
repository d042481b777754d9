//! Stores that are filled with whole spans and then attended to. Conformance, benchmarks and evaluations need only
//! this; a cache also grows, forks and frees pages.
//!
//! A cache does not fill its stores through this module. Its page tables decide for the stores of all layers at once,
//! in changes that are committed or abandoned, and lease pages that forks share and a budget counts. Both build on
//! [`PageAllocator`], which hands out pages, and on [`Packing::quantize`](super::Packing::quantize), which writes a
//! span into them.

use super::{Backend, LARGEST_CENTRED_KEY, NewCentre, SpanRead, SpanWrite, TokenWrite, WindowMove};
use crate::counts::{TokenCount, saturated};
use crate::format::{AttentionShape, Calibration, SegmentFormat, TILE_TOKENS};
use crate::plan::{AttendPlan, Page, PageAllocator, QueryRun, RowLayout, Rows, SpanView, StoreView, TokenRange};
use crate::{Error, Result};

/// Stores of several formats, and the parts of them that are in use.
///
/// ```
/// use kvpack::backend::{Device, FilledStores, NewSpan, SpanSource};
/// use kvpack::cpu::Cpu;
/// use kvpack::plan::{QueryRun, RowLayout, TokenRange};
/// use kvpack::{AttentionShape, Bits, SegmentFormat};
///
/// # futures::executor::block_on(async {
/// let (cpu, shape) = (Cpu::new(), AttentionShape::new(2, 1, 64)?);
/// let rows = cpu.upload((&[0.5f32; 300 * 64][..]).into()).await?;
/// let source = |start, end| {
///     let tokens = TokenRange::new(start, end)?.into();
///     Ok::<_, kvpack::Error>(SpanSource { rows: RowLayout::token_major(300, &shape), tokens, keys: &rows, values: &rows })
/// };
/// // The first 100 tokens in f16, the others at 4 bits.
/// let mut stores = FilledStores::new(&cpu, shape, &[SegmentFormat::F16, SegmentFormat::per_channel(Bits::Four)])?;
/// let spans = stores
///     .fill(&cpu, &[
///         (NewSpan { store: 0, sequence: 0, start: 0, tokens: 100 }, source(0, 100)?),
///         (NewSpan { store: 1, sequence: 0, start: 100, tokens: 200 }, source(100, 300)?),
///     ])
///     .await?;
/// let plan = stores.plan(&[QueryRun::decode(0)], spans.iter(), &[None, None])?;
/// assert_eq!(plan.segments().len(), 2);
/// # Ok::<(), kvpack::Error>(())
/// # }).unwrap();
/// ```
pub struct FilledStores<B: Backend> {
    shape: AttentionShape,
    stores: Vec<B::Store>,
    room: Vec<FilledRoom>,
    shard_pages: u32,
    /// Slots of centres, one per sequence; 0 where keys are not centred.
    centres: usize,
}

/// Free and used room of one store.
struct FilledRoom {
    format: SegmentFormat,
    pages: PageAllocator,
    /// Range slots that spans have taken.
    slots: usize,
}

/// A span to store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewSpan {
    /// Index of its store.
    pub store: usize,
    /// Its sequence.
    pub sequence: usize,
    /// Position of its first token in the sequence. Causal queries use it.
    pub start: usize,
    /// Number of its tokens. A span of 0 tokens has no pages.
    pub tokens: usize,
}

/// A stored span with its pages and its range slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilledSpan {
    /// The span.
    pub span: NewSpan,
    /// Its pages, in token order.
    pub pages: Vec<Page>,
    /// Slot of its ranges, if the format has them.
    pub range_slot: usize,
}

/// The source of a span: tokens of dense tensors.
pub struct SpanSource<'a, B: Backend> {
    /// Layout of keys and values in their tensors; the same for both.
    pub rows: RowLayout,
    /// The tokens: consecutive ones, or for every KV head those that indices name.
    pub tokens: Rows<'a, B::Indices>,
    /// The keys.
    pub keys: &'a B::Tensor,
    /// The values.
    pub values: &'a B::Tensor,
}

impl<B: Backend> Clone for SpanSource<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for SpanSource<'_, B> {}

impl<B: Backend> FilledStores<B> {
    /// An empty store for each format.
    ///
    /// # Errors
    /// Those of [`Storage::create_store`](super::Storage::create_store).
    pub fn new(backend: &B, shape: AttentionShape, formats: &[SegmentFormat]) -> Result<Self> {
        let stores = formats.iter().map(|&format| backend.create_store(shape, format)).collect::<Result<_>>()?;
        let room = |&format: &SegmentFormat| FilledRoom { format, pages: PageAllocator::default(), slots: 0 };
        Ok(Self { shape, stores, room: formats.iter().map(room).collect(), shard_pages: u32::MAX, centres: 0 })
    }

    /// The same stores with shards of up to `pages` pages, so that spans lie in several shards.
    #[must_use]
    pub fn with_shards_of(self, pages: u32) -> Self {
        Self { shard_pages: pages.max(1), ..self }
    }

    /// The same stores with centred keys for the sequences `0..sequences`: see [`FilledStores::set_centre`]. Keys of
    /// other sequences are not centred.
    #[must_use]
    pub fn with_centres(self, sequences: usize) -> Self {
        Self { centres: sequences, ..self }
    }

    /// Sets the centre of a sequence to the mean of some keys, in every store. Call it after spans were placed and
    /// before any token of the sequence is stored.
    ///
    /// # Errors
    /// As [`Packing::key_mean`](super::Packing::key_mean).
    pub fn set_centre(
        &mut self,
        backend: &B,
        sequence: usize,
        keys: &B::Tensor,
        of: (RowLayout, TokenRange),
    ) -> Result<()> {
        let centre = NewCentre { rows: of.0, tokens: of.1, slot: sequence, largest: LARGEST_CENTRED_KEY };
        self.stores.iter_mut().try_for_each(|store| backend.key_mean(store, keys, centre))
    }

    /// The slot of the centre of a span.
    fn centre_of(&self, span: &FilledSpan) -> Option<usize> {
        Some(span.span.sequence).filter(|&sequence| sequence < self.centres)
    }

    /// Places spans and packs them.
    ///
    /// # Errors
    /// As [`FilledStores::place`] and [`Packing::quantize`](super::Packing::quantize). On an error nothing is stored.
    pub async fn fill(&mut self, backend: &B, spans: &[(NewSpan, SpanSource<'_, B>)]) -> Result<Vec<FilledSpan>> {
        let new: Vec<NewSpan> = spans.iter().map(|(span, _)| *span).collect();
        let placed = self.place(backend, &new).await?;
        let all = placed.iter().zip(spans).filter(|(span, _)| span.span.tokens > 0);
        let stored = all.into_iter().try_for_each(|(span, (_, source))| self.quantize(backend, span, *source));
        match stored {
            Ok(()) => Ok(placed),
            Err(error) => {
                placed.iter().for_each(|span| self.take_back(span));
                Err(error)
            }
        }
    }

    /// Reserves memory for exactly these spans, in addition to those placed before, and assigns it: pages in order, one
    /// range slot per span.
    ///
    /// # Errors
    /// [`Error::Plan`] when a span names a store that does not exist, [`Error::OutOfMemory`] or [`Error::Limit`] when
    /// the device has no room or a span ends beyond [`MOST_TOKENS`](crate::plan::MOST_TOKENS). On an error no page is
    /// taken.
    pub async fn place(&mut self, backend: &B, spans: &[NewSpan]) -> Result<Vec<FilledSpan>> {
        if let Some(span) = spans.iter().find(|span| span.store >= self.stores.len()) {
            let reason = format!("a span of store {} of {}", span.store, self.stores.len());
            return Err(Error::Plan { what: "placing spans", reason });
        }
        for span in spans {
            TokenCount::new(span.start.saturating_add(span.tokens))?;
        }
        for (index, (store, room)) in self.stores.iter_mut().zip(&mut self.room).enumerate() {
            let of_store = || spans.iter().filter(|span| span.store == index);
            let pages: usize = of_store().map(NewSpan::pages).sum();
            let most = backend.max_shard_pages(&self.shape, &room.format).clamp(1, self.shard_pages);
            while room.pages.free() < pages {
                let missing = saturated(pages - room.pages.free()).min(most);
                // The books first: a shard that they do not know would shift all that follow.
                let mut larger = room.pages.clone();
                larger.add_shard(missing)?;
                backend.add_shard(store, missing).await?;
                room.pages = larger;
            }
            backend.reserve_ranges(store, room.slots + of_store().count()).await?;
            if self.centres > 0 {
                backend.reserve_centres(store, self.centres).await?;
            }
        }
        let place = |&span: &NewSpan| {
            let room = &mut self.room[span.store];
            let pages = room.pages.allocate(span.pages())?;
            room.slots += 1;
            Ok(FilledSpan { span, pages, range_slot: room.slots - 1 })
        };
        spans.iter().map(place).collect()
    }

    /// Packs tokens into a span that was placed.
    ///
    /// # Errors
    /// As [`Packing::quantize`](super::Packing::quantize).
    pub fn quantize(&mut self, backend: &B, span: &FilledSpan, source: SpanSource<'_, B>) -> Result<()> {
        let SpanSource { rows, tokens, keys, values } = source;
        self.check_placed(span)?;
        let centre = self.centre_of(span);
        let write = SpanWrite { rows, tokens, pages: &span.pages, range_slot: span.range_slot, centre };
        backend.quantize(&mut self.stores[span.span.store], keys, values, write)
    }

    /// Writes tokens of dense tensors, starting at `first`, one by one into a span that was placed.
    ///
    /// # Errors
    /// As [`Packing::append`](super::Packing::append).
    pub fn append(
        &mut self,
        backend: &B,
        span: &FilledSpan,
        rows: RowLayout,
        [keys, values]: [&B::Tensor; 2],
        first: usize,
    ) -> Result<()> {
        self.check_placed(span)?;
        TokenCount::new(first.saturating_add(span.span.tokens))?;
        let centre = self.centre_of(span);
        let write = |i: usize| TokenWrite {
            token: first + i,
            page: span.pages[i / TILE_TOKENS],
            slot: i % TILE_TOKENS,
            centre,
        };
        let writes: Vec<TokenWrite> = (0..span.span.tokens).map(write).collect();
        backend.append(&mut self.stores[span.span.store], keys, values, rows, &writes)
    }

    /// Reads the keys and the values of a span back, `[kv_heads, tokens, head_dim]`.
    ///
    /// # Errors
    /// As [`Packing::dequantize`](super::Packing::dequantize) and [`Device::download`](super::Device::download).
    pub async fn read(&self, backend: &B, span: &FilledSpan) -> Result<(Vec<f32>, Vec<f32>)> {
        self.check_placed(span)?;
        let read = SpanRead {
            pages: &span.pages,
            tokens: span.span.tokens,
            range_slot: span.range_slot,
            centre: self.centre_of(span),
        };
        let (keys, values) = backend.dequantize(&self.stores[span.span.store], read)?;
        Ok((backend.download(&keys).await?, backend.download(&values).await?))
    }

    /// The plan of a step over some of the spans; `calibrations` has one entry for each store.
    ///
    /// # Errors
    /// As [`AttendPlan::new`].
    pub fn plan<'a>(
        &self,
        runs: &[QueryRun],
        spans: impl Iterator<Item = &'a FilledSpan>,
        calibrations: &[Option<Calibration>],
    ) -> Result<AttendPlan> {
        let calibrations = calibrations.iter().copied().chain(std::iter::repeat(None));
        let view =
            |(room, calibration): (&FilledRoom, _)| StoreView { format: room.format, calibration, spans: Vec::new() };
        let mut views: Vec<StoreView<'_>> = self.room.iter().zip(calibrations).map(view).collect();
        for span in spans {
            self.check_placed(span)?;
            views[span.span.store].spans.push(span.view());
        }
        AttendPlan::new(self.shape, runs, &views)
    }

    /// The stores, in the order in which a plan of [`FilledStores::plan`] names them.
    pub fn stores(&self) -> Vec<&B::Store> {
        self.stores.iter().collect()
    }

    /// Copies a page to another page of the same store.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such store; as [`Packing::copy_page`](super::Packing::copy_page).
    pub fn copy_page(&mut self, backend: &B, store: usize, from: Page, to: Page) -> Result<()> {
        let stores = self.stores.len();
        let Some(store) = self.stores.get_mut(store) else {
            return Err(Error::Plan { what: "copying a page", reason: format!("store {store} of {stores}") });
        };
        backend.copy_page(store, from, to)
    }

    /// Packs full pages of one store into pages of another.
    ///
    /// # Errors
    /// [`Error::Plan`] when both are the same store; as [`Packing::pack_windows`](super::Packing::pack_windows).
    pub fn pack_windows(&mut self, backend: &B, [from, to]: [usize; 2], windows: &[WindowMove]) -> Result<()> {
        match self.stores.get_disjoint_mut([from, to]) {
            Ok([from, to]) => backend.pack_windows(&self.shape, from, to, windows),
            Err(_) => {
                let reason = format!("stores {from} and {to} of {}", self.stores.len());
                Err(Error::Plan { what: "packing windows", reason })
            }
        }
    }

    /// Bytes that the stores hold on the device.
    pub fn bytes(&self, backend: &B) -> u64 {
        self.stores.iter().map(|store| backend.store_bytes(store)).sum()
    }

    /// Checks that a span names a store that there is, and has the pages of its tokens.
    fn check_placed(&self, FilledSpan { span, pages, .. }: &FilledSpan) -> Result<()> {
        let reject = |reason: String| Err(Error::Plan { what: "span", reason });
        if span.store >= self.stores.len() {
            return reject(format!("a span of store {} of {}", span.store, self.stores.len()));
        }
        if pages.len() != span.pages() {
            return reject(format!(
                "{} tokens need {} pages, and {} are given",
                span.tokens,
                span.pages(),
                pages.len()
            ));
        }
        Ok(())
    }

    fn take_back(&mut self, span: &FilledSpan) {
        let room = &mut self.room[span.span.store];
        let released = room.pages.release(&span.pages);
        debug_assert!(released.is_ok(), "{released:?}");
        room.slots -= 1;
    }
}

impl NewSpan {
    fn pages(&self) -> usize {
        self.tokens.div_ceil(TILE_TOKENS)
    }
}

impl FilledSpan {
    /// The span in the form that a plan takes.
    pub fn view(&self) -> SpanView<'_> {
        let NewSpan { sequence, start, tokens, .. } = self.span;
        SpanView { sequence, start, tokens, gathered: None, pages: &self.pages, range_slot: self.range_slot }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bits;
    use crate::backend::Device;
    use crate::cpu::Cpu;
    use pollster::block_on;

    fn shape() -> AttentionShape {
        AttentionShape::new(2, 2, 64).unwrap()
    }

    /// Spans lie in shards of the requested size, whether consecutive or gathered, and read back as they were stored.
    #[test]
    fn runs_and_gathers_share_a_store() {
        let (cpu, shape) = (Cpu::new(), shape());
        let elements: Vec<f32> = (0..300 * 128).map(|i| (i as f32).sin()).collect();
        let tensor = block_on(cpu.upload(elements.as_slice().into())).unwrap();
        let indices = block_on(cpu.upload_indices(&[5, 4, 299, 0], 2, 300)).unwrap();
        let rows = RowLayout::token_major(300, &shape);
        let source = |tokens| SpanSource { rows, tokens, keys: &tensor, values: &tensor };
        let mut stores = FilledStores::new(&cpu, shape, &[SegmentFormat::F16]).unwrap().with_shards_of(2);
        let new = |start, tokens| NewSpan { store: 0, sequence: 0, start, tokens };
        let run = Rows::Run(TokenRange::new(0, 300).unwrap());
        let spans = [(new(0, 300), source(run)), (new(300, 2), source(Rows::Gather(&indices)))];
        let spans = block_on(stores.fill(&cpu, &spans)).unwrap();
        let pages: Vec<(u32, u32)> =
            spans.iter().flat_map(|span| &span.pages).map(|page| (page.shard, page.index)).collect();
        assert_eq!(pages, [(0, 0), (0, 1), (1, 0), (1, 1)]);
        assert_eq!((spans[0].range_slot, spans[1].range_slot), (0, 1));
        let (keys, _) = block_on(stores.read(&cpu, &spans[1])).unwrap();
        let of = |token: usize, head: usize| half::f16::from_f32(elements[token * 128 + head * 64]).to_f32();
        assert_eq!([keys[0], keys[64], keys[128], keys[192]], [of(5, 0), of(4, 0), of(299, 1), of(0, 1)]);
    }

    #[test]
    fn stores_that_do_not_exist_are_refused() {
        let cpu = Cpu::new();
        let mut stores = FilledStores::new(&cpu, shape(), &[SegmentFormat::F16]).unwrap();
        let page = Page { shard: 0, index: 0 };
        assert!(matches!(stores.copy_page(&cpu, 1, page, page), Err(Error::Plan { .. })));
        assert!(matches!(stores.pack_windows(&cpu, [0, 1], &[]), Err(Error::Plan { .. })));
    }

    /// If a span cannot be stored, those before it are taken back too.
    #[test]
    fn nothing_is_stored_where_one_span_fails() {
        let (cpu, shape) = (Cpu::new(), shape());
        let tensor = block_on(cpu.upload([0.5f32; 10 * 128].as_slice().into())).unwrap();
        let mut stores =
            FilledStores::new(&cpu, shape, &[SegmentFormat::F16, SegmentFormat::per_channel(Bits::Two)]).unwrap();
        let source = |rows| {
            let tokens = Rows::Run(TokenRange::new(0, 10).unwrap());
            SpanSource { rows: RowLayout::token_major(rows, &shape), tokens, keys: &tensor, values: &tensor }
        };
        let new = |store| NewSpan { store, sequence: 0, start: 0, tokens: 10 };
        assert!(block_on(stores.fill(&cpu, &[(new(0), source(10)), (new(1), source(11))])).is_err());
        let spans = block_on(stores.fill(&cpu, &[(new(0), source(10)), (new(1), source(10))])).unwrap();
        assert!(spans.iter().all(|span| span.range_slot == 0 && span.pages == [Page { shard: 0, index: 0 }]));
        assert!(matches!(block_on(stores.place(&cpu, &[new(2)])), Err(Error::Plan { .. })));
    }
}
