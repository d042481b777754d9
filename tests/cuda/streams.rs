//! What threads, streams and captured graphs may do with the memory of a backend.

use std::thread;

use futures::executor::block_on;
use kvpack::backend::{Device, Packing, Storage};
use kvpack::cuda::cudarc::driver::sys::CUresult;
use kvpack::cuda::cudarc::driver::{CudaContext, DriverError};
use kvpack::cuda::{Cuda, Indices, KernelCache, NonFiniteFlags, TopKPlan, Words};
use kvpack::format::KeyOrValue;
use kvpack::plan::{Elements, Page};
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
    let other = backend.on_stream(backend.stream().context().new_stream().unwrap());
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
