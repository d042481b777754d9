//! A rank that fails at any exchange: errors on the others within a bound, and caches that go on.

use std::time::{Duration, Instant};

use kvpack::cache::{ModelCache, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor, nmse};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::ranks::{ContextParallel, Placement, Reduction, ThreadTransport, Transport};
use kvpack::{Error, Result};
use pollster::block_on;

use super::script::{SEQUENCES, shape};
use super::{LONG, failed};
use crate::any_backend::model_steps::recipe;
use crate::any_backend::random_rows::Random;

const RANKS: usize = 3;

/// How a rank fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// It is gone.
    Dies,
    /// It does nothing until long after the deadline.
    Hangs(Duration),
}

/// A transport that fails at one of its exchanges.
struct Faulty {
    inner: Option<ThreadTransport>,
    backend: Cpu,
    place: (usize, usize),
    calls: usize,
    fault: Option<(usize, Fault)>,
}

impl Faulty {
    fn new(inner: ThreadTransport, fault: Option<(usize, Fault)>) -> Self {
        let (backend, place) = (inner.backend().clone(), (inner.rank(), inner.ranks()));
        Self { inner: Some(inner), backend, place, calls: 0, fault }
    }

    fn next(&mut self) -> Result<&mut ThreadTransport> {
        self.calls += 1;
        if let Some((_, fault)) = self.fault.filter(|&(at, _)| at == self.calls - 1) {
            if let Fault::Hangs(time) = fault {
                std::thread::sleep(time);
            }
            self.inner = None;
        }
        let (rank, ranks) = self.place;
        let reason = "it failed on purpose".into();
        self.inner.as_mut().ok_or(Error::Transport { operation: "test", rank, ranks, failed: vec![rank], reason })
    }
}

impl Transport for Faulty {
    type Backend = Cpu;

    fn backend(&self) -> &Cpu {
        &self.backend
    }

    fn rank(&self) -> usize {
        self.place.0
    }

    fn ranks(&self) -> usize {
        self.place.1
    }

    fn all_gather(&mut self, part: &CpuTensor, elements: usize, all: &mut CpuTensor) -> Result<()> {
        self.next()?.all_gather(part, elements, all)
    }

    fn broadcast(&mut self, tensor: &mut CpuTensor, elements: usize, root: usize) -> Result<()> {
        self.next()?.broadcast(tensor, elements, root)
    }

    fn all_reduce(&mut self, tensor: &mut CpuTensor, elements: usize, reduction: Reduction) -> Result<()> {
        self.next()?.all_reduce(tensor, elements, reduction)
    }

    fn wait(&mut self) -> Result<()> {
        match &mut self.inner {
            Some(inner) => inner.wait(),
            None => self.next().map(drop),
        }
    }
}

type Rank = ContextParallel<Faulty>;

fn rows(random: &mut Random, rows: usize, heads: usize) -> CpuTensor {
    CpuTensor::F32((0..rows * heads * 64).map(|_| random.normal()).collect())
}

/// What every step appends to sequence 0.
const STEPS: [usize; 3] = [300, 1, 129];

/// A step of one layer as engines make it. On an error it is abandoned.
fn step(rank: &mut Rank, tokens: usize, random: &mut Random) -> Result<Vec<f32>> {
    let runs = [if tokens == 1 { TokenRun::decode(0) } else { TokenRun::chunk(0, tokens) }];
    let [keys, values, queries] = [2, 2, 4].map(|heads| rows(random, tokens, heads));
    let attended = (|| {
        block_on(rank.reserve_for_append(&runs))?;
        rank.begin_append(&runs)?;
        block_on(rank.store(0, RowLayout::token_major(tokens, &shape()), &keys, &values))?;
        let output = block_on(rank.attend(0, &queries, ElementType::F32))?;
        rank.commit()?;
        Ok(output.to_f32())
    })();
    if attended.is_err() {
        rank.abandon();
    }
    attended
}

/// What a rank had when it failed, and what it does once it has found the others again.
#[derive(Debug)]
struct Outcome {
    calls: usize,
    error: Option<Error>,
    elapsed: Duration,
    length: usize,
    after: Vec<f32>,
}

fn run(transports: (ThreadTransport, ThreadTransport), fault: Option<(usize, Fault)>) -> Option<Outcome> {
    let begun = Instant::now();
    let (first, second) = transports;
    let new = |transport| {
        let layers = [(shape(), recipe("f16"))];
        block_on(Rank::new(transport, &layers, SEQUENCES, Placement::new(RANKS).unwrap()))
    };
    let mut rank = match new(Faulty::new(first, fault)) {
        Ok(rank) => rank,
        Err(error) => {
            assert!(matches!(error, Error::Transport { .. }), "{error}");
            return None;
        }
    };
    let mut random = Random::new(1);
    let steps = STEPS.iter().try_for_each(|&tokens| step(&mut rank, tokens, &mut random).map(drop));
    let elapsed = begun.elapsed();
    let calls = rank.transport_mut().calls;
    let rejoined = block_on(rank.rejoin(Faulty::new(second, None))).unwrap();
    assert!(rejoined.lost.is_empty() && rejoined.truncated.iter().all(|&sequence| sequence == 0));
    let length = rank.cache().length(0).unwrap();
    let after = step(&mut rank, 70, &mut Random::new(9)).unwrap();
    Some(Outcome { calls, error: steps.err(), elapsed, length, after })
}

fn on_ranks(deadline: Duration, faulty: usize, fault: Option<(usize, Fault)>) -> Vec<Option<Outcome>> {
    let connect = |deadline| ThreadTransport::connect(vec![Cpu::new(); RANKS], deadline).unwrap();
    let both = connect(deadline).into_iter().zip(connect(LONG));
    std::thread::scope(|scope| {
        let of_rank = |(rank, both)| scope.spawn(move || run(both, fault.filter(|_| rank == faulty)));
        let threads: Vec<_> = both.enumerate().map(of_rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What one cache returns for the step that follows, once it is of this length.
fn expected(length: usize) -> Vec<f64> {
    let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), recipe("f16"))], 1).unwrap();
    let mut random = Random::new(1);
    let mut step = |tokens: usize, random: &mut Random| {
        let runs = [TokenRun::chunk(0, tokens)];
        let [keys, values, queries] = [2, 2, 4].map(|heads| rows(random, tokens, heads));
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        block_on(cache.store(0, RowLayout::token_major(tokens, &shape()), &keys, &values)).unwrap();
        let output = block_on(cache.attend(0, &queries, ElementType::F32)).unwrap().to_f32();
        cache.commit().unwrap();
        (cache.length(0).unwrap(), output)
    };
    let mut held = 0;
    for tokens in STEPS {
        if held < length {
            held = step(tokens, &mut random).0;
        }
    }
    assert_eq!(held, length, "no length between two steps");
    step(70, &mut Random::new(9)).1.into_iter().map(f64::from).collect()
}

/// Whatever the ranks had, they go on with the same, and attend to all of it.
fn check_after(what: &str, outcomes: &[&Outcome]) {
    let expected = expected(outcomes[0].length);
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.length, outcomes[0].length, "{what}, rank {rank}");
        assert!(outcome.after == outcomes[0].after, "{what}: rank {rank} returns other bits");
        let error = nmse(&outcome.after, &expected);
        assert!(error <= 1e-6, "{what}, rank {rank}: {error:.1e} after {} tokens", outcome.length);
    }
}

#[test]
fn a_rank_that_dies_at_any_exchange_is_named_and_the_others_go_on() {
    let whole = on_ranks(LONG, 0, None);
    let whole: Vec<&Outcome> = whole.iter().flatten().collect();
    assert!(whole.len() == RANKS && whole.iter().all(|of| of.error.is_none()));
    check_after("no failure", &whole);
    let calls = whole[0].calls;
    assert!(calls > STEPS.len() * 3, "{calls} exchanges");
    for at in 0..calls {
        let faulty = [0, 2][at % 2];
        let outcomes = on_ranks(LONG, faulty, Some((at, Fault::Dies)));
        let outcomes: Vec<&Outcome> = outcomes.iter().flatten().collect();
        // Caches that were never made are made again with the next transports.
        assert_eq!(outcomes.len(), if at == 0 { 0 } else { RANKS }, "exchange {at}");
        for (rank, outcome) in outcomes.iter().enumerate() {
            assert!(outcome.elapsed < LONG / 2, "exchange {at}, rank {rank}: {:?}", outcome.elapsed);
            let error = outcome.error.clone().map_or(Ok(()), Err);
            assert_eq!(failed(&error), [faulty], "exchange {at}, rank {rank}");
        }
        if at > 0 {
            check_after(&format!("exchange {at}"), &outcomes);
        }
    }
}

#[test]
fn a_rank_that_hangs_is_an_error_within_the_deadline() {
    let deadline = Duration::from_millis(300);
    for at in [2, 5, 9] {
        let outcomes = on_ranks(deadline, 1, Some((at, Fault::Hangs(3 * deadline))));
        let outcomes: Vec<&Outcome> = outcomes.iter().flatten().collect();
        assert_eq!(outcomes.len(), RANKS);
        for (rank, outcome) in outcomes.iter().enumerate() {
            assert!(matches!(outcome.error, Some(Error::Transport { .. })), "exchange {at}, rank {rank}");
        }
        check_after(&format!("exchange {at}"), &outcomes);
    }
}

/// A rank that committed the last step and one that did not, and one whose process is new.
#[test]
fn ranks_agree_on_what_all_have() {
    for is_new in [false, true] {
        let connect = || ThreadTransport::connect(vec![Cpu::new(); RANKS], LONG).unwrap();
        let (first, second) = (connect(), connect());
        let lengths = std::thread::scope(|scope| {
            let of_rank = |(first, second): (ThreadTransport, ThreadTransport)| {
                scope.spawn(move || {
                    let new = |transport| {
                        let layers = [(shape(), recipe("saw-int4"))];
                        block_on(ContextParallel::new(transport, &layers, 2, Placement::new(RANKS).unwrap())).unwrap()
                    };
                    let mut rank = new(first);
                    let append = |rank: &mut ContextParallel<ThreadTransport>, commits: bool| {
                        let runs = [TokenRun::chunk(0, 200)];
                        let keys = rows(&mut Random::new(4), 200, 2);
                        block_on(rank.reserve_for_append(&runs)).unwrap();
                        rank.begin_append(&runs).unwrap();
                        block_on(rank.store(0, RowLayout::token_major(200, &shape()), &keys, &keys)).unwrap();
                        if commits { rank.commit().unwrap() } else { rank.abandon() }
                    };
                    append(&mut rank, true);
                    let is_behind = rank.rank() == 1;
                    append(&mut rank, !is_behind);
                    if is_behind && is_new {
                        rank.clear(0).unwrap();
                    }
                    let rejoined = block_on(rank.rejoin(second)).unwrap();
                    (rejoined, rank.cache().length(0).unwrap(), rank.cache().length(1).unwrap())
                })
            };
            let threads: Vec<_> = first.into_iter().zip(second).map(of_rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for (rejoined, length, other) in lengths {
            assert_eq!((rejoined.truncated, rejoined.lost), (vec![0], Vec::new()));
            assert_eq!((length, other), (if is_new { 0 } else { 200 }, 0));
        }
    }
}
