//! The observation of a prompt by a policy, part by part, while its steps are encoded.

use std::fmt;

use super::ModelCache;
use super::decided::{Decided, DecidedLayer};
use super::measured_layers::MeasuredLayer;
use super::observed::columns;
use crate::backend::{Backend, NewQueries, SpanBytes, SpanRead, TensorRows};
use crate::format::AttentionShape;
use crate::plan::{PlannedRun, RowLayout, Visible};
use crate::policy::{
    ColumnRequest, HeadAggregation, KeepRule, LayerStatistics, Policy, QueryPositions, ScoreRequest, Selection, Spans,
};
use crate::{Error, Result};

/// A prompt whose parts pass through a model while the cache holds them in f16
/// ([`TokenRun::unpacked`](super::TokenRun::unpacked)). It gathers the attention that a policy looks at, on the device,
/// and [`ModelCache::compress_parts`] stores what the policy keeps.
///
/// Nothing is copied to the host but the counts that budgets by sparsity need (VL-Cache): see
/// [`ObservedParts::begin_counts`].
pub struct ObservedParts<B: Backend> {
    backend: B,
    policy: Policy,
    spans: Spans,
    /// The measured query rows; `None` if nothing is measured.
    rows: Option<QueryPositions>,
    /// What is summed up. Where the policy takes the maximum over heads, the sums of each are kept until all parts
    /// came.
    columns: ColumnRequest,
    sequence: usize,
    /// Position of the prompt's first token.
    start: usize,
    layers: Vec<LayerParts<B>>,
    /// The choice of a policy that looks at no scores.
    chosen: Option<Vec<DecidedLayer<B>>>,
    /// Counts on their way to the host.
    reads: Option<B::SpanReads>,
    /// Of every layer, once they are on the host.
    counts: Option<Vec<LayerStatistics>>,
    /// Decoded keys and values, for one layer after the other.
    scratch: Option<(B::Tensor, B::Tensor)>,
    /// What was chosen, once it was.
    decided: Option<Decided<B>>,
}

/// What was measured of a layer.
struct LayerParts<B: Backend> {
    layer: MeasuredLayer,
    /// Rows measured so far.
    rows: usize,
    /// Column sums over these rows, `[kv_heads, tokens]`, or `[query_heads, tokens]`.
    sums: Option<B::Tensor>,
    /// Counts `[query_heads, rows]` of every part, with its number of rows.
    counts: Vec<(B::Words, usize)>,
}

/// The queries of a step, and what its attention gave.
#[derive(Debug)]
pub struct PartQueries<'a, T> {
    /// The queries of all rows of the step, `[rows, query_heads, head_dim]`, after rotary embedding. The layout has one
    /// head per query head.
    pub queries: TensorRows<'a, T>,
    /// The natural log-sum-exps that the step wrote (`ModelStep::with_log_sum_exps`), f32 `[rows, query_heads]`: keys
    /// are then read once instead of twice. Recipes with a centre have none. Policies that count entries
    /// ([`Policy::threshold`]) do not use them, and neither do prompts behind other tokens of their sequence, whose
    /// log-sum-exps are over these too.
    pub log_sum_exps: Option<&'a T>,
}

impl<T> Clone for PartQueries<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for PartQueries<'_, T> {}

impl<B: Backend + Clone> ModelCache<B> {
    /// A prompt of which a policy is to keep some tokens, before its first part is appended to a sequence. `spans` are
    /// the text and the images of the whole prompt. [`ModelCache::compress_parts`] has an example.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence; [`Error::NoTextAfterImage`] when the policy measures the
    /// text after the image and there is none; [`Error::Selection`] when layers differ in KV heads;
    /// [`Error::Unsupported`] when layers have a sliding window; [`Error::OutOfMemory`] or [`Error::Limit`].
    pub async fn observe_parts(&self, sequence: usize, policy: Policy, spans: Spans) -> Result<ObservedParts<B>> {
        let (start, rows, columns) = (self.length(sequence)?, policy.query_rows(&spans)?, added_columns(&policy));
        let shapes = self.shapes();
        let kv_heads = shapes[0].kv_heads();
        if let Some(other) = shapes.iter().position(|shape| shape.kv_heads() != kv_heads) {
            let given = shapes[other].kv_heads();
            let reason =
                format!("layer {other} has {given} KV heads and layer 0 has {kv_heads}; budgets are shared by heads");
            return Err(Error::Selection { reason });
        }
        self.check_gathers("a policy that chooses among a prompt in parts")?;
        let backend = self.backend().clone();
        let chosen = match (&rows, policy.keep) {
            (Some(_), KeepRule::Best { .. }) => None,
            _ => {
                let selection = policy.select(&spans, shapes.len(), kv_heads, &[])?;
                Some(Decided::upload(&backend, selection).await?.layers)
            }
        };
        let rows = rows.filter(|_| chosen.is_none());
        let layers = self.measured_layers().into_iter();
        let layers = layers.map(|layer| LayerParts { layer, rows: 0, sums: None, counts: Vec::new() }).collect();
        let (reads, counts, scratch, decided) = (None, None, None, None);
        Ok(ObservedParts {
            backend,
            policy,
            spans,
            rows,
            columns,
            sequence,
            start,
            layers,
            chosen,
            reads,
            counts,
            scratch,
            decided,
        })
    }
}

impl<B: Backend> ObservedParts<B> {
    /// The policy.
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Text and images of the prompt.
    pub const fn spans(&self) -> &Spans {
        &self.spans
    }

    /// The sequence that the parts are appended to.
    pub const fn sequence(&self) -> usize {
        self.sequence
    }

    /// Position of the prompt's first token in its sequence.
    pub const fn start(&self) -> usize {
        self.start
    }

    /// The positions in the prompt of the queries that are measured; `None` if none are.
    pub const fn query_rows(&self) -> Option<&QueryPositions> {
        self.rows.as_ref()
    }

    /// Goes on in another sequence, which the prompt was swapped in to.
    pub const fn move_to(&mut self, sequence: usize) {
        self.sequence = sequence;
    }

    /// Measures what the policy needs of the part that the open step appends, in one layer: once the step's attention
    /// in the layer is queued, and in every step with a part of the prompt. It queues kernels and waits for nothing.
    /// Through wgpu it submits them, unless `Wgpu::record` takes them for the pass of the engine. Where no query of the
    /// part is measured it does nothing.
    ///
    /// Measured rows are causal: each sees the tokens up to its own. A step may let the tokens of an image see each
    /// other ([`ModelCache::begin_append_seeing`]) if the policy measures none of them.
    ///
    /// A step that was measured is to be committed. If it is abandoned, or the kernels are not submitted, the prompt
    /// has to be observed from its beginning.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, no step of the sequence is open, or the step appends no part of the
    /// prompt; [`Error::Selection`] when parts were left out or measured before; [`Error::Elements`] when a tensor has
    /// fewer rows than the step; [`Error::Unsupported`] when a measured row is not causal in the step, or attention is
    /// measured in a layer with a soft cap, or with sinks and without log-sum-exps; [`Error::OutOfMemory`] or
    /// [`Error::Limit`].
    pub fn observe(&mut self, cache: &ModelCache<B>, layer: usize, queries: PartQueries<'_, B::Tensor>) -> Result<()> {
        let part = cache.open_part(layer, (self.sequence, self.start))?;
        let (total, layers) = (self.spans.tokens(), self.layers.len());
        if part.end > total {
            let reason = format!("{} tokens of a prompt of {total} are appended", part.end);
            return Err(Error::Selection { reason });
        }
        let Some(rows) = &self.rows else { return Ok(()) };
        let of = self.layers.get_mut(layer).ok_or_else(|| Error::Plan {
            what: "layer",
            reason: format!("layer {layer} of a prompt of {layers} layers"),
        })?;
        let before = |end: usize| rows.positions().partition_point(|&position| (position as usize) < end);
        let (first, end) = (before(part.end - part.tokens), before(part.end));
        if of.rows != first {
            let reason = format!(
                "layer {layer}: {} query rows are measured where {first} come before this part; measure every part once",
                of.rows
            );
            return Err(Error::Selection { reason });
        }
        if first == end {
            return Ok(());
        }
        // Those of the step are over all that the sequence holds, and the keys are those of the prompt.
        let of_prompt = self.columns.threshold.is_none() && self.start == 0;
        let log_sum_exps = queries.log_sum_exps.filter(|_| of_prompt);
        of.layer.attention.check_measured(layer, log_sum_exps.is_some())?;
        let positions = rows.positions()[first..end].to_vec();
        part.check_causal(layer, &positions)?;
        let first_row = part.planned.first_row + part.query(positions[0]);
        let measured = QueryPositions::new(positions, part.end)?;
        let stores = cache.stores(layer)?;
        self.backend.dequantize_with(stores[0], part.read, &mut self.scratch)?;
        let Some((keys, _)) = &self.scratch else { return Ok(()) };
        let keys = TensorRows { tensor: keys, layout: RowLayout::head_major(part.end, &of.layer.shape) };
        let input = NewQueries {
            shape: of.layer.shape,
            scale: of.layer.scale(),
            rows: &measured,
            queries: queries.queries,
            first_row,
            log_sum_exps,
            keys,
            tokens: total,
        };
        let counts = self.backend.add_attention(input, self.columns, &mut of.sums)?;
        of.counts.extend(counts.map(|counts| (counts, end - first)));
        of.rows = end;
        Ok(())
    }

    /// Whether budgets depend on counts that the host has not read.
    pub const fn needs_counts(&self) -> bool {
        self.policy.threshold().is_some() && self.chosen.is_none() && self.counts.is_none()
    }

    /// Begins to read the counts that the policy's budgets depend on: queues a copy of 4 bytes for each query head and
    /// measured row of a layer behind all submitted work, in one submission through wgpu, and waits for nothing. Does
    /// nothing for a policy that [needs none](ObservedParts::needs_counts).
    ///
    /// # Errors
    /// [`Error::Selection`] when parts are missing; [`Error::NotSubmitted`] when steps are encoded and not submitted;
    /// [`Error::OutOfMemory`] or [`Error::DeviceLost`].
    pub fn begin_counts(&mut self, cache: &ModelCache<B>) -> Result<()> {
        if !self.needs_counts() {
            return Ok(());
        }
        self.check_measured()?;
        let words: Vec<&B::Words> =
            self.layers.iter().flat_map(|of| of.counts.iter().map(|(words, _)| words)).collect();
        self.reads = Some(self.backend.begin_word_reads(&words, &cache.all_stores())?);
        Ok(())
    }

    /// Whether [`ObservedParts::finish_counts`] waits for nothing. Asks the device, and waits for nothing itself.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub fn counts_have_arrived(&self) -> Result<bool> {
        self.reads.as_ref().map_or(Ok(true), |reads| self.backend.have_arrived(reads))
    }

    /// Takes the counts. It waits for what has not arrived yet, and does nothing if none were asked for.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub async fn finish_counts(&mut self) -> Result<()> {
        let Some(reads) = self.reads.take() else { return Ok(()) };
        let mut read = self.backend.finish_reads(reads).await?.into_iter();
        let layers = self.layers.iter().map(|of| {
            let parts: Vec<(Vec<u32>, usize)> =
                of.counts.iter().zip(read.by_ref()).map(|((_, rows), bytes)| (words_of(&bytes), *rows)).collect();
            let of_head = |head: usize| {
                parts.iter().flat_map(move |(words, rows)| words.iter().skip(head * rows).take(*rows).copied())
            };
            let counts = (0..of.layer.shape.query_heads()).flat_map(of_head).collect();
            LayerStatistics { column_sums: Vec::new(), counts }
        });
        self.counts = Some(layers.collect());
        Ok(())
    }

    /// What the policy kept, downloaded once the prompt was compressed. It waits for the device.
    ///
    /// # Errors
    /// [`Error::Selection`] when it was not compressed; [`Error::NotANumber`] when a score was NaN, which ranked below
    /// all numbers; [`Error::NotSubmitted`] when steps are encoded and not submitted; [`Error::DeviceLost`].
    pub async fn selection(&self, cache: &ModelCache<B>) -> Result<Selection> {
        match &self.decided {
            Some(decided) => {
                self.backend.check_submitted("positions of kept tokens", &cache.all_stores())?;
                decided.selection(&self.backend).await
            }
            None => Err(Error::Selection { reason: "the prompt is not compressed yet".into() }),
        }
    }

    /// Checks that all measured rows came.
    fn check_measured(&self) -> Result<()> {
        let needed = self.rows.as_ref().map_or(0, QueryPositions::len);
        match self.layers.iter().position(|of| of.rows != needed) {
            None => Ok(()),
            Some(layer) => {
                let found = self.layers[layer].rows;
                let reason = format!(
                    "layer {layer}: {found} of {needed} query rows are measured; call ObservedParts::observe for every part"
                );
                Err(Error::Selection { reason })
            }
        }
    }

    /// Lets the device choose the tokens that stay, of the number that every layer may keep. It queues kernels and
    /// waits for nothing.
    ///
    /// # Errors
    /// [`Error::Selection`] when parts are missing or counts were not read, and those of [`Policy::budgets`].
    pub(super) fn decide(&self) -> Result<Vec<DecidedLayer<B>>> {
        if let Some(chosen) = &self.chosen {
            let same = |of: &DecidedLayer<B>| DecidedLayer { kept: of.kept.clone(), not_numbers: None };
            return Ok(chosen.iter().map(same).collect());
        }
        self.check_measured()?;
        if self.needs_counts() {
            let reason =
                "budgets depend on counts; read them with ObservedParts::begin_counts and finish_counts".into();
            return Err(Error::Selection { reason });
        }
        let kv_heads = self.layers[0].layer.shape.kv_heads();
        let statistics = self.counts.as_deref().unwrap_or(&[]);
        let budgets = self.policy.budgets(&self.spans, self.layers.len(), kv_heads, statistics)?;
        let mut decided = Vec::with_capacity(budgets.len());
        for (of, count) in self.layers.iter().zip(budgets) {
            let request = match &self.rows {
                Some(rows) => self.policy.score_request(&self.spans, rows, count)?,
                None => None,
            };
            // Sums of heads that were not aggregated wait for it.
            let waits = self.policy.scores.aggregation == HeadAggregation::Max;
            let group = if waits { of.layer.shape.group() } else { 1 };
            let request = request.map(|request| ScoreRequest { group, ..request });
            decided.push(match (&of.sums, request) {
                (Some(sums), Some(request)) => {
                    DecidedLayer::by_scores(&self.backend, sums, (kv_heads, count), &request)?
                }
                _ => DecidedLayer::none(),
            });
        }
        Ok(decided)
    }

    /// The number of tokens that every KV head of each layer keeps.
    ///
    /// # Errors
    /// As [`ObservedParts::decide`].
    pub(super) fn budgets(&self) -> Result<Vec<usize>> {
        if let Some(chosen) = &self.chosen {
            return Ok(chosen.iter().map(DecidedLayer::count).collect());
        }
        if self.needs_counts() {
            let reason =
                "budgets depend on counts; read them with ObservedParts::begin_counts and finish_counts".into();
            return Err(Error::Selection { reason });
        }
        let statistics = self.counts.as_deref().unwrap_or(&[]);
        self.policy.budgets(&self.spans, self.layers.len(), self.layers[0].layer.shape.kv_heads(), statistics)
    }

    pub(super) fn scratch(&mut self) -> &mut Option<(B::Tensor, B::Tensor)> {
        &mut self.scratch
    }

    /// Keeps what was chosen and stored.
    pub(super) fn set_decided(&mut self, layers: Vec<DecidedLayer<B>>) {
        let (tokens, kv_heads) = (self.spans.tokens(), self.layers[0].layer.shape.kv_heads());
        self.decided = Some(Decided { tokens, kv_heads, layers });
    }

    /// The shapes of the layers that it was begun for.
    pub(super) fn shapes(&self) -> impl Iterator<Item = AttentionShape> + '_ {
        self.layers.iter().map(|of| of.layer.shape)
    }
}

impl<B: Backend> fmt::Debug for ObservedParts<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObservedParts")
            .field("policy", &self.policy)
            .field("sequence", &self.sequence)
            .field("tokens", &self.spans.tokens())
            .finish_non_exhaustive()
    }
}

/// What is summed up of every part: sums and means over heads add up, the largest of them is taken in the end.
fn added_columns(policy: &Policy) -> ColumnRequest {
    let columns = columns(policy);
    match columns.aggregation {
        HeadAggregation::Max => ColumnRequest { aggregation: HeadAggregation::Each, ..columns },
        HeadAggregation::Each | HeadAggregation::Sum | HeadAggregation::Mean => columns,
    }
}

fn words_of(bytes: &SpanBytes) -> Vec<u32> {
    bytemuck::pod_collect_to_vec(bytes.bytes())
}

/// A part of a prompt that the open step appends.
struct OpenPart<'a> {
    /// Its queries among those of the step.
    planned: &'a PlannedRun,
    tokens: usize,
    /// Tokens of the prompt up to its end.
    end: usize,
    /// The prompt so far.
    read: SpanRead<'a>,
}

impl OpenPart<'_> {
    /// Which query of the part stands at a position of the prompt.
    const fn query(&self, position: u32) -> usize {
        position as usize - (self.end - self.tokens)
    }

    /// Checks that the queries at these positions of the prompt see the tokens up to their own, as kernels measure.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    fn check_causal(&self, layer: usize, positions: &[u32]) -> Result<()> {
        let other = positions.iter().find(|&&position| !self.planned.sees_causally(self.query(position)));
        let Some(position) = other else { return Ok(()) };
        let seen = match &self.planned.run.visible {
            Visible::All => "all tokens of the step",
            Visible::Causal => "the tokens up to its own",
            Visible::Window { .. } => "a window",
            Visible::Spans { .. } => "a span that ends behind it, or a window",
            Visible::Tree(_) => "a draft tree",
        };
        let what = format!(
            "layer {layer}: a policy that measures the query at position {position} of the prompt, which sees {seen} in \
             this step"
        );
        let hint = "measured queries see the tokens up to their own, all of them and no other; append the part with \
                    causal queries, or choose a policy that measures text behind the images, such as VL-Cache";
        Err(Error::Unsupported { what, hint: hint.into() })
    }
}

impl<B: Backend> ModelCache<B> {
    /// The part of a prompt, which begins at a position of a sequence, that the open step appends.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, no step is open, or it appends no part of the prompt.
    fn open_part(&self, layer: usize, (sequence, start): (usize, usize)) -> Result<OpenPart<'_>> {
        let plan = self.plan(layer)?;
        let (group, _) = self.group(layer)?;
        let (_, prompt) = group.page_tables.unpacked(sequence, Some(start))?;
        let held = group.page_tables.sequence(sequence)?;
        let appended = plan.runs().iter().find(|planned| planned.run.sequence == sequence);
        let (Some(planned), true) = (appended, prompt.end() == Some(held.length)) else {
            let reason = format!("the open step appends no part of the prompt of sequence {sequence}");
            return Err(Error::Plan { what: "prompt in parts", reason });
        };
        let read = SpanRead { pages: &prompt.lease.pages, tokens: prompt.tokens, range_slot: 0, centre: held.centre };
        Ok(OpenPart { planned, tokens: planned.run.queries, end: prompt.tokens, read })
    }
}
