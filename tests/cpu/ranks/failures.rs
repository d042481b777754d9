//! A rank that fails at any exchange: errors on the others within a bound, and caches that go on.

use std::time::{Duration, Instant};

use kvpack::backend::TensorRows;
use kvpack::cache::{DenseLayer, MeasuredQueries, ModelCache, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor, nmse};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::policy::{Merging, Policy, Spans};
use kvpack::ranks::{ContextParallel, Placement, Reduction, ThreadTransport, Transport};
use kvpack::{AttentionShape, Error, Result};
use pollster::block_on;

use super::script::{SEQUENCES, shape};
use super::{LONG, failed};
use any_backend::model_steps::recipe;
use any_backend::random_rows::Random;

const RANKS: usize = 3;

/// How a rank fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// It is gone.
    Dies,
    /// It does nothing until long after the deadline.
    Hangs(Duration),
    /// Its exchanges say that they are done, and the next wait that they were not, as those that a stream queues.
    IsTold,
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

    /// Whether an exchange failed that nobody was told of yet.
    fn is_told_later(&self) -> bool {
        self.inner.is_none() && matches!(self.fault, Some((_, Fault::IsTold)))
    }

    /// The transport of an exchange; none if it does nothing.
    fn next(&mut self) -> Result<Option<&mut ThreadTransport>> {
        self.calls += 1;
        if let Some((_, fault)) = self.fault.filter(|&(at, _)| at == self.calls - 1) {
            if let Fault::Hangs(time) = fault {
                std::thread::sleep(time);
            }
            self.inner = None;
        }
        if self.is_told_later() {
            return Ok(None);
        }
        let (rank, ranks) = self.place;
        let reason = "it failed on purpose".into();
        let failed = Error::Transport { operation: "test", rank, ranks, failed: vec![rank], reason };
        self.inner.as_mut().map(Some).ok_or(failed)
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
        self.next()?.map_or(Ok(()), |inner| inner.all_gather(part, elements, all))
    }

    fn broadcast(&mut self, tensor: &mut CpuTensor, elements: usize, root: usize) -> Result<()> {
        self.next()?.map_or(Ok(()), |inner| inner.broadcast(tensor, elements, root))
    }

    fn all_reduce(&mut self, tensor: &mut CpuTensor, elements: usize, reduction: Reduction) -> Result<()> {
        self.next()?.map_or(Ok(()), |inner| inner.all_reduce(tensor, elements, reduction))
    }

    fn wait(&mut self) -> Result<()> {
        match &mut self.inner {
            Some(inner) => inner.wait(),
            None => {
                self.fault = None;
                self.next().map(drop)
            }
        }
    }
}

type Rank = ContextParallel<Faulty>;

pub(super) fn rows(random: &mut Random, rows: usize, heads: usize) -> CpuTensor {
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
        let is_faulty = move |rank: usize| rank == faulty || matches!(fault, Some((_, Fault::IsTold)));
        let of_rank = |(rank, both)| scope.spawn(move || run(both, fault.filter(|_| is_faulty(rank))));
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

/// Where no rank is told of a failure before it waits, none keeps a step that was computed from it.
#[test]
fn steps_whose_exchange_failed_later_are_not_committed() {
    let whole = on_ranks(LONG, 0, None);
    let calls = whole.iter().flatten().next().unwrap().calls;
    for at in 1..calls {
        let outcomes = on_ranks(LONG, 0, Some((at, Fault::IsTold)));
        let outcomes: Vec<&Outcome> = outcomes.iter().flatten().collect();
        assert_eq!(outcomes.len(), RANKS);
        for (rank, outcome) in outcomes.iter().enumerate() {
            assert!(outcome.error.is_some(), "exchange {at}, rank {rank}");
        }
        check_after(&format!("exchange {at}"), &outcomes);
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

/// What is done to sequence 1 in the test of policies: a prompt of which a part stays, tokens, and a compression.
const PROMPT: usize = 300;

/// The layers, queries and policy of the test of policies.
struct Compressed {
    policy: Policy,
    dense: DenseLayer<CpuTensor>,
    queries: CpuTensor,
}

impl Compressed {
    fn new() -> Self {
        let mut random = Random::new(6);
        let policy = Policy { merging: Some(Merging::Pivotal), ..Policy::snapkv(0.5).unwrap() };
        let [keys, values] = [2, 2].map(|heads| rows(&mut random, PROMPT, heads));
        let dense = DenseLayer { rows: RowLayout::token_major(PROMPT, &shape()), keys, values };
        Self { policy, dense, queries: rows(&mut random, 32, 4) }
    }

    fn queries(&self) -> MeasuredQueries<'_, CpuTensor> {
        let layout = RowLayout::token_major(32, &AttentionShape::new(4, 4, 64).unwrap());
        MeasuredQueries { queries: TensorRows { tensor: &self.queries, layout }, known_lse: None }
    }

    /// What ranks do; the same in one cache is [`Compressed::in_one_cache`].
    fn on_rank(&self, rank: &mut Rank) -> Result<()> {
        let mut prompt = rank.observe(self.policy.clone(), Spans::new(PROMPT, &[])?)?;
        block_on(rank.observe_layer(&mut prompt, 0, self.dense.clone(), Some(self.queries())))?;
        block_on(rank.compress(0, &prompt))?;
        step(rank, 40, &mut Random::new(2))?;
        let spans = Spans::new(PROMPT + 40, &[])?;
        block_on(rank.compress_again(0, &self.policy, &spans, &[self.queries()])).map(drop)
    }

    /// What one cache holds after each of the acts, and returns for the step that follows.
    fn in_one_cache(&self) -> Vec<((usize, usize), Vec<f64>)> {
        let after = |acts: usize| {
            let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), recipe("f16"))], 1).unwrap();
            let append = |cache: &mut ModelCache<Cpu>, tokens: usize, seed: u64| {
                let (runs, mut random) = ([TokenRun::chunk(0, tokens)], Random::new(seed));
                let [keys, values, queries] = [2, 2, 4].map(|heads| rows(&mut random, tokens, heads));
                block_on(cache.reserve_for_append(&runs)).unwrap();
                cache.begin_append(&runs).unwrap();
                block_on(cache.store(0, RowLayout::token_major(tokens, &shape()), &keys, &values)).unwrap();
                let output = block_on(cache.attend(0, &queries, ElementType::F32)).unwrap().to_f32();
                cache.commit().unwrap();
                output
            };
            if acts > 0 {
                let mut prompt = cache.observe(self.policy.clone(), Spans::new(PROMPT, &[]).unwrap()).unwrap();
                prompt.observe(0, self.dense.clone(), Some(self.queries())).unwrap();
                block_on(cache.compress(0, &prompt)).unwrap();
            }
            if acts > 1 {
                append(&mut cache, 40, 2);
            }
            if acts > 2 {
                let spans = Spans::new(PROMPT + 40, &[]).unwrap();
                block_on(cache.compress_again(0, &self.policy, &spans, &[self.queries()])).unwrap();
            }
            let held = (cache.length(0).unwrap(), cache.tokens(0, 0).unwrap());
            (held, append(&mut cache, 70, 9).into_iter().map(f64::from).collect())
        };
        (0..4).map(after).collect()
    }
}

/// The same for policies: whatever call fails, all ranks hold what one cache held after some act, or nothing.
#[test]
fn a_rank_that_dies_while_a_policy_decides_parts_no_ranks() {
    let compressed = Compressed::new();
    let expected = compressed.in_one_cache();
    let attempt = |fault: Option<(usize, Fault)>, faulty: usize| {
        let connect = || ThreadTransport::connect(vec![Cpu::new(); RANKS], LONG).unwrap();
        let both: Vec<_> = connect().into_iter().zip(connect()).collect();
        std::thread::scope(|scope| {
            let of_rank = |(number, (first, second))| {
                let (compressed, fault) = (&compressed, fault.filter(|_| number == faulty));
                scope.spawn(move || {
                    let layers = [(shape(), recipe("f16"))];
                    let placement = Placement::new(RANKS).unwrap();
                    let transport = Faulty::new(first, fault);
                    let mut rank = block_on(Rank::new(transport, &layers, SEQUENCES, placement)).ok()?;
                    let done = compressed.on_rank(&mut rank);
                    let calls = rank.transport_mut().calls;
                    let rejoined = block_on(rank.rejoin(Faulty::new(second, None))).unwrap();
                    let held = (rank.cache().length(0).unwrap(), rank.cache().tokens(0, 0).unwrap());
                    let after = step(&mut rank, 70, &mut Random::new(9)).unwrap();
                    Some((done, calls, rejoined, held, after))
                })
            };
            let threads: Vec<_> = both.into_iter().enumerate().map(of_rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Option<Vec<_>>>()
        })
    };
    let whole = attempt(None, 0).unwrap();
    assert!(whole.iter().all(|(done, ..)| done.is_ok()));
    let calls = whole[0].1;
    assert!(calls > 15, "{calls} exchanges");
    for at in 1..=calls {
        let fault = (at < calls).then_some((at, Fault::Dies));
        let outcomes = attempt(fault, at % RANKS).unwrap();
        let length = outcomes[0].3.0;
        let stored: usize = outcomes.iter().map(|(.., held, _)| held.1).sum();
        for (done, _, rejoined, held, after) in &outcomes {
            let named = matches!(done, Err(Error::Transport { .. }));
            assert!(named || done.is_ok(), "exchange {at}: {done:?}");
            assert!(*rejoined == outcomes[0].2 && held.0 == length && *after == outcomes[0].4, "exchange {at}");
        }
        let same = expected.iter().find(|(held, _)| *held == (length, stored));
        let (_, exact) = same.unwrap_or_else(|| panic!("exchange {at}: {stored} tokens of {length}"));
        let error = nmse(&outcomes[0].4, exact);
        assert!(error <= 1e-6, "exchange {at}: {error:.1e} after {stored} tokens of {length}");
    }
}
