//! Evicts from, merges and packs a prompt: carries out a policy's decision in all layers of a model, or in none.

use super::change::Change;
use super::decided::DecidedLayer;
use super::layers::LayerGroup;
use super::observed::{DenseLayer, ObservedLayer, ObservedPrompt};
use super::reserve::Asked;
use super::step::NewTokens;
use super::{ModelCache, PromptSpan, SpanPositions, StoreId};
use crate::backend::{Backend, KeptAndEvicted, MergedTokens, TensorRows};
use crate::counts::saturated;
use crate::format::AttentionShape;
use crate::plan::{RankShare, RowLayout, TokenIndices};
use crate::policy::{LayerSelection, Merging, Policy, Selection, Spans};
use crate::{Error, Result};

/// The tokens of a layer that stay, on the device.
struct KeptTokens<B: Backend> {
    /// Their positions in the prompt, for every KV head.
    positions: B::Indices,
    /// Their rows, with those of evicted tokens merged in; `None` if nothing is merged.
    merged: Option<MergedTokens<B::Tensor, B::Words>>,
}

impl<B: Backend + Clone> ModelCache<B> {
    /// A prompt for a policy to observe, layer by layer, before [`ModelCache::compress`] stores the part that stays.
    ///
    /// ```
    /// use kvpack::backend::TensorRows;
    /// use kvpack::cache::{DenseLayer, MeasuredQueries, ModelCache, Recipe};
    /// use kvpack::cpu::{Cpu, CpuTensor};
    /// use kvpack::plan::{RowLayout, TokenRange};
    /// use kvpack::policy::{Policy, Spans};
    /// use kvpack::{AttentionShape, SegmentFormat};
    ///
    /// # futures::executor::block_on(async {
    /// let shape = AttentionShape::new(4, 2, 64)?;
    /// let mut cache = ModelCache::new(&Cpu::new(), &vec![(shape, Recipe::pack_all(SegmentFormat::saw_int4())); 3], 1)?;
    ///
    /// // 200 tokens, of which 20 .. 180 are an image: VL-Cache keeps a tenth, and a share of it in each layer.
    /// let spans = Spans::new(200, &[TokenRange::new(20, 180)?])?;
    /// let mut prompt = cache.observe(Policy::vlcache(0.1)?, spans)?;
    /// let rows = prompt.query_rows().map_or(0, |rows| rows.len()); // the question after the image
    /// for layer in 0..cache.layers() {
    ///     // Of the layer's projections, after rotary embedding:
    ///     let keys = CpuTensor::F32((0..200 * 2 * 64).map(|i| (i as f32 * 0.3 + layer as f32).sin()).collect());
    ///     let queries = CpuTensor::F32((0..rows * 4 * 64).map(|i| (i as f32 * 0.7).cos()).collect());
    ///     let of_queries = RowLayout::token_major(rows, &AttentionShape::new(4, 4, 64)?);
    ///     let queries = TensorRows { tensor: &queries, layout: of_queries };
    ///     let dense = DenseLayer { rows: RowLayout::token_major(200, &shape), values: keys.clone(), keys };
    ///     prompt.observe(layer, dense, Some(MeasuredQueries { queries, known_lse: None }))?;
    /// }
    /// let selection = cache.compress(0, &prompt).await?;
    /// assert_eq!(selection.layers().iter().map(|layer| layer.count()).sum::<usize>(), 60);
    /// assert_eq!(cache.tokens(1, 0)?, selection.layers()[1].count());
    /// assert_eq!(cache.length(0)?, 200); // decoding goes on at position 200
    /// # Ok::<(), kvpack::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::NoTextAfterImage`] when the policy measures the text after the image and there is none;
    /// [`Error::Unsupported`] when a layer has a sliding window.
    pub fn observe(&self, policy: Policy, spans: Spans) -> Result<ObservedPrompt<B>> {
        self.check_gathers("a policy that chooses among a prompt")?;
        ObservedPrompt::new(self.backend().clone(), self.measured_layers(), policy, spans)
    }

    /// Stores the part of a prompt that its policy keeps, at the end of a sequence, in every layer: with budgets over
    /// all layers and the kept tokens of every KV head. Evicted tokens are merged into kept ones if the policy merges,
    /// and rows are packed as they are gathered.
    ///
    /// The kept tokens become one span in the first packed store of the layer's recipe, or in f16 if it packs nothing.
    /// The sequence is as long as if nothing had been evicted: appended tokens continue at their positions, and
    /// [`ModelCache::positions`] returns the positions of the kept ones. A layer with a budget of no tokens holds none
    /// of the prompt. The same prompt gives the same bits in every run.
    ///
    /// Layers that keep as many tokens go on to share their page tables, so that a step has one part for them: those of
    /// policies whose layers have equal budgets. Otherwise every layer of a kind has page tables of its own until no
    /// sequence holds the layers apart: see [`ModelCache::clear`].
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence; [`Error::Plan`] when a step is open or the prompt was
    /// observed for layers of other shapes; [`Error::Unsupported`] when a layer has a sliding window, or where ranks
    /// share sequences (use [`ContextParallel`](crate::ranks::ContextParallel)); those of [`ObservedPrompt::select`];
    /// [`Error::NotFinite`] for keys and values; [`Error::NoRoom`] or [`Error::OutOfMemory`] when what is kept does not fit. The cache is as it was.
    pub async fn compress(&mut self, sequence: usize, prompt: &ObservedPrompt<B>) -> Result<Selection> {
        self.check_no_step()?;
        self.length(sequence)?;
        self.groups[0].page_tables.check_whole("compressing a prompt")?;
        let layers = self.layers_of(prompt)?;
        for (index, layer) in layers.iter().enumerate() {
            self.group(index)?.0.check_rows(new_tokens(layer)).await?;
        }
        let decided = prompt.decide().await?;
        let mut kept = Vec::with_capacity(layers.len());
        for (layer, decided) in layers.iter().zip(&decided.layers) {
            kept.push(keep(self.backend(), layer, decided, prompt.policy().merging)?);
        }
        let (changes, written) = self.store_kept(sequence, &layers, &kept).await?;
        // The host reads the decision only now: whether scores were numbers, and the selection to return.
        let selection = match written {
            Ok(()) => decided.selection(self.backend()).await,
            Err(error) => Err(error),
        };
        self.close_all(changes, selection.is_ok());
        selection
    }

    /// Stores the tokens of a prompt that the caller chose, at the end of a sequence, in every layer: what
    /// [`ModelCache::compress`] does with the choice of a policy. `prompt` has keys and values of every layer.
    ///
    /// ```
    /// use kvpack::cache::{DenseLayer, ModelCache, Recipe};
    /// use kvpack::cpu::{Cpu, CpuTensor};
    /// use kvpack::plan::RowLayout;
    /// use kvpack::policy::{LayerSelection, Selection};
    /// use kvpack::{AttentionShape, SegmentFormat};
    ///
    /// # futures::executor::block_on(async {
    /// let shape = AttentionShape::new(4, 2, 64)?;
    /// let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    /// let mut cache = ModelCache::new(&Cpu::new(), &[(shape, recipe)], 1)?;
    /// let rows = RowLayout::token_major(200, &shape);
    /// let of = |phase: f32| CpuTensor::F32((0..200 * 2 * 64).map(|i| (i as f32 * 0.3 + phase).sin()).collect());
    /// // The first tokens and the newest for one head, every other token for the other.
    /// let (first, second): (Vec<u32>, Vec<u32>) = ((0..10).chain(150..200).collect(), (80..200).step_by(2).collect());
    /// let selection = Selection::new(vec![LayerSelection::new(200, vec![first, second])?])?;
    /// cache.keep(0, vec![DenseLayer { rows, keys: of(0.0), values: of(1.0) }], &selection).await?;
    /// assert_eq!((cache.length(0)?, cache.tokens(0, 0)?), (200, 60));
    /// # Ok::<(), kvpack::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::Selection`] when prompt or selection are not of the layers of the cache, of different lengths, or the
    /// selection asks for merging, which policies alone do; otherwise as [`ModelCache::compress`]. The cache is as it
    /// was.
    pub async fn keep(
        &mut self,
        sequence: usize,
        prompt: Vec<DenseLayer<B::Tensor>>,
        selection: &Selection,
    ) -> Result<()> {
        self.groups[0].page_tables.check_whole("keeping tokens of a prompt")?;
        self.keep_chosen(sequence, prompt, selection).await
    }

    /// [`ModelCache::keep`], also in the cache of a rank, which stores its part of the choice: of the tokens that a KV
    /// head keeps, those whose place among them is its own.
    pub(crate) async fn keep_chosen(
        &mut self,
        sequence: usize,
        prompt: Vec<DenseLayer<B::Tensor>>,
        selection: &Selection,
    ) -> Result<()> {
        self.check_no_step()?;
        self.length(sequence)?;
        self.check_gathers("keeping tokens of a prompt")?;
        let shapes = self.shapes();
        if prompt.len() != shapes.len() || selection.layers().len() != shapes.len() {
            let (given, chosen) = (prompt.len(), selection.layers().len());
            let reason = format!("{given} layers, {chosen} of them chosen, for a cache of {}", shapes.len());
            return Err(Error::Selection { reason });
        }
        let layers: Vec<ObservedLayer<B>> =
            shapes.into_iter().zip(prompt).map(|(shape, dense)| ObservedLayer::unmeasured(shape, dense)).collect();
        self.keep_of(sequence, &layers.iter().collect::<Vec<_>>(), selection, None).await
    }

    /// Stores what ranks chose of an observed prompt, merged as its policy says: on a rank its part.
    pub(crate) async fn keep_observed(
        &mut self,
        sequence: usize,
        prompt: &ObservedPrompt<B>,
        selection: &Selection,
    ) -> Result<()> {
        self.check_no_step()?;
        self.length(sequence)?;
        let layers = self.layers_of(prompt)?;
        if selection.layers().len() != layers.len() {
            let reason = format!("{} layers were chosen of {}", selection.layers().len(), layers.len());
            return Err(Error::Selection { reason });
        }
        self.keep_of(sequence, &layers, selection, prompt.policy().merging).await
    }

    /// The layers of a prompt that was observed for this cache.
    fn layers_of<'a>(&self, prompt: &'a ObservedPrompt<B>) -> Result<Vec<&'a ObservedLayer<B>>> {
        self.check_gathers("compressing a prompt")?;
        let layers = prompt.observed()?;
        if layers.iter().map(|layer| layer.shape).eq(self.shapes()) {
            return Ok(layers);
        }
        let reason = "it was observed for layers of other shapes; observe it with this cache".into();
        Err(Error::Plan { what: "prompt to compress", reason })
    }

    async fn keep_of(
        &mut self,
        sequence: usize,
        layers: &[&ObservedLayer<B>],
        selection: &Selection,
        merging: Option<Merging>,
    ) -> Result<()> {
        let share = self.share().copied();
        let mut kept = Vec::with_capacity(layers.len());
        for (index, (layer, chosen)) in layers.iter().zip(selection.layers()).enumerate() {
            check_chosen(index, layer, chosen)?;
            self.group(index)?.0.check_rows(new_tokens(layer)).await?;
            kept.push(match share {
                None => {
                    let decided = DecidedLayer::upload(self.backend(), chosen).await?;
                    keep(self.backend(), layer, &decided, merging)?
                }
                Some(share) => keep_part(self.backend(), layer, (chosen, share), merging).await?,
            });
        }
        let (changes, written) = self.store_kept(sequence, layers, &kept).await?;
        self.close_all(changes, written.is_ok());
        written
    }

    /// Writes what is kept of a prompt, in changes that are still open. Layers that keep as many tokens go on to share
    /// their page tables; a kind of layers that do not parts.
    async fn store_kept(
        &mut self,
        sequence: usize,
        layers: &[&ObservedLayer<B>],
        kept: &[Option<KeptTokens<B>>],
    ) -> Result<(Vec<Change<B::Indices>>, Result<()>)> {
        let shape_of = |&number: &usize| kept[number].as_ref().map(|kept| kept.positions.shape());
        self.part_layers(|group| {
            group.numbers().iter().any(|number| shape_of(number) != shape_of(&group.numbers()[0]))
        });
        let mut needed = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            let spans: Vec<_> = kept[group.numbers()[0]].iter().map(KeptTokens::span).collect();
            needed.push(group.page_tables.room_for_prompt(&spans)?);
        }
        if let Err(error) = self.reserve_room(&needed, Asked::OnTheWay).await {
            self.join_layers();
            return Err(error);
        }
        let mut changes = Vec::with_capacity(self.groups.len());
        let mut written = Ok(());
        for group in &mut self.groups {
            written = group.store_kept(sequence, layers, kept, &mut changes);
            if written.is_err() {
                break;
            }
        }
        Ok((changes, written))
    }

    /// Commits the changes of the first groups, or rolls them back.
    pub(super) fn close_all(&mut self, changes: Vec<Change<B::Indices>>, commits: bool) {
        for (group, change) in self.groups.iter_mut().zip(changes) {
            if commits { group.page_tables.commit(change) } else { group.page_tables.abandon(change) }
        }
        if !commits {
            self.join_layers();
        }
    }

    pub(super) fn shapes(&self) -> Vec<AttentionShape> {
        self.layers.iter().map(|&(group, _)| self.groups[group].shape).collect()
    }
}

impl<B: Backend> ModelCache<B> {
    /// The positions of the tokens of a sequence that a layer holds, span by span in the order of
    /// [`ModelCache::dequantize`].
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, [`Error::Sequence`] when there is no such sequence,
    /// [`Error::NotSubmitted`] when a step that
    /// chose them is encoded and not submitted, [`Error::DeviceLost`].
    pub async fn positions(&self, layer: usize, sequence: usize) -> Result<Vec<SpanPositions>> {
        let (group, place) = self.group(layer)?;
        group.positions(place, sequence).await
    }
}

/// Merges the evicted tokens of a layer into the kept ones, if the policy merges.
fn keep<B: Backend>(
    backend: &B,
    layer: &ObservedLayer<B>,
    decided: &DecidedLayer<B>,
    merging: Option<Merging>,
) -> Result<Option<KeptTokens<B>>> {
    let Some(positions) = decided.kept.clone() else { return Ok(None) };
    let dense = &layer.dense;
    let merged = match merging.filter(|_| positions.shape().count() < dense.rows.tokens) {
        None => None,
        Some(merging) => {
            let evicted = backend.evicted(&positions)?;
            let (keys, values) = (&dense.keys, &dense.values);
            let input = KeptAndEvicted {
                shape: layer.shape,
                rows: dense.rows,
                keys,
                values,
                kept: &positions,
                evicted: &evicted,
            };
            Some(backend.merge_tokens(input, merging)?)
        }
    };
    Ok(Some(KeptTokens { positions, merged }))
}

/// The part of the kept tokens that a rank stores. Where tokens are merged, the rank merges all and takes its rows:
/// the nearest kept token may be one of any rank.
async fn keep_part<B: Backend>(
    backend: &B,
    layer: &ObservedLayer<B>,
    (chosen, share): (&LayerSelection, RankShare),
    merging: Option<Merging>,
) -> Result<Option<KeptTokens<B>>> {
    let places: Vec<u32> = share.positions(0..chosen.count()).map(saturated).collect();
    let part = chosen.of_places(&places)?;
    let Some(positions) = DecidedLayer::upload(backend, &part).await?.kept else { return Ok(None) };
    let Some(merging) = merging.filter(|_| chosen.count() < chosen.tokens()) else {
        return Ok(Some(KeptTokens { positions, merged: None }));
    };
    let all = DecidedLayer::upload(backend, chosen).await?;
    let merged = keep(backend, layer, &all, Some(merging))?.and_then(|kept| kept.merged);
    let Some(merged) = merged else { return Ok(Some(KeptTokens { positions, merged: None })) };
    let places = places.repeat(chosen.kv_heads());
    let places = backend.upload_indices(&places, chosen.kv_heads(), saturated(chosen.count())).await?;
    let layout = RowLayout::head_major(chosen.count(), &layer.shape);
    let rows = |tensor| backend.gather(&layer.shape, TensorRows { tensor, layout }, &places);
    let (keys, values) = (rows(&merged.keys)?, rows(&merged.values)?);
    Ok(Some(KeptTokens { positions, merged: Some(MergedTokens { keys, values, ..merged }) }))
}

impl<B: Backend> KeptTokens<B> {
    fn span(&self) -> PromptSpan<'_, B::Indices> {
        PromptSpan::gather(&self.positions, StoreId::PACKED)
    }

    /// Writes the tokens to the span that was opened for them.
    fn write(&self, group: &mut LayerGroup<B>, change: &Change<B::Indices>, to: Destination<'_, B>) -> Result<()> {
        match &self.merged {
            Some(merged) => {
                let rows = RowLayout::head_major(self.positions.shape().count(), &to.layer.shape);
                let new = NewTokens { rows, keys: &merged.keys, values: &merged.values };
                group.write_rows(to.place, change, to.sequence, new)
            }
            None => group.write_spans(to.place, change, to.sequence, new_tokens(to.layer), &[self.span()]),
        }
    }
}

/// A layer of a prompt, its place in its group, and its target sequence.
struct Destination<'a, B: Backend> {
    layer: &'a ObservedLayer<B>,
    place: usize,
    sequence: usize,
}

impl<B: Backend> LayerGroup<B> {
    /// Opens a span for what is kept of a prompt, and writes it in every layer, each its own tokens: as many. Adds the
    /// change to those that are open, also where writing fails.
    fn store_kept(
        &mut self,
        sequence: usize,
        layers: &[&ObservedLayer<B>],
        kept: &[Option<KeptTokens<B>>],
        changes: &mut Vec<Change<B::Indices>>,
    ) -> Result<()> {
        let numbers = self.numbers().to_vec();
        let spans: Vec<_> = kept[numbers[0]].iter().map(KeptTokens::span).collect();
        let change = self.page_tables.keep(sequence, layers[numbers[0]].dense.rows.tokens, &spans)?;
        if numbers.len() > 1 && !spans.is_empty() {
            let of_layers = numbers.iter().filter_map(|&number| kept[number].as_ref());
            let (newest, of_layers) = (self.page_tables.newest(sequence), of_layers.map(|kept| kept.positions.clone()));
            self.page_tables.differ_in_layers(sequence, newest, of_layers.collect());
        }
        let written = numbers.iter().enumerate().try_for_each(|(place, &number)| {
            let layer = layers[number];
            self.write_centres(place, &change, layer.dense.rows, &layer.dense.keys)?;
            let to = |kept: &KeptTokens<B>| kept.write(self, &change, Destination { layer, place, sequence });
            kept[number].iter().try_for_each(to)
        });
        changes.push(change);
        written
    }
}

/// Checks that a layer's choice is one of the tokens that are given for it.
fn check_chosen<B: Backend>(index: usize, layer: &ObservedLayer<B>, chosen: &LayerSelection) -> Result<()> {
    let (given, kv_heads) = (layer.dense.rows.tokens, layer.shape.kv_heads());
    let reason = if (chosen.tokens(), chosen.kv_heads()) != (given, kv_heads) {
        let (tokens, heads) = (chosen.tokens(), chosen.kv_heads());
        format!("layer {index}: {given} tokens of {kv_heads} KV heads, chosen from {tokens} of {heads}")
    } else if (0..kv_heads).any(|head| !chosen.merges(head).is_empty()) {
        format!("layer {index}: the selection merges tokens; use ModelCache::compress with a policy that does")
    } else {
        return Ok(());
    };
    Err(Error::Selection { reason })
}

fn new_tokens<B: Backend>(layer: &ObservedLayer<B>) -> NewTokens<'_, B::Tensor> {
    let DenseLayer { rows, keys, values } = &layer.dense;
    NewTokens { rows: *rows, keys, values }
}
