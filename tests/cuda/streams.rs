//! What threads, streams and captured graphs may do with the memory of a backend.

use std::thread;

use futures::executor::block_on;
use kvpack::backend::{Device, Packing, Storage};
use kvpack::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode, cuGraphGetNodes};
use kvpack::cuda::cudarc::driver::{CudaContext, DriverError};
use kvpack::cuda::peer::PeerSlots;
use kvpack::cuda::{Cuda, DEADLINE, Indices, KernelCache, NonFiniteFlags, Tensor, TopKPlan, Words};
use kvpack::format::KeyOrValue;
use kvpack::plan::{ElementType, Elements, Page};
use kvpack::ranks::{Reduction, Transport};
use kvpack::{AttentionShape, Error, SegmentFormat};

/// Memory of a stream that cudarc does not count is given back on a thread without a context. It leaves no error, and
/// an error of another call is still there for the next one.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn memory_is_given_back_on_threads_without_a_context() {
    let context = CudaContext::new(0).unwrap();
    let backend = Cuda::new(context.default_stream(), KernelCache::of_user()).unwrap();
    let drop_elsewhere = || {
        let tensor = block_on(backend.upload(Elements::F32(&[1.0; 64]))).unwrap();
        move || thread::spawn(move || drop(tensor)).join().unwrap()
    };
    drop_elsewhere()();
    assert_eq!(context.check_err(), Ok(()));
    let dropped = drop_elsewhere();
    let of_another = DriverError(CUresult::CUDA_ERROR_INVALID_VALUE);
    context.record_err::<()>(Err(of_another));
    dropped();
    assert_eq!(context.check_err(), Err(of_another));
}

/// What one stream writes could be read too early on another: such reads are refused.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn reads_on_other_streams_are_refused() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let other = backend.on_stream(backend.stream().context().new_stream().unwrap()).unwrap();
    let refused = |error: Option<Error>| assert!(matches!(error, Some(Error::Plan { .. })), "{error:?}");
    let tensor = block_on(backend.upload(Elements::F32(&[1.0; 64]))).unwrap();
    refused(block_on(other.download(&tensor)).err());
    refused(tensor.download_part(other.stream(), 3, 2).err());
    let indices = Indices::zeroed(backend.stream(), TopKPlan::new(1, 64, 2).unwrap().indices()).unwrap();
    refused(block_on(other.download_indices(&indices)).err());
    refused(Words::zeroed(backend.stream(), "words", 4).unwrap().download(other.stream()).err());
    let flags = NonFiniteFlags::new(backend.stream(), 1).unwrap();
    refused(block_on(other.read_non_finite_flags(&flags)).err());
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let mut store = backend.create_store(shape, SegmentFormat::F16).unwrap();
    block_on(backend.add_shard(&mut store, 1)).unwrap();
    let page = Page { shard: 0, index: 0 };
    refused(store.tile_words(other.stream(), KeyOrValue::Key, page, 0).err());
    assert!(store.tile_words(backend.stream(), KeyOrValue::Key, page, 0).is_ok());
    assert_eq!(tensor.download_part(backend.stream(), 3, 2).unwrap(), [1.0; 2]);
}

/// Elements in pinned memory may be overwritten once an upload returns, however much work is before it on the stream.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn pinned_elements_are_taken_before_uploads_return() {
    const ELEMENTS: usize = 1 << 10;
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let stream = backend.stream();
    // SAFETY: All elements are written before any is read.
    let mut pinned = unsafe { stream.context().alloc_pinned::<f32>(ELEMENTS) }.unwrap();
    let mut work = stream.alloc_zeros::<u8>(1 << 30).unwrap();
    let mut keep_busy = || (0..100).for_each(|_| stream.memset_zeros(&mut work).unwrap());
    pinned.as_mut_slice().unwrap().fill(1.0);
    keep_busy();
    let uploaded = Tensor::upload(stream, Elements::F32(pinned.as_slice().unwrap())).unwrap();
    pinned.as_mut_slice().unwrap().fill(2.0);
    let written = Tensor::zeroed(stream, ELEMENTS, ElementType::F32).unwrap();
    keep_busy();
    written.write(stream, Elements::F32(pinned.as_slice().unwrap())).unwrap();
    pinned.as_mut_slice().unwrap().fill(3.0);
    assert_eq!(uploaded.download(stream).unwrap(), [1.0; ELEMENTS]);
    assert_eq!(written.download(stream).unwrap(), [2.0; ELEMENTS]);
    // A graph would read them at every replay, and nothing can wait for it.
    let elements = Elements::F32(pinned.as_slice().unwrap());
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let refused = written.write(stream, elements);
    stream.end_capture(CUgraphInstantiate_flags(0)).unwrap();
    assert!(matches!(refused, Err(Error::Plan { .. })), "{refused:?}");
}

/// The default stream of a thread has one handle on all threads, but is another stream on each.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn default_streams_of_threads_are_refused() {
    let context = CudaContext::new(0).unwrap();
    let refused = |made: Result<Cuda, Error>| assert!(matches!(made, Err(Error::Plan { .. })), "{made:?}");
    refused(Cuda::new(context.per_thread_stream(), KernelCache::of_user()));
    let backend = Cuda::new(context.default_stream(), KernelCache::of_user()).unwrap();
    refused(backend.on_stream(context.per_thread_stream()));
}

/// A rank that is dropped while a graph captures its stream adds nothing to the graph, which would tell the others at
/// every replay that the rank has left. Its slots stay, since the exchanges of the graph use them.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn ranks_that_are_dropped_in_a_capture_stay_out_of_the_graph() {
    let backends = [0, 1].map(|_| Cuda::open(0, KernelCache::of_user()).unwrap());
    let slots_of = |rank: usize| PeerSlots::new(&backends[rank], (rank, 2), 64).unwrap();
    let slots = [0, 1].map(slots_of);
    let handles: Vec<_> = slots.iter().map(PeerSlots::handle).collect();
    // SAFETY: The handles are those of both ranks, of one process. Nothing is exchanged.
    let [mut rank, other] = slots.map(|slots| unsafe { slots.connect(&handles, DEADLINE) }.unwrap());
    drop(other);
    let mut tensor = block_on(backends[0].upload(Elements::F32(&[1.0; 8]))).unwrap();
    let stream = backends[0].stream();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    rank.all_reduce(&mut tensor, 8, Reduction::Sum).unwrap();
    drop(rank);
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph");
    let mut nodes = 0;
    // SAFETY: The graph lives, and without a list the driver writes only their number.
    unsafe { cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut nodes) }.result().unwrap();
    assert_eq!(nodes, 1, "the exchange alone");
    let again = slots_of(1);
    let handles = [handles[0].clone(), again.handle()];
    // SAFETY: As above.
    assert!(unsafe { again.connect(&handles, DEADLINE) }.is_ok(), "the slots of the rank are there");
}
