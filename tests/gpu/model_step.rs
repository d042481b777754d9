//! Steps of a whole model that an engine encodes itself, against the same steps on the CPU. `gpu_device` says
//! on which adapter.

use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use kvpack::backend::{Device, QueryPrecision};
use kvpack::cache::{ModelCache, Recipe, StoreRoom, TokenRun};
use kvpack::cpu::{Cpu, nmse};
use kvpack::plan::{ElementType, LayerAttention, RowLayout, Scoring};
use kvpack::policy::Policy;
use kvpack::wgpu::{LayerTensors, ModelStep, Tensor, Wgpu};
use kvpack::{AttentionShape, Error};
use pollster::block_on;

use crate::round_trips::newest_submission;
use crate::{gpu_device, steps_ahead};
use any_backend::model_steps::{BEGINNING_ROWS, CENTRED, LAYERS, RECIPES, ROWS, SEQUENCES, STEPS};
use any_backend::random_rows::Random;
use any_backend::{compressed, model_steps, parted_layers};

/// An engine with tensors of its own for every layer, and the same cache on the CPU.
pub struct Engine {
    pub backend: Wgpu,
    pub cache: ModelCache<Wgpu>,
    pub twin: ModelCache<Cpu>,
    tensors: Vec<LayerTensors>,
    steps: ModelStep,
    random: Random,
    rows: usize,
}

impl Engine {
    pub fn new(backend: Wgpu, recipe: &str) -> Self {
        Self::with_rows(backend, recipe, ROWS)
    }

    fn with_rows(backend: Wgpu, recipe: &str, rows: usize) -> Self {
        Self::of_recipe(backend, model_steps::recipe(recipe), rows)
    }

    fn of_recipe(backend: Wgpu, recipe: Recipe, rows: usize) -> Self {
        let of_layer = |_| {
            let zeroed = |elements| Tensor::zeroed(backend.device(), elements, ElementType::F32).unwrap();
            let [keys, values, queries, output] = model_steps::elements_of(rows).map(zeroed);
            LayerTensors { keys, values, queries, output }
        };
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(of_layer).collect();
        let layout = RowLayout::token_major(rows, &model_steps::shape());
        Self {
            cache: model_steps::cache(&backend, &recipe),
            twin: model_steps::cache(&Cpu::new(), &recipe),
            steps: ModelStep::new(&backend, layout, tensors.clone()).unwrap(),
            backend,
            tensors,
            random: Random::new(7),
            rows,
        }
    }

    /// A step on both. True if something was bound anew for it.
    pub fn step(&mut self, runs: &[TokenRun]) -> bool {
        let inputs = model_steps::inputs_of(&mut self.random, self.rows);
        self.step_with(runs, &inputs)
    }

    fn step_with(&mut self, runs: &[TokenRun], inputs: &model_steps::Inputs) -> bool {
        let (device, queue) = (self.backend.device(), self.backend.queue());
        for (of, rows) in self.tensors.iter().zip(inputs) {
            for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(rows) {
                queue.write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
            }
        }
        block_on(self.cache.reserve_for_append(runs)).unwrap();
        self.cache.begin_append(runs).unwrap();
        let open = self.cache.open_steps().unwrap();
        assert_eq!(open[0].layers, [0, 1, 2]);
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
        model_steps::compare(&mut self.twin, runs, inputs, &outputs);
        anew
    }
}

/// A device on which nothing else is made meanwhile, so that an engine can count what it makes.
struct Alone {
    backend: Wgpu,
    _turn: Option<MutexGuard<'static, ()>>,
}

/// A new device. In a brief run engines have one device in turn, which compiles the kernels that they share once; the run
/// beside it shows that every engine prepares all of its own.
fn alone() -> Alone {
    static IN_TURN: LazyLock<Wgpu> = LazyLock::new(gpu_device::fresh);
    static TURN: Mutex<()> = Mutex::new(());
    if !gpu_device::is_brief() {
        return Alone { backend: gpu_device::fresh(), _turn: None };
    }
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Alone { backend: IN_TURN.clone(), _turn: Some(turn) }
}

/// How much there is of everything that a device makes.
pub fn made(device: &wgpu::Device) -> [isize; 5] {
    let hal = device.get_internal_counters().hal;
    let counters = [hal.buffers, hal.bind_groups, hal.compute_pipelines, hal.command_encoders, hal.buffer_memory];
    counters.map(|counter| counter.read())
}

/// Every layer attends as on the CPU, what is bound lasts, and no kernel is compiled once they are prepared.
#[test]
fn steps_are_bound_once_and_only_encoded() {
    // Every test counts what its own device makes.
    let scoring = Scoring::of(&model_steps::shape()).with_soft_cap(30.0).unwrap();
    let local = LayerAttention::default().with_window(60).with_scoring(scoring);
    let all = RECIPES.map(|recipe| (recipe, LayerAttention::default()));
    for (recipe, attention) in all.into_iter().chain(["f16", "calibquant:2"].map(|recipe| (recipe, local.clone()))) {
        let alone = alone();
        let of = model_steps::recipe(recipe).with_attention(attention);
        let mut engine = Engine::of_recipe(alone.backend.clone(), of, ROWS);
        let kind = engine.cache.step_kind(0).unwrap();
        block_on(engine.steps.prepare(kind)).unwrap();
        block_on(engine.steps.prepare_chunks(kind, ROWS)).unwrap();
        let compiled = |engine: &Engine| engine.backend.device().get_internal_counters().hal.compute_pipelines.read();
        let prepared = compiled(&engine);
        let mut anew = 0;
        for step in 0..STEPS {
            if let Some(sequence) = model_steps::leaves(step) {
                engine.cache.clear(sequence).unwrap();
                engine.twin.clear(sequence).unwrap();
            }
            anew += usize::from(engine.step(&model_steps::runs(step)));
            assert_eq!(compiled(&engine), prepared, "{recipe}: step {step} compiled a kernel");
        }
        assert!(anew <= 24, "{recipe}: bound anew in {anew} of {STEPS} steps");
        assert_eq!(block_on(engine.cache.non_finite()).unwrap(), []);
        for sequence in 0..SEQUENCES {
            assert_eq!(engine.cache.length(sequence), engine.twin.length(sequence));
        }
    }
}

/// The centres of sequences that begin are made within the step, and all is stored as by the calls that
/// submit, bit for bit.
#[test]
fn centred_sequences_begin_within_a_step() {
    for recipe in CENTRED {
        let alone = alone();
        let mut engine = Engine::with_rows(alone.backend.clone(), recipe, BEGINNING_ROWS);
        let mut submitted = model_steps::cache(&engine.backend, &model_steps::recipe(recipe));
        for step in 0..model_steps::BEGINNING {
            model_steps::before_beginning(&mut engine.cache, step);
            model_steps::before_beginning(&mut engine.twin, step);
            model_steps::before_beginning(&mut submitted, step);
            let runs = model_steps::beginning(step);
            let inputs = model_steps::inputs_of(&mut engine.random, BEGINNING_ROWS);
            engine.step_with(&runs, &inputs);
            model_steps::submit(&mut submitted, &runs, &inputs);
            let (encoded, submitted) = (model_steps::held(&engine.cache), model_steps::held(&submitted));
            assert!(encoded == submitted, "{recipe}: step {step} stores something else");
            assert!(model_steps::centres(&engine.cache) == model_steps::centres(&engine.twin), "{recipe}: step {step}");
        }
        assert_eq!(block_on(engine.cache.non_finite()).unwrap(), []);
    }
}

/// That a sequence begins binds nothing anew.
#[test]
fn steps_that_begin_sequences_are_bound_with_the_others() {
    let alone = alone();
    let mut engine = Engine::new(alone.backend.clone(), "saw-int4+centre");
    let all: Vec<TokenRun> = (0..SEQUENCES).map(TokenRun::decode).collect();
    assert!(engine.step(&all), "three sequences begin");
    engine.cache.clear(1).unwrap();
    engine.twin.clear(1).unwrap();
    assert!(!engine.step(&all), "one begins again");
    assert!(!engine.step(&all), "none begins");
}

/// Batches that take turns find what was bound for them.
#[test]
fn classes_are_kept_side_by_side() {
    let alone = alone();
    let mut engine = Engine::new(alone.backend.clone(), "saw-int4");
    let anew = (0..model_steps::ALTERNATING).filter(|&step| engine.step(&model_steps::alternating(step))).count();
    assert!(anew <= 3, "bound anew in {anew} of {} steps", model_steps::ALTERNATING);
}

/// A shard that takes the place of one of the same size is another buffer: steps read and write it, not the one that
/// their class was bound to before.
#[test]
fn a_shard_in_the_place_of_another_is_bound_anew() {
    for recipe in ["f16", "int8", "kivi:4+window=0"] {
        let alone = alone();
        let mut engine = Engine::new(alone.backend.clone(), recipe);
        let all: Vec<TokenRun> = (0..SEQUENCES).map(TokenRun::decode).collect();
        let pages = |engine: &Engine| engine.cache.memory().stores().iter().map(|of| of.pages).collect::<Vec<_>>();
        assert!(engine.step(&all), "{recipe}: the first step");
        let before = pages(&engine);
        for sequence in 0..SEQUENCES {
            engine.cache.clear(sequence).unwrap();
            engine.twin.clear(sequence).unwrap();
        }
        assert!(engine.cache.trim().unwrap() > 0);
        assert!(engine.step(&all), "{recipe}: the store is another");
        assert_eq!(pages(&engine), before, "{recipe}");
        assert!(!engine.step(&all), "{recipe}: nothing has changed");
    }
}

/// Layers that were parted share a layout, and one engine's tensors serve their steps in turn: each is bound to
/// its own stores.
#[test]
fn parted_layers_are_bound_to_their_own_stores() {
    let alone = alone();
    let backend = alone.backend.clone();
    let (mut cache, mut twin) = (parted_layers::cache(&backend), parted_layers::cache(&Cpu::new()));
    let of = LayerTensors::zeroed(backend.device(), &model_steps::shape(), ROWS, ElementType::F32).unwrap();
    let rows = RowLayout::token_major(ROWS, &model_steps::shape());
    let mut steps = ModelStep::new(&backend, rows, vec![of.clone()]).unwrap();
    let (mut random, mut anew) = (Random::new(7), 0);
    for _ in 0..parted_layers::STEPS {
        let (runs, inputs) = ([TokenRun::decode(0)], model_steps::inputs(&mut random));
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        parted_layers::check_layout(&cache);
        let mut outputs = Vec::new();
        for (layer, open) in cache.open_steps().unwrap().iter().enumerate() {
            assert_eq!(open.layers, [layer]);
            for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(&inputs[layer]) {
                backend.queue().write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
            }
            let step = steps.write(std::slice::from_ref(open)).unwrap();
            anew += usize::from(step.bound_anew());
            let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            step.encode_store(0, &mut pass).unwrap();
            step.encode_attend(0, &mut pass).unwrap();
            drop(pass);
            backend.queue().submit([encoder.finish()]);
            outputs.push(block_on(backend.download(&of.output)).unwrap());
        }
        cache.commit().unwrap();
        model_steps::compare(&mut twin, &runs, &inputs, &outputs);
    }
    assert_eq!(anew, LAYERS, "each layer is bound once");
}

/// More steps than there are tables at first, encoded before the first is submitted: each reads its own, and no token
/// is lost. Those that were dropped without a submission leave their tables to others.
#[test]
fn steps_of_one_submission_read_their_own_tables() {
    const AHEAD: usize = 9;
    let mut engine = Engine::new(gpu_device::fresh(), "f16");
    block_on(engine.cache.reserve(&[StoreRoom { pages: 8, spans: 8 }])).unwrap();
    let (device, queue) = (engine.backend.device().clone(), engine.backend.queue().clone());
    let mut appended = steps_ahead::Appended::new();
    for submission in 0..3 {
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut steps = Vec::new();
        for step in 0..AHEAD {
            let mut runs: Vec<TokenRun> = (0..1 + (step + submission) % SEQUENCES).map(TokenRun::decode).collect();
            runs[0] = if step % 4 == 1 { TokenRun::chunk(0, 3) } else { runs[0] };
            let inputs = steps_ahead::exact_inputs(&mut engine.random);
            engine.cache.begin_append(&runs).unwrap();
            let open = engine.cache.open_steps().unwrap();
            let written = engine.steps.write(&open).unwrap();
            let staged: Vec<_> = inputs.iter().map(|of| steps_ahead::staged(&device, &queue, of)).collect();
            for (layer, (staged, bound)) in staged.iter().zip(&engine.tensors).enumerate() {
                steps_ahead::encode_inputs(staged, bound, &mut encoder);
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                written.encode_store(layer, &mut pass).unwrap();
                written.encode_attend(layer, &mut pass).unwrap();
                drop(pass);
                bound.output.encode_copy(&staged.output, &mut encoder).unwrap();
            }
            if submission == 1 {
                engine.cache.abandon();
                continue;
            }
            engine.cache.commit().unwrap();
            steps.push((runs, inputs, staged));
        }
        if submission == 1 {
            continue; // what was encoded is dropped
        }
        queue.submit([encoder.finish()]);
        for (step, (runs, inputs, staged)) in steps.iter().enumerate() {
            for (layer, (inputs, staged)) in inputs.iter().zip(staged).enumerate() {
                let expected = appended.attend(layer, runs, inputs);
                let output = block_on(engine.backend.download(&staged.output)).unwrap();
                let error = nmse(&output[..expected.len()], &expected);
                assert!(error < 1e-6, "submission {submission}, step {step}, layer {layer}, {runs:?}: {error:.1e}");
            }
        }
    }
}

/// One `ModelStep` serves the layers of a step in turn, which hold different tokens, all in one submission.
#[test]
fn parts_of_one_submission_read_their_own_tables() {
    let backend = gpu_device::fresh();
    let prompt = compressed::Prompt::new(model_steps::shape(), LAYERS, 300, 11);
    let mut cache = prompt.cache(&backend, &model_steps::recipe("saw-int4"));
    let mut twin = prompt.cache(&Cpu::new(), &model_steps::recipe("saw-int4"));
    let policy = Policy::pyramidkv(0.4).unwrap();
    block_on(cache.compress(0, &prompt.observe(&cache, policy.clone()))).unwrap();
    block_on(twin.compress(0, &prompt.observe(&twin, policy))).unwrap();
    assert_ne!(cache.tokens(0, 0), cache.tokens(LAYERS - 1, 0), "layers hold different tokens");
    let rows = RowLayout::token_major(ROWS, &model_steps::shape());
    let of = LayerTensors::zeroed(backend.device(), &model_steps::shape(), ROWS, ElementType::F32).unwrap();
    let mut steps = ModelStep::new(&backend, rows, vec![of.clone()]).unwrap();
    let mut random = Random::new(7);
    for _ in 0..3 {
        let (runs, inputs) = ([TokenRun::decode(0), TokenRun::chunk(1, 4)], model_steps::inputs(&mut random));
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut staged = Vec::new();
        for (layer, open) in cache.open_steps().unwrap().iter().enumerate() {
            staged.push(steps_ahead::staged(backend.device(), backend.queue(), &inputs[layer]));
            steps_ahead::encode_inputs(&staged[layer], &of, &mut encoder);
            let step = steps.write(std::slice::from_ref(open)).unwrap();
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            step.encode_store(0, &mut pass).unwrap();
            step.encode_attend(0, &mut pass).unwrap();
            drop(pass);
            of.output.encode_copy(&staged[layer].output, &mut encoder).unwrap();
        }
        backend.queue().submit([encoder.finish()]);
        cache.commit().unwrap();
        let outputs: Vec<_> = staged.iter().map(|of| block_on(backend.download(&of.output)).unwrap()).collect();
        model_steps::compare(&mut twin, &runs, &inputs, &outputs);
    }
}

/// Elements of an output behind the rows of a step.
const BEHIND: usize = 12;

/// An engine that submits for itself, with tensors elsewhere in every step and of as many rows as the step.
#[test]
fn a_layer_takes_one_submission() {
    let alone = alone();
    let mut engine = Engine::new(alone.backend.clone(), "kivi:2+window=0");
    let device = engine.backend.device().clone();
    for step in 0..12 {
        let runs = model_steps::runs(step);
        let tokens: usize = runs.iter().map(TokenRun::tokens).sum();
        let inputs = model_steps::inputs(&mut engine.random);
        let mut given = Vec::new();
        for rows in &inputs {
            let of = LayerTensors::zeroed(&device, &model_steps::shape(), tokens, ElementType::F32).unwrap();
            // More rows than the step has, which are none of its own.
            let output = vec![7f32; of.output.elements() + BEHIND];
            let output = block_on(engine.backend.upload(output.as_slice().into())).unwrap();
            let of = LayerTensors { output, ..of };
            for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(rows) {
                let rows = &rows[..tensor.elements()];
                engine.backend.queue().write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
            }
            given.push(of);
        }
        block_on(engine.cache.reserve_for_append(&runs)).unwrap();
        engine.cache.begin_append(&runs).unwrap();
        let open = engine.cache.open_steps().unwrap();
        let written = engine.steps.write(&open).unwrap();
        let before = newest_submission(&engine.backend);
        for (layer, of) in given.iter().enumerate() {
            written.submit(layer, of).unwrap();
        }
        // wgpu gives a number, and submits nothing, for the callback that frees the tables of a submission.
        assert_eq!(newest_submission(&engine.backend) - before - 1, 2 * LAYERS as u64);
        // Tensors of too few rows, of another type, or those that the layer copies to.
        let few = LayerTensors { keys: given[0].keys.slice(0, 128 * tokens - 64).unwrap(), ..given[0].clone() };
        assert!(matches!(written.submit(0, &few), Err(Error::Elements { .. })));
        let half = LayerTensors::zeroed(&device, &model_steps::shape(), tokens, ElementType::F16).unwrap();
        assert!(matches!(written.submit(0, &half), Err(Error::Buffer { .. })));
        assert!(matches!(written.submit(0, &engine.tensors[0]), Err(Error::Buffer { .. })));
        engine.cache.commit().unwrap();
        let outputs = given.iter().map(|of| {
            let mut output = block_on(engine.backend.download(&of.output)).unwrap();
            let behind = output.split_off(output.len() - BEHIND);
            assert_eq!(behind, [7.0; BEHIND], "step {step}: elements behind its rows");
            output
        });
        model_steps::compare(&mut engine.twin, &runs, &inputs, &outputs.collect::<Vec<_>>());
    }
}

/// Prompts in chunks, decoding, windows that are packed, stores that grow and outputs of both types: whatever a model
/// is served with, the kernels are there. Nothing runs on the device, which would not change what is compiled.
#[test]
fn no_kernel_is_compiled_while_serving() {
    const ROWS: usize = 640;
    for (recipe, of) in RECIPES.into_iter().flat_map(|recipe| [(recipe, ElementType::F32), (recipe, ElementType::F16)])
    {
        let backend = gpu_device::fresh();
        let (device, recipe_of) = (backend.device().clone(), model_steps::recipe(recipe));
        let tensors = vec![LayerTensors::zeroed(&device, &model_steps::shape(), ROWS, of).unwrap(); LAYERS];
        let rows = RowLayout::token_major(ROWS, &model_steps::shape());
        let mut steps = ModelStep::new(&backend, rows, tensors).unwrap();
        let mut cache = model_steps::cache(&backend, &recipe_of);
        block_on(steps.prepare(cache.step_kind(0).unwrap())).unwrap();
        block_on(steps.prepare_chunks(cache.step_kind(0).unwrap(), ROWS)).unwrap();
        let compiled = || device.get_internal_counters().hal.compute_pipelines.read();
        let prepared = compiled();
        let mut step = |runs: &[TokenRun]| {
            block_on(cache.reserve_for_append(runs)).unwrap();
            cache.begin_append(runs).unwrap();
            let open = cache.open_steps().unwrap();
            let written = steps.write(&open).unwrap();
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            for layer in 0..LAYERS {
                written.encode_store(layer, &mut pass).unwrap();
                written.encode_attend(layer, &mut pass).unwrap();
            }
            drop(pass);
            drop(encoder); // what is encoded is not run
            cache.commit().unwrap();
            for run in runs.iter().filter(|run| run.tokens() > 1) {
                block_on(cache.pack_windows(run.sequence())).unwrap();
            }
            assert_eq!(compiled(), prepared, "{recipe}, {of:?}: {runs:?}");
        };
        (2..12).for_each(|tokens| step(&[TokenRun::chunk(0, tokens)]));
        step(&[TokenRun::chunk(1, ROWS)]);
        step(&[TokenRun::chunk(1, ROWS - 2), TokenRun::decode(0), TokenRun::decode(2)]);
        (0..8).for_each(|_| step(&[TokenRun::chunk(1, ROWS)])); // states of one sequence become many
        (0..70).for_each(|_| step(&[TokenRun::decode(0), TokenRun::decode(1), TokenRun::decode(2)]));
    }
}

/// The recipe decides on the precision of queries, unless the engine does; and a step that was not encoded in every
/// layer is not committed.
#[test]
fn the_recipe_decides_on_the_precision_of_queries() {
    let runs = [TokenRun::chunk(0, 9), TokenRun::decode(1)];
    let outputs = |precision: Option<QueryPrecision>| {
        let mut engine = Engine::new(gpu_device::fresh(), "int8+query=int8");
        if let Some(precision) = precision {
            engine.steps = engine.steps.with_query_precision(precision);
        }
        let inputs = model_steps::inputs(&mut engine.random);
        for (of, inputs) in engine.tensors.iter().zip(&inputs) {
            for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(inputs) {
                engine.backend.queue().write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
            }
        }
        block_on(engine.cache.reserve_for_append(&runs)).unwrap();
        engine.cache.begin_append(&runs).unwrap();
        for layers in [0, LAYERS - 1, LAYERS] {
            let open = engine.cache.open_steps().unwrap();
            let step = engine.steps.write(&open).unwrap();
            let mut encoder =
                engine.backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            for layer in 0..layers {
                step.encode_store(layer, &mut pass).unwrap();
                step.encode_attend(layer, &mut pass).unwrap();
            }
            drop((pass, open));
            if layers < LAYERS {
                assert!(matches!(engine.cache.commit(), Err(Error::Plan { .. })), "{layers} layers are encoded");
                continue;
            }
            engine.backend.queue().submit([encoder.finish()]);
        }
        let queries = engine.tensors[1].queries.slice(0, 10 * 4 * 64).unwrap();
        let called = block_on(engine.cache.attend(1, &queries, ElementType::F32)).unwrap();
        engine.cache.commit().unwrap();
        let encoded = block_on(engine.backend.download(&engine.tensors[1].output)).unwrap();
        let called: Vec<f64> = block_on(engine.backend.download(&called)).unwrap().into_iter().map(f64::from).collect();
        nmse(&encoded[..called.len()], &called)
    };
    assert!(outputs(None) < 1e-9);
    assert!(outputs(Some(QueryPrecision::Int16)) > 1e-6, "the engine asks for another precision");
}

/// A step that is not one of these layers, or too long for the tensors, is refused, and can be abandoned.
#[test]
fn steps_of_others_are_refused() {
    let alone = alone();
    let mut engine = Engine::new(alone.backend.clone(), "saw-int4");
    engine.step(&[TokenRun::decode(0)]);
    let runs = [TokenRun::chunk(1, ROWS + 1)];
    block_on(engine.cache.reserve_for_append(&runs)).unwrap();
    engine.cache.begin_append(&runs).unwrap();
    let refused = engine.steps.write(&engine.cache.open_steps().unwrap()).map(drop);
    assert!(matches!(refused, Err(Error::Plan { .. } | Error::Elements { .. })), "{refused:?}");
    engine.cache.abandon();

    let other = AttentionShape::new(4, 2, 128).unwrap();
    let recipe = engine.cache.recipe(0).unwrap().clone();
    let mut cache = ModelCache::new(&engine.backend, &[(other, recipe)], 1).unwrap();
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    let refused = engine.steps.write(&cache.open_steps().unwrap()).map(drop);
    assert!(refused.is_err());
    // Nothing was broken by it.
    engine.step(&[TokenRun::decode(0), TokenRun::decode(1)]);
}
