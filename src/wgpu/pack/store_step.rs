//! The storing half of a step: plan, bind, encode.

use std::sync::Arc;

use super::non_finite_flags::NonFiniteFlags;
use super::write_launch::{Binder, WriteLaunch};
use super::write_memory::WriteMemory;
use super::{append, copy_page, key_mean, pack_windows};
use crate::backend::WriteInput;
use crate::format::KeyOrValue;
use crate::plan::{BackendStore, ElementType, TableSection, WriteLayout, WriteTable};
use crate::wgpu::device::encoded::EncodedSteps;
use crate::wgpu::device::{Kernels, Store, Tensor, Variant, guard};
use crate::{Error, Result};

const BOTH: [KeyOrValue; 2] = [KeyOrValue::Key, KeyOrValue::Value];

/// The writes of steps, for all layers: copies of shared pages, centres of sequences that begin, tokens, and windows
/// that are packed, as listed in a [`WriteTable`].
///
/// Once per model: a [`WriteLayout`], a [`WriteMemory`] that holds the table on the device, and [`NonFiniteFlags`].
/// Once per layer and its engine's tensors: [`StoreStep::bind`]. In every step: [`WriteMemory::write`], which is one
/// small upload, and for every layer [`BoundStoreStep::encode`], which only records dispatches.
///
/// ```no_run
/// use std::sync::Arc;
/// use kvpack::backend::WriteInput;
/// use kvpack::plan::{RowLayout, WriteLayout, WriteTable, LayerWrites, TokenWrite};
/// use kvpack::wgpu::{NonFiniteFlags, StoreStep, WriteMemory, Store, Tensor, Wgpu};
/// # fn example(backend: &Wgpu, store: &Store, keys: &Tensor, values: &Tensor, write: TokenWrite) -> kvpack::Result<()> {
/// // Steps of up to 64 tokens.
/// let layout = Arc::new(WriteLayout::new(*store.shape(), 64, vec![store.step_capacity(64, 0)], vec![])?);
/// let memory = WriteMemory::new(backend.device(), &layout)?;
/// let flags = NonFiniteFlags::new(backend.device(), 1)?;
/// let rows = RowLayout::token_major(64, store.shape());
/// let input = WriteInput { keys, values, rows, flags: &flags, layer: 0 };
/// let step = StoreStep::new(&layout).bind(backend.kernels(), &[store], &memory, Some(input))?;
///
/// let (mut writes, mut table) = (LayerWrites::of(&layout), WriteTable::new(&layout));
/// let mut encoder = backend.device().create_command_encoder(&Default::default());
/// // Every step:
/// writes.clear();
/// writes.stores[0].tokens.push(write);
/// table.set(&writes)?;
/// memory.write(backend.queue(), &table)?;
/// step.encode(&table, &mut encoder.begin_compute_pass(&Default::default()))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct StoreStep {
    layout: Arc<WriteLayout>,
}

impl StoreStep {
    /// A plan for the steps of a layout.
    pub fn new(layout: &Arc<WriteLayout>) -> Self {
        Self { layout: layout.clone() }
    }

    /// The kernel variants for keys and values of these types, for [`Kernels::prepare`], on a device that binds
    /// `storage_buffers` storage buffers to a kernel ([`Kernels::storage_buffers`]).
    pub fn variants(&self, storage_buffers: u32, keys: ElementType, values: ElementType) -> Vec<Variant> {
        let (layout, mut found) = (&self.layout, Vec::new());
        for (index, store) in layout.stores().iter().enumerate() {
            if store.tokens > 0 {
                let (types, centred) = ([keys, values], layout.has_centres(index));
                found.extend(append::variants_of_tokens(
                    storage_buffers,
                    layout.shape(),
                    &store.format,
                    types,
                    centred,
                ));
            }
            if store.centres > 0 {
                found.push(key_mean::of_step(keys));
            }
            // A page of a store that takes tokens may be shared one day, and is copied then.
            if store.copies > 0 || store.tokens > 0 {
                found.extend(copy_page::variants());
            }
        }
        for pair in layout.windows().iter().filter(|pair| pair.windows > 0) {
            let format = &layout.stores()[pair.to].format;
            found.extend(
                BOTH.map(|which| pack_windows::variants_of(layout.shape(), format.tensor(which), which)).concat(),
            );
        }
        found
    }

    /// Binds the stores of one layer, in the order of the layout, and its engine's tensors, whose contents every step
    /// reads again. The tensors may be left out if steps read no tokens. While steps are encoded and not submitted,
    /// calls that submit commands over the stores by themselves return [`Error::NotSubmitted`].
    ///
    /// # Errors
    /// [`Error::Plan`] when the stores, the memory or the flags do not belong to the layout, or keys and values have
    /// fewer tokens than it; [`Error::Elements`] when they are shorter than their rows; [`Error::Limit`] when something
    /// is too large for the device.
    pub fn bind(
        &self,
        kernels: &Kernels,
        stores: &[&Store],
        memory: &WriteMemory,
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
    ) -> Result<BoundStoreStep> {
        if let Some(rows) = input.map(|input| input.rows).filter(|rows| rows.tokens < self.layout.rows()) {
            let reason = format!("keys and values have {} tokens; the layout has {}", rows.tokens, self.layout.rows());
            return Err(Error::Plan { what: "step", reason });
        }
        let bound = self.bind_some(kernels, stores, memory, input, |_| true)?;
        let steps = EncodedSteps::new(kernels.submissions());
        stores.iter().for_each(|store| store.encoders().add(&steps));
        memory.encoders().add(&steps);
        input.iter().for_each(|input| input.flags.encoders().add(&steps));
        Ok(BoundStoreStep { steps: Some(steps), ..bound })
    }

    /// Binds everything for tables that name no more tokens than keys and values have.
    pub(in crate::wgpu) fn bind_with_room(
        &self,
        kernels: &Kernels,
        stores: &[&Store],
        memory: &WriteMemory,
        input: WriteInput<'_, Tensor, NonFiniteFlags>,
    ) -> Result<BoundStoreStep> {
        self.bind_some(kernels, stores, memory, Some(input), |_| true)
    }

    /// Binds only the resources that one table uses.
    pub(crate) fn bind_for(
        &self,
        kernels: &Kernels,
        stores: &[&Store],
        memory: &WriteMemory,
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<BoundStoreStep> {
        input.map_or(Ok(()), |input| table.check_rows(&input.rows))?;
        self.bind_some(kernels, stores, memory, input, |section| table.count(section) > 0)
    }

    fn bind_some(
        &self,
        kernels: &Kernels,
        stores: &[&Store],
        memory: &WriteMemory,
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
        takes: impl Fn(TableSection) -> bool,
    ) -> Result<BoundStoreStep> {
        let layout = &*self.layout;
        check_stores(layout, stores)?;
        memory.check_layout(layout)?;
        if let Some(input) = input {
            check_input(layout, &input)?;
        }
        let limits = kernels.device().limits();
        let bind = Binder { kernels, layout, stores, memory, input, limits };
        let mut launches = Vec::new();
        for section in layout.sections().filter(|&section| layout.capacity(section) > 0 && takes(section)) {
            launches.extend(launches_of(&bind, section)?);
        }
        guard::check_alive(kernels.device())?;
        let most = u64::from(bind.limits.max_compute_workgroups_per_dimension);
        Ok(BoundStoreStep { layout: self.layout.clone(), launches, most, steps: None })
    }
}

/// The writes of a step for one layer, bound to its stores and its engine's tensors.
#[derive(Clone, Debug)]
pub struct BoundStoreStep {
    layout: Arc<WriteLayout>,
    launches: Vec<WriteLaunch>,
    /// Maximum number of workgroups in one dimension.
    most: u64,
    /// The steps that an engine encodes with it and has not submitted; `None` within the steps of a model and where
    /// this crate submits.
    steps: Option<Arc<EncodedSteps>>,
}

impl BoundStoreStep {
    /// Encodes the dispatches of a step into an open pass, and none for sections that its table leaves empty. Does not
    /// submit, wait, map or allocate. [`WriteMemory::write`] must have written the same table to the device before.
    ///
    /// # Errors
    /// [`Error::Plan`] when the table belongs to another layout.
    pub fn encode(&self, table: &WriteTable, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        self.encode_slot(table, 0, pass)?;
        self.steps.iter().for_each(|steps| steps.hold(steps.begin(), pass));
        Ok(())
    }

    /// The same for a table that begins `offset` bytes after the first one of the memory.
    pub(in crate::wgpu) fn encode_slot(
        &self,
        table: &WriteTable,
        offset: u32,
        pass: &mut wgpu::ComputePass<'_>,
    ) -> Result<()> {
        table.check_layout(&self.layout)?;
        self.launches.iter().for_each(|launch| launch.encode((table, offset), self.most, pass));
        Ok(())
    }
}

fn check_stores(layout: &WriteLayout, stores: &[&Store]) -> Result<()> {
    layout.check_store_count(stores.len())?;
    for (index, store) in stores.iter().enumerate() {
        let found = BackendStore {
            shape: store.shape(),
            format: store.format(),
            shard_pages: &|shard| store.shard_pages(shard),
            range_slots: store.range_slots(),
            centre_slots: store.centre_slots(),
        };
        layout.check_store(index, &found)?;
    }
    Ok(())
}

fn check_input(layout: &WriteLayout, input: &WriteInput<'_, Tensor, NonFiniteFlags>) -> Result<()> {
    input.rows.check("keys", input.keys.elements(), layout.shape())?;
    input.rows.check("values", input.values.elements(), layout.shape())?;
    input.flags.check_layer(input.layer)
}

/// All launches of a section, for every shard or pair of shards that its entries may name.
fn launches_of(bind: &Binder<'_>, section: TableSection) -> Result<Vec<WriteLaunch>> {
    let shards = |store: usize| 0..bind.layout.stores()[store].shard_pages.len() as u32;
    let mut launches = Vec::new();
    match section {
        TableSection::Copies(store) => {
            for pair in pairs(shards(store), shards(store)) {
                launches.extend(copy_page::bind_copies(bind, store, pair)?);
            }
        }
        TableSection::Centres(store) => launches.push(key_mean::bind_centres(bind, store)?),
        TableSection::Tokens(store) => {
            for shard in shards(store) {
                launches.extend(append::bind_tokens(bind, store, shard)?);
            }
        }
        TableSection::Windows(pair) => {
            let of = bind.layout.windows()[pair];
            for shards in pairs(shards(of.from), shards(of.to)) {
                for which in BOTH {
                    launches.extend(pack_windows::bind_windows(bind, pair, shards, which)?);
                }
            }
        }
    }
    Ok(launches)
}

fn pairs(from: std::ops::Range<u32>, to: std::ops::Range<u32>) -> impl Iterator<Item = [u32; 2]> {
    from.flat_map(move |from| to.clone().map(move |to| [from, to]))
}
