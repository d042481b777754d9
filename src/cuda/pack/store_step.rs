//! The storing half of a step: plan, bind, launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, LaunchConfig};

use super::non_finite_flags::NonFiniteFlags;
use super::write_memory::WriteMemory;
use crate::backend::WriteInput;
use crate::cuda::Cuda;
use crate::cuda::device::launch::KernelLaunch;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::page_format::PageFormat;
use crate::cuda::device::program::Program;
use crate::cuda::device::store::{MOST_SHARDS, Store};
use crate::cuda::device::tensor::Tensor;
use crate::format::AttentionShape;
use crate::format::KeyOrValue;
use crate::plan::{BackendStore, RowLayout, TableSection, WriteLayout, WriteTable};
use crate::{Error, Result};

/// The kernel that stores tokens.
const APPEND: &str = "append";

/// The kernel that copies shared pages.
const COPY_PAGE: &str = "copy_page";

/// `APPEND_WARPS` of `cuda/append.cu`.
const APPEND_WARPS: usize = 8;

/// `WINDOW_THREADS` and `WINDOW_PARTS` of `cuda/pack_windows.cu`.
const WINDOW_THREADS: u32 = 512;
const WINDOW_PARTS: usize = 4;

const COPY_THREADS: u32 = 256;
const MEAN_THREADS: u32 = 128;

/// Blocks per multiprocessor of a kernel that takes its work in turns.
const BLOCKS_EACH: usize = 2;

/// `WriteCall` of `cuda/common/step_call.cuh`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(in crate::cuda) struct WriteCall {
    table: u64,
    keys: u64,
    values: u64,
    token_stride: u64,
    head_stride: u64,
    flags: u64,
    key_ranges: u64,
    value_ranges: u64,
    kv_heads: u32,
    key_type: u32,
    value_type: u32,
    key_largest: f32,
    value_largest: f32,
    key_shrink: f32,
    value_shrink: f32,
    capacity: u32,
    beside: u32,
    unused: u32,
    centres: u64,
    shards: [u64; MOST_SHARDS],
    from_shards: [u64; MOST_SHARDS],
}

// SAFETY: A struct of C layout without padding, the same on both sides. Addresses are plain integers.
unsafe impl DeviceRepr for WriteCall {}

impl WriteCall {
    /// With contiguous rows of other tensors.
    fn with_rows(self, shape: &AttentionShape, [keys, values]: [&Tensor; 2]) -> Self {
        let rows = RowLayout::token_major(1, shape);
        let [token_stride, head_stride] = [rows.token_stride, rows.head_stride].map(|stride| stride as u64);
        let (key_type, value_type) = (keys.type_code(), values.type_code());
        let (keys, values) = (keys.address(), values.address());
        Self { keys, values, token_stride, head_stride, key_type, value_type, ..self }
    }
}

/// The writes of steps, for all layers: copies of shared pages, centres of sequences that begin, tokens, and windows
/// that are packed, as listed in a [`WriteTable`].
///
/// Once per model: a [`WriteLayout`], a [`WriteMemory`] that holds the table on the device, and [`NonFiniteFlags`].
/// Once per layer and its engine's tensors: [`StoreStep::bind`]. In every step: [`WriteMemory::write`], which is one
/// small upload, and for every layer [`BoundStoreStep::launch`]. Launches read their work from the table, so a graph
/// that captured them can be replayed while the table changes.
///
/// ```no_run
/// use std::sync::Arc;
/// use kvpack::backend::WriteInput;
/// use kvpack::cuda::{Cuda, NonFiniteFlags, StoreStep, WriteMemory, Store, Tensor};
/// use kvpack::plan::{RowLayout, WriteLayout, WriteTable, LayerWrites, TokenWrite};
/// # fn example(backend: &Cuda, store: &Store, keys: &Tensor, values: &Tensor, write: TokenWrite) -> kvpack::Result<()> {
/// // Steps of up to 64 tokens.
/// let layout = Arc::new(WriteLayout::new(*store.shape(), 64, vec![store.step_capacity(64, 0)], vec![])?);
/// let memory = WriteMemory::new(backend.stream(), &layout)?;
/// let flags = NonFiniteFlags::new(backend.stream(), 1)?;
/// let rows = RowLayout::token_major(64, store.shape());
/// let input = WriteInput { keys, values, rows, flags: &flags, layer: 0 };
/// let step = StoreStep::new(&layout).bind(backend, &[store], &memory, Some(input))?;
///
/// let (mut writes, mut table) = (LayerWrites::of(&layout), WriteTable::new(&layout));
/// // Every step:
/// writes.clear();
/// writes.stores[0].tokens.push(write);
/// table.set(&writes)?;
/// memory.write(backend.stream(), &table)?;
/// step.launch()?; // or a replay of the graph that captured it
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

    /// Binds the stores of one layer, in the order of the layout, and its engine's tensors, whose contents every step
    /// reads again. The tensors may be left out if steps read no tokens. Compiles missing kernels.
    ///
    /// # Errors
    /// [`Error::Plan`] when the stores, the memory, the flags or the stream do not belong to the layout and the
    /// backend, or keys and values have fewer tokens than the layout; [`Error::Elements`] when they are shorter than
    /// their rows; [`Error::Limit`] for a store of more than 16 shards; errors from compiling kernels.
    pub fn bind(
        &self,
        backend: &Cuda,
        stores: &[&Store],
        memory: &WriteMemory,
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
    ) -> Result<BoundStoreStep> {
        if let Some(rows) = input.map(|input| input.rows).filter(|rows| rows.tokens < self.layout.rows()) {
            let reason = format!("keys and values have {} tokens; the layout has {}", rows.tokens, self.layout.rows());
            return Err(Error::Plan { what: "step", reason });
        }
        self.bind_some(backend, stores, memory, input, |section| Some(self.layout.capacity(section)))
    }

    /// Compiles every kernel of the layout's steps.
    pub(in crate::cuda) fn prepare(&self, backend: &Cuda) -> Result<()> {
        let layout = &self.layout;
        for section in layout.sections().filter(|&section| layout.capacity(section) > 0) {
            let (name, store) = kernel_of(layout, section);
            let pages = PageFormat::new(layout.shape(), &layout.stores()[store].format)?;
            backend.kernels().function(&program_of(layout, section, &pages), name)?;
        }
        Ok(())
    }

    /// Binds everything for tables that name at most `tokens` tokens, of those that keys and values have, and compute
    /// no centres unless `begins`. A layout has the capacity of the largest step so far, and blocks without work take
    /// time: those of a prompt of 8192 tokens 20 µs.
    pub(in crate::cuda) fn bind_with_room(
        &self,
        backend: &Cuda,
        stores: &[&Store],
        memory: &WriteMemory,
        input: WriteInput<'_, Tensor, NonFiniteFlags>,
        (tokens, begins): (usize, bool),
    ) -> Result<BoundStoreStep> {
        let takes = |section| {
            let entries = if matches!(section, TableSection::Tokens(_)) { tokens } else { usize::MAX };
            (begins || !self.layout.is_of_prompts(section)).then_some(entries)
        };
        self.bind_some(backend, stores, memory, Some(input), takes)
    }

    /// Binds only the resources that one table uses.
    pub(in crate::cuda) fn bind_for(
        &self,
        backend: &Cuda,
        stores: &[&Store],
        memory: &WriteMemory,
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<BoundStoreStep> {
        input.map_or(Ok(()), |input| table.check_rows(&input.rows))?;
        self.bind_some(backend, stores, memory, input, |section| Some(table.count(section)))
    }

    /// Binds the sections that take some entries, for as many of them as `takes` says.
    fn bind_some(
        &self,
        backend: &Cuda,
        stores: &[&Store],
        memory: &WriteMemory,
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
        takes: impl Fn(TableSection) -> Option<usize>,
    ) -> Result<BoundStoreStep> {
        let (layout, stream) = (&*self.layout, backend.stream());
        check_stores(layout, stores, stream)?;
        memory.check_layout(layout)?;
        memory.table().check_stream("table of a step", stream)?;
        let mut kept = vec![memory.table().clone()];
        kept.extend(stores.iter().flat_map(|store| store.memory()));
        if let Some(input) = &input {
            check_input(layout, input, stream)?;
            kept.extend([input.keys.memory(), input.values.memory(), input.flags.memory()].map(Arc::clone));
        }
        let bind = Binder { backend, layout, stores, memory, input };
        let mut launches: Vec<Launch> = Vec::new();
        for section in layout.sections() {
            let entries = takes(section).unwrap_or(0).min(layout.capacity(section));
            if entries == 0 {
                continue;
            }
            let launch = bind.section(section, entries)?;
            let full_before = matches!(section, TableSection::Windows(pair) if layout.windows()[pair].newer > 0);
            let beside = full_before && launches.last().is_some_and(|last| last.kernel.name == APPEND);
            launches.push(if beside { launch.beside_append() } else { launch });
        }
        Ok(BoundStoreStep { stream: stream.clone(), shape: *layout.shape(), launches, _memory: kept })
    }
}

/// The writes of a step for one layer, bound to its stores and its engine's tensors, on the stream of the backend that
/// bound it. It keeps alive all memory that it reads and writes. A graph that captured it needs it as long as the graph
/// is replayed.
#[derive(Debug)]
pub struct BoundStoreStep {
    stream: Arc<CudaStream>,
    shape: AttentionShape,
    launches: Vec<Launch>,
    _memory: Vec<Arc<Memory>>,
}

impl BoundStoreStep {
    /// Launches the kernels: one each for copies, centres, tokens and windows of the layout. Those without work end at
    /// once. Does not allocate, copy or wait.
    ///
    /// # Errors
    /// Errors of the driver from a launch.
    pub fn launch(&self) -> Result<()> {
        self.launches.iter().try_for_each(|launch| launch.run(&self.stream))
    }

    /// [`Self::launch`] on `stream`, from tensors of contiguous rows, whatever the layout of those that were bound.
    pub(in crate::cuda) fn launch_on(&self, stream: &Arc<CudaStream>, keys: &Tensor, values: &Tensor) -> Result<()> {
        let on_tensors = |launch: &Launch| {
            // Copies and windows read no tensors.
            let reads = launch.call.keys != 0;
            let call = if reads { launch.call.with_rows(&self.shape, [keys, values]) } else { launch.call };
            launch.run_as(stream, &call)
        };
        self.launches.iter().try_for_each(on_tensors)
    }

    /// The call of the last launch, if that is the only one that stores tokens, and centres none: its tokens may be
    /// stored by the kernel that attends to them.
    pub(in crate::cuda) fn last_append(&self) -> Option<WriteCall> {
        let (last, before) = self.launches.split_last()?;
        let alone = last.kernel.name == APPEND && before.iter().all(|launch| launch.kernel.name == COPY_PAGE);
        (alone && last.call.centres == 0).then_some(last.call)
    }

    /// [`Self::launch_on`] of all launches but the last. Returns the call of that one.
    pub(in crate::cuda) fn launch_before_append(
        &self,
        stream: &Arc<CudaStream>,
        tensors: Option<[&Tensor; 2]>,
    ) -> Result<Option<WriteCall>> {
        let Some(append) = self.last_append() else { return Ok(None) };
        self.launches.iter().rev().skip(1).rev().try_for_each(|launch| launch.run(stream))?;
        Ok(Some(tensors.map_or(append, |tensors| append.with_rows(&self.shape, tensors))))
    }

    /// Whether it stores tokens. Kernels behind `append` are admitted once all work before the step is done.
    pub(in crate::cuda) fn appends(&self) -> bool {
        self.launches.iter().any(|launch| launch.kernel.name == APPEND)
    }
}

#[derive(Debug)]
struct Launch {
    kernel: KernelLaunch,
    call: WriteCall,
}

impl Launch {
    /// The same launch, overlapping with the previous one: one extra column of blocks waits for that one
    /// (`cuda/pack_windows.cu`).
    fn beside_append(mut self) -> Self {
        if self.kernel.overlaps {
            let blocks = &mut self.kernel.config.grid_dim.0;
            self.call.beside = *blocks;
            *blocks += 1;
        }
        self
    }

    fn run(&self, stream: &Arc<CudaStream>) -> Result<()> {
        self.run_as(stream, &self.call)
    }

    /// [`Self::run`] with other tensors in the call.
    fn run_as(&self, stream: &Arc<CudaStream>, call: &WriteCall) -> Result<()> {
        // SAFETY: The argument matches the kernel. Stores and tensors were checked to have everything that tables of
        // the layout may name, and the table's memory only ever holds tables of the layout. All of it lives as long as
        // the bound step, and is freed in the order of the stream.
        unsafe { self.kernel.run(stream, call) }
    }
}

/// The resources that launches of a step are bound to.
struct Binder<'a> {
    backend: &'a Cuda,
    layout: &'a WriteLayout,
    stores: &'a [&'a Store],
    memory: &'a WriteMemory,
    input: Option<WriteInput<'a, Tensor, NonFiniteFlags>>,
}

impl Binder<'_> {
    /// The launch that takes this many entries of a section.
    fn section(&self, section: TableSection, entries: usize) -> Result<Launch> {
        let shape = self.layout.shape();
        let kv_heads = shape.kv_heads();
        // Kernels count parts of windows, and tokens, over all KV heads in one word.
        let (needed, allowed) =
            ((self.layout.capacity(section) * kv_heads * WINDOW_PARTS) as u64, u64::from(i32::MAX as u32));
        if needed > allowed {
            let hint = "create a layout with fewer tokens and windows";
            return Err(Error::Limit { what: "parts of a step".into(), needed, allowed, hint });
        }
        let in_turns = BLOCKS_EACH * self.backend.kernels().facts().multiprocessors;
        match section {
            TableSection::Copies(store) => {
                let call = self.call(section, store)?;
                let pieces = entries * kv_heads * self.stores[store].pages().head_bytes() / 16;
                let blocks = pieces.div_ceil(COPY_THREADS as usize).min(4 * in_turns);
                self.launch(section, call, [blocks, 1], COPY_THREADS)
            }
            TableSection::Centres(store) => {
                let call = self.with_input(store, self.call(section, store)?)?;
                let call = WriteCall { key_largest: self.layout.largest_centred(), ..call };
                let blocks = (entries * kv_heads * shape.head_dim()).div_ceil(MEAN_THREADS as usize);
                self.launch(section, call, [blocks.min(4 * in_turns), 1], MEAN_THREADS)
            }
            TableSection::Tokens(store) => {
                let call = self.with_input(store, self.call(section, store)?)?;
                let blocks = (entries * kv_heads).div_ceil(APPEND_WARPS);
                self.launch(section, call, [blocks, 2], 32 * APPEND_WARPS as u32)
            }
            TableSection::Windows(pair) => {
                let of = self.layout.windows()[pair];
                let call = self.call(section, of.to)?;
                let call = WriteCall { from_shards: self.shards(of.from)?, ..call };
                let blocks = (entries * kv_heads * WINDOW_PARTS).min(in_turns);
                self.launch(section, call, [blocks, 2], WINDOW_THREADS)
            }
        }
    }

    fn call(&self, section: TableSection, store: usize) -> Result<WriteCall> {
        let of = self.stores[store];
        let shrink = |which| of.format().tensor(which).affine().map_or(1.0, |affine| affine.shrink);
        Ok(WriteCall {
            table: self.memory.address(section),
            key_ranges: of.slot_address(KeyOrValue::Key, 0),
            value_ranges: of.slot_address(KeyOrValue::Value, 0),
            kv_heads: self.layout.shape().kv_heads() as u32,
            key_shrink: shrink(KeyOrValue::Key),
            value_shrink: shrink(KeyOrValue::Value),
            capacity: self.layout.capacity(section) as u32,
            centres: of.centre_address(0),
            shards: self.shards(store)?,
            ..WriteCall::default()
        })
    }

    fn with_input(&self, store: usize, call: WriteCall) -> Result<WriteCall> {
        let Some(WriteInput { keys, values, rows, flags, layer }) = self.input else {
            let reason = "it reads tokens, but no keys and values were given";
            return Err(Error::Plan { what: "step", reason: reason.into() });
        };
        Ok(WriteCall {
            keys: keys.address(),
            values: values.address(),
            token_stride: rows.token_stride as u64,
            head_stride: rows.head_stride as u64,
            flags: flags.address(layer),
            key_type: keys.type_code(),
            value_type: values.type_code(),
            key_largest: self.layout.largest_element(store, KeyOrValue::Key),
            value_largest: self.layout.largest_element(store, KeyOrValue::Value),
            ..call
        })
    }

    /// Addresses of a store's shards that the layout knows.
    fn shards(&self, store: usize) -> Result<[u64; MOST_SHARDS]> {
        self.stores[store].shard_addresses(self.layout.stores()[store].shard_pages.len())
    }

    fn launch(&self, section: TableSection, call: WriteCall, [x, y]: [usize; 2], threads: u32) -> Result<Launch> {
        let (name, store) = kernel_of(self.layout, section);
        let program = program_of(self.layout, section, self.stores[store].pages());
        let function = self.backend.kernels().function(&program, name)?;
        let config =
            LaunchConfig { grid_dim: (x as u32, y as u32, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        let overlaps = self.backend.kernels().facts().is_9_0_or_newer();
        Ok(Launch { kernel: KernelLaunch { name, function, config, cluster: 1, overlaps }, call })
    }
}

/// The kernel of a section, and the store that it writes.
fn kernel_of(layout: &WriteLayout, section: TableSection) -> (&'static str, usize) {
    match section {
        TableSection::Copies(store) => (COPY_PAGE, store),
        TableSection::Centres(store) => ("key_mean_of_step", store),
        TableSection::Tokens(store) => (APPEND, store),
        TableSection::Windows(pair) => ("pack_windows", layout.windows()[pair].to),
    }
}

/// The program that is compiled for the pages of that store.
fn program_of(layout: &WriteLayout, section: TableSection, pages: &PageFormat) -> Program {
    match section {
        TableSection::Centres(_) => pages.mean_program(),
        TableSection::Tokens(store) if layout.has_centres(store) => pages.centred_step_program(),
        _ => pages.step_program(),
    }
}

fn check_stores(layout: &WriteLayout, stores: &[&Store], stream: &CudaStream) -> Result<()> {
    layout.check_store_count(stores.len())?;
    for (index, store) in stores.iter().enumerate() {
        store.check_stream("step", stream)?;
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

fn check_input(
    layout: &WriteLayout,
    input: &WriteInput<'_, Tensor, NonFiniteFlags>,
    stream: &CudaStream,
) -> Result<()> {
    for (what, tensor) in [("keys", input.keys), ("values", input.values)] {
        input.rows.check(what, tensor.elements(), layout.shape())?;
        tensor.memory().check_stream(what, stream)?;
    }
    input.flags.memory().check_stream("non-finite flags", stream)?;
    input.flags.check_layer(input.layer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AttentionShape, SegmentFormat};
    use crate::plan::StoreCapacity;

    /// The sources of all storing kernels compile. This needs no device.
    #[test]
    #[ignore = "needs NVRTC"]
    fn kernels_compile() {
        let shape = AttentionShape::new(8, 2, 80).unwrap();
        for (format, centre_slots) in [(SegmentFormat::F16, 0), (SegmentFormat::saw_int4(), 4)] {
            let (shard_pages, centres) = (vec![1], centre_slots);
            let store =
                StoreCapacity { format, shard_pages, range_slots: 1, tokens: 1, copies: 1, centres, centre_slots };
            let layout = WriteLayout::new(shape, 1, vec![store], vec![]).unwrap();
            let pages = PageFormat::new(&shape, &format).unwrap();
            for section in layout.sections().filter(|&section| layout.capacity(section) > 0) {
                let binary = program_of(&layout, section, &pages).compile("sm_90");
                let binary = binary.unwrap_or_else(|error| panic!("{section:?} of {format}: {error}"));
                let name = kernel_of(&layout, section).0.as_bytes();
                assert!(binary.windows(name.len()).any(|bytes| bytes == name), "{section:?} of {format}");
            }
        }
    }
}
