//! Ranks that exchange through NCCL and through peer memory. Ranks are threads with a GPU each, since a rank that waits in
//! a kernel holds up those on its GPU. What needs more GPUs than there are says so.
//!
//!     cargo test --release -p kvpack-tests --features cuda,nccl --test cuda -- --ignored ranks::

mod exchanges;
mod killed;
#[cfg(feature = "nccl")]
mod nccl;
mod policies;
mod steps;

use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use kvpack::cuda::cudarc::driver::CudaContext;
use kvpack::cuda::peer::{Peer, PeerHandle, PeerSlots};
use kvpack::cuda::{Cuda, KernelCache};

/// Enough for kernels that are compiled while another rank waits.
const DEADLINE: Duration = Duration::from_secs(20);

/// Words of a slot: few, so that longer operations take several launches.
const WORDS: usize = 8 * 32 * 129;

fn gpus() -> usize {
    CudaContext::device_count().expect("an NVIDIA GPU").max(1) as usize
}

/// The GPUs, for one test at a time: kernels of one test that wait for each other would wait for those of another that
/// came between. Fails on a machine with one GPU: a test that ran nothing would look like one that passed.
fn two_gpus() -> MutexGuard<'static, ()> {
    static GPUS: Mutex<()> = Mutex::new(());
    assert!(
        gpus() >= 2,
        "ranks need two GPUs, and this machine has {}: leave these tests out by --skip ranks::",
        gpus()
    );
    // A test that failed leaves the GPUs as usable as one that passed.
    GPUS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the machine has the number of GPUs that a larger case needs.
fn are_gpus(needed: usize, what: &str) -> bool {
    if gpus() < needed {
        eprintln!("NOT RUN: {what} needs {needed} GPUs; this machine has {}", gpus());
    }
    gpus() >= needed
}

/// A backend for a rank.
fn backend(rank: usize) -> Cuda {
    Cuda::open(rank % gpus(), KernelCache::of_user()).expect("an NVIDIA GPU")
}

/// What `work` returns on every rank, connected by peer memory.
fn over_peers<R: Send>(ranks: usize, deadline: Duration, work: impl Fn(Peer) -> R + Sync) -> Vec<R> {
    let (handles, all_there) = (Mutex::new(vec![None; ranks]), Barrier::new(ranks));
    let of_rank = |rank: usize| {
        let slots = PeerSlots::new(&backend(rank), (rank, ranks), WORDS).unwrap();
        // As another process would get it.
        handles.lock().unwrap()[rank] = Some(slots.handle().to_bytes());
        all_there.wait();
        let handles: Vec<PeerHandle> = {
            let bytes = handles.lock().unwrap();
            bytes.iter().flatten().map(|bytes| PeerHandle::from_bytes(bytes).unwrap()).collect()
        };
        // SAFETY: The handles are those of the ranks of this exchange, in one process.
        work(unsafe { slots.connect(&handles, deadline) }.unwrap())
    };
    on_threads(ranks, of_rank)
}

/// What `work` returns on every rank, connected by NCCL.
#[cfg(feature = "nccl")]
fn over_nccl<R: Send>(ranks: usize, deadline: Duration, work: impl Fn(kvpack::cuda::nccl::Nccl) -> R + Sync) -> Vec<R> {
    use kvpack::cuda::nccl::{Nccl, NcclId};
    let id = NcclId::new().unwrap();
    on_threads(ranks, |rank| work(Nccl::connect(&backend(rank), &id, (rank, ranks), deadline).unwrap()))
}

fn on_threads<R: Send>(ranks: usize, of_rank: impl Fn(usize) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn({
                    let of_rank = &of_rank;
                    move || of_rank(rank)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
