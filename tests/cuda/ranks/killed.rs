//! A rank in another process that is killed: the survivor gets an error in time, stays alive, and so do its caches.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use futures::executor::block_on;
use kvpack::backend::{AttentionStates, Device};
use kvpack::cuda::peer::{PeerHandle, PeerSlots};
use kvpack::cuda::{Cuda, Tensor};
use kvpack::plan::{ElementType, Elements, QueryRun, RowLayout};
use kvpack::ranks::{StateExchange, Transport};
use kvpack::{AttentionShape, Error, KvCache, Recipe};

use super::{WORDS, backend};
use any_backend::random_rows::Random;

const KILLS: usize = 20;

/// In time is 5 s; the deadline is far below.
const IN_TIME: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_millis(800);

/// What the child's environment names its transport with.
const ROLE: &str = "KVPACK_TEST_RANK";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.trim().bytes().map(|digit| (digit as char).to_digit(16).unwrap() as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Exchanges until it fails.
fn exchange_on<T: Transport<Backend = Cuda>>(transport: &mut T) -> Error {
    let shape = AttentionShape::new(32, 8, 128).unwrap();
    let backend = transport.backend().clone();
    let zeroed = |elements| Tensor::zeroed(backend.stream(), elements, ElementType::F32).unwrap();
    let states = AttentionStates { outputs: zeroed(32 * 128), lse: zeroed(32) };
    let mut gathered = block_on(transport.room_for_states(&shape, 1)).unwrap();
    let mut output = zeroed(32 * 128);
    loop {
        for _ in 0..50 {
            let exchange = StateExchange { shape, rows: 1, states: &states, gathered: &mut gathered };
            if let Err(error) = transport.merge_states(exchange, &mut output, None) {
                return error;
            }
        }
        if let Err(error) = transport.wait() {
            return error;
        }
    }
}

/// The process of the rank that is killed, started by the tests below.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rank_in_another_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let backend = backend(1);
    let hear = || {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        bytes(&line)
    };
    if role == "peer" {
        let slots = PeerSlots::new(&backend, (1, 2), WORDS).unwrap();
        println!("READY {}", hex(&slots.handle().to_bytes()));
        let handles = [PeerHandle::from_bytes(&hear()).unwrap(), slots.handle()];
        // SAFETY: The handles are those of both ranks.
        exchange_on(&mut unsafe { slots.connect(&handles, DEADLINE) }.unwrap());
    }
    #[cfg(feature = "nccl")]
    if role == "nccl" {
        use kvpack::cuda::nccl::{Nccl, NcclId};
        println!("READY ");
        let id = NcclId::from_bytes(hear().try_into().unwrap());
        exchange_on(&mut Nccl::connect(&backend, &id, (1, 2), DEADLINE).unwrap());
    }
}

struct Rank1 {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Rank1 {
    fn start(role: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "ranks::killed::rank_in_another_process"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        Self { process, to, from }
    }

    /// What it says once it is ready.
    fn ready(&mut self) -> Vec<u8> {
        loop {
            let mut line = String::new();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "the other process has ended");
            if let Some((_, said)) = line.split_once("READY ") {
                return bytes(said);
            }
        }
    }

    fn tell(&mut self, said: &[u8]) {
        writeln!(self.to, "{}", hex(said)).unwrap();
    }
}

impl Drop for Rank1 {
    fn drop(&mut self) {
        self.process.kill().unwrap_or(());
        self.process.wait().unwrap();
    }
}

/// A cache of the survivor, which must not change.
struct Kept {
    cache: KvCache<Cuda>,
    queries: Tensor,
    before: Vec<f32>,
}

impl Kept {
    fn new(backend: &Cuda) -> Self {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let mut random = Random::new(3);
        let mut rows = |elements: usize| {
            let rows: Vec<f32> = (0..elements).map(|_| random.normal()).collect();
            Tensor::upload(backend.stream(), Elements::F32(&rows)).unwrap()
        };
        let (keys, values, queries) = (rows(200 * 128), rows(200 * 128), rows(256));
        let mut cache = KvCache::new(backend.clone(), shape, 1, Recipe::f16()).unwrap();
        block_on(cache.extend(0, RowLayout::token_major(200, &shape), &keys, &values)).unwrap();
        let mut kept = Self { cache, queries, before: Vec::new() };
        kept.before = kept.attend();
        kept
    }

    fn attend(&self) -> Vec<f32> {
        let output = block_on(self.cache.attend_runs(&[QueryRun::decode(0)], &self.queries, ElementType::F32)).unwrap();
        block_on(self.cache.backend().download(&output)).unwrap()
    }
}

/// Exchanges with the other process, kills it `after` a while, and returns how long the error took from then on.
fn survive<T: Transport<Backend = Cuda>>(
    transport: &mut T,
    other: &mut Rank1,
    after: Duration,
    kept: &Kept,
) -> Duration {
    let killed = thread::scope(|scope| {
        let killer = scope.spawn(|| {
            thread::sleep(after);
            other.process.kill().unwrap();
            Instant::now()
        });
        let error = exchange_on(transport);
        let at = Instant::now();
        assert!(matches!(error, Error::Transport { .. }), "{error}");
        at.saturating_duration_since(killer.join().unwrap())
    });
    let mut tensor = Tensor::zeroed(transport.backend().stream(), 8, ElementType::F32).unwrap();
    let begin = Instant::now();
    assert!(matches!(transport.broadcast(&mut tensor, 8, 0), Err(Error::Transport { .. })), "it is lost for good");
    assert!(begin.elapsed() < Duration::from_millis(50), "and says so at once");
    assert!(kept.attend() == kept.before, "the survivor's cache has changed");
    killed
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_killed_peer_is_an_error_in_time() {
    let _gpus = super::two_gpus();
    let backend = backend(0);
    let (kept, mut random, mut longest) = (Kept::new(&backend), Random::new(1), Duration::ZERO);
    for _ in 0..KILLS {
        let mut other = Rank1::start("peer");
        let slots = PeerSlots::new(&backend, (0, 2), WORDS).unwrap();
        let theirs = PeerHandle::from_bytes(&other.ready()).unwrap();
        other.tell(&slots.handle().to_bytes());
        let handles = [slots.handle(), theirs];
        // SAFETY: The handles are those of both ranks. The other one is killed while this one writes to its memory:
        // that the driver keeps it is what is tested.
        let mut peer = unsafe { slots.connect(&handles, DEADLINE) }.unwrap();
        longest = longest.max(survive(&mut peer, &mut other, Duration::from_millis(random.below(400) as u64), &kept));
    }
    println!("{KILLS} peers killed, an error after {longest:?} at the latest");
    assert!(longest < IN_TIME, "{longest:?}");
}

#[cfg(feature = "nccl")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_killed_rank_of_nccl_is_an_error_in_time() {
    use kvpack::cuda::nccl::{Nccl, NcclId};
    let _gpus = super::two_gpus();
    let backend = backend(0);
    let (kept, mut random, mut longest) = (Kept::new(&backend), Random::new(2), Duration::ZERO);
    for _ in 0..KILLS {
        let mut other = Rank1::start("nccl");
        other.ready();
        let id = NcclId::new().unwrap();
        other.tell(&id.to_bytes());
        let mut nccl = Nccl::connect(&backend, &id, (0, 2), DEADLINE).unwrap();
        longest = longest.max(survive(&mut nccl, &mut other, Duration::from_millis(random.below(400) as u64), &kept));
    }
    println!("{KILLS} ranks of NCCL killed, an error after {longest:?} at the latest");
    assert!(longest < IN_TIME, "{longest:?}");
}
