//! Compresses a sequence again after it has grown: decodes its contents, chooses from them and stores the choice, in
//! all layers or in none.

use super::change::Change;
use super::decided::DecidedLayer;
use super::layers::LayerGroup;
use super::observed::{DenseLayer, MeasuredQueries, columns, counts};
use super::reserve::Asked;
use super::sequence::Sequence;
use super::step::NewTokens;
use super::{ModelCache, PromptSpan, SpanPositions, StoreId};
use crate::backend::{Backend, KeptAndEvicted, MeasuredAttention, QueriesAndKeys, TensorRows};
use crate::counts::saturated;
use crate::format::AttentionShape;
use crate::plan::{RowLayout, TokenIndices};
use crate::policy::{
    KeepRule, LayerSelection, Merging, Policy, QueryPositions, RowStatsSource, Selection, Spans, StatsRequest, TextRule,
};
use crate::{Error, Result};

/// The tokens that a layer keeps of those that it holds.
struct Chosen<B: Backend> {
    /// Their places among the held tokens, on the device, `[kv_heads, count]`; `None` if none are kept.
    places: Option<B::Indices>,
    /// Their positions in the sequence.
    positions: LayerSelection,
}

impl<B: Backend> ModelCache<B> {
    /// Number of tokens appended to a sequence since it was last [compressed](ModelCache::compress), or all its tokens
    /// if it never was.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence.
    pub fn appended(&self, sequence: usize) -> Result<usize> {
        let mut appended = self.length(sequence)?;
        for group in &self.groups {
            appended = appended.min(group.page_tables.unbroken(sequence)?);
        }
        Ok(appended)
    }

    /// Whether a sequence should be compressed again: `every` tokens or more were appended since the last compression
    /// ([`ModelRecipe::every`](super::ModelRecipe::every)). An engine asks after a step is committed.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence.
    pub fn compression_due(&self, sequence: usize, every: usize) -> Result<bool> {
        Ok(self.appended(sequence)? >= every.max(1))
    }

    /// The positions that each layer holds of a sequence.
    pub(crate) async fn held(&self, sequence: usize) -> Result<Selection> {
        let length = self.length(sequence)?;
        let mut layers = Vec::with_capacity(self.layers());
        for layer in 0..self.layers() {
            let mut held = vec![Vec::new(); self.shape(layer)?.kv_heads()];
            let (group, place) = self.group(layer)?;
            for positions in group.positions(place, sequence).await? {
                match positions {
                    SpanPositions::Run(run) => {
                        held.iter_mut().for_each(|head| head.extend(run.positions()));
                    }
                    SpanPositions::PerHead(positions) => {
                        let count = positions.len() / held.len();
                        for (head, positions) in held.iter_mut().zip(positions.chunks(count.max(1))) {
                            head.extend(positions.iter().map(|&position| saturated(position)));
                        }
                    }
                }
            }
            layers.push(LayerSelection::new(length, held)?);
        }
        Selection::new(layers)
    }

    /// The number of query rows given, if they are valid for the policy.
    pub(crate) fn check_queries(
        &self,
        appended: usize,
        policy: &Policy,
        queries: &[MeasuredQueries<'_, B::Tensor>],
    ) -> Result<usize> {
        let reject = |reason: String| Err(Error::Selection { reason });
        // The rows for one token show whether the policy measures at all.
        if policy.rows_again(1) == 0 {
            return Ok(0);
        }
        let rows = queries.first().map_or(0, |queries| queries.queries.layout.tokens);
        if queries.len() != self.layers() || queries.iter().any(|of| of.queries.layout.tokens != rows) {
            return reject(format!(
                "queries of {} layers were brought, and the same rows of all {} layers are measured",
                queries.len(),
                self.layers()
            ));
        }
        self.check_measured(queries)?;
        if rows == 0 || rows > appended {
            return reject(format!(
                "{rows} query rows of the {appended} tokens that were appended since the sequence was compressed; bring at \
                 least one row, and no more rows than tokens"
            ));
        }
        Ok(rows)
    }

    /// The attention that a layer's held keys receive from the newest query rows.
    async fn measure_held(
        &self,
        (layer, sequence): (usize, usize),
        policy: &Policy,
        rows: usize,
        queries: MeasuredQueries<'_, B::Tensor>,
    ) -> Result<MeasuredAttention<B::Tensor, B::Words>> {
        let (group, index) = self.group(layer)?;
        let (backend, shape) = (self.backend(), group.shape);
        let dense = group.dense(index, group.page_tables.sequence(sequence)?).await?;
        let rows = QueryPositions::last(rows, dense.rows.tokens)?;
        let keys = TensorRows { tensor: &dense.keys, layout: dense.rows };
        let source = if queries.known_lse.is_some() { RowStatsSource::KnownLse } else { RowStatsSource::Measured };
        let request = StatsRequest { columns: columns(policy), rows: source };
        let scale = group.recipe().attention().scale(&shape);
        let input = QueriesAndKeys { shape, scale, rows: &rows, queries: queries.queries, keys };
        backend.measure_attention(input, request, queries.known_lse)
    }

    /// The tokens that every layer keeps of those that it holds: the decision of [`Policy::select_again`].
    ///
    /// If scores alone decide, the device chooses as in [`ModelCache::compress`]. If text is scored differently from
    /// images, the host chooses: heads hold different tokens, so text lies at different places in each, and kernels
    /// support only one order for all heads.
    async fn choose(
        &self,
        policy: &Policy,
        spans: &Spans,
        held: &Selection,
        rows: usize,
        measured: &[MeasuredAttention<B::Tensor, B::Words>],
    ) -> Result<Vec<Chosen<B>>> {
        let mut statistics = Vec::with_capacity(measured.len());
        for of_layer in measured {
            statistics.push(counts(self.backend(), Some(of_layer)).await?);
        }
        match policy.keep {
            KeepRule::Best { text: TextRule::Equal, .. } if rows > 0 => {
                let budgets = policy.budgets_again(spans, held, rows, &statistics)?;
                self.choose_by_scores(policy, held, rows, measured, budgets).await
            }
            KeepRule::Best { .. } => {
                for (of_layer, statistics) in measured.iter().zip(&mut statistics) {
                    statistics.column_sums = self.backend().download(&of_layer.column_sums).await?;
                }
                self.upload_choice(held, policy.places_again(spans, held, rows, &statistics)?).await
            }
            KeepRule::SinkAndRecent { .. } | KeepRule::Random { .. } => {
                self.upload_choice(held, policy.places_again(spans, held, rows, &statistics)?).await
            }
        }
    }

    /// Lets the device choose the best tokens of every layer, `budgets` tokens of each head.
    async fn choose_by_scores(
        &self,
        policy: &Policy,
        held: &Selection,
        rows: usize,
        measured: &[MeasuredAttention<B::Tensor, B::Words>],
        budgets: Vec<usize>,
    ) -> Result<Vec<Chosen<B>>> {
        let backend = self.backend();
        let mut decided = Vec::with_capacity(measured.len());
        for ((held, measured), count) in held.layers().iter().zip(measured).zip(budgets) {
            // Images make no difference to these scores.
            let (spans, rows) = (Spans::new(held.count(), &[])?, QueryPositions::last(rows, held.count())?);
            decided.push(match policy.score_request(&spans, &rows, count)? {
                Some(request) => {
                    DecidedLayer::by_scores(backend, &measured.column_sums, (held.kv_heads(), count), &request)?
                }
                None => DecidedLayer::none(),
            });
        }
        // All layers are in flight before the host waits for the first.
        let mut chosen = Vec::with_capacity(decided.len());
        for (held, decided) in held.layers().iter().zip(decided) {
            let places = decided.selection(backend, held.count(), held.kv_heads()).await?;
            chosen.push(Chosen { places: decided.kept, positions: held.at(&places)? });
        }
        Ok(chosen)
    }

    /// Uploads the host's choice, given as places among the tokens that each layer holds.
    async fn upload_choice(&self, held: &Selection, places: Vec<LayerSelection>) -> Result<Vec<Chosen<B>>> {
        let mut chosen = Vec::with_capacity(places.len());
        for (held, places) in held.layers().iter().zip(places) {
            let decided = DecidedLayer::upload(self.backend(), &places).await?;
            chosen.push(Chosen { places: decided.kept, positions: held.at(&places)? });
        }
        Ok(chosen)
    }
}

impl<B: Backend + Clone> ModelCache<B> {
    /// Compresses a sequence again, to the policy's budget for its present length: for outputs so long that appended
    /// tokens would outgrow the kept part of the prompt.
    ///
    /// `spans` are those of the whole sequence, as long as [`ModelCache::length`]; appended tokens are text. `queries`
    /// are those of the newest tokens, one tensor for each layer in order, all with the same number of rows.
    /// [`Policy::rows_again`] of [`ModelCache::appended`] returns the number of rows that the policy prefers. An engine
    /// that keeps fewer may pass fewer. A policy that measures nothing takes none. Scores are of these queries alone: H2O
    /// and LOOK-M forget earlier sums.
    ///
    /// The contents of the sequence are decoded, measured and chosen from. The kept tokens are stored as one span, as
    /// [`ModelCache::compress`] does with a prompt: in the first packed store of the layer's recipe, including tokens
    /// of residual windows and sinks. Evicted tokens are merged if the policy merges. Positions stay those of the
    /// sequence, whose length does not change. Packed tokens are packed again from their decoded form, so their error
    /// may grow every time. The device chooses if scores alone decide; the host chooses if text is scored differently
    /// from images. Positions are downloaded in either case. Decoding goes layer by layer, twice. If a layer holds
    /// several spans, its rows pass through the host to be concatenated. The same cache and queries give the same bits
    /// in every run.
    ///
    /// ```
    /// use kvpack::backend::TensorRows;
    /// use kvpack::cache::{MeasuredQueries, ModelCache, Recipe, TokenRun};
    /// use kvpack::cpu::{Cpu, CpuTensor};
    /// use kvpack::plan::RowLayout;
    /// use kvpack::policy::{Policy, Spans};
    /// use kvpack::{AttentionShape, SegmentFormat};
    ///
    /// # futures::executor::block_on(async {
    /// let shape = AttentionShape::new(4, 2, 64)?;
    /// let mut cache = ModelCache::new(&Cpu::new(), &[(shape, Recipe::pack_all(SegmentFormat::saw_int4()))], 1)?;
    /// let (policy, every) = (Policy::snapkv(0.25)?, 100);
    /// for token in 0..250 {
    ///     let runs = [TokenRun::decode(0)];
    ///     cache.reserve_for_append(&runs).await?;
    ///     cache.begin_append(&runs)?;
    ///     let row = CpuTensor::F32((0..2 * 64).map(|i| ((i * (token + 1)) as f32).sin()).collect());
    ///     cache.store(0, RowLayout::token_major(1, &shape), &row, &row).await?;
    ///     cache.commit()?;
    ///     if cache.compression_due(0, every)? {
    ///         let rows = policy.rows_again(cache.appended(0)?); // the engine kept this many queries
    ///         let queries = CpuTensor::F32((0..rows * 4 * 64).map(|i| (i as f32 * 0.7).cos()).collect());
    ///         let layout = RowLayout::token_major(rows, &AttentionShape::new(4, 4, 64)?);
    ///         let queries = TensorRows { tensor: &queries, layout };
    ///         let spans = Spans::new(cache.length(0)?, &[])?;
    ///         cache.compress_again(0, &policy, &spans, &[MeasuredQueries { queries, known_lse: None }]).await?;
    ///     }
    /// }
    /// // A quarter of 200 tokens, and what came since.
    /// assert_eq!((cache.length(0)?, cache.tokens(0, 0)?), (250, 100));
    /// # Ok::<(), kvpack::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence; [`Error::Plan`] when a step is open; [`Error::Selection`]
    /// when `spans` are of another length, queries are missing or of more rows than tokens came since, layers differ in
    /// KV heads, or tokens are held in another order than theirs ([`ChunkSpans`](super::ChunkSpans));
    /// [`Error::NoTokens`] for an empty sequence; [`Error::Unsupported`] when a layer has a sliding window, when
    /// attention is measured in a layer with a soft cap, or with sinks and without `known_lse`, and where ranks share
    /// sequences (use [`ContextParallel`](crate::ranks::ContextParallel)); those of [`Policy::select_again`] and
    /// [`measure_attention`](crate::backend::TokenSelection::measure_attention); [`Error::NotFinite`] when something
    /// decodes to what no store holds; [`Error::NoRoom`] or [`Error::OutOfMemory`] when the kept tokens do not fit
    /// in addition to the present ones. The cache is as it was.
    pub async fn compress_again(
        &mut self,
        sequence: usize,
        policy: &Policy,
        spans: &Spans,
        queries: &[MeasuredQueries<'_, B::Tensor>],
    ) -> Result<Selection> {
        self.check_no_step()?;
        self.groups[0].page_tables.check_whole("compressing a sequence again")?;
        self.check_gathers("compressing a sequence again")?;
        let held = self.held(sequence).await?;
        let rows = self.check_queries(self.appended(sequence)?, policy, queries)?;
        let mut measured = Vec::new();
        if rows > 0 {
            for (layer, queries) in queries.iter().enumerate() {
                measured.push(self.measure_held((layer, sequence), policy, rows, *queries).await?);
            }
        }
        let chosen = self.choose(policy, spans, &held, rows, &measured).await?;
        let selection = Selection::new(chosen.iter().map(|chosen| chosen.positions.clone()).collect())?;
        let count = |number: &usize| chosen[*number].positions.count();
        self.part_layers(|group| group.numbers().iter().any(|number| count(number) != count(&group.numbers()[0])));
        let mut needed = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            let places = chosen[group.numbers()[0]].places.as_ref();
            let spans = places.map(|places| PromptSpan::gather(places, StoreId::PACKED));
            needed.push(group.page_tables.room_for_prompt(spans.as_slice())?);
        }
        if let Err(error) = self.reserve_room(&needed, Asked::OnTheWay).await {
            self.join_layers();
            return Err(error);
        }
        let mut changes = Vec::with_capacity(self.groups.len());
        let mut written = Ok(());
        for group in &mut self.groups {
            match group.replace(sequence, &chosen, policy.merging).await {
                Ok(change) => changes.push(change),
                Err(error) => {
                    written = Err(error);
                    break;
                }
            }
        }
        self.close_all(changes, written.is_ok());
        written.map(|()| selection)
    }
}

impl<B: Backend> LayerGroup<B> {
    /// All that a sequence holds, or held, in a layer, span after span, as dense f32 rows.
    pub(super) async fn dense(&self, layer: usize, held: &Sequence<B::Indices>) -> Result<DenseLayer<B::Tensor>> {
        let mut stored = self.dequantize_held(layer, held)?;
        let rows = RowLayout::head_major(stored.iter().map(|span| span.tokens).sum(), &self.shape);
        if stored.len() == 1
            && let Some(span) = stored.pop()
        {
            return Ok(DenseLayer { rows, keys: span.keys, values: span.values });
        }
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for span in stored {
            keys.push(self.backend.download(&span.keys).await?);
            values.push(self.backend.download(&span.values).await?);
        }
        let (keys, values) = (join(&keys, &self.shape), join(&values, &self.shape));
        let keys = self.backend.upload(keys.as_slice().into()).await?;
        let values = self.backend.upload(values.as_slice().into()).await?;
        Ok(DenseLayer { rows, keys, values })
    }

    /// Opens a change that replaces the held tokens by the kept ones, as many in every layer, and writes it layer by
    /// layer. On an error nothing has changed, except that free room may have been added.
    async fn replace(
        &mut self,
        sequence: usize,
        chosen: &[Chosen<B>],
        merging: Option<Merging>,
    ) -> Result<Change<B::Indices>> {
        let numbers = self.numbers().to_vec();
        let mut positions = Vec::with_capacity(numbers.len());
        for kept in numbers.iter().map(|&number| &chosen[number].positions).filter(|kept| kept.count() > 0) {
            let (heads, below) = (self.shape.kv_heads(), saturated(kept.tokens()));
            positions.push(self.backend.upload_indices(&kept.indices(), heads, below).await?);
        }
        let (change, held) = self.open_replaced(sequence, positions)?;
        for (place, &number) in numbers.iter().enumerate() {
            let Some(places) = &chosen[number].places else { continue };
            if let Err(error) = self.replace_in_layer((place, sequence), &held, places, &change, merging).await {
                self.page_tables.abandon(change);
                return Err(error);
            }
        }
        Ok(change)
    }

    /// Writes the tokens at some places of what a sequence held to the span of an open change in one layer.
    async fn replace_in_layer(
        &mut self,
        (place, sequence): (usize, usize),
        held: &Sequence<B::Indices>,
        places: &B::Indices,
        change: &Change<B::Indices>,
        merging: Option<Merging>,
    ) -> Result<()> {
        let (shape, count) = (self.shape, places.shape().count());
        let DenseLayer { rows, keys, values } = self.dense(place, held).await?;
        let new = NewTokens { rows, keys: &keys, values: &values };
        self.check_rows(new).await?;
        let Some(merging) = merging.filter(|_| count < rows.tokens) else {
            return self.write_spans(place, change, sequence, new, &[PromptSpan::gather(places, StoreId::PACKED)]);
        };
        let (kept, evicted) = (places, &self.backend.evicted(places)?);
        let input = KeptAndEvicted { shape, rows, keys: &keys, values: &values, kept, evicted };
        let merged = self.backend.merge_tokens(input, merging)?;
        let rows = RowLayout::head_major(count, &shape);
        self.write_rows(place, change, sequence, NewTokens { rows, keys: &merged.keys, values: &merged.values })
    }
}

/// Concatenates rows `[kv_heads, tokens, head_dim]` of spans within every head.
fn join(spans: &[Vec<f32>], shape: &AttentionShape) -> Vec<f32> {
    let of_head = |head: usize| {
        let part = move |span: &'_ Vec<f32>| {
            let elements = span.len() / shape.kv_heads();
            head * elements..(head + 1) * elements
        };
        spans.iter().flat_map(move |span| span[part(span)].iter().copied())
    };
    (0..shape.kv_heads()).flat_map(of_head).collect()
}
