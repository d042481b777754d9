//! What is stored of a prompt whose parts lie in f16: the tokens that a policy keeps, or all in several stores.

use super::change::Change;
use super::decided::DecidedLayer;
use super::layers::LayerGroup;
use super::observed_parts::ObservedParts;
use super::page_tables::Packed;
use super::prompt::check_spans;
use super::reserve::Asked;
use super::{ModelCache, PromptSpan, StoreId};
use crate::backend::{Backend, KeptAndEvicted, SpanRead};
use crate::plan::{RowLayout, Rows, TokenIndices, TokenRange};
use crate::policy::Merging;
use crate::{Error, Result};

impl<B: Backend + Clone> ModelCache<B> {
    /// Stores what a policy keeps of a prompt whose parts were appended in f16, in every layer, in place of them: as
    /// [`ModelCache::compress`] does with a prompt that lies in dense tensors. It queues kernels and waits for nothing,
    /// and it uploads nothing. Through wgpu it submits them, unless `Wgpu::record` takes them for the pass of the
    /// engine: the pass of the last part, for a policy that [needs no counts](ObservedParts::needs_counts). Tokens that
    /// were decoded since the last part stay behind the prompt.
    ///
    /// The cache needs room for the kept tokens in addition to the prompt's: [`ModelCache::reserve_for_parts`].
    ///
    /// ```
    /// use kvpack::backend::TensorRows;
    /// use kvpack::cache::{ModelCache, PartQueries, Recipe, TokenRun};
    /// use kvpack::cpu::{Cpu, CpuTensor};
    /// use kvpack::plan::{ElementType, RowLayout};
    /// use kvpack::policy::{Policy, Spans};
    /// use kvpack::{AttentionShape, SegmentFormat};
    ///
    /// # futures::executor::block_on(async {
    /// let (shape, of_queries) = (AttentionShape::new(4, 2, 64)?, AttentionShape::new(4, 4, 64)?);
    /// let mut cache = ModelCache::new(&Cpu::new(), &vec![(shape, Recipe::pack_all(SegmentFormat::saw_int4())); 3], 1)?;
    /// let mut prompt = cache.observe_parts(0, Policy::snapkv(0.25)?, Spans::new(200, &[])?).await?;
    /// for tokens in [128, 72] {
    ///     let runs = [TokenRun::unpacked(0, tokens)];
    ///     cache.reserve_for_append(&runs).await?;
    ///     cache.begin_append(&runs)?;
    ///     for layer in 0..cache.layers() {
    ///         // Of the layer's projections, after rotary embedding:
    ///         let keys = CpuTensor::F32((0..tokens * 2 * 64).map(|i| (i as f32 * 0.3 + layer as f32).sin()).collect());
    ///         let queries = CpuTensor::F32((0..tokens * 4 * 64).map(|i| (i as f32 * 0.7).cos()).collect());
    ///         cache.store(layer, RowLayout::token_major(tokens, &shape), &keys, &keys).await?;
    ///         let output = cache.attend(layer, &queries, ElementType::F32).await?; // of all queries of the part
    ///         let layout = RowLayout::token_major(tokens, &of_queries);
    ///         let queries = TensorRows { tensor: &queries, layout };
    ///         prompt.observe(&cache, layer, PartQueries { queries, log_sum_exps: None })?;
    ///     }
    ///     cache.commit()?;
    /// }
    /// cache.reserve_for_parts(&prompt).await?;
    /// cache.compress_parts(&mut prompt)?;
    /// assert_eq!((cache.length(0)?, cache.tokens(0, 0)?), (200, 50));
    /// # Ok::<(), kvpack::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::Plan`] when a step is open, or the sequence holds another prompt or only a part of it;
    /// [`Error::Selection`] when parts were not observed or counts were not read; [`Error::NoRoom`] when the kept
    /// tokens do not fit in addition to the prompt. The cache is as it was.
    pub fn compress_parts(&mut self, prompt: &mut ObservedParts<B>) -> Result<()> {
        self.check_no_step()?;
        if !prompt.shapes().eq(self.shapes()) {
            let reason = "it was observed for layers of other shapes; observe it with this cache".into();
            return Err(Error::Plan { what: "prompt to compress", reason });
        }
        let (sequence, start, tokens) = (prompt.sequence(), prompt.start(), prompt.spans().tokens());
        self.check_parts((sequence, start), tokens)?;
        let decided = prompt.decide()?;
        let count = |number: &usize| decided[*number].count();
        self.part_layers(|group| group.numbers().iter().any(|number| count(number) != count(&group.numbers()[0])));
        let merging = prompt.policy().merging;
        let mut changes = Vec::with_capacity(self.groups.len());
        let mut written = Ok(());
        for group in &mut self.groups {
            let (place, scratch) = ((sequence, start), prompt.scratch());
            written = group.keep_of_parts(place, &decided, merging, scratch).map(|change| changes.push(change));
            if written.is_err() {
                break;
            }
        }
        self.close_all(changes, written.is_ok());
        written.map(|()| prompt.set_decided(decided))
    }

    /// Allocates room for [`ModelCache::compress_parts`], within the budget.
    ///
    /// # Errors
    /// [`Error::Selection`] when counts were not read that the policy's budgets depend on; [`Error::NoRoom`] or
    /// [`Error::OutOfMemory`].
    pub async fn reserve_for_parts(&mut self, prompt: &ObservedParts<B>) -> Result<()> {
        self.check_no_step()?;
        let counts = prompt.budgets()?;
        let pages = |number: usize| counts.get(number).map_or(0, |count| count.div_ceil(crate::format::TILE_TOKENS));
        let mut needed = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            // Layers that keep different numbers have room for the largest.
            let most = group.numbers().iter().map(|&number| pages(number)).max().unwrap_or(0);
            let mut rooms = group.page_tables.room_for_prompt(&[])?;
            let room = &mut rooms[group.recipe().resolve(StoreId::PACKED)?.index()];
            (room.pages, room.spans) = (most, usize::from(most > 0));
            needed.push(rooms);
        }
        self.reserve_room(&needed, Asked::OnTheWay).await
    }

    /// Stores a prompt whose parts were appended in f16 as these spans, in every layer, in place of them: chunks in the
    /// stores of a mixture ([`ChunkSpans::prompt`](super::ChunkSpans::prompt)), or tokens of the engine's own choice.
    /// The tokens of spans count from the prompt's first. It queues kernels and waits for nothing, and uploads nothing.
    /// Through wgpu it submits them, unless `Wgpu::record` takes them for the pass of the engine.
    ///
    /// The cache needs room for the spans in addition to the prompt's: [`ModelCache::reserve_for_prefill`].
    ///
    /// ```
    /// use kvpack::cache::{ChunkStores, ModelCache, ModelRecipe, StoreId, TokenRun};
    /// use kvpack::cpu::{Cpu, CpuTensor};
    /// use kvpack::plan::{RowLayout, TokenRange};
    /// use kvpack::AttentionShape;
    ///
    /// # futures::executor::block_on(async {
    /// let shape = AttentionShape::new(4, 2, 64)?;
    /// let recipe: ModelRecipe = "cocktail".parse()?; // f16, 4 bits and 2 bits
    /// let mut cache = ModelCache::new(&Cpu::new(), &vec![(shape, recipe.layer(0, &shape)); 2], 1)?;
    /// // A context of 100 tokens, three whole chunks of 32, and a question of 10: see ChunkStores.
    /// let chunks = ChunkStores::new(TokenRange::new(0, 100)?, 32, vec![StoreId(0), StoreId(2), StoreId(1)])?;
    /// let spans = chunks.upload(cache.backend(), shape.kv_heads(), 110).await?;
    /// for tokens in [64, 46] {
    ///     let runs = [TokenRun::unpacked(0, tokens)];
    ///     cache.reserve_for_append(&runs).await?;
    ///     cache.begin_append(&runs)?;
    ///     for layer in 0..2 {
    ///         let keys = CpuTensor::F32((0..tokens * 2 * 64).map(|i| (i as f32 * 0.3).sin()).collect());
    ///         cache.store(layer, RowLayout::token_major(tokens, &shape), &keys, &keys).await?;
    ///         // Attention of all queries of the part.
    ///     }
    ///     cache.commit()?;
    /// }
    /// cache.reserve_for_prefill(&spans.prompt()).await?;
    /// cache.pack_parts(0, &spans.prompt())?;
    /// assert_eq!(cache.memory().stores().iter().map(|of| of.tokens).collect::<Vec<_>>(), [32 + 14, 32, 32]);
    /// # Ok::<(), kvpack::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::Plan`] when a step is open, the sequence holds no prompt of which nothing is packed, or a span names no
    /// store of a layer; [`Error::PromptSpans`] when the spans are not those of a prompt of its length;
    /// [`Error::Unsupported`] when a span is gathered and a layer has a window; [`Error::NoRoom`] when too little room is
    /// free. The cache is as it was.
    pub fn pack_parts(&mut self, sequence: usize, spans: &[PromptSpan<'_, B::Indices>]) -> Result<()> {
        self.check_no_step()?;
        let (start, prompt) = self.groups[0].page_tables.unpacked(sequence, None)?;
        check_spans(spans, prompt.tokens)?;
        let mut scratch = None;
        let mut changes = Vec::with_capacity(self.groups.len());
        let mut written = Ok(());
        for group in &mut self.groups {
            let packed = group.pack_parts((sequence, start), spans, &mut scratch);
            written = packed.map(|change| changes.push(change));
            if written.is_err() {
                break;
            }
        }
        self.close_all(changes, written.is_ok());
        written
    }

    /// Checks that a sequence holds a whole prompt of which nothing is packed.
    fn check_parts(&self, (sequence, start): (usize, usize), tokens: usize) -> Result<()> {
        for group in &self.groups {
            let (_, held) = group.page_tables.unpacked(sequence, Some(start))?;
            if held.tokens != tokens {
                let reason = format!("{} tokens of a prompt of {tokens} were appended; append the others", held.tokens);
                return Err(Error::Plan { what: "prompt in parts", reason });
            }
        }
        Ok(())
    }
}

impl<B: Backend> LayerGroup<B> {
    /// Opens a change that replaces a prompt by what is kept of it, and writes it in every layer. On an error nothing
    /// has changed.
    fn keep_of_parts(
        &mut self,
        (sequence, start): (usize, usize),
        decided: &[DecidedLayer<B>],
        merging: Option<Merging>,
        scratch: &mut Option<(B::Tensor, B::Tensor)>,
    ) -> Result<Change<B::Indices>> {
        let kept: Vec<&B::Indices> =
            self.numbers().iter().filter_map(|&number| decided[number].kept.as_ref()).collect();
        let spans: Vec<_> =
            kept.first().copied().map(|first| PromptSpan::gather(first, StoreId::PACKED)).into_iter().collect();
        let packed = self.page_tables.pack_unpacked((sequence, start), &spans)?;
        if kept.len() > 1 {
            let indices = kept.iter().map(|&kept| kept.clone()).collect();
            self.page_tables.differ_in_layers(sequence, packed.first, indices);
        }
        let written = kept.iter().copied().enumerate().try_for_each(|(place, kept)| {
            self.read_parts(place, sequence, &packed, scratch)?;
            let Some((keys, values)) = scratch else { return Ok(()) };
            let (shape, rows) = (self.shape, RowLayout::head_major(packed.prompt.tokens, &self.shape));
            let Some(merging) = merging.filter(|_| kept.shape().count() < rows.tokens) else {
                return self.write_part((place, sequence, packed.first), (rows, &*keys, &*values), Rows::Gather(kept));
            };
            let evicted = &self.backend.evicted(kept)?;
            let input = KeptAndEvicted { shape, rows, keys: &*keys, values: &*values, kept, evicted };
            let merged = self.backend.merge_tokens(input, merging)?;
            let rows = RowLayout::head_major(kept.shape().count(), &shape);
            let all = Rows::Run(TokenRange::new(0, rows.tokens)?);
            self.write_part((place, sequence, packed.first), (rows, &merged.keys, &merged.values), all)
        });
        self.or_abandon(packed.change, written)
    }

    /// Opens a change that replaces a prompt by spans, and writes them in every layer. On an error nothing has changed.
    fn pack_parts(
        &mut self,
        (sequence, start): (usize, usize),
        spans: &[PromptSpan<'_, B::Indices>],
        scratch: &mut Option<(B::Tensor, B::Tensor)>,
    ) -> Result<Change<B::Indices>> {
        let packed = self.page_tables.pack_unpacked((sequence, start), spans)?;
        let rows = RowLayout::head_major(packed.prompt.tokens, &self.shape);
        let written = (0..self.layers()).try_for_each(|place| {
            self.read_parts(place, sequence, &packed, scratch)?;
            let Some((keys, values)) = scratch else { return Ok(()) };
            spans.iter().enumerate().try_for_each(|(at, span)| {
                self.write_part((place, sequence, packed.first + at), (rows, &*keys, &*values), span.tokens)
            })
        });
        self.or_abandon(packed.change, written)
    }

    /// Decodes a prompt in one layer.
    fn read_parts(
        &self,
        place: usize,
        sequence: usize,
        packed: &Packed<B::Indices>,
        scratch: &mut Option<(B::Tensor, B::Tensor)>,
    ) -> Result<()> {
        let (lease, tokens) = (&packed.prompt.lease, packed.prompt.tokens);
        let centre = self.page_tables.sequence(sequence)?.centre;
        let read = SpanRead { pages: &lease.pages, tokens, range_slot: 0, centre };
        let stores = self.stores(place);
        self.backend.dequantize_with(stores[StoreId::F16.index()], read, scratch)
    }

    fn or_abandon(&mut self, change: Change<B::Indices>, written: Result<()>) -> Result<Change<B::Indices>> {
        match written {
            Ok(()) => Ok(change),
            Err(error) => {
                self.page_tables.abandon(change);
                Err(error)
            }
        }
    }
}
