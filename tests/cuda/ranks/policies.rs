//! Policies over ranks with a GPU each, against one cache on one GPU.

use futures::executor::block_on;
use kvpack::AttentionShape;
use kvpack::backend::{Device, TensorRows};
use kvpack::cache::{DenseLayer, MeasuredQueries, ModelCache, TokenRun};
use kvpack::cpu::nmse;
use kvpack::cuda::{Cuda, Tensor};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::policy::{Policy, Selection, Spans};
use kvpack::ranks::{ContextParallel, Placement, Transport};

use super::{DEADLINE, are_gpus, over_peers, two_gpus};
use any_backend::compressed::{Prompt, policies};
use any_backend::model_steps::recipe;
use any_backend::random_rows::Random;

const LAYERS: usize = 2;
const TOKENS: usize = 700;
/// Appended between two compressions: beyond a turn.
const APPENDED: usize = 150;

/// What was kept, and the outputs of all steps.
type Done = (Vec<Selection>, Vec<Vec<f32>>);

/// A sequence in one cache, and over ranks.
struct Both<T: Transport<Backend = Cuda>> {
    backend: Cuda,
    shape: AttentionShape,
    one: ModelCache<Cuda>,
    rank: ContextParallel<T>,
    random: Random,
    outputs: [Vec<Vec<f32>>; 2],
}

impl<T: Transport<Backend = Cuda>> Both<T> {
    fn new(transport: T, shape: AttentionShape, name: &str) -> Self {
        let (backend, layers) = (transport.backend().clone(), vec![(shape, recipe(name)); LAYERS]);
        let placement = Placement::new(transport.ranks()).unwrap();
        let one = ModelCache::new(&backend, &layers, 1).unwrap();
        let rank = block_on(ContextParallel::new(transport, &layers, 1, placement)).unwrap();
        Self { backend, shape, one, rank, random: Random::new(31), outputs: [Vec::new(), Vec::new()] }
    }

    fn tensor(&mut self, rows: usize, heads: usize) -> Tensor {
        let rows: Vec<f32> = (0..rows * heads * self.shape.head_dim()).map(|_| self.random.normal()).collect();
        block_on(self.backend.upload(rows[..].into())).unwrap()
    }

    /// What one cache keeps of a prompt, and what ranks keep together.
    fn compress(&mut self, policy: &Policy) -> [Selection; 2] {
        let prompt = Prompt::new(self.shape, LAYERS, TOKENS, 5);
        let observed = prompt.observe(&self.one, policy.clone());
        let by_one = block_on(self.one.compress(0, &observed)).unwrap();
        let mut shared = self.rank.observe(policy.clone(), prompt.spans()).unwrap();
        for layer in 0..LAYERS {
            let measured = prompt.measured(shared.query_rows(), &self.backend, layer);
            let queries = measured.as_ref().map(|(tensor, layout)| TensorRows { tensor, layout: *layout });
            let queries = queries.map(|queries| MeasuredQueries { queries, known_lse: None });
            let dense: DenseLayer<Tensor> = prompt.dense(&self.backend, layer);
            block_on(self.rank.observe_layer(&mut shared, layer, dense, queries)).unwrap();
        }
        [by_one, block_on(self.rank.compress(0, &shared)).unwrap()]
    }

    fn compress_again(&mut self, policy: &Policy) -> [Selection; 2] {
        let (appended, length) = (self.one.appended(0).unwrap(), self.one.length(0).unwrap());
        assert_eq!(block_on(self.rank.appended(0)).unwrap(), appended);
        let rows = policy.rows_again(appended);
        let heads = self.shape.query_heads();
        let tensors: Vec<Tensor> = (0..LAYERS).map(|_| self.tensor(rows, heads)).collect();
        let layout = RowLayout::token_major(rows, &AttentionShape::new(heads, heads, self.shape.head_dim()).unwrap());
        let measured = |tensor| MeasuredQueries { queries: TensorRows { tensor, layout }, known_lse: None };
        let queries: Vec<_> = tensors.iter().map(measured).collect();
        let spans = Spans::new(length, &[TokenRange::new(15, length * 4 / 5).unwrap()]).unwrap();
        [
            block_on(self.one.compress_again(0, policy, &spans, &queries)).unwrap(),
            block_on(self.rank.compress_again(0, policy, &spans, &queries)).unwrap(),
        ]
    }

    /// Appends to both, and keeps what attention returns. Many queries would compile kernels that decoding does not use:
    /// those of `tokens` at once are not asked for.
    fn append(&mut self, tokens: usize) {
        let run = [if tokens == 1 { TokenRun::decode(0) } else { TokenRun::chunk(0, tokens) }];
        let rows = RowLayout::token_major(tokens, &self.shape);
        block_on(self.one.reserve_for_append(&run)).unwrap();
        self.one.begin_append(&run).unwrap();
        block_on(self.rank.reserve_for_append(&run)).unwrap();
        self.rank.begin_append(&run).unwrap();
        for layer in 0..LAYERS {
            let kv_heads = self.shape.kv_heads();
            let [keys, values] = [0; 2].map(|_| self.tensor(tokens, kv_heads));
            block_on(self.one.store(layer, rows, &keys, &values)).unwrap();
            block_on(self.rank.store(layer, rows, &keys, &values)).unwrap();
            if tokens == 1 {
                let queries = self.tensor(1, self.shape.query_heads());
                let by_one = block_on(self.one.attend(layer, &queries, ElementType::F32)).unwrap();
                let by_ranks = block_on(self.rank.attend(layer, &queries, ElementType::F32)).unwrap();
                self.rank.transport_mut().wait().unwrap();
                for (outputs, output) in self.outputs.iter_mut().zip([by_one, by_ranks]) {
                    outputs.push(block_on(self.backend.download(&output)).unwrap());
                }
            }
        }
        self.one.commit().unwrap();
        self.rank.commit().unwrap();
    }
}

/// Compresses a prompt, appends, compresses again, and appends: on one GPU, and on those of all ranks.
fn evict<T: Transport<Backend = Cuda>>(transport: T, policy: &Policy, name: &str) -> [Done; 2] {
    let mut both = Both::new(transport, AttentionShape::new(4, 2, 64).unwrap(), name);
    let mut kept = [Vec::new(), Vec::new()];
    let mut keep = |chosen: [Selection; 2]| kept.iter_mut().zip(chosen).for_each(|(kept, chosen)| kept.push(chosen));
    keep(both.compress(policy));
    both.append(1);
    both.append(APPENDED);
    keep(both.compress_again(policy));
    (0..3).for_each(|_| both.append(1));
    let [by_one, by_ranks] = kept;
    let [outputs, of_ranks] = both.outputs;
    [(by_one, outputs), (by_ranks, of_ranks)]
}

/// Ranks keep the same as one GPU. Their outputs are the same bits on all, and like those of one GPU.
fn check(what: &str, over_ranks: impl Fn(usize, &Policy, &str) -> Vec<[Done; 2]>) {
    let _gpus = two_gpus();
    for ranks in [2, 4] {
        if !are_gpus(ranks, what) {
            return;
        }
        for (index, (name, policy)) in policies(0.4).into_iter().enumerate() {
            let done = over_ranks(ranks, &policy, ["saw-int4", "f16"][index % 2]);
            for [(by_one, exact), (by_ranks, outputs)] in &done {
                assert!(by_ranks == by_one, "{what}: {name} on {ranks} ranks keeps other tokens");
                assert!(*outputs == done[0][1].1, "{what}: {name} on {ranks} ranks: other bits");
                for (exact, output) in exact.iter().zip(outputs) {
                    let exact: Vec<f64> = exact.iter().map(|&x| x.into()).collect();
                    let error = nmse(output, &exact);
                    assert!(error <= 1e-6, "{what}: {name} on {ranks} ranks: NMSE {error:.1e}");
                }
            }
            println!("{what}: {name} on {ranks} ranks");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn policies_keep_over_peers_what_one_gpu_keeps() {
    check("peer memory", |ranks, policy, name| over_peers(ranks, DEADLINE, |peer| evict(peer, policy, name)));
}

#[cfg(feature = "nccl")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn policies_keep_over_nccl_what_one_gpu_keeps() {
    check("NCCL", |ranks, policy, name| super::over_nccl(ranks, DEADLINE, |nccl| evict(nccl, policy, name)));
}
