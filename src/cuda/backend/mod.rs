//! The CUDA backend: [`Backend`](crate::Backend) over a stream.

mod attention;
mod packing;
mod selection;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaStream;

use super::attend::scratch::SharedScratch;
use super::device::driver::{check_is_one_stream, driver_error, open_context};
use super::device::indices::Indices;
use super::device::kernels::Kernels;
use super::device::memory::Memory;
use super::device::program::KernelCache;
use super::device::span_bytes::SpanReads;
use super::device::store::{self, MOST_SHARDS, Store};
use super::device::tensor::Tensor;
use super::pack::rows::Launcher;
use super::pack::scratch::PackScratch;
use crate::Result;
use crate::backend::{Device, SpanBytes, SpanPlace, Storage};
use crate::format::{AttentionShape, SegmentFormat};
use crate::plan::{Elements, LargerShard};

/// What the stream of a backend is called in errors.
const STREAM_OF_BACKEND: &str = "the stream of a backend";

/// A CUDA stream with the kernels of its device. Cheap to clone.
///
/// Work is queued on the stream in order. The caller must order writes of other streams before it.
///
/// ```no_run
/// use kvpack::cuda::{Cuda, KernelCache};
/// # fn example(stream: std::sync::Arc<kvpack::cuda::cudarc::driver::CudaStream>) -> kvpack::Result<()> {
/// // The stream of an engine ...
/// let backend = Cuda::new(stream, KernelCache::of_user())?;
/// // ... or a new one of the first device.
/// let backend = Cuda::open(0, KernelCache::of_user())?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Cuda {
    stream: Arc<CudaStream>,
    kernels: Arc<Kernels>,
    scratch: Arc<Mutex<PackScratch>>,
    attend_scratch: Arc<SharedScratch>,
}

impl Cuda {
    /// The backend on an engine's stream. Compiled kernels are kept in `cache`.
    ///
    /// # Errors
    /// [`Error::Adapter`](crate::Error::Adapter) when the device is older than compute capability 8.0, or the driver
    /// than CUDA 11.8; [`Error::Plan`](crate::Error::Plan) for the default stream of a thread
    /// (`CudaContext::per_thread_stream`), which is another stream on every thread.
    pub fn new(stream: Arc<CudaStream>, cache: KernelCache) -> Result<Self> {
        check_is_one_stream(STREAM_OF_BACKEND, stream.cu_stream())?;
        let kernels = Arc::new(Kernels::new(stream.context().clone(), cache)?);
        Ok(Self { stream, kernels, scratch: Arc::default(), attend_scratch: Arc::default() })
    }

    /// The backend on a new stream of a device's primary context.
    ///
    /// # Errors
    /// [`Error::Adapter`](crate::Error::Adapter) when there is no driver or it is older than CUDA 11.8, or there is no
    /// such device or it is older than compute capability 8.0.
    pub fn open(ordinal: usize, cache: KernelCache) -> Result<Self> {
        let context = open_context(ordinal)?;
        Self::new(context.new_stream().map_err(|error| driver_error("a stream", 0, error))?, cache)
    }

    /// The same kernels on another stream of the same device, for caches on that stream: stores and tensors that kvpack
    /// allocates belong to the stream of the backend that created them.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) for the default stream of a thread, as [`Cuda::new`].
    pub fn on_stream(&self, stream: Arc<CudaStream>) -> Result<Self> {
        check_is_one_stream(STREAM_OF_BACKEND, stream.cu_stream())?;
        let kernels = self.kernels.clone();
        Ok(Self { stream, kernels, scratch: Arc::default(), attend_scratch: Arc::default() })
    }

    /// The stream.
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The compiled kernels of the device. Another library that stands on the device layer can share them.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    pub(super) fn attend_scratch(&self) -> &SharedScratch {
        &self.attend_scratch
    }

    /// Memory that the calls of the backend share. No other thread may write to it between this call's writes and the
    /// launches that read them.
    fn scratch(&self) -> MutexGuard<'_, PackScratch> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn launcher(&self) -> Launcher<'_> {
        Launcher { stream: &self.stream, kernels: &self.kernels }
    }

    /// The launcher for a call that uses the store and the tensors. They must belong to the backend's stream.
    fn launcher_for(&self, what: &'static str, store: &Store, tensors: &[&Tensor]) -> Result<Launcher<'_>> {
        store.check_stream(what, &self.stream)?;
        self.check_tensors(what, tensors)?;
        Ok(self.launcher())
    }

    /// Checks that work on the backend's stream may use the tensors.
    fn check_tensors(&self, what: &'static str, tensors: &[&Tensor]) -> Result<()> {
        tensors.iter().try_for_each(|tensor| tensor.memory().check_stream(what, &self.stream))
    }
}

impl Device for Cuda {
    type Tensor = Tensor;
    type Indices = Indices;

    fn name(&self) -> String {
        let name = self.stream.context().name().unwrap_or_else(|_| "unknown device".into());
        format!("{name} (CUDA, {})", self.kernels.facts().architecture())
    }

    async fn upload(&self, elements: Elements<'_>) -> Result<Tensor> {
        Tensor::upload(&self.stream, elements)
    }

    async fn download(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        tensor.download(&self.stream)
    }

    async fn upload_indices(&self, tokens: &[u32], kv_heads: usize, below: u32) -> Result<Indices> {
        Indices::upload(&self.stream, tokens, kv_heads, below)
    }

    async fn download_indices(&self, indices: &Indices) -> Result<Vec<u32>> {
        indices.download(&self.stream)
    }

    fn elements(&self, tensor: &Tensor) -> usize {
        tensor.elements()
    }
}

impl Storage for Cuda {
    type Store = Store;
    type Shard = LargerShard<Arc<Memory>>;
    type SpanReads = SpanReads;

    fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<Store> {
        Store::new(&self.stream, shape, format)
    }

    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32 {
        store::max_shard_pages(shape, format)
    }

    async fn add_shard(&self, store: &mut Store, pages: u32) -> Result<()> {
        store.check_stream("a shard", &self.stream)?;
        store.add_shard(&self.stream, pages)
    }

    /// As many as the tables of a step hold.
    fn shards_at_once(&self) -> usize {
        MOST_SHARDS
    }

    async fn larger_shard(&self, store: &Store, pages: u32) -> Result<Self::Shard> {
        store.check_stream("a shard", &self.stream)?;
        store.larger_shard(&self.stream, pages)
    }

    fn replace_shard(&self, store: &mut Store, shard: Self::Shard) -> Result<()> {
        store.check_stream("a shard", &self.stream)?;
        store.replace_shard(shard)
    }

    fn drop_shard(&self, store: &mut Store) {
        store.drop_shard();
    }

    fn available_bytes(&self) -> Option<u64> {
        None // what the driver calls free leaves out memory that was freed and waits in its pool
    }

    async fn reserve_ranges(&self, store: &mut Store, slots: usize) -> Result<()> {
        store.check_stream("span ranges", &self.stream)?;
        store.reserve_ranges(&self.stream, slots)
    }

    async fn reserve_centres(&self, store: &mut Store, slots: usize) -> Result<()> {
        store.check_stream("centres", &self.stream)?;
        store.reserve_centres(&self.stream, slots)
    }

    async fn read_spans(&self, places: &[(&Store, SpanPlace<'_>)]) -> Result<Vec<SpanBytes>> {
        places.iter().try_for_each(|(store, _)| store.check_stream("a span", &self.stream))?;
        places.iter().map(|&(store, place)| store.read_span(&self.stream, place)).collect()
    }

    fn begin_reads(&self, places: &[(&Store, SpanPlace<'_>)]) -> Result<SpanReads> {
        places.iter().try_for_each(|(store, _)| store.check_stream("a span", &self.stream))?;
        SpanReads::begin(&self.stream, places)
    }

    fn check_submitted(&self, _: &'static str, _: &[&Self::Store]) -> Result<()> {
        Ok(())
    }

    fn have_arrived(&self, reads: &SpanReads) -> Result<bool> {
        reads.have_arrived()
    }

    async fn finish_reads(&self, reads: SpanReads) -> Result<Vec<SpanBytes>> {
        reads.finish()
    }

    fn write_span(&self, store: &mut Store, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()> {
        store.check_stream("a span", &self.stream)?;
        store.write_span(&self.stream, bytes, place)
    }

    fn span_layout(&self) -> &'static str {
        "cuda with matrices of halves"
    }

    fn store_bytes(&self, store: &Store) -> u64 {
        store.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::{Cuda, KernelCache};
    use crate::Error;

    #[test]
    fn no_driver_is_an_error_and_no_panic() {
        if crate::cuda::driver_present() {
            return;
        }
        let error = Cuda::open(0, KernelCache::Directory("unused".into())).expect_err("there is no driver");
        assert!(matches!(error, Error::Adapter { .. }), "{error}");
    }
}
