//! Steps that return log-sum-exps, and steps that attend without storing, in an engine's own pass, against the same on
//! the CPU.

use kvpack::Error;
use kvpack::backend::Device;
use kvpack::cache::{ModelCache, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor, nmse};
use kvpack::plan::{ElementType, QueryRun, RowLayout, Visible};
use kvpack::wgpu::{LayerTensors, ModelStep, Tensor, Wgpu};
use pollster::block_on;

use crate::gpu_device;
use any_backend::model_steps::{self, Inputs, LAYERS, ROWS, shape};
use any_backend::random_rows::Random;

/// An engine whose steps return log-sum-exps, and the same cache on the CPU.
struct Engine {
    backend: Wgpu,
    cache: ModelCache<Wgpu>,
    twin: ModelCache<Cpu>,
    tensors: Vec<LayerTensors>,
    lse: Vec<Tensor>,
    steps: ModelStep,
    random: Random,
}

impl Engine {
    fn new(recipe: &str) -> Self {
        let backend = gpu_device::shared();
        let recipe = model_steps::recipe(recipe);
        let zeroed = || LayerTensors::zeroed(backend.device(), &shape(), ROWS, ElementType::F32).unwrap();
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(|_| zeroed()).collect();
        let lse = || Tensor::zeroed(backend.device(), ROWS * 4, ElementType::F32).unwrap();
        let lse: Vec<Tensor> = (0..LAYERS).map(|_| lse()).collect();
        let rows = RowLayout::token_major(ROWS, &shape());
        let steps = ModelStep::new(&backend, rows, tensors.clone()).unwrap().with_log_sum_exps(lse.clone()).unwrap();
        let (cache, twin) = (model_steps::cache(&backend, &recipe), model_steps::cache(&Cpu::new(), &recipe));
        Self { backend, cache, twin, tensors, lse, steps, random: Random::new(11) }
    }

    fn inputs(&mut self) -> Inputs {
        let inputs = model_steps::inputs(&mut self.random);
        for (of, rows) in self.tensors.iter().zip(&inputs) {
            for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(rows) {
                self.backend.queue().write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
            }
        }
        inputs
    }

    /// Encodes the open step and submits it.
    fn submit(&mut self, stores: bool) {
        let open = self.cache.open_steps().unwrap();
        let step = self.steps.write(&open).unwrap();
        let device = self.backend.device();
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for layer in 0..LAYERS {
            if stores {
                step.encode_store(layer, &mut pass).unwrap();
            }
            step.encode_attend(layer, &mut pass).unwrap();
        }
        drop(pass);
        self.backend.queue().submit([encoder.finish()]);
        self.cache.commit().unwrap();
    }

    /// Compares the outputs and log-sum-exps of the step that is open on the twin.
    fn compare(&mut self, inputs: &Inputs, rows: usize, what: &str) {
        for (layer, [_, _, queries]) in inputs.iter().enumerate() {
            let queries = CpuTensor::F32(queries[..rows * 4 * 64].to_vec());
            let states = block_on(self.twin.attend_states(layer, &queries)).unwrap();
            let of = |tensor: &Tensor| block_on(self.backend.download(tensor)).unwrap();
            for (got, expected) in [(&self.tensors[layer].output, states.outputs), (&self.lse[layer], states.lse)] {
                let expected: Vec<f64> = expected.to_f32().into_iter().map(f64::from).collect();
                let error = nmse(&of(got)[..expected.len()], &expected);
                assert!(error < 1e-4, "{what}, layer {layer}: {error:.1e}");
            }
        }
        self.twin.commit().unwrap();
    }

    fn append(&mut self, runs: &[TokenRun], queries: &[QueryRun], what: &str) {
        let inputs = self.inputs();
        let rows: usize = runs.iter().map(TokenRun::tokens).sum();
        block_on(self.cache.reserve_for_append(runs)).unwrap();
        block_on(self.twin.reserve_for_append(runs)).unwrap();
        self.cache.begin_append_seeing(runs, queries).unwrap();
        self.twin.begin_append_seeing(runs, queries).unwrap();
        self.submit(true);
        for (layer, [keys, values, _]) in inputs.iter().enumerate() {
            let of = |all: &[f32]| CpuTensor::F32(all[..rows * 2 * 64].to_vec());
            let layout = RowLayout::token_major(rows, &shape());
            block_on(self.twin.store(layer, layout, &of(keys), &of(values))).unwrap();
        }
        self.compare(&inputs, rows, what);
    }
}

/// Decoded tokens beside chunks, and chunks whose tokens see each other.
#[test]
fn steps_return_log_sum_exps() {
    for recipe in ["f16", "saw-int4", "kivi:2+window=0", "calibquant:2+window=1"] {
        let mut engine = Engine::new(recipe);
        for step in 0..60 {
            let runs = model_steps::runs(step);
            let seen = |run: &TokenRun| match run.tokens() {
                1 => QueryRun::decode(run.sequence()),
                tokens => QueryRun::causal(run.sequence(), tokens),
            };
            let queries: Vec<QueryRun> = runs.iter().map(seen).collect();
            engine.append(&runs, &queries, &format!("{recipe}, step {step}"));
        }
        let start = engine.cache.length(1).unwrap();
        let image = Visible::spans(std::slice::from_ref(&(start + 2..start + 7)));
        engine.append(&[TokenRun::chunk(1, 9)], &[QueryRun::new(1, 9, image)], &format!("{recipe}, an image"));
    }
}

/// Steps that store nothing leave all as it was, and see what is asked.
#[test]
fn steps_attend_without_storing() {
    for recipe in ["f16", "saw-int4"] {
        let mut engine = Engine::new(recipe);
        for _ in 0..20 {
            let runs = [TokenRun::chunk(0, 9), TokenRun::decode(2)];
            engine.append(&runs, &[QueryRun::causal(0, 9), QueryRun::decode(2)], recipe);
        }
        let (memory, held) = (engine.cache.memory(), engine.cache.length(0));
        let earlier = QueryRun { end: Some(100), ..QueryRun::causal(0, 5) };
        for queries in [vec![QueryRun::new(0, 3, Visible::All), QueryRun::decode(2)], vec![earlier]] {
            let inputs = engine.inputs();
            engine.cache.begin_attend(&queries).unwrap();
            engine.twin.begin_attend(&queries).unwrap();
            engine.submit(false);
            let rows = queries.iter().map(|run| run.queries).sum();
            engine.compare(&inputs, rows, recipe);
        }
        assert_eq!((engine.cache.memory(), engine.cache.length(0)), (memory, held));
        engine.append(&[TokenRun::decode(0)], &[QueryRun::decode(0)], recipe);
    }
}

#[test]
fn log_sum_exps_that_do_not_fit_are_refused() {
    let engine = Engine::new("saw-int4+centre");
    let (backend, mut cache, lse) = (engine.backend.clone(), engine.cache, engine.lse);
    let steps = |lse: Vec<Tensor>| {
        let rows = RowLayout::token_major(ROWS, &shape());
        ModelStep::new(&backend, rows, engine.tensors.clone()).unwrap().with_log_sum_exps(lse)
    };
    assert!(matches!(steps(lse[..2].to_vec()), Err(Error::Plan { .. })));
    let half = Tensor::zeroed(backend.device(), ROWS * 4, ElementType::F16).unwrap();
    assert!(matches!(steps(vec![half; LAYERS]), Err(Error::Buffer { .. })));
    let runs = [TokenRun::chunk(0, 3)];
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    let open = cache.open_steps().unwrap();
    let refused = steps(lse).unwrap().write(&open).map(drop);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");

    let mut cache = model_steps::cache(&backend, &model_steps::recipe("f16"));
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    let open = cache.open_steps().unwrap();
    let few = Tensor::zeroed(backend.device(), 2 * 4, ElementType::F32).unwrap();
    let refused = steps(vec![few; LAYERS]).unwrap().write(&open).map(drop);
    assert!(matches!(refused, Err(Error::Elements { given: 8, expected: 12, .. })), "{refused:?}");
}
