//! The wgpu backend: [`Backend`](crate::Backend) over a device and its queue.

mod recorded;
mod selection;
mod submit;

pub use recorded::Recorded;

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::backend::{
    AttendArithmetic, AttendOptions, Attention, AttentionStates, Device, FlaggedToken, NewCentre, NonFinite, Packing,
    QueryPrecision, RowCentres, SpanBytes, SpanPlace, SpanRead, SpanWrite, StateParts, Storage, WriteInput,
};
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat};
use crate::plan::{
    AttendPlan, ElementType, Elements, LargerShard, Page, PageCopy, RowLayout, TokenWrite, WindowMove, WriteTable,
    append_table, copy_table, windows_layout, windows_table,
};
use crate::wgpu::attend::{
    AttendTensors, LseOutput, MergePairPlan, MergePartsPlan, RecentLaunches, STATE_BUFFERS, Scratch, ScratchBytes,
    UncentreLsePlan, arithmetic,
};
use crate::wgpu::device::capabilities::Path;
use crate::wgpu::device::{
    Capabilities, Checks, Indices, KernelLimits, Kernels, Requirements, Shard, SpanReads, Store, Tensor, buffers,
    choose_adapter, guard, max_shard_pages, open_device, span_bytes,
};
use crate::wgpu::pack::{
    DequantizePlan, FindNonFinitePlan, KeyMeanPlan, NonFiniteFlags, QuantizePlan, rotated_window_bytes,
};
use crate::{Error, Result};

/// Maximum bytes of rotated rows that wait to be packed, unless a single window has more.
const SCRATCH_BYTES: u64 = 16 << 20;

/// A device with its queue, its compiled kernels and its capabilities. Cheap to clone.
///
/// Natively the futures of calls that wait for the device are ready when they are first polled: they block their thread
/// in `wgpu::Device::poll` until the device is done. Run them where a thread may block.
///
/// A browser runs calls in another process, which reports their errors later. Calls that wait (`upload`, `attend`,
/// `download`, ...) await these errors. An error of a call that does not wait (`quantize`, `append`, ...) is kept, and
/// the next call that waits returns it. Do not rely on what such a call stored.
///
/// ```no_run
/// use kvpack::wgpu::Wgpu;
/// # async fn example(device: wgpu::Device, queue: wgpu::Queue) -> kvpack::Result<()> {
/// // The device of an engine ...
/// let backend = Wgpu::new(device, queue)?;
/// // ... or one of kvpack's own choice, with cooperative matrices where it has them.
/// // SAFETY: see wgpu::ExperimentalFeatures.
/// let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
/// let backend = Wgpu::open(None, experimental).await?;
/// # Ok(())
/// # }
/// ```
///
/// Where the device has [`wgpu::Features::PIPELINE_CACHE`], kernels that were compiled once need not be again:
///
/// ```no_run
/// use std::sync::Arc;
/// use kvpack::wgpu::{Checks, Kernels, Wgpu};
/// # fn example(device: wgpu::Device, queue: wgpu::Queue, earlier: &[u8]) -> kvpack::Result<()> {
/// let descriptor = wgpu::PipelineCacheDescriptor { label: None, data: Some(earlier), fallback: true };
/// // SAFETY: `earlier` is what `get_data` returned on such a device, or empty.
/// let pipelines = unsafe { device.create_pipeline_cache(&descriptor) };
/// let kernels = Kernels::new(&device, Checks::default()).with_pipeline_cache(pipelines.clone());
/// let backend = Wgpu::with_kernels(queue, Arc::new(kernels))?;
/// // Once `ModelStep::prepare` has compiled all kernels:
/// let data = pipelines.get_data(); // keep it for the next process
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Wgpu {
    queue: wgpu::Queue,
    kernels: Arc<Kernels>,
    capabilities: Capabilities,
    scratch: Arc<Mutex<Option<Scratch>>>,
    /// What the steps that engines encode share, as long as one of them is bound.
    step_scratch: Arc<Mutex<Weak<Scratch>>>,
    /// Launches of the last calls that submit their own commands.
    recent: Arc<RecentLaunches>,
}

impl Wgpu {
    /// The backend on an engine's device, with kernels of its own and without wgpu's run-time checks
    /// ([`Checks::Trusted`]). Use [`Wgpu::with_kernels`] for other kernels. Kernels use all that the device was created
    /// with and kvpack knows, cooperative matrices too: [`Wgpu::capabilities`] tells.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) when the device is below the floor: see [`Capabilities::from_device`].
    pub fn new(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self> {
        Self::with_kernels(queue, Arc::new(Kernels::new(&device, Checks::default())))
    }

    /// The backend with kernels that the caller owns and may share. `queue` must belong to their device.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) when the device is below the floor: see [`Capabilities::from_device`].
    pub fn with_kernels(queue: wgpu::Queue, kernels: Arc<Kernels>) -> Result<Self> {
        let capabilities = Capabilities::from_device(kernels.device())?;
        Ok(Self {
            queue,
            kernels,
            capabilities,
            scratch: Arc::default(),
            step_scratch: Arc::default(),
            recent: Arc::default(),
        })
    }

    /// The backend on a device of its own: that of the named adapter, or of the best one, see
    /// [`choose_adapter`](super::choose_adapter). `experimental` allows cooperative matrices or not: see
    /// [`Requirements::of`].
    ///
    /// # Errors
    /// [`Error::Adapter`](crate::Error::Adapter) when there is no such adapter or it cannot open a device;
    /// [`Error::Limit`](crate::Error::Limit) when the device is below the floor.
    pub async fn open(adapter: Option<&str>, experimental: wgpu::ExperimentalFeatures) -> Result<Self> {
        let adapter = choose_adapter(adapter).await?;
        let (device, queue) = open_device(&adapter, Requirements::of(&adapter, experimental)).await?;
        Self::new(device, queue)
    }

    /// The same backend with kernels restricted to `path`.
    pub fn restricted_to(self, path: Path) -> Self {
        Self { capabilities: self.capabilities.restricted_to(path), ..self }
    }

    /// The same backend with storage bindings of no more than `bytes`, so that stores are cut into smaller shards.
    pub fn with_binding_limit(self, bytes: u64) -> Self {
        let limits = self.capabilities.limits;
        let limits = KernelLimits { binding_bytes: limits.binding_bytes.min(bytes), ..limits };
        Self { capabilities: Capabilities { limits, ..self.capabilities }, ..self }
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        self.kernels.device()
    }

    /// The queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.queue
    }

    /// The compiled kernels.
    pub fn kernels(&self) -> &Arc<Kernels> {
        &self.kernels
    }

    /// The features and limits that kernels may use.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Scratch of steps that engines encode, but for their tables. Commands run in the order of the queue, and those of
    /// a layer's attention follow each other, so one piece serves the steps of all layers and models on the device. A
    /// step that needs more than there is gets a larger piece, and later ones share that.
    pub(in crate::wgpu) fn step_scratch(&self, bytes: ScratchBytes) -> Result<Arc<Scratch>> {
        let mut kept = self.step_scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = ScratchBytes { tables: 0, ..bytes };
        let larger = match kept.upgrade() {
            Some(scratch) if scratch.holds(bytes) => return Ok(scratch),
            Some(scratch) => scratch.bytes().or(bytes),
            None => bytes,
        };
        let scratch = Arc::new(Scratch::new_now(self.device(), larger)?);
        *kept = Arc::downgrade(&scratch);
        Ok(scratch)
    }

    fn zeroed_states(&self, shape: &AttentionShape, rows: usize) -> Result<AttentionStates<Tensor>> {
        let heads = rows * shape.query_heads();
        Ok(AttentionStates {
            outputs: Tensor::zeroed(self.device(), heads * shape.head_dim(), ElementType::F32)?,
            lse: Tensor::zeroed(self.device(), heads, ElementType::F32)?,
        })
    }
}

impl Device for Wgpu {
    type Tensor = Tensor;
    type Indices = Indices;

    fn name(&self) -> String {
        let info = self.device().adapter_info();
        format!("{} ({:?}, {})", info.name, info.backend, self.capabilities.path())
    }

    async fn upload(&self, elements: Elements<'_>) -> Result<Tensor> {
        self.check_not_recording("an upload")?;
        Tensor::upload(self.device(), &self.queue, elements).await
    }

    async fn download(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        self.check_not_recording("a download")?;
        tensor.download(self.device(), &self.queue).await
    }

    async fn upload_indices(&self, tokens: &[u32], kv_heads: usize, below: u32) -> Result<Indices> {
        Indices::upload(self.device(), tokens, kv_heads, below)
    }

    async fn download_indices(&self, indices: &Indices) -> Result<Vec<u32>> {
        self.check_not_recording("a download")?;
        indices.download(self.device(), &self.queue).await
    }

    fn elements(&self, tensor: &Tensor) -> usize {
        tensor.elements()
    }
}

impl Storage for Wgpu {
    type Store = Store;
    type Shard = LargerShard<Shard>;
    type SpanReads = SpanReads;

    fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<Store> {
        Store::new(shape, format, &self.capabilities.limits)
    }

    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32 {
        max_shard_pages(shape, format, &self.capabilities.limits)
    }

    async fn add_shard(&self, store: &mut Store, pages: u32) -> Result<()> {
        store.add_shard(self.device(), pages).await
    }

    /// As many as run side by side, each with states in a buffer of its own.
    fn shards_at_once(&self) -> usize {
        STATE_BUFFERS
    }

    async fn larger_shard(&self, store: &Store, pages: u32) -> Result<Self::Shard> {
        if cfg!(target_family = "wasm") {
            let (what, hint) = ("a larger shard in a browser".into(), "add another shard");
            // A browser does not tell which steps are submitted: their tokens would go to the old shard.
            return Err(Error::Unsupported { what, hint: hint.into() });
        }
        self.check_not_recording("growth of a shard")?;
        store.larger_shard(self.device(), &self.queue, pages).await
    }

    fn replace_shard(&self, store: &mut Store, shard: Self::Shard) -> Result<()> {
        store.replace_shard(shard)
    }

    fn drop_shard(&self, store: &mut Store) {
        store.drop_shard();
    }

    fn available_bytes(&self) -> Option<u64> {
        None // wgpu tells of no device how much memory it has
    }

    async fn reserve_ranges(&self, store: &mut Store, slots: usize) -> Result<()> {
        self.check_not_recording("room for ranges")?;
        store.reserve_ranges(self.device(), &self.queue, slots).await
    }

    async fn reserve_centres(&self, store: &mut Store, slots: usize) -> Result<()> {
        self.check_not_recording("room for centres")?;
        store.reserve_centres(self.device(), &self.queue, slots).await
    }

    async fn read_spans(&self, places: &[(&Store, SpanPlace<'_>)]) -> Result<Vec<SpanBytes>> {
        self.check_not_recording("a download")?;
        span_bytes::read_all(self.device(), &self.queue, places).await
    }

    fn begin_reads(&self, places: &[(&Store, SpanPlace<'_>)]) -> Result<SpanReads> {
        self.check_not_recording("a download")?;
        SpanReads::begin(self.device(), &self.queue, places)
    }

    fn check_submitted(&self, what: &'static str, stores: &[&Store]) -> Result<()> {
        self.check_not_recording(what)?;
        self.check_all_submitted(what, stores)
    }

    fn have_arrived(&self, reads: &SpanReads) -> Result<bool> {
        reads.have_arrived(self.device())
    }

    async fn finish_reads(&self, reads: SpanReads) -> Result<Vec<SpanBytes>> {
        reads.finish(self.device()).await
    }

    fn write_span(&self, store: &mut Store, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()> {
        self.check_not_recording("an upload")?;
        store.write_span(self.device(), &self.queue, bytes, place)
    }

    fn span_layout(&self) -> &'static str {
        "wgpu"
    }

    fn store_bytes(&self, store: &Store) -> u64 {
        store.bytes()
    }
}

impl Packing for Wgpu {
    type NonFiniteFlags = NonFiniteFlags;

    async fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &Tensor,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> Result<Option<NonFinite>> {
        self.check_not_recording("a check of elements")?;
        let plan = FindNonFinitePlan::new(shape, *rows, largest)?;
        let what = match which {
            KeyOrValue::Key => "keys",
            KeyOrValue::Value => "values",
        };
        let search = plan.bind(&self.kernels, what, tensor)?;
        self.run("kvpack find_non_finite", &[search.launch].into_iter().collect())?;
        let found = buffers::read(self.device(), &self.queue, &search.found, 0, 4).await?;
        let Some(at) = plan.position(bytemuck::pod_read_unaligned(&found)) else { return Ok(None) };
        let index = rows.row(at.token, at.kv_head) + at.channel;
        let value = tensor.slice(index, 1)?.download(self.device(), &self.queue).await?[0];
        Ok(Some(NonFinite { token: at.token, kv_head: at.kv_head, channel: at.channel, value }))
    }

    fn key_mean(&self, store: &mut Store, keys: &Tensor, centre: NewCentre) -> Result<()> {
        self.check_all_submitted("centre of keys", &[store])?;
        let launch = KeyMeanPlan::new(store.shape(), centre)?.bind(&self.kernels, store, keys)?;
        self.run("kvpack key_mean", &[launch].into_iter().collect())
    }

    fn quantize(&self, store: &mut Store, keys: &Tensor, values: &Tensor, write: SpanWrite<'_, Indices>) -> Result<()> {
        self.check_all_submitted("packing", &[store])?;
        let plan = QuantizePlan::new(store.shape(), store.format(), &write)?;
        self.run("kvpack quantize", &plan.bind(&self.kernels, store, keys, values)?)
    }

    fn pack_windows(&self, shape: &AttentionShape, from: &Store, to: &mut Store, windows: &[WindowMove]) -> Result<()> {
        from.check_planned("pack windows", shape, from.format())?;
        to.check_planned("pack windows", shape, to.format())?;
        let stores = || [from.step_capacity(0, 0), to.step_capacity(0, 0)];
        // Rotated rows pass through scratch memory, as many windows at a time as fit into a few MiB.
        let at_once = match rotated_window_bytes(&*windows_layout(shape, stores(), 1)?) {
            0 => windows.len().max(1),
            bytes => (SCRATCH_BYTES / bytes).max(1) as usize,
        };
        for windows in windows.chunks(at_once) {
            self.run_pack_step(&[from, to], None, &windows_table(shape, stores(), windows)?)?;
        }
        Ok(())
    }

    fn append(
        &self,
        store: &mut Store,
        keys: &Tensor,
        values: &Tensor,
        rows: RowLayout,
        writes: &[TokenWrite],
    ) -> Result<()> {
        let table = append_table(store.shape(), store.step_capacity(writes.len(), 0), rows.tokens, writes)?;
        let flags = NonFiniteFlags::new(self.device(), 1)?;
        self.run_pack_step(&[store], Some(WriteInput { keys, values, rows, flags: &flags, layer: 0 }), &table)
    }

    fn copy_page(&self, store: &mut Store, from: Page, to: Page) -> Result<()> {
        let table = copy_table(store.shape(), store.step_capacity(0, 1), PageCopy { from, to })?;
        self.run_pack_step(&[store], None, &table)
    }

    fn write_step(
        &self,
        stores: &mut [&mut Store],
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<()> {
        let stores: Vec<&Store> = stores.iter().map(|store| &**store).collect();
        self.run_pack_step(&stores, input, table)
    }

    fn create_non_finite_flags(&self, layers: usize) -> Result<NonFiniteFlags> {
        NonFiniteFlags::new(self.device(), layers)
    }

    async fn read_non_finite_flags(&self, flags: &NonFiniteFlags) -> Result<Vec<FlaggedToken>> {
        self.check_not_recording("a download")?;
        flags.read(self.device(), &self.queue).await
    }

    fn clear_non_finite_flags(&self, flags: &NonFiniteFlags) -> Result<()> {
        self.check_not_recording("clearing of flags")?;
        flags.clear(self.device(), &self.queue)
    }

    fn dequantize(&self, store: &Store, read: SpanRead<'_>) -> Result<(Tensor, Tensor)> {
        self.check_all_submitted("decoding", &[store])?;
        let plan = DequantizePlan::new(store.shape(), store.format(), &read)?;
        let keys = Tensor::zeroed(self.device(), plan.elements(), ElementType::F32)?;
        let values = Tensor::zeroed(self.device(), plan.elements(), ElementType::F32)?;
        self.run("kvpack dequantize", &plan.bind(&self.kernels, store, &keys, &values)?)?;
        Ok((keys, values))
    }

    fn dequantize_with(&self, store: &Store, read: SpanRead<'_>, rows: &mut Option<(Tensor, Tensor)>) -> Result<()> {
        self.check_all_submitted("decoding", &[store])?;
        let plan = DequantizePlan::new(store.shape(), store.format(), &read)?;
        let (needed, held) = (plan.elements(), rows.as_ref().map_or(0, |(keys, _)| keys.elements()));
        if held < needed {
            // A prompt is read again with every part: the room for its next parts is made with the first.
            let most = (self.capabilities.limits.binding_bytes / 4) as usize;
            let larger = || Tensor::zeroed(self.device(), needed.max((2 * held).min(most)), ElementType::F32);
            *rows = Some((larger()?, larger()?));
        }
        let Some((keys, values)) = rows else { return Ok(()) };
        let (keys, values) = (keys.slice(0, needed)?, values.slice(0, needed)?);
        self.run("kvpack dequantize", &plan.bind(&self.kernels, store, &keys, &values)?)
    }
}

impl Attention for Wgpu {
    fn arithmetic(
        &self,
        shape: &AttentionShape,
        format: &SegmentFormat,
        query: QueryPrecision,
    ) -> Result<AttendArithmetic> {
        self.create_store(*shape, *format)?;
        Ok(arithmetic(shape, format, query.bytes(format), &self.capabilities))
    }

    async fn attend(
        &self,
        plan: &AttendPlan,
        stores: &[&Store],
        queries: &Tensor,
        options: AttendOptions,
    ) -> Result<Tensor> {
        let mut output = Tensor::zeroed(self.device(), plan.elements(), options.output)?;
        self.attend_into(plan, stores, queries, &mut output, options).await?;
        Ok(output)
    }

    async fn attend_into(
        &self,
        plan: &AttendPlan,
        stores: &[&Store],
        queries: &Tensor,
        output: &mut Tensor,
        options: AttendOptions,
    ) -> Result<()> {
        plan.check_elements("queries", queries.elements())?;
        plan.check_elements("output", output.elements())?;
        let options = AttendOptions { output: output.element_type(), ..options };
        let step = self.planned_step(plan, queries.element_type(), options, LseOutput::None)?;
        self.run_step(&step, stores, AttendTensors { queries, output, lse: None }).await
    }

    async fn attend_states(
        &self,
        plan: &AttendPlan,
        stores: &[&Store],
        queries: &Tensor,
        options: AttendOptions,
    ) -> Result<AttentionStates<Tensor>> {
        plan.check_elements("queries", queries.elements())?;
        let options = AttendOptions { output: ElementType::F32, ..options };
        let step = self.planned_step(plan, queries.element_type(), options, LseOutput::F32)?;
        let states = self.zeroed_states(plan.shape(), plan.rows())?;
        let tensors = AttendTensors { queries, output: &states.outputs, lse: Some(&states.lse) };
        self.run_step(&step, stores, tensors).await?;
        Ok(states)
    }

    async fn uncentre_lse(
        &self,
        store: &Store,
        queries: &Tensor,
        centres: RowCentres<'_>,
        states: AttentionStates<Tensor>,
    ) -> Result<AttentionStates<Tensor>> {
        self.check_all_submitted("log-sum-exps of original keys", &[store])?;
        let launch = UncentreLsePlan::new(store.shape(), centres)?.bind(&self.kernels, store, queries, &states.lse)?;
        self.run("kvpack uncentre_lse", &[launch].into_iter().collect())?;
        guard::settled(self.device()).await?;
        Ok(states)
    }

    async fn merge(
        &self,
        shape: &AttentionShape,
        first: &AttentionStates<Tensor>,
        second: &AttentionStates<Tensor>,
    ) -> Result<AttentionStates<Tensor>> {
        let rows = first.lse.elements() / shape.query_heads();
        let joined = self.zeroed_states(shape, rows)?;
        let launch = MergePairPlan::new(*shape, rows).bind(&self.kernels, first, second, &joined)?;
        self.run("kvpack merge", &[launch].into_iter().collect())?;
        guard::settled(self.device()).await?;
        Ok(joined)
    }

    fn merge_parts(
        &self,
        shape: &AttentionShape,
        parts: StateParts<'_, Tensor>,
        output: &mut Tensor,
        lse: Option<&mut Tensor>,
    ) -> Result<()> {
        parts.check(self, shape, output, lse.as_deref())?;
        let plan = MergePartsPlan::new(*shape, parts.parts, parts.rows)?;
        let launch = plan.bind(&self.kernels, parts.states, output, lse.as_deref())?;
        self.run("kvpack merge_parts", &[launch].into_iter().collect())
    }
}
