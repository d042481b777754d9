//! What threads, streams and captured graphs may do with the memory of a backend.

use std::thread;

use futures::executor::block_on;
use kvpack::backend::Device;
use kvpack::cuda::cudarc::driver::sys::CUresult;
use kvpack::cuda::cudarc::driver::{CudaContext, DriverError};
use kvpack::cuda::{Cuda, KernelCache};
use kvpack::plan::Elements;

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
