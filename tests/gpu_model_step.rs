//! Steps of a whole model that an engine encodes itself, against the same steps on the CPU. `gpu_device` says on which adapter.
#![cfg(feature = "wgpu")]

mod gpu_device;
mod model_steps;
mod random_rows;

use kvpack::backend::AttendOptions;
use kvpack::cache::{ModelCache, TokenRun};
use kvpack::cpu::Cpu;
use kvpack::plan::{ElementType, RowLayout};
use kvpack::wgpu::{LayerTensors, ModelStep, Tensor, Wgpu};
use kvpack::{AttentionShape, Error};
use model_steps::{LAYERS, RECIPES, ROWS, SEQUENCES, STEPS};
use pollster::block_on;
use random_rows::Random;

/// An engine with tensors of its own for every layer, and the same cache on the CPU.
struct Engine {
    backend: Wgpu,
    cache: ModelCache<Wgpu>,
    twin: ModelCache<Cpu>,
    tensors: Vec<LayerTensors>,
    steps: ModelStep,
    random: Random,
}

impl Engine {
    fn new(backend: Wgpu, recipe: &str) -> Self {
        let recipe = model_steps::recipe(recipe);
        let of_layer = |_| {
            let zeroed = |elements| Tensor::zeroed(backend.device(), elements, ElementType::F32).unwrap();
            let [keys, values, queries, output] = model_steps::tensor_elements().map(zeroed);
            LayerTensors { keys, values, queries, output }
        };
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(of_layer).collect();
        let rows = RowLayout::token_major(ROWS, &model_steps::shape());
        let options = AttendOptions { query: recipe.query(), ..AttendOptions::default() };
        Self {
            cache: model_steps::cache(&backend, &recipe),
            twin: model_steps::cache(&Cpu::new(), &recipe),
            steps: ModelStep::new(&backend, rows, tensors.clone(), options).unwrap(),
            backend,
            tensors,
            random: Random::new(7),
        }
    }

    /// A step on both. True if something was bound anew for it.
    fn step(&mut self, runs: &[TokenRun]) -> bool {
        let inputs = model_steps::inputs(&mut self.random);
        let (device, queue) = (self.backend.device(), self.backend.queue());
        for (of, rows) in self.tensors.iter().zip(&inputs) {
            for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(rows) {
                queue.write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
            }
        }
        block_on(self.cache.reserve_for_append(runs)).unwrap();
        self.cache.begin_append(runs).unwrap();
        let open = self.cache.encode().unwrap().remove(0);
        assert_eq!(open.layers, [0, 1, 2]);
        let step = self.steps.write(&open).unwrap();
        let anew = step.bound_anew();
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        let before = made(device);
        assert!(before.iter().all(|&count| count > 0), "the counters count: {before:?}");
        for layer in 0..LAYERS {
            step.encode_store(layer, &mut pass).unwrap();
            step.encode_attend(layer, &mut pass).unwrap();
        }
        assert_eq!(made(device), before, "encoding makes nothing on the device");
        drop(pass);
        queue.submit([encoder.finish()]);
        self.cache.commit().unwrap();

        let download = |of: &LayerTensors| block_on(of.output.download(device, queue)).unwrap();
        let outputs: Vec<Vec<f32>> = self.tensors.iter().map(download).collect();
        model_steps::compare(&mut self.twin, runs, &inputs, &outputs);
        anew
    }
}

/// How much there is of everything that a device makes.
fn made(device: &wgpu::Device) -> [isize; 5] {
    let hal = device.get_internal_counters().hal;
    let counters = [hal.buffers, hal.bind_groups, hal.compute_pipelines, hal.command_encoders, hal.buffer_memory];
    counters.map(|counter| counter.read())
}

/// Every layer attends as on the CPU, what is bound lasts, and no kernel is compiled once they are prepared.
#[test]
fn steps_are_bound_once_and_only_encoded() {
    // Every test counts what its own device makes.
    for recipe in RECIPES {
        let mut engine = Engine::new(gpu_device::fresh(), recipe);
        let (layout, stores) = (engine.cache.step_layout(0).unwrap(), engine.cache.recipe(0).unwrap().stores());
        block_on(engine.steps.prepare(layout, stores)).unwrap();
        let compiled = |engine: &Engine| engine.backend.device().get_internal_counters().hal.compute_pipelines.read();
        let mut prepared = compiled(&engine);
        let mut anew = 0;
        for step in 0..STEPS {
            if let Some(sequence) = model_steps::leaves(step) {
                engine.cache.clear(sequence).unwrap();
                engine.twin.clear(sequence).unwrap();
            }
            let runs = model_steps::runs(step);
            anew += usize::from(engine.step(&runs));
            // Chunks have kernels of their own, for several queries.
            if runs.iter().any(|run| run.tokens() > 1) {
                prepared = compiled(&engine);
            }
            assert_eq!(compiled(&engine), prepared, "{recipe}: step {step} compiled a kernel");
        }
        assert!(anew <= 24, "{recipe}: bound anew in {anew} of {STEPS} steps");
        assert_eq!(block_on(engine.cache.non_finite()).unwrap(), []);
        for sequence in 0..SEQUENCES {
            assert_eq!(engine.cache.length(sequence), engine.twin.length(sequence));
        }
    }
}

/// A step that is not one of these layers, or too long for the tensors, is refused, and can be abandoned.
#[test]
fn steps_of_others_are_refused() {
    let mut engine = Engine::new(gpu_device::fresh(), "saw-int4");
    engine.step(&[TokenRun::decode(0)]);
    let runs = [TokenRun::chunk(1, ROWS + 1)];
    block_on(engine.cache.reserve_for_append(&runs)).unwrap();
    engine.cache.begin_append(&runs).unwrap();
    let refused = engine.steps.write(&engine.cache.encode().unwrap()[0]).map(drop);
    assert!(matches!(refused, Err(Error::Plan { .. } | Error::Elements { .. })), "{refused:?}");
    engine.cache.abandon();

    let other = AttentionShape::new(4, 2, 128).unwrap();
    let recipe = engine.cache.recipe(0).unwrap().clone();
    let mut cache = ModelCache::new(&engine.backend, &[(other, recipe)], 1).unwrap();
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    let refused = engine.steps.write(&cache.encode().unwrap()[0]).map(drop);
    assert!(refused.is_err());
    // Nothing was broken by it.
    engine.step(&[TokenRun::decode(0), TokenRun::decode(1)]);
}
