//! Sequences that ranks share: threads with CPU backends, against one cache.

mod compress_again;
mod evictions;
mod failures;
mod refused;
mod rejoin;
mod script;
mod sequences;
mod step_time;
mod transport;

use std::time::Duration;

use kvpack::Result;
use kvpack::cpu::Cpu;
use kvpack::ranks::{ThreadTransport, Transport};

/// Longer than any call of a test takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// What every rank returns, in the order of the ranks.
fn on_ranks<R: Send>(ranks: usize, deadline: Duration, run: impl Fn(ThreadTransport) -> R + Sync) -> Vec<R> {
    let transports = ThreadTransport::connect(vec![Cpu::new(); ranks], deadline).unwrap();
    std::thread::scope(|scope| {
        let of_rank = |transport| scope.spawn(|| run(transport));
        let threads: Vec<_> = transports.into_iter().map(of_rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The error of a transport, and the ranks that it names.
fn failed<R: std::fmt::Debug>(result: &Result<R>) -> &[usize] {
    match result {
        Err(kvpack::Error::Transport { failed, .. }) => failed,
        other => panic!("{other:?} is no failure of a transport"),
    }
}

/// A tensor of the transport's ranks that all agree on.
fn rank_of(transport: &ThreadTransport) -> f32 {
    transport.rank() as f32
}
