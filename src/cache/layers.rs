//! Layers that share their page tables: one page table and one set of pages, and separate stores for each layer.

use std::sync::Arc;

use super::change::Change;
use super::last_step::LastStep;
use super::memory::{CacheMemory, StoreMemory};
use super::page_tables::PageTables;
use super::sequence::{Positions, Span};
use super::step::NewTokens;
use super::write_table::GroupTable;
use super::{MOST_SEQUENCES, PromptSpan, Recipe, StoreId};
use crate::backend::{
    Backend, FlaggedToken, LARGEST_CENTRED_KEY, NewCentre, OpenStep, SpanWrite, StepKind, StoredLayers, WriteInput,
};
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat};
use crate::plan::{AttendPlan, RowLayout, Rows, Split, TokenRange};
use crate::{Error, Result};

/// Layers of one shape and one recipe that hold the same tokens of the same sequences.
pub(super) struct LayerGroup<B: Backend> {
    pub(super) backend: B,
    pub(super) shape: AttentionShape,
    pub(super) split: Split,
    pub(super) page_tables: PageTables<B::Indices>,
    /// The writes of the open step.
    pub(super) table: GroupTable,
    /// The flags of all layers of the model.
    pub(super) flags: Arc<B::NonFiniteFlags>,
    pub(super) layers: Vec<Vec<LayerStore<B>>>,
    /// The index of every layer in its model.
    pub(super) numbers: Vec<usize>,
    /// What the last step left.
    pub(super) last: LastStep<B::Indices>,
}

/// A store of one layer on the device.
pub(super) struct LayerStore<B: Backend> {
    store: B::Store,
    /// Shards. It may have more than the page tables know of, where a future was dropped that added them.
    shards: usize,
    /// Range slots. It may have more than the page tables know of, if they could not be added to every layer.
    slots: usize,
}

impl<B: Backend> LayerStore<B> {
    async fn add_shard(&mut self, backend: &B, pages: u32) -> Result<()> {
        backend.add_shard(&mut self.store, pages).await?;
        self.shards += 1;
        Ok(())
    }

    /// Drops the newest shards until there are no more than `most`.
    fn drop_shards(&mut self, backend: &B, most: usize) {
        while self.shards > most {
            backend.drop_shard(&mut self.store);
            self.shards -= 1;
        }
    }
}

/// The layers of a group, and the flags of all layers of their model.
pub(super) struct Members<F> {
    pub(super) numbers: Vec<usize>,
    pub(super) flags: Arc<F>,
}

impl<B: Backend> LayerGroup<B> {
    pub(super) fn new(
        backend: B,
        shape: AttentionShape,
        recipe: Recipe,
        sequences: usize,
        Members { numbers, flags }: Members<B::NonFiniteFlags>,
    ) -> Result<Self> {
        if sequences == 0 {
            return Err(Error::Plan { what: "cache", reason: "it needs room for at least one sequence".into() });
        }
        if sequences > MOST_SEQUENCES {
            return Err(Error::Limit {
                what: "the sequences of a cache".into(),
                needed: sequences as u64,
                allowed: MOST_SEQUENCES as u64,
                hint: "spread them over several caches",
            });
        }
        recipe.check()?;
        recipe.attention().check(&shape)?;
        let layer_store = |format: SegmentFormat| {
            let store = backend.create_store(shape, format)?;
            Ok(LayerStore { store, shards: 0, slots: 0 })
        };
        let of_layer = || recipe.stores().iter().map(|store| layer_store(store.format)).collect();
        let layers = numbers.iter().map(|_| of_layer()).collect::<Result<Vec<_>>>()?;
        let page_tables = PageTables::new(recipe, sequences);
        let table = GroupTable::new(shape, &page_tables)?;
        let (split, last) = (Split::default(), LastStep::default());
        Ok(Self { backend, shape, split, page_tables, table, flags, layers, numbers, last })
    }

    pub(super) fn recipe(&self) -> &Recipe {
        self.page_tables.recipe()
    }

    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The index of every layer in its model.
    pub(super) fn numbers(&self) -> &[usize] {
        &self.numbers
    }

    /// The stores of a layer, in the order of plans.
    pub(super) fn stores(&self, layer: usize) -> Vec<&B::Store> {
        self.layers[layer].iter().map(|of| &of.store).collect()
    }

    /// A store of a layer.
    pub(super) fn store(&self, layer: usize, store: StoreId) -> &B::Store {
        &self.layers[layer][store.index()].store
    }

    /// The stores of a layer for writing, with the backend that writes.
    pub(super) fn backend_and_stores(&mut self, layer: usize) -> (&B, Vec<&mut B::Store>) {
        (&self.backend, self.layers[layer].iter_mut().map(|of| &mut of.store).collect())
    }

    pub(super) fn store_ids(&self) -> impl Iterator<Item = StoreId> + use<B> {
        (0..self.recipe().stores().len()).map(StoreId::at)
    }

    // --- room --------------------------------------------------------------------------------------------------

    /// Adds a shard to a store in every layer, or in none.
    ///
    /// The page tables know of it last, so that they never name a shard that a layer lacks, also where the future is
    /// dropped before its end. What it left in some layers then is dropped here.
    pub(super) async fn add_shard(&mut self, store: StoreId, pages: u32) -> Result<()> {
        self.table.note_changed_stores();
        let known = self.page_tables.room(store).shards();
        // Whether they take it, before a device is asked.
        self.page_tables.room_mut(store).add_shard(pages)?;
        self.page_tables.room_mut(store).drop_shard();
        let Self { backend, layers, .. } = self;
        layers.iter_mut().for_each(|of| of[store.index()].drop_shards(backend, known));
        for layer in 0..layers.len() {
            if let Err(error) = layers[layer][store.index()].add_shard(backend, pages).await {
                layers[..layer].iter_mut().for_each(|of| of[store.index()].drop_shards(backend, known));
                return Err(error);
            }
        }
        self.page_tables.room_mut(store).add_shard(pages)
    }

    /// Drops the newest shard of a store in every layer, if nothing lies in it. Says whether it did.
    pub(super) fn drop_shard(&mut self, store: StoreId) -> bool {
        let dropped = self.page_tables.room_mut(store).drop_shard();
        if dropped {
            let Self { backend, layers, table, page_tables, .. } = self;
            table.note_changed_stores();
            let known = page_tables.room(store).shards();
            layers.iter_mut().for_each(|of| of[store.index()].drop_shards(backend, known));
        }
        dropped
    }

    /// Drops the shards of every layer that the page tables do not know of.
    pub(super) fn drop_unknown_shards(&mut self) {
        self.table.note_changed_stores();
        let Self { backend, layers, page_tables, .. } = self;
        for stores in layers {
            for (of, known) in stores.iter_mut().zip(page_tables.shards()) {
                of.drop_shards(backend, known);
            }
        }
    }

    /// Grows the range slots of a store in every layer. What an error leaves behind is free slots, nothing else.
    pub(super) async fn reserve_ranges(&mut self, store: StoreId, slots: usize) -> Result<()> {
        self.table.note_changed_stores();
        for layer in &mut self.layers {
            let of = &mut layer[store.index()];
            if of.slots < slots {
                self.backend.reserve_ranges(&mut of.store, slots).await?;
                of.slots = slots;
            }
        }
        self.page_tables.room_mut(store).add_slots(slots);
        Ok(())
    }

    /// Grows the centres of all stores in every layer.
    pub(super) async fn reserve_centres(&mut self, slots: usize) -> Result<()> {
        self.table.note_changed_stores();
        for of in self.layers.iter_mut().flatten() {
            self.backend.reserve_centres(&mut of.store, slots).await?;
        }
        self.page_tables.centres_mut().grow(slots);
        Ok(())
    }

    /// Bytes of all layers.
    pub(super) fn memory(&self) -> CacheMemory {
        self.memory_of(&self.layers)
    }

    /// Bytes of one layer.
    pub(super) fn layer_memory(&self, layer: usize) -> CacheMemory {
        self.memory_of(&self.layers[layer..=layer])
    }

    fn memory_of(&self, of_layers: &[Vec<LayerStore<B>>]) -> CacheMemory {
        let layers = of_layers.len() as u64;
        let of_store = |store: StoreId| {
            let room = self.page_tables.room(store);
            let format = self.recipe().stores()[store.index()].format;
            let page_bytes = format.page_bytes(&self.shape) as u64;
            let slot_bytes = format.range_slot_bytes(&self.shape) as u64;
            let centre_bytes =
                self.page_tables.centres().in_use() as u64 * SegmentFormat::centre_bytes(&self.shape) as u64;
            let pages_in_use = room.pages() - room.free_pages();
            let tokens: usize = self.page_tables.sequences().iter().map(|sequence| sequence.tokens_in(store)).sum();
            let allocated = of_layers.iter().map(|layer| self.backend.store_bytes(&layer[store.index()].store));
            StoreMemory {
                format,
                allocated_bytes: allocated.sum(),
                in_use_bytes: layers
                    * (pages_in_use as u64 * page_bytes + room.slots_in_use() as u64 * slot_bytes + centre_bytes),
                pages: room.pages(),
                pages_in_use,
                tokens,
                elements: layers * 2 * tokens as u64 * (self.shape.kv_heads() * self.shape.head_dim()) as u64,
            }
        };
        CacheMemory::new(of_store(StoreId::F16), self.store_ids().skip(1).map(of_store))
    }

    // --- writing -------------------------------------------------------------------------------------------------

    /// Checks keys and values before anything changes: first their lengths, then their elements.
    pub(super) async fn check_rows(&self, new: NewTokens<'_, B::Tensor>) -> Result<()> {
        self.check_lengths(new)?;
        self.check_finite(KeyOrValue::Key, new.keys, &new.rows).await?;
        self.check_finite(KeyOrValue::Value, new.values, &new.rows).await
    }

    /// Checks a centre that an engine sets.
    pub(super) async fn check_centre(&self, centre: &B::Tensor) -> Result<()> {
        let rows = RowLayout::token_major(1, &self.shape);
        rows.check("centre", self.backend.elements(centre), &self.shape)?;
        self.check_finite(KeyOrValue::Key, centre, &rows).await
    }

    /// Checks that all elements can be stored.
    async fn check_finite(&self, which: KeyOrValue, tensor: &B::Tensor, rows: &RowLayout) -> Result<()> {
        // Tokens that are stored in f16 now may be packed later.
        let largest = self.largest_element(which);
        match self.backend.first_non_finite(which, tensor, rows, &self.shape, largest).await? {
            None => Ok(()),
            Some(found) => Err(Error::NotFinite {
                tensor: which,
                token: found.token,
                kv_head: found.kv_head,
                channel: found.channel,
                value: found.value.to_string(),
                largest,
            }),
        }
    }

    /// Checks the lengths of keys and values.
    pub(super) fn check_lengths(&self, new: NewTokens<'_, B::Tensor>) -> Result<()> {
        new.rows.check("keys", self.backend.elements(new.keys), &self.shape)?;
        new.rows.check("values", self.backend.elements(new.values), &self.shape)
    }

    /// The largest element that every store can hold. A key minus its centre may be twice as large as either.
    fn largest_element(&self, which: KeyOrValue) -> f32 {
        let stores = self.recipe().stores().iter();
        let largest = stores.map(|store| store.format.tensor(which).largest_element(self.shape.head_dim()));
        let largest = largest.fold(f32::INFINITY, f32::min);
        if which == KeyOrValue::Key && self.recipe().is_centred() { largest / 2.0 } else { largest }
    }

    /// Opens a change of the page tables that packs windows, and lays out its writes. On an error nothing has changed.
    pub(super) fn open_windows(&mut self, sequence: usize) -> Result<Change<B::Indices>> {
        let change = self.page_tables.pack_windows(sequence)?;
        self.lay_out(change, 0)
    }

    /// Opens a change that writes nothing, for a step that attends alone.
    pub(super) fn open_attend(&mut self) -> Result<Change<B::Indices>> {
        let change = Change::new(self.recipe());
        self.lay_out(change, 0)
    }

    pub(super) fn lay_out(&mut self, change: Change<B::Indices>, tokens: usize) -> Result<Change<B::Indices>> {
        match self.table.set(&self.page_tables, &change.writes, tokens) {
            Ok(()) => Ok(change),
            Err(error) => {
                self.page_tables.abandon(change);
                Err(error)
            }
        }
    }

    /// The open step for an engine: what the layers store and attend to.
    pub(super) fn open_step<'a>(
        &'a self,
        change: &'a Change<B::Indices>,
        plan: &'a AttendPlan,
        stored: &'a StoredLayers,
    ) -> OpenStep<'a, B::Store, B::NonFiniteFlags> {
        let stores = (0..self.layers.len()).map(|layer| self.stores(layer)).collect();
        let (table, query, flags) = (self.table.table(), self.recipe().query(), &*self.flags);
        OpenStep { layers: &self.numbers, table, staged: &change.staged, plan, query, stores, flags, stored }
    }

    /// What all steps of the layers have in common.
    pub(super) fn step_kind(&self) -> StepKind<'_> {
        let recipe = self.recipe();
        StepKind {
            layout: self.table.table().layout(),
            stores: recipe.stores(),
            query: recipe.query(),
            attention: recipe.attention(),
        }
    }

    /// The tokens that steps could not store exactly, in all layers of the model.
    pub(super) async fn read_flags(&self) -> Result<Vec<FlaggedToken>> {
        self.backend.read_non_finite_flags(&self.flags).await
    }

    /// Clears the flags.
    pub(super) fn clear_flags(&self) -> Result<()> {
        self.backend.clear_non_finite_flags(&self.flags)
    }

    /// Writes the centres of sequences that begin with a prompt, or that were set, to all stores of a layer.
    pub(super) fn write_centres(
        &mut self,
        layer: usize,
        change: &Change<B::Indices>,
        rows: RowLayout,
        keys: &B::Tensor,
    ) -> Result<()> {
        let Self { backend, layers, .. } = self;
        for centre in &change.centres {
            let (tokens, slot) = (centre.mean.tokens, centre.mean.slot);
            // The keys of prompts were checked.
            let new = NewCentre { rows, tokens, slot, largest: LARGEST_CENTRED_KEY };
            layers[layer].iter_mut().try_for_each(|of| backend.key_mean(&mut of.store, keys, new))?;
        }
        Ok(())
    }

    /// Packs the windows of a change in every layer. Nothing runs if none is due.
    pub(super) fn write_windows(&mut self, change: &Change<B::Indices>) -> Result<()> {
        if change.writes.is_empty() {
            return Ok(());
        }
        (0..self.layers()).try_for_each(|layer| self.write_step(layer, None))
    }

    /// Writes the open step to one layer. Without keys and values it only packs windows.
    pub(super) fn write_step(&mut self, layer: usize, new: Option<NewTokens<'_, B::Tensor>>) -> Result<()> {
        let Self { backend, layers, flags, table, numbers, .. } = self;
        let number = numbers[layer];
        let input = new.map(|NewTokens { rows, keys, values }| WriteInput {
            keys,
            values,
            rows,
            flags: &**flags,
            layer: number,
        });
        let mut stores: Vec<&mut B::Store> = layers[layer].iter_mut().map(|of| &mut of.store).collect();
        backend.write_step(&mut stores, input, table.table())
    }

    /// Writes new tokens to one layer, and packs the parts of prompts that the change staged.
    pub(super) fn write_tokens(
        &mut self,
        layer: usize,
        change: &Change<B::Indices>,
        new: NewTokens<'_, B::Tensor>,
    ) -> Result<()> {
        self.write_step(layer, Some(new))?;
        let Self { backend, layers, shape, .. } = self;
        for span in &change.staged {
            let (keys, values) = backend.dequantize(&layers[layer][StoreId::F16.index()].store, span.read())?;
            backend.quantize(&mut layers[layer][span.store].store, &keys, &values, span.write(shape)?)?;
        }
        Ok(())
    }

    /// Writes the spans of a prompt to one layer, after the centre of a sequence that begins.
    pub(super) fn write_prompt(
        &mut self,
        layer: usize,
        change: &Change<B::Indices>,
        sequence: usize,
        new: NewTokens<'_, B::Tensor>,
        spans: &[PromptSpan<'_, B::Indices>],
    ) -> Result<()> {
        self.write_centres(layer, change, new.rows, new.keys)?;
        self.write_spans(layer, change, sequence, new, spans)
    }

    /// Writes the spans of a prompt to one layer.
    pub(super) fn write_spans(
        &mut self,
        layer: usize,
        change: &Change<B::Indices>,
        sequence: usize,
        new: NewTokens<'_, B::Tensor>,
        spans: &[PromptSpan<'_, B::Indices>],
    ) -> Result<()> {
        let Self { backend, layers, page_tables, .. } = self;
        let centre = page_tables.sequence(sequence)?.centre;
        let opened = page_tables.spans_since(change, sequence);
        let base = change.length_before(sequence);
        let same = |(span, prompt): (&Span<B::Indices>, &PromptSpan<'_, B::Indices>)| {
            let same_tokens = match (&span.positions, prompt.tokens) {
                (Positions::From(start), Rows::Run(run)) => *start == base + run.start() && span.tokens == run.len(),
                (Positions::Gathered { .. }, Rows::Gather(_)) => span.tokens == prompt.tokens.len(),
                _ => false,
            };
            same_tokens && Ok(span.store) == page_tables.recipe().resolve(prompt.store)
        };
        if opened.len() != spans.len() || !opened.iter().zip(spans).all(same) {
            let reason = "pass the spans that the step was opened with".into();
            return Err(Error::Plan { what: "spans of a prompt", reason });
        }
        for (span, prompt) in opened.iter().zip(spans) {
            write_span(backend, &mut layers[layer], (span, centre), new, prompt.tokens)?;
        }
        Ok(())
    }

    /// Writes rows to one layer as the spans that a change opened, in their order. Each span takes as many rows as it
    /// has tokens.
    pub(super) fn write_rows(
        &mut self,
        layer: usize,
        change: &Change<B::Indices>,
        sequence: usize,
        new: NewTokens<'_, B::Tensor>,
    ) -> Result<()> {
        let Self { backend, layers, page_tables, .. } = self;
        let centre = page_tables.sequence(sequence)?.centre;
        let mut start = 0;
        for span in page_tables.spans_since(change, sequence) {
            let rows = TokenRange::new(start, start + span.tokens)?;
            write_span(backend, &mut layers[layer], (span, centre), new, Rows::Run(rows))?;
            start = rows.end();
        }
        Ok(())
    }

    /// Commits a change if its writes succeeded, otherwise abandons it.
    pub(super) fn close(&mut self, change: Change<B::Indices>, written: Result<()>) -> Result<()> {
        match written {
            Ok(()) => self.page_tables.commit(change),
            Err(_) => self.page_tables.abandon(change),
        }
        written
    }
}

impl<B: Backend> LayerGroup<B> {
    /// Writes tokens of dense rows to a span of a sequence in one layer, by the places of layer, sequence and span.
    pub(super) fn write_part(
        &mut self,
        (layer, sequence, span): (usize, usize, usize),
        (rows, keys, values): (RowLayout, &B::Tensor, &B::Tensor),
        tokens: Rows<'_, B::Indices>,
    ) -> Result<()> {
        let Self { backend, layers, page_tables, .. } = self;
        let held = page_tables.sequence(sequence)?;
        let Some(span) = held.spans.get(span) else { return Ok(()) };
        write_span(backend, &mut layers[layer], (span, held.centre), NewTokens { rows, keys, values }, tokens)
    }
}

/// Writes the tokens of dense rows as one span of a sequence with this centre.
fn write_span<B: Backend>(
    backend: &B,
    stores: &mut [LayerStore<B>],
    (span, centre): (&Span<B::Indices>, Option<usize>),
    new: NewTokens<'_, B::Tensor>,
    tokens: Rows<'_, B::Indices>,
) -> Result<()> {
    let (pages, range_slot) = (&span.lease.pages, span.lease.range_slot());
    let write = SpanWrite { rows: new.rows, tokens, pages, range_slot, centre };
    backend.quantize(&mut stores[span.store.index()].store, new.keys, new.values, write)
}
