//! Steps of a whole model that an engine captures in a graph, against the same steps on the CPU.
//!
//!     cargo test --release --features cuda --test cuda -- --ignored model_step::

use std::collections::{HashMap, HashSet};

use kvpack::backend::Device;
use kvpack::cache::TokenRun;
use kvpack::cpu::Cpu;
use kvpack::cuda::cudarc::driver::CudaGraph;
use kvpack::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use kvpack::cuda::{Cuda, KernelCache, LaunchMemory, LayerTensors, ModelStep, Tensor, WrittenStep};
use kvpack::plan::{ElementType, QueryRun, RowLayout};
use pollster::block_on;

use any_backend::model_steps::{BEGINNING_ROWS, CENTRED, LAYERS, RECIPES, ROWS, SEQUENCES, STEADY, STEPS};
use any_backend::random_rows::Random;
use any_backend::{model_steps, parted_layers};

/// Tensors of a layer.
fn tensors(backend: &Cuda) -> LayerTensors {
    tensors_of(backend, ROWS)
}

/// Those with so many rows.
fn tensors_of(backend: &Cuda, rows: usize) -> LayerTensors {
    let zeroed = |elements| Tensor::zeroed(backend.stream(), elements, ElementType::F32).unwrap();
    let [keys, values, queries, output] = model_steps::elements_of(rows).map(zeroed);
    LayerTensors { keys, values, queries, output }
}

/// Keys, values and queries of a layer on the device.
fn write(backend: &Cuda, of: &LayerTensors, inputs: &[Vec<f32>; 3]) {
    for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(inputs) {
        tensor.write(backend.stream(), rows.as_slice().into()).unwrap();
    }
}

/// A graph of so many layers of a step, and the memory of its launches. Attention begins beside what is stored in every
/// other layer, the last among them.
fn capture(backend: &Cuda, step: &WrittenStep<'_>, layers: usize) -> (CudaGraph, LaunchMemory) {
    let stream = backend.stream();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    for layer in 0..layers {
        if (layers - layer) % 2 == 1 {
            step.launch(layer).unwrap();
        } else {
            step.launch_store(layer).unwrap();
            step.launch_attend(layer).unwrap();
        }
    }
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph");
    (graph, step.memory())
}

/// Every layer attends as on the CPU, a graph is captured only where something was bound anew, and that is seldom while
/// the batch stays the same.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn one_graph_is_replayed_while_sequences_grow() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    for name in RECIPES {
        let recipe = model_steps::recipe(name);
        let (mut cache, mut twin) = (model_steps::cache(&backend, &recipe), model_steps::cache(&Cpu::new(), &recipe));
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(|_| tensors(&backend)).collect();
        let rows = RowLayout::token_major(ROWS, &model_steps::shape());
        let mut steps = ModelStep::new(&backend, rows, tensors.clone()).unwrap();
        let (mut random, mut graph, mut captured) = (Random::new(7), None, 0);
        for step in 0..STEPS {
            if let Some(sequence) = model_steps::leaves(step) {
                cache.clear(sequence).unwrap();
                twin.clear(sequence).unwrap();
            }
            let (runs, inputs) = (model_steps::runs(step), model_steps::inputs(&mut random));
            tensors.iter().zip(&inputs).for_each(|(of, inputs)| write(&backend, of, inputs));
            block_on(cache.reserve_for_append(&runs)).unwrap();
            cache.begin_append(&runs).unwrap();
            let open = cache.open_steps().unwrap();
            let written = steps.write(&open).unwrap();
            if !written.is_for_graphs() {
                written.replayed();
                assert!(open[0].stored.first_missing().is_some(), "a graph packs no part of a prompt");
                (0..LAYERS).for_each(|layer| written.launch(layer).unwrap());
            } else if written.bound_anew() || graph.is_none() {
                graph = Some(capture(&backend, &written, LAYERS));
                captured += usize::from(step > STEADY);
            }
            if let (true, Some((graph, _))) = (written.is_for_graphs(), &graph) {
                graph.launch().unwrap();
                written.replayed();
            }
            cache.commit().unwrap();
            let download = |of: &LayerTensors| block_on(backend.download(&of.output)).unwrap();
            let outputs: Vec<Vec<f32>> = tensors.iter().map(download).collect();
            model_steps::compare(&mut twin, &runs, &inputs, &outputs);
        }
        println!("{name}: {captured} graphs for {} steady steps", STEPS - STEADY);
        assert!(captured <= 6, "{name}: {captured} graphs for {} steady steps", STEPS - STEADY);
        assert_eq!(block_on(cache.non_finite()).unwrap(), []);
        for sequence in 0..SEQUENCES {
            assert_eq!(cache.length(sequence), twin.length(sequence));
        }
    }
}

/// The centres of sequences that begin are made within the step, and all is stored as by the calls that submit, bit for
/// bit: steps that make centres have a graph of their own.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn centred_sequences_begin_within_a_step() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    for name in CENTRED {
        let recipe = model_steps::recipe(name);
        let (mut cache, mut twin) = (model_steps::cache(&backend, &recipe), model_steps::cache(&Cpu::new(), &recipe));
        let mut submitted = model_steps::cache(&backend, &recipe);
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(|_| tensors_of(&backend, BEGINNING_ROWS)).collect();
        let rows = RowLayout::token_major(BEGINNING_ROWS, &model_steps::shape());
        let mut steps = ModelStep::new(&backend, rows, tensors.clone()).unwrap().keeping(8);
        let (mut random, mut graphs, mut classes) = (Random::new(7), HashMap::new(), [HashSet::new(), HashSet::new()]);
        for step in 0..model_steps::BEGINNING {
            model_steps::before_beginning(&mut cache, step);
            model_steps::before_beginning(&mut twin, step);
            model_steps::before_beginning(&mut submitted, step);
            let runs = model_steps::beginning(step);
            let inputs = model_steps::inputs_of(&mut random, BEGINNING_ROWS);
            tensors.iter().zip(&inputs).for_each(|(of, inputs)| write(&backend, of, inputs));
            block_on(cache.reserve_for_append(&runs)).unwrap();
            cache.begin_append(&runs).unwrap();
            let written = steps.write(&cache.open_steps().unwrap()).unwrap();
            classes[usize::from([0, 2, 5].contains(&step))].insert(written.class());
            let captured = || capture(&backend, &written, LAYERS);
            graphs.entry(written.class()).or_insert_with(captured).0.launch().unwrap();
            written.replayed();
            cache.commit().unwrap();
            model_steps::submit(&mut submitted, &runs, &inputs);
            let (encoded, submitted) = (model_steps::held(&cache), model_steps::held(&submitted));
            assert!(encoded == submitted, "{name}: step {step} stores something else");
            let outputs = tensors.iter().map(|of| block_on(backend.download(&of.output)).unwrap());
            model_steps::compare(&mut twin, &runs, &inputs, &outputs.collect::<Vec<_>>());
            assert!(model_steps::centres(&cache) == model_steps::centres(&twin), "{name}: step {step}");
        }
        assert!(classes[0].is_disjoint(&classes[1]), "{name}: decoding launches no kernel that makes centres");
        assert_eq!(block_on(cache.non_finite()).unwrap(), []);
    }
}

/// What was prepared is all that steps ask for, of sequences that grow from nothing into several items.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn no_kernel_is_compiled_while_a_model_is_served() {
    let folder = std::env::temp_dir().join(format!("kvpack-prepared-{}", std::process::id()));
    let backend = Cuda::open(0, KernelCache::Directory(folder.clone())).unwrap();
    let compiled = || std::fs::read_dir(&folder).map_or(0, Iterator::count);
    for name in ["calibquant:2+window=0", "saw-int4+window=0+centre"] {
        let recipe = model_steps::recipe(name);
        let mut cache = model_steps::cache(&backend, &recipe);
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(|_| tensors(&backend)).collect();
        let rows = RowLayout::token_major(ROWS, &model_steps::shape());
        let mut steps = ModelStep::new(&backend, rows, tensors.clone()).unwrap();
        let before = compiled();
        // Before there is room for anything.
        steps.prepare(cache.step_kind(0).unwrap()).unwrap();
        let prepared = compiled();
        for _ in 0..3 * 128 {
            block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
            cache.begin_append(&[TokenRun::decode(0)]).unwrap();
            let open = cache.open_steps().unwrap();
            let written = steps.write(&open).unwrap();
            for layer in 0..LAYERS {
                written.launch(layer).unwrap();
            }
            cache.commit().unwrap();
        }
        let asked_for = compiled() - prepared;
        assert!(prepared > before && asked_for == 0, "{name}: {asked_for} kernels beside {prepared}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// Batches that take turns replay the graphs that were captured for them.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn classes_are_kept_side_by_side() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let recipe = model_steps::recipe("saw-int4");
    let (mut cache, mut twin) = (model_steps::cache(&backend, &recipe), model_steps::cache(&Cpu::new(), &recipe));
    let tensors: Vec<LayerTensors> = (0..LAYERS).map(|_| tensors(&backend)).collect();
    let rows = RowLayout::token_major(ROWS, &model_steps::shape());
    let mut steps = ModelStep::new(&backend, rows, tensors.clone()).unwrap().keeping(8);
    let (mut random, mut graphs) = (Random::new(7), HashMap::new());
    for step in 0..model_steps::ALTERNATING {
        let (runs, inputs) = (model_steps::alternating(step), model_steps::inputs(&mut random));
        tensors.iter().zip(&inputs).for_each(|(of, inputs)| write(&backend, of, inputs));
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        let written = steps.write(&cache.open_steps().unwrap()).unwrap();
        assert!(!written.bound_anew() || !graphs.contains_key(&written.class()));
        let captured = || capture(&backend, &written, LAYERS);
        graphs.entry(written.class()).or_insert_with(captured).0.launch().unwrap();
        written.replayed();
        cache.commit().unwrap();
        let outputs = tensors.iter().map(|of| block_on(backend.download(&of.output)).unwrap());
        model_steps::compare(&mut twin, &runs, &inputs, &outputs.collect::<Vec<_>>());
    }
    println!("{} graphs for {} steps", graphs.len(), model_steps::ALTERNATING);
    // Within a tile a longer sequence may be served by other kernels.
    assert!(graphs.len() <= 12, "{} graphs for {} steps", graphs.len(), model_steps::ALTERNATING);
}

/// Layers that were parted share a layout, and one engine's tensors serve their steps in turn: each is bound to
/// its own stores.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn parted_layers_are_bound_to_their_own_stores() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let (mut cache, mut twin) = (parted_layers::cache(&backend), parted_layers::cache(&Cpu::new()));
    let of = tensors(&backend);
    let rows = RowLayout::token_major(ROWS, &model_steps::shape());
    let mut steps = ModelStep::new(&backend, rows, vec![of.clone()]).unwrap().keeping(LAYERS);
    let (mut random, mut anew) = (Random::new(7), 0);
    for _ in 0..parted_layers::STEPS {
        let (runs, inputs) = ([TokenRun::decode(0)], model_steps::inputs(&mut random));
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        parted_layers::check_layout(&cache);
        let mut outputs = Vec::new();
        for (layer, open) in cache.open_steps().unwrap().iter().enumerate() {
            assert_eq!(open.layers, [layer]);
            write(&backend, &of, &inputs[layer]);
            let step = steps.write(std::slice::from_ref(open)).unwrap();
            anew += usize::from(step.bound_anew());
            step.launch_store(0).unwrap();
            step.launch_attend(0).unwrap();
            outputs.push(block_on(backend.download(&of.output)).unwrap());
        }
        cache.commit().unwrap();
        model_steps::compare(&mut twin, &runs, &inputs, &outputs);
    }
    assert_eq!(anew, LAYERS, "each layer is bound once");
}

/// One `ModelStep` serves layers that hold different numbers of tokens.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn one_step_serves_all_parts() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let (mut cache, mut twin) = (parted_layers::cache(&backend), parted_layers::cache(&Cpu::new()));
    let of: Vec<_> = (0..LAYERS).map(|_| tensors(&backend)).collect();
    let rows = RowLayout::token_major(ROWS, &model_steps::shape());
    let mut steps = ModelStep::new(&backend, rows, of.clone()).unwrap();
    let (mut random, mut classes) = (Random::new(7), Vec::new());
    for _ in 0..parted_layers::STEPS {
        let (runs, inputs) = ([TokenRun::decode(0)], model_steps::inputs(&mut random));
        of.iter().zip(&inputs).for_each(|(of, inputs)| write(&backend, of, inputs));
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        let open = cache.open_steps().unwrap();
        assert_eq!(open.len(), LAYERS);
        let step = steps.write(&open).unwrap();
        classes.push((step.bound_anew(), step.class()));
        (0..LAYERS).for_each(|layer| step.launch(layer).unwrap());
        drop((step, open));
        cache.commit().unwrap();
        let outputs: Vec<_> = of.iter().map(|of| block_on(backend.download(&of.output)).unwrap()).collect();
        model_steps::compare(&mut twin, &runs, &inputs, &outputs);
    }
    let class = classes[0].1;
    assert!(classes.iter().enumerate().all(|(step, of)| *of == (step == 0, class)), "{classes:?}");
}

/// A graph that only attends must not be replayed for a step that stores, though what is bound serves both.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn steps_that_store_nothing_have_classes_of_their_own() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let mut cache = model_steps::cache(&backend, &model_steps::recipe("f16"));
    let of: Vec<_> = (0..LAYERS).map(|_| tensors(&backend)).collect();
    let mut steps = ModelStep::new(&backend, RowLayout::token_major(ROWS, &model_steps::shape()), of).unwrap();
    let mut classes = Vec::new();
    for stores in [true, false, true, false] {
        block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
        if stores {
            cache.begin_append(&[TokenRun::decode(0)]).unwrap();
        } else {
            cache.begin_attend(&[QueryRun::decode(0)]).unwrap();
        }
        let open = cache.open_steps().unwrap();
        let step = steps.write(&open).unwrap();
        classes.push(step.class());
        (0..LAYERS).for_each(|layer| step.launch(layer).unwrap());
        drop((step, open));
        cache.commit().unwrap();
    }
    // The third step is served by what was bound for the second, which stores nothing.
    assert!([classes[0], classes[2]].iter().all(|class| ![classes[1], classes[3]].contains(class)), "{classes:?}");
    assert_eq!(classes[1], classes[3]);
}
