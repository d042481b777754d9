//! Evicts from, merges and packs a prompt: carries out a policy's decision in all layers of a model, or in none.

use super::change::Change;
use super::decided::DecidedLayer;
use super::layers::LayerGroup;
use super::observed::{DenseLayer, ObservedLayer, ObservedPrompt};
use super::reserve::Asked;
use super::step::NewTokens;
use super::{ModelCache, PromptSpan, SpanPositions, StoreId};
use crate::backend::{Backend, KeptAndEvicted, MergedTokens};
use crate::format::AttentionShape;
use crate::plan::{RowLayout, TokenIndices};
use crate::policy::{Merging, Policy, Selection, Spans};
use crate::{Error, Result};

/// The place of the only layer of its page tables.
pub(super) const ONLY_LAYER: usize = 0;

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
    /// [`Error::NoTextAfterImage`] when the policy measures the text after the image and there is none.
    pub fn observe(&self, policy: Policy, spans: Spans) -> Result<ObservedPrompt<B>> {
        ObservedPrompt::new(self.backend().clone(), &self.shapes(), policy, spans)
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
    /// After the first call every layer keeps page tables of its own, since layers hold different tokens.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence; [`Error::Plan`] when a step is open or the prompt was
    /// observed for layers of other shapes; those of [`ObservedPrompt::select`]; [`Error::NotFinite`] for keys and
    /// values; [`Error::NoRoom`] or [`Error::OutOfMemory`] when what is kept does not fit. The cache is as it was.
    pub async fn compress(&mut self, sequence: usize, prompt: &ObservedPrompt<B>) -> Result<Selection> {
        self.check_no_step()?;
        self.length(sequence)?;
        let layers = prompt.observed()?;
        if !layers.iter().map(|layer| layer.shape).eq(self.shapes()) {
            let reason = "it was observed for layers of other shapes; observe it with this cache".into();
            return Err(Error::Plan { what: "prompt to compress", reason });
        }
        for (index, layer) in layers.iter().enumerate() {
            self.group(index)?.0.check_rows(new_tokens(layer)).await?;
        }
        let decided = prompt.decide().await?;
        let mut kept = Vec::with_capacity(layers.len());
        for (layer, decided) in layers.iter().zip(&decided.layers) {
            kept.push(keep(self.backend(), layer, decided, prompt.policy().merging)?);
        }
        self.part_layers();
        let mut needed = Vec::with_capacity(kept.len());
        for (group, kept) in self.groups.iter().zip(&kept) {
            let spans: Vec<_> = kept.iter().map(KeptTokens::span).collect();
            needed.push(group.page_tables.room_for_prompt(&spans)?);
        }
        self.reserve_room(&needed, Asked::OnTheWay).await?;
        let mut changes = Vec::with_capacity(layers.len());
        let mut written = Ok(());
        for (group, (layer, kept)) in self.groups.iter_mut().zip(layers.into_iter().zip(&kept)) {
            let spans: Vec<_> = kept.iter().map(KeptTokens::span).collect();
            written = group.page_tables.keep(sequence, layer.dense.rows.tokens, &spans).and_then(|change| {
                changes.push(change);
                let change = &changes[changes.len() - 1];
                group.write_centres(ONLY_LAYER, change, layer.dense.rows, &layer.dense.keys)?;
                kept.iter().try_for_each(|kept| kept.write(group, change, Destination { layer, sequence }))
            });
            if written.is_err() {
                break;
            }
        }
        // The host reads the decision only now: whether scores were numbers, and the selection to return.
        let selection = match written {
            Ok(()) => decided.selection(self.backend()).await,
            Err(error) => Err(error),
        };
        for (group, change) in self.groups.iter_mut().zip(changes) {
            if selection.is_ok() { group.page_tables.commit(change) } else { group.page_tables.abandon(change) }
        }
        selection
    }

    fn shapes(&self) -> Vec<AttentionShape> {
        self.layers.iter().map(|&(group, _)| self.groups[group].shape).collect()
    }

    /// Gives every layer page tables of its own.
    pub(super) fn part_layers(&mut self) {
        if self.groups.len() == self.layers.len() {
            return;
        }
        let mut parted: Vec<_> = std::mem::take(&mut self.groups).into_iter().map(LayerGroup::part).collect();
        for (layer, place) in self.layers.iter_mut().enumerate() {
            // The layers of a group are in their original order.
            self.groups.extend(parted[place.0].next());
            *place = (layer, 0);
        }
    }
}

impl<B: Backend> ModelCache<B> {
    /// The positions of the tokens of a sequence that a layer holds, span by span in the order of
    /// [`ModelCache::dequantize`].
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, [`Error::Sequence`] when there is no such sequence,
    /// [`Error::DeviceLost`].
    pub async fn positions(&self, layer: usize, sequence: usize) -> Result<Vec<SpanPositions>> {
        self.group(layer)?.0.positions(sequence).await
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
                group.write_rows(ONLY_LAYER, change, to.sequence, new)
            }
            None => group.write_spans(ONLY_LAYER, change, to.sequence, new_tokens(to.layer), &[self.span()]),
        }
    }
}

/// A layer of a prompt, and its target sequence.
struct Destination<'a, B: Backend> {
    layer: &'a ObservedLayer<B>,
    sequence: usize,
}

fn new_tokens<B: Backend>(layer: &ObservedLayer<B>) -> NewTokens<'_, B::Tensor> {
    let DenseLayer { rows, keys, values } = &layer.dense;
    NewTokens { rows: *rows, keys, values }
}
