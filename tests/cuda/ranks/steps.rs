//! Decode steps of a batch whose sequences are spread over ranks, against a cache on one GPU: replayed from graphs while
//! they grow, and called in every format.

use std::collections::HashMap;

use futures::executor::block_on;
use kvpack::SegmentFormat;
use kvpack::backend::{Attention, AttentionStates, Device};
use kvpack::cache::{ModelCache, Recipe, TokenRun};
use kvpack::conformance::decode_formats;
use kvpack::cpu::nmse;
use kvpack::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use kvpack::cuda::{Cuda, LayerTensors, ModelStep, Tensor};
use kvpack::plan::{ElementType, Elements, RowLayout};
use kvpack::ranks::{ContextParallel, Placement, StateExchange, Transport};

use super::{DEADLINE, are_gpus, over_peers, two_gpus};
use any_backend::model_steps::{recipe, shape};
use any_backend::random_rows::Random;

/// What outputs may differ by from those of one GPU.
const MOST_NMSE: f64 = 1e-6;

const STEPS: usize = 1000;

/// The second sequence begins so much later than the first: their pages end in different steps.
const LATER: usize = 77;

const RECIPES: [&str; 4] = ["f16", "saw-int4", "kivi:2+window=0", "saw-int4+window=1+sink=128"];

/// The tokens of a step: one for each sequence that has begun.
fn runs(step: usize) -> Vec<TokenRun> {
    (0..if step < LATER { 1 } else { 2 }).map(TokenRun::decode).collect()
}

fn random_tensor(backend: &Cuda, random: &mut Random, elements: usize) -> Tensor {
    let rows: Vec<f32> = (0..elements).map(|_| random.normal()).collect();
    Tensor::upload(backend.stream(), Elements::F32(&rows)).unwrap()
}

/// The step on one GPU.
fn on_one(twin: &mut ModelCache<Cuda>, runs: &[TokenRun], [keys, values, queries]: [&Tensor; 3]) -> Vec<f64> {
    let rows = RowLayout::token_major(runs.iter().map(TokenRun::tokens).sum(), twin.shape(0).unwrap());
    block_on(twin.reserve_for_append(runs)).unwrap();
    twin.begin_append(runs).unwrap();
    let part = |tensor: &Tensor, heads: usize| tensor.slice(0, rows.tokens * heads * 64).unwrap();
    block_on(twin.store(0, rows, &part(keys, 2), &part(values, 2))).unwrap();
    let output = block_on(twin.attend(0, &part(queries, 4), ElementType::F32)).unwrap();
    twin.commit().unwrap();
    block_on(twin.backend().download(&output)).unwrap().into_iter().map(f64::from).collect()
}

/// All outputs of a rank, as bits, and the number of its graphs.
fn grow<T: Transport<Backend = Cuda>>(transport: &mut T, name: &str) -> (Vec<u32>, usize) {
    let (backend, rank, ranks) = (transport.backend().clone(), transport.rank(), transport.ranks());
    let cache = || ModelCache::new(&backend, &[(shape(), recipe(name))], 2).unwrap();
    let share = Placement::new(ranks).unwrap().share(rank).unwrap();
    let (mut cache, mut twin) = (cache().with_share(share).unwrap(), cache());
    let zeroed = |elements: usize| Tensor::zeroed(backend.stream(), elements, ElementType::F32).unwrap();
    let of = LayerTensors { keys: zeroed(256), values: zeroed(256), queries: zeroed(512), output: zeroed(512) };
    let states = AttentionStates { outputs: of.output.clone(), lse: zeroed(8) };
    let (mut gathered, mut output) = (block_on(transport.room_for_states(&shape(), 2)).unwrap(), zeroed(512));
    let rows = RowLayout::token_major(2, &shape());
    let steps = ModelStep::new(&backend, rows, vec![of.clone()]).unwrap().keeping(8);
    let mut steps = steps.with_log_sum_exps(vec![states.lse.clone()]).unwrap();
    let mut merge = |transport: &mut T, rows: usize| {
        let exchange = StateExchange { shape: shape(), rows, states: &states, gathered: &mut gathered };
        transport.merge_states(exchange, &mut output, None).unwrap();
        output.clone()
    };
    // Once before it is captured: NCCL connects then.
    let output = merge(transport, 2);
    transport.wait().unwrap();
    let (mut random, mut graphs, mut bits) = (Random::new(11), HashMap::new(), Vec::new());
    for step in 0..STEPS {
        let runs = runs(step);
        for (tensor, elements) in [(&of.keys, 256), (&of.values, 256), (&of.queries, 512)] {
            let rows: Vec<f32> = (0..elements).map(|_| random.normal()).collect();
            tensor.write(backend.stream(), rows.as_slice().into()).unwrap();
        }
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        let parts = cache.open_steps().unwrap();
        let written = steps.write(&parts).unwrap();
        let graph = graphs.entry((written.class(), runs.len())).or_insert_with(|| {
            backend.stream().begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            written.launch(0).unwrap();
            merge(transport, runs.len());
            let graph = backend.stream().end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph");
            (graph, written.memory())
        });
        graph.0.launch().unwrap();
        written.replayed();
        drop(parts);
        cache.commit().unwrap();
        transport.wait().unwrap();
        let got = block_on(backend.download(&output)).unwrap();
        let got = &got[..runs.len() * 256];
        bits.extend(got.iter().map(|x| x.to_bits()));
        let error = nmse(got, &on_one(&mut twin, &runs, [&of.keys, &of.values, &of.queries]));
        assert!(error < MOST_NMSE, "{name}, step {step}, rank {rank} of {ranks}: NMSE {error:.1e}");
    }
    let stored = cache.tokens(0, 0).unwrap();
    assert!(stored < STEPS && stored > 0, "a rank stores a part: {stored}");
    (bits, graphs.len())
}

/// All ranks and all runs agree to the bit.
fn check(runs: &[Vec<(Vec<u32>, usize)>], what: &str) {
    let first = &runs[0][0].0;
    assert!(runs.iter().flatten().all(|(bits, _)| bits == first), "{what}: ranks or runs differ in their bits");
    println!("{what}: {STEPS} steps, {} graphs", runs[0][0].1);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn graphs_over_peers_are_replayed_while_sequences_grow() {
    let _gpus = two_gpus();
    for name in RECIPES {
        let run = |_| over_peers(2, DEADLINE, |mut peer| grow(&mut peer, name));
        check(&[0, 1].map(run), &format!("peers, {name}"));
    }
    for ranks in [3, 4] {
        if are_gpus(ranks, "peer memory between more ranks") {
            check(&[over_peers(ranks, DEADLINE, |mut peer| grow(&mut peer, "f16"))], &format!("{ranks} peers, f16"));
        }
    }
}

#[cfg(feature = "nccl")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn graphs_over_nccl_are_replayed_while_sequences_grow() {
    let _gpus = two_gpus();
    for name in RECIPES {
        let run = |_| super::over_nccl(2, DEADLINE, |mut nccl| grow(&mut nccl, name));
        check(&[0, 1].map(run), &format!("NCCL, {name}"));
    }
}

/// A ragged batch in one format by the calls of [`ContextParallel`]: prompts that end within a page, then tokens.
/// Returns the largest error against one cache, and that against the shares of all ranks merged on one GPU.
fn attend_in<T: Transport<Backend = Cuda>>(transport: T, format: SegmentFormat) -> [f64; 2] {
    const PROMPTS: [usize; 3] = [700, 129, 1];
    let (backend, shape, ranks) = (transport.backend().clone(), shape(), transport.ranks());
    let recipe = if format == SegmentFormat::F16 { Recipe::f16() } else { Recipe::pack_all(format) };
    let layers = [(shape, recipe)];
    let placement = Placement::new(ranks).unwrap();
    let mut rank = block_on(ContextParallel::new(transport, &layers, 3, placement)).unwrap();
    let cache = || ModelCache::new(&backend, &layers, 3).unwrap();
    let mut twin = cache();
    let share = |rank: usize| cache().with_share(placement.share(rank).unwrap()).unwrap();
    let mut shares: Vec<ModelCache<Cuda>> = (0..ranks).map(share).collect();
    let (mut random, mut largest) = (Random::new(21), [0.0f64; 2]);
    for step in 0..4 {
        let prompts: Vec<TokenRun> = PROMPTS.iter().enumerate().map(|(s, &n)| TokenRun::prompt(s, n)).collect();
        let runs = if step == 0 { prompts } else { (0..3).map(TokenRun::decode).collect() };
        let tokens: usize = runs.iter().map(TokenRun::tokens).sum();
        let [keys, values, queries] = [2, 2, 4].map(|heads| random_tensor(&backend, &mut random, tokens * heads * 64));
        let rows = RowLayout::token_major(tokens, &shape);
        block_on(rank.reserve_for_append(&runs)).unwrap();
        rank.begin_append(&runs).unwrap();
        block_on(rank.store(0, rows, &keys, &values)).unwrap();
        for cache in shares.iter_mut().chain([&mut twin]) {
            block_on(cache.reserve_for_append(&runs)).unwrap();
            cache.begin_append(&runs).unwrap();
            block_on(cache.store(0, rows, &keys, &values)).unwrap();
        }
        // The many queries of the prompts would compile kernels that decode steps do not use.
        if step > 0 {
            let output = block_on(rank.attend(0, &queries, ElementType::F32)).unwrap();
            rank.transport_mut().wait().unwrap();
            let got = block_on(backend.download(&output)).unwrap();
            let expected = [block_on(twin.attend(0, &queries, ElementType::F32)).unwrap(), merged(&shares, &queries)];
            for (largest, expected) in largest.iter_mut().zip(&expected) {
                let expected: Vec<f64> =
                    block_on(backend.download(expected)).unwrap().into_iter().map(f64::from).collect();
                *largest = largest.max(nmse(&got, &expected));
            }
        }
        rank.commit().unwrap();
        shares.iter_mut().chain([&mut twin]).for_each(|cache| cache.commit().unwrap());
        // Steps pack one window of a sequence each, and ranks together more than one cache.
        for cache in shares.iter_mut().chain([&mut twin, rank.cache_mut()]) {
            (0..PROMPTS.len()).for_each(|sequence| block_on(cache.pack_windows(sequence)).unwrap());
        }
    }
    largest
}

/// What all shares attend to, merged pair by pair.
fn merged(shares: &[ModelCache<Cuda>], queries: &Tensor) -> Tensor {
    let of = |cache: &ModelCache<Cuda>| block_on(cache.attend_states(0, queries)).unwrap();
    let joined = shares[1..]
        .iter()
        .fold(of(&shares[0]), |joined, cache| block_on(cache.backend().merge(&shape(), &joined, &of(cache))).unwrap());
    joined.outputs
}

/// Every format on two ranks and on four, one after the other: a device that another pair of ranks makes wait cannot
/// load kernels.
fn check_formats(what: &str, attend: impl Fn(usize, SegmentFormat) -> Vec<[f64; 2]>) {
    let _gpus = two_gpus();
    for ranks in [2, 4] {
        if !are_gpus(ranks, what) {
            return;
        }
        for format in decode_formats() {
            let errors = attend(ranks, format);
            println!("{ranks} ranks, {format}: {errors:?}");
            assert!(errors.iter().flatten().all(|&error| error < MOST_NMSE), "{ranks} ranks, {format}: {errors:?}");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_format_is_attended_to_over_peers() {
    check_formats("peer memory between ranks", |ranks, format| {
        over_peers(ranks, DEADLINE, |peer| attend_in(peer, format))
    });
}

#[cfg(feature = "nccl")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_format_is_attended_to_over_nccl() {
    check_formats("NCCL between ranks", |ranks, format| {
        super::over_nccl(ranks, DEADLINE, |nccl| attend_in(nccl, format))
    });
}
