//! [`ModelCache`]: the keys and values of all layers of a model.

use std::fmt;
use std::sync::Arc;

use super::budget::Budget;
use super::change::Change;
use super::generation::Generation;
use super::layers::{LayerGroup, Members};
use super::prompt::check_spans;
use super::step::NewTokens;
use super::{CacheMemory, PromptSpan, Recipe, TokenRun};
use crate::backend::{Backend, OpenStep, StepKind, StepKinds, StoredLayers};
use crate::format::AttentionShape;
use crate::plan::{AttendPlan, QueryRun, RowLayout};
use crate::{Error, Result};

/// Keys and values of all layers of a model for a batch of sequences.
///
/// Layers with the same shape and recipe share their page tables: one page table, decided once per step, and one plan
/// of its attention, until a prompt is [compressed](ModelCache::compress) and layers hold different tokens. A change of
/// the page tables has two phases. First a step is opened ([`begin_append`](ModelCache::begin_append),
/// [`begin_prefill`](ModelCache::begin_prefill)), and the page tables show the new state. Every layer stores and
/// attends. Then the step is committed or abandoned. A failure in layer 17 therefore does not leave layers 0 to 16
/// ahead, and the pages that the step took are released.
///
/// Through wgpu, calls that submit commands return [`Error::NotSubmitted`] as long as an engine has steps of the cache
/// that it encoded and did not submit.
///
/// ```
/// use kvpack::cache::{ModelCache, Recipe, TokenRun};
/// use kvpack::cpu::{Cpu, CpuTensor};
/// use kvpack::plan::{ElementType, RowLayout};
/// use kvpack::{AttentionShape, SegmentFormat};
///
/// # futures::executor::block_on(async {
/// let shape = AttentionShape::new(8, 2, 64)?;
/// let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
/// let layers = vec![(shape, recipe); 4];
/// let mut cache = ModelCache::new(&Cpu::new(), &layers, 2)?;
///
/// // A step: the next token of both sequences, layer after layer.
/// let runs = [TokenRun::decode(0), TokenRun::decode(1)];
/// cache.reserve_for_append(&runs).await?; // here memory is allocated, if it must be
/// cache.begin_append(&runs)?;
/// for layer in 0..cache.layers() {
///     // Of the layer's projections, after rotary embedding:
///     let (keys, queries) = (CpuTensor::F32(vec![0.5; 2 * 2 * 64]), CpuTensor::F32(vec![0.1; 2 * 8 * 64]));
///     cache.store(layer, RowLayout::token_major(2, &shape), &keys, &keys).await?;
///     let output = cache.attend(layer, &queries, ElementType::F32).await?;
///     assert_eq!(output.to_f32().len(), 2 * 8 * 64);
/// }
/// cache.commit()?;
/// assert_eq!(cache.length(0)?, 1);
/// # Ok::<(), kvpack::Error>(())
/// # }).unwrap();
/// ```
pub struct ModelCache<B: Backend> {
    pub(super) groups: Vec<LayerGroup<B>>,
    /// The group of every layer, and its place there.
    pub(super) layers: Vec<(usize, usize)>,
    pub(super) budget: Budget,
    pub(super) step: Option<Step<B::Indices>>,
    /// Of every sequence.
    pub(super) generations: Vec<Generation>,
}

/// A step that is open.
pub(super) struct Step<I> {
    kind: Opened,
    /// Tokens of every layer's keys and values.
    tokens: usize,
    /// One per group.
    changes: Vec<Change<I>>,
    plans: Vec<AttendPlan>,
    pub(super) stored: StoredLayers,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Opened {
    Append,
    Prefill(usize),
    /// Nothing is stored.
    Attend,
}

impl<B: Backend + Clone> ModelCache<B> {
    /// An empty cache of these layers for `sequences` sequences. It allocates nothing yet.
    ///
    /// # Errors
    /// [`Error::Plan`] for no layers; as [`KvCache::new`](super::KvCache::new) for each layer.
    pub fn new(backend: &B, layers: &[(AttentionShape, Recipe)], sequences: usize) -> Result<Self> {
        if layers.is_empty() {
            return Err(Error::Plan { what: "cache of a model", reason: "it needs at least one layer".into() });
        }
        // The kinds of layers, in the order of their first occurrence.
        let mut kinds: Vec<&(AttentionShape, Recipe)> = Vec::new();
        let mut numbers: Vec<Vec<usize>> = Vec::new();
        let mut places = Vec::with_capacity(layers.len());
        for (number, layer) in layers.iter().enumerate() {
            let group = kinds.iter().position(|kind| *kind == layer).unwrap_or(kinds.len());
            if group == kinds.len() {
                kinds.push(layer);
                numbers.push(Vec::new());
            }
            places.push((group, numbers[group].len()));
            numbers[group].push(number);
        }
        let flags = Arc::new(backend.create_non_finite_flags(layers.len())?);
        let of_kind = |(kind, numbers): (&(AttentionShape, Recipe), Vec<usize>)| {
            let members = Members { numbers, flags: flags.clone() };
            LayerGroup::new(backend.clone(), kind.0, kind.1.clone(), sequences, members)
        };
        let groups = kinds.into_iter().zip(numbers).map(of_kind).collect::<Result<Vec<_>>>()?;
        let generations = vec![Generation::default(); sequences];
        Ok(Self { groups, layers: places, budget: Budget::default(), step: None, generations })
    }
}

impl<B: Backend> ModelCache<B> {
    /// The backend.
    pub fn backend(&self) -> &B {
        &self.groups[0].backend
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.groups[0].page_tables.sequences().len()
    }

    /// Shape of a layer.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn shape(&self, layer: usize) -> Result<&AttentionShape> {
        Ok(&self.group(layer)?.0.shape)
    }

    /// The recipe of a layer.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn recipe(&self, layer: usize) -> Result<&Recipe> {
        Ok(self.group(layer)?.0.recipe())
    }

    /// Number of tokens of a sequence that a layer holds, including those of an open step.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer, [`Error::Sequence`] when there is no such sequence.
    pub fn tokens(&self, layer: usize, sequence: usize) -> Result<usize> {
        Ok(self.group(layer)?.0.page_tables.sequence(sequence)?.tokens())
    }

    /// Length of a sequence: the position of its next token, the same in all layers.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence.
    pub fn length(&self, sequence: usize) -> Result<usize> {
        Ok(self.groups[0].page_tables.sequence(sequence)?.length)
    }

    /// Bytes of all layers, by format: first the f16 stores together, then the packed ones of each kind of layer, or of
    /// each layer once a prompt was [compressed](ModelCache::compress).
    pub fn memory(&self) -> CacheMemory {
        let of_groups: Vec<CacheMemory> = self.groups.iter().map(LayerGroup::memory).collect();
        let mut f16 = *of_groups[0].f16();
        of_groups[1..].iter().for_each(|memory| f16 = f16.plus(memory.f16()));
        CacheMemory::new(f16, of_groups.iter().flat_map(|memory| memory.packed().iter().copied()))
    }

    /// Bytes of one layer.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn memory_of(&self, layer: usize) -> Result<CacheMemory> {
        let (group, index) = self.group(layer)?;
        Ok(group.layer_memory(index))
    }

    // --- steps -----------------------------------------------------------------------------------------------------

    /// Opens a step that appends these token runs, whose rows are contiguous in every layer's keys and values. It works
    /// on the host alone: it does not allocate on the device, encode or wait.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when one is named twice or a step is open,
    /// [`Error::NoTokens`], [`Error::Limit`] when a sequence would exceed [`MOST_TOKENS`](crate::plan::MOST_TOKENS),
    /// [`Error::Unsupported`] for [`TokenRun::unpacked`] where ranks share sequences, [`Error::NoRoom`] when too little
    /// room is free ([`ModelCache::reserve_for_append`]). Nothing has changed.
    pub fn begin_append(&mut self, runs: &[TokenRun]) -> Result<()> {
        let queries: Vec<QueryRun> = runs.iter().map(queries_of).collect();
        self.open(Opened::Append, tokens_of(runs), &queries, |group| group.open_append(runs, tokens_of(runs)))
    }

    /// Opens a step that stores a prompt, or a further part of one, of `tokens` tokens at the end of a sequence. Its
    /// spans are those of [`KvCache::prefill`](super::KvCache::prefill), the same in all layers. The queries of the
    /// step are those of the newest token.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::PromptSpans`], [`Error::NoTokens`], [`Error::Limit`] for too many tokens,
    /// [`Error::Unsupported`] where ranks share sequences, or a span is gathered and a layer has a window,
    /// [`Error::Plan`] when a span names no store of a layer or a step is open, [`Error::NoRoom`] when too little room is
    /// free ([`ModelCache::reserve_for_prefill`]). Nothing has changed.
    pub fn begin_prefill(
        &mut self,
        sequence: usize,
        tokens: usize,
        spans: &[PromptSpan<'_, B::Indices>],
    ) -> Result<()> {
        check_spans(spans, tokens)?;
        self.open(Opened::Prefill(sequence), tokens, &[QueryRun::decode(sequence)], |group| {
            group.page_tables.prefill(sequence, tokens, spans)
        })
    }

    /// The open step for an engine that encodes it itself, one part for all layers that share a page table: a single
    /// one for a model of like layers. It encodes nothing: `wgpu::ModelStep` and `cuda::ModelStep` do, and note which
    /// layers have stored their tokens. Centres of sequences that begin with the step are made on the device, of their
    /// first tokens.
    ///
    /// # Errors
    /// [`Error::Plan`] when no step that appends or attends is open.
    pub fn open_steps(&self) -> Result<Vec<OpenStep<'_, B::Store, B::NonFiniteFlags>>> {
        let encoded = |step: &&Step<_>| matches!(step.kind, Opened::Append | Opened::Attend);
        let step = self.step.as_ref().filter(encoded).ok_or_else(no_step)?;
        let groups = self.groups.iter().zip(&step.changes).zip(&step.plans);
        Ok(groups.map(|((group, change), plan)| group.open_step(change, plan, &step.stored)).collect())
    }

    /// What all steps of a layer have in common, for compiling kernels before a model is served; `ModelStep::prepare`
    /// takes the whole cache as well.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn step_kind(&self, layer: usize) -> Result<StepKind<'_>> {
        Ok(self.group(layer)?.0.step_kind())
    }

    /// The plan of the open step's attention in a layer: decoded tokens attend to their whole sequence, chunks
    /// causally.
    ///
    /// # Errors
    /// [`Error::Plan`] when no step is open or there is no such layer.
    pub fn plan(&self, layer: usize) -> Result<&AttendPlan> {
        let (group, _) = self.place(layer)?;
        Ok(&self.step.as_ref().ok_or_else(no_step)?.plans[group])
    }

    /// The stores of a layer, in the order of plans.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer.
    pub fn stores(&self, layer: usize) -> Result<Vec<&B::Store>> {
        let (group, index) = self.group(layer)?;
        Ok(group.stores(index))
    }

    /// Checks that a layer has stored what the open step appends to a sequence. The page tables count these tokens since
    /// the step is open, and their pages hold what lay there before.
    pub(super) fn check_holds(&self, layer: usize, sequence: usize) -> Result<()> {
        let lacks = |step: &Step<B::Indices>| {
            !step.stored.has(layer) && step.changes.iter().any(|change| change.touches(sequence))
        };
        if !self.step.as_ref().is_some_and(lacks) {
            return Ok(());
        }
        let reason = format!(
            "layer {layer} has not stored the tokens of the open step of sequence {sequence}; store them first, or \
             abandon the step"
        );
        Err(Error::Plan { what: "contents of a sequence", reason })
    }

    /// The stores of all layers.
    pub(super) fn all_stores(&self) -> Vec<&B::Store> {
        self.groups.iter().flat_map(|group| (0..group.layers()).flat_map(|place| group.stores(place))).collect()
    }

    /// Stores the keys and values of the open step's tokens in one layer. The data that they replace stay until the
    /// step is committed. Elements that are not finite are stored as zeros, and [reported
    /// later](ModelCache::non_finite).
    ///
    /// # Errors
    /// [`Error::Plan`] when no step that appends is open, there is no such layer, or `rows` are not those of the step;
    /// [`Error::Elements`] for keys and values. The step may be tried again, or abandoned.
    pub async fn store(&mut self, layer: usize, rows: RowLayout, keys: &B::Tensor, values: &B::Tensor) -> Result<()> {
        self.store_as(layer, NewTokens { rows, keys, values }, Opened::Append, &[]).await
    }

    /// Stores the keys and values of the open step's prompt in one layer. `spans` are those that the step was opened
    /// with.
    ///
    /// # Errors
    /// As [`ModelCache::store`], and [`Error::NotFinite`]: a prompt's elements are checked first.
    pub async fn store_prompt(
        &mut self,
        layer: usize,
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
        spans: &[PromptSpan<'_, B::Indices>],
    ) -> Result<()> {
        let Some(Opened::Prefill(sequence)) = self.step.as_ref().map(|step| step.kind) else { return Err(no_step()) };
        self.store_as(layer, NewTokens { rows, keys, values }, Opened::Prefill(sequence), spans).await
    }

    /// Commits the open step: its tokens become part of the cache, and the pages that it replaced are free. An engine
    /// that encodes the step itself may commit it before it submits the commands.
    ///
    /// # Errors
    /// [`Error::Plan`] when no step is open, or a layer has not stored its tokens. The step stays open.
    pub fn commit(&mut self) -> Result<()> {
        let step = self.step.as_ref().ok_or_else(no_step)?;
        if let Some(layer) = step.stored.first_missing() {
            let reason = format!(
                "layer {layer} has not stored its tokens; store them (ModelCache::store, WrittenStep::encode_store, \
                 WrittenStep::launch, or WrittenStep::replayed for a graph), or abandon the step"
            );
            return Err(Error::Plan { what: "commit", reason });
        }
        if let Some(step) = self.step.take() {
            let opened = step.changes.into_iter().zip(step.plans);
            self.groups.iter_mut().zip(opened).for_each(|(group, (change, plan))| group.commit(change, plan));
        }
        Ok(())
    }

    /// Rolls back the open step: the pages that it took are free again. Does nothing if none is open.
    pub fn abandon(&mut self) {
        if let Some(step) = self.step.take() {
            self.groups.iter_mut().zip(step.changes).for_each(|(group, change)| group.page_tables.abandon(change));
        }
    }

    // --- parts -----------------------------------------------------------------------------------------------------

    pub(super) fn place(&self, layer: usize) -> Result<(usize, usize)> {
        let no_layer = || {
            let reason = format!("layer {layer} of a cache with {} layers", self.layers.len());
            Error::Plan { what: "layer", reason }
        };
        self.layers.get(layer).copied().ok_or_else(no_layer)
    }

    pub(super) fn group(&self, layer: usize) -> Result<(&LayerGroup<B>, usize)> {
        let (group, index) = self.place(layer)?;
        Ok((&self.groups[group], index))
    }

    pub(super) fn check_no_step(&self) -> Result<()> {
        match self.step {
            None => Ok(()),
            Some(_) => {
                let reason = "a step is open; commit it, or abandon it".into();
                Err(Error::Plan { what: "cache of a model", reason })
            }
        }
    }

    /// Opens a step in every group, or in none.
    pub(super) fn open(
        &mut self,
        kind: Opened,
        tokens: usize,
        queries: &[QueryRun],
        change: impl Fn(&mut LayerGroup<B>) -> Result<Change<B::Indices>>,
    ) -> Result<()> {
        self.check_no_step()?;
        let groups = self.groups.len();
        let (mut changes, mut plans) = (Vec::with_capacity(groups), Vec::with_capacity(groups));
        let mut opened = Ok(());
        for group in &mut self.groups {
            opened = change(group).and_then(|change| {
                changes.push(change);
                let plan = group.open_plan(changes.last(), queries)?;
                plans.push(plan);
                Ok(())
            });
            if opened.is_err() {
                break;
            }
        }
        if let Err(error) = opened {
            self.groups.iter_mut().zip(changes).for_each(|(group, change)| group.page_tables.abandon(change));
            return Err(error);
        }
        self.step = Some(Step { kind, tokens, changes, plans, stored: StoredLayers::none_of(self.layers.len()) });
        Ok(())
    }

    async fn store_as(
        &mut self,
        layer: usize,
        new: NewTokens<'_, B::Tensor>,
        kind: Opened,
        spans: &[PromptSpan<'_, B::Indices>],
    ) -> Result<()> {
        let (at, index) = self.place(layer)?;
        let step = self.step.as_mut().filter(|step| step.kind == kind).ok_or_else(no_step)?;
        if new.rows.tokens != step.tokens {
            let reason = format!("{} tokens for a step of {}", new.rows.tokens, step.tokens);
            return Err(Error::Plan { what: "tokens of a step", reason });
        }
        let group = &mut self.groups[at];
        match kind {
            Opened::Append => {
                group.check_lengths(new)?;
                group.write_tokens(index, &step.changes[at], new)?;
            }
            Opened::Prefill(sequence) => {
                group.check_rows(new).await?;
                group.write_prompt(index, &step.changes[at], sequence, new, spans)?;
            }
            Opened::Attend => return Err(no_step()),
        }
        step.stored.mark(layer);
        Ok(())
    }
}

/// Those of all layers.
impl<B: Backend> StepKinds for &ModelCache<B> {
    fn step_kinds(&self) -> Vec<StepKind<'_>> {
        let mut kinds: Vec<StepKind<'_>> = Vec::new();
        for of in self.groups.iter().map(LayerGroup::step_kind) {
            let same = |other: &StepKind<'_>| {
                let shapes =
                    (other.layout.shape(), other.stores, other.query) == (of.layout.shape(), of.stores, of.query);
                shapes && other.layout.windows() == of.layout.windows() && other.attention.is_alike(of.attention)
            };
            if !kinds.iter().any(same) {
                kinds.push(of);
            }
        }
        kinds
    }
}

impl<B: Backend> fmt::Debug for ModelCache<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelCache")
            .field("backend", &self.backend().name())
            .field("layers", &self.layers())
            .field("sequences", &self.sequences())
            .field("step_is_open", &self.step.is_some())
            .finish_non_exhaustive()
    }
}

fn no_step() -> Error {
    Error::Plan { what: "step", reason: "no such step is open; begin one first".into() }
}

pub(super) fn tokens_of(runs: &[TokenRun]) -> usize {
    runs.iter().fold(0usize, |sum, run| sum.saturating_add(run.tokens()))
}

/// The queries of new tokens: one that sees all, or a causal run.
fn queries_of(run: &TokenRun) -> QueryRun {
    match run.tokens() {
        1 => QueryRun::decode(run.sequence()),
        tokens => QueryRun::causal(run.sequence(), tokens),
    }
}
