//! A transport over a communicator that an engine made by NCCL's own functions.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use futures::executor::block_on;
use kvpack::Error;
use kvpack::backend::Device;
use kvpack::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use kvpack::cuda::nccl::{Nccl, NcclId};
use kvpack::cuda::{Cuda, Tensor};
use kvpack::plan::Elements;
use kvpack::ranks::{Reduction, Transport};
use libloading::{Library, Symbol};

use super::{DEADLINE, backend, on_threads, two_gpus};

/// `ncclUniqueId`.
#[repr(C)]
struct Id([u8; 128]);

/// A function of NCCL. The caller names its type, as in NCCL's header.
fn function<'a, F>(nccl: &'a Library, name: &str) -> Symbol<'a, F> {
    // SAFETY: The types below are those of the header.
    unsafe { nccl.get(name.as_bytes()) }.unwrap()
}

/// What an engine does: NCCL's own blocking communicator, on the device of a backend.
fn communicator(nccl: &Library, backend: &Cuda, id: &NcclId, rank: usize) -> *mut c_void {
    backend.stream().context().bind_to_thread().unwrap();
    let join: Symbol<'_, unsafe extern "C" fn(*mut *mut c_void, c_int, Id, c_int) -> c_int> =
        function(nccl, "ncclCommInitRank");
    let mut communicator = std::ptr::null_mut();
    // SAFETY: NCCL writes a pointer, and the context of the rank's device is current.
    assert_eq!(unsafe { join(&mut communicator, 2, Id(id.to_bytes()), rank as c_int) }, 0);
    communicator
}

fn sum(transport: &mut Nccl) -> Vec<f32> {
    let backend = transport.backend().clone();
    let mine = [transport.rank() as f32 + 1.0, 10.0];
    let mut tensor = Tensor::upload(backend.stream(), Elements::F32(&mine)).unwrap();
    transport.all_reduce(&mut tensor, 2, Reduction::Sum).unwrap();
    transport.wait().unwrap();
    block_on(backend.download(&tensor)).unwrap()
}

/// The transport works over it, twice, and leaves it to the engine: it can still be used, and destroyed.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_engine_keeps_its_communicator() {
    let _gpus = two_gpus();
    let id = NcclId::new().unwrap();
    let sums = on_threads(2, |rank| {
        // SAFETY: NCCL's library was loaded before, by `NcclId::new`, and has no further start.
        let nccl = unsafe { Library::new("libnccl.so.2") }.unwrap();
        let backend = backend(rank);
        let raw = communicator(&nccl, &backend, &id, rank);
        let sums = [0; 2].map(|_| {
            // SAFETY: The communicator is that of the backend's device, and nothing else uses it.
            let mut transport = unsafe { Nccl::from_raw(&backend, raw, DEADLINE) }.unwrap();
            assert_eq!((transport.rank(), transport.ranks()), (rank, 2));
            sum(&mut transport)
        });
        let destroy: Symbol<'_, unsafe extern "C" fn(*mut c_void) -> c_int> = function(&nccl, "ncclCommDestroy");
        // SAFETY: The communicator is the engine's, and no transport is left.
        assert_eq!(unsafe { destroy(raw) }, 0);
        sums
    });
    assert!(sums.iter().flatten().all(|sum| *sum == [3.0, 20.0]), "{sums:?}");
}

/// A rank that waits for another in vain says so, and the engine still has its communicator to abort.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_engine_aborts_its_communicator() {
    let _gpus = two_gpus();
    let id = NcclId::new().unwrap();
    let results = on_threads(2, |rank| {
        // SAFETY: As above.
        let nccl = unsafe { Library::new("libnccl.so.2") }.unwrap();
        let backend = backend(rank);
        let raw = communicator(&nccl, &backend, &id, rank);
        // SAFETY: As above.
        let mut transport = unsafe { Nccl::from_raw(&backend, raw, Duration::from_secs(2)) }.unwrap();
        // Connects; the next call misses rank 1.
        sum(&mut transport);
        let waited = (rank == 0).then(|| {
            let mut tensor = Tensor::upload(backend.stream(), Elements::F32(&[1.0])).unwrap();
            let reduced = transport.all_reduce(&mut tensor, 1, Reduction::Sum);
            reduced.and_then(|()| transport.wait())
        });
        drop(transport);
        if rank == 0 {
            let abort: Symbol<'_, unsafe extern "C" fn(*mut c_void) -> c_int> = function(&nccl, "ncclCommAbort");
            // SAFETY: The communicator is the engine's, and no transport is left.
            assert_eq!(unsafe { abort(raw) }, 0);
        }
        waited
    });
    assert!(matches!(&results[0], Some(Err(Error::Transport { .. }))), "{results:?}");
}

/// A captured all-reduce writes to room of the transport. A larger one in between does not give that room to others.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_captured_sum_keeps_its_room() {
    const SENTINELS: usize = 64;
    let _gpus = two_gpus();
    let id = NcclId::new().unwrap();
    on_threads(2, |rank| {
        let mut transport = Nccl::connect(&backend(rank), &id, (rank, 2), DEADLINE).unwrap();
        let backend = transport.backend().clone();
        let upload = |of: &[f32]| Tensor::upload(backend.stream(), Elements::F32(of)).unwrap();
        let begin =
            || backend.stream().begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        let end = || backend.stream().end_capture(CUgraphInstantiate_flags(0)).unwrap();
        sum(&mut transport);
        let mut tensor = upload(&[rank as f32 + 1.0, 10.0]);
        begin();
        transport.all_reduce(&mut tensor, 2, Reduction::Sum).unwrap();
        let graph = end().expect("a graph");
        // Room that does not exist is not made within a graph.
        let mut large = upload(&vec![1.0; 1 << 20]);
        begin();
        let refused = transport.all_reduce(&mut large, 1 << 20, Reduction::Sum);
        drop(end());
        assert!(matches!(&refused, Err(Error::Plan { reason, .. }) if reason.contains("captured")), "{refused:?}");
        transport.all_reduce(&mut large, 1 << 20, Reduction::Sum).unwrap();
        transport.wait().unwrap();
        // They would lie where the room was, if it were free.
        let sentinels: Vec<Tensor> = (0..SENTINELS).map(|_| upload(&[7.0; 4])).collect();
        graph.launch().unwrap();
        transport.wait().unwrap();
        assert_eq!(block_on(backend.download(&tensor)).unwrap(), [3.0, 20.0]);
        for sentinel in &sentinels {
            assert_eq!(block_on(backend.download(sentinel)).unwrap(), [7.0; 4]);
        }
    });
}
