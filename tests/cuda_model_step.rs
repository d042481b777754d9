//! Steps of a whole model that an engine captures in a graph, against the same steps on the CPU.
//!
//!     cargo test --release --features cuda --test cuda_model_step -- --ignored
#![cfg(feature = "cuda")]

mod model_steps;
mod random_rows;

use kvpack::backend::Device;
use kvpack::cpu::Cpu;
use kvpack::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use kvpack::cuda::{Cuda, KernelCache, LayerTensors, ModelStep, Tensor};
use kvpack::plan::{ElementType, RowLayout};
use model_steps::{LAYERS, RECIPES, ROWS, SEQUENCES, STEADY, STEPS};
use pollster::block_on;
use random_rows::Random;

/// Every layer attends as on the CPU, a graph is captured only where something was bound anew, and that is seldom while the
/// batch stays the same.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn one_graph_is_replayed_while_sequences_grow() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let stream = backend.stream();
    for name in RECIPES {
        let recipe = model_steps::recipe(name);
        let (mut cache, mut twin) = (model_steps::cache(&backend, &recipe), model_steps::cache(&Cpu::new(), &recipe));
        let of_layer = |_| {
            let zeroed = |elements| Tensor::zeroed(stream, elements, ElementType::F32).unwrap();
            let [keys, values, queries, output] = model_steps::tensor_elements().map(zeroed);
            LayerTensors { keys, values, queries, output }
        };
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(of_layer).collect();
        let rows = RowLayout::token_major(ROWS, &model_steps::shape());
        let mut steps = ModelStep::new(&backend, rows, tensors.clone()).unwrap();
        let (mut random, mut graph, mut captured) = (Random::new(7), None, 0);
        for step in 0..STEPS {
            if let Some(sequence) = model_steps::leaves(step) {
                cache.clear(sequence).unwrap();
                twin.clear(sequence).unwrap();
            }
            let (runs, inputs) = (model_steps::runs(step), model_steps::inputs(&mut random));
            for (of, rows) in tensors.iter().zip(&inputs) {
                for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(rows) {
                    tensor.write(stream, rows.as_slice().into()).unwrap();
                }
            }
            block_on(cache.reserve_for_append(&runs)).unwrap();
            cache.begin_append(&runs).unwrap();
            let open = cache.encode().unwrap().remove(0);
            let written = steps.write(&open).unwrap();
            if written.bound_anew() {
                stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
                for layer in 0..LAYERS {
                    written.launch_store(layer).unwrap();
                    written.launch_attend(layer).unwrap();
                }
                let new = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph");
                graph = Some((new, written.memory()));
                captured += usize::from(step > STEADY);
            }
            graph.as_ref().unwrap().0.launch().unwrap();
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
