//! Steps on CUDA that return log-sum-exps, that store nothing, and that follow a store which was given back, against the
//! same on the CPU.
//!
//!     cargo test --release --features cuda --test cuda -- --ignored step_states::

use kvpack::backend::Device;
use kvpack::cache::TokenRun;
use kvpack::cpu::{Cpu, CpuTensor, nmse};
use kvpack::cuda::{Cuda, KernelCache, LayerTensors, ModelStep, Tensor};
use kvpack::plan::{ElementType, QueryRun, RowLayout, Visible};
use pollster::block_on;

use any_backend::model_steps::{self, LAYERS, ROWS, SEQUENCES, shape};
use any_backend::random_rows::Random;

/// What a step does.
enum Asked {
    Append(Vec<TokenRun>),
    Attend(Vec<QueryRun>),
    /// All sequences end, and memory is given back.
    Trim,
}

fn asked() -> Vec<Asked> {
    let appended = |step| Asked::Append(model_steps::runs(step));
    let attended = Asked::Attend(vec![QueryRun::new(0, 3, Visible::All), QueryRun::decode(2)]);
    let steps = (0..30).map(appended).chain([attended, Asked::Trim]);
    steps.chain((30..60).map(appended)).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn steps_return_log_sum_exps() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    for name in ["f16", "saw-int4", "kivi:2+window=0"] {
        let recipe = model_steps::recipe(name);
        let (mut cache, mut twin) = (model_steps::cache(&backend, &recipe), model_steps::cache(&Cpu::new(), &recipe));
        let zeroed = |elements| Tensor::zeroed(backend.stream(), elements, ElementType::F32).unwrap();
        let tensors = |_| {
            let [keys, values, queries, output] = model_steps::elements_of(ROWS).map(zeroed);
            LayerTensors { keys, values, queries, output }
        };
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(tensors).collect();
        let lse: Vec<Tensor> = (0..LAYERS).map(|_| zeroed(ROWS * 4)).collect();
        let rows = RowLayout::token_major(ROWS, &shape());
        let mut steps =
            ModelStep::new(&backend, rows, tensors.clone()).unwrap().with_log_sum_exps(lse.clone()).unwrap();
        let mut random = Random::new(7);
        for (step, asked) in asked().into_iter().enumerate() {
            let inputs = model_steps::inputs(&mut random);
            for (of, inputs) in tensors.iter().zip(&inputs) {
                for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(inputs) {
                    tensor.write(backend.stream(), rows.as_slice().into()).unwrap();
                }
            }
            let stored = match asked {
                Asked::Append(runs) => {
                    block_on(cache.reserve_for_append(&runs)).unwrap();
                    block_on(twin.reserve_for_append(&runs)).unwrap();
                    cache.begin_append(&runs).unwrap();
                    twin.begin_append(&runs).unwrap();
                    runs.iter().map(TokenRun::tokens).sum()
                }
                Asked::Attend(queries) => {
                    cache.begin_attend(&queries).unwrap();
                    twin.begin_attend(&queries).unwrap();
                    0
                }
                Asked::Trim => {
                    for sequence in 0..SEQUENCES {
                        cache.clear(sequence).unwrap();
                        twin.clear(sequence).unwrap();
                    }
                    assert!(cache.trim().unwrap() > 0);
                    continue;
                }
            };
            let written = steps.write(&cache.open_steps().unwrap()).unwrap();
            for layer in 0..LAYERS {
                if stored > 0 {
                    written.launch_store(layer).unwrap();
                }
                written.launch_attend(layer).unwrap();
            }
            cache.commit().unwrap();
            for (layer, [keys, values, queries]) in inputs.iter().enumerate() {
                let of = |all: &[f32], rows: usize, heads: usize| CpuTensor::F32(all[..rows * heads * 64].to_vec());
                if stored > 0 {
                    let (keys, values) = (of(keys, stored, 2), of(values, stored, 2));
                    block_on(twin.store(layer, RowLayout::token_major(stored, &shape()), &keys, &values)).unwrap();
                }
                let asked = twin.plan(layer).unwrap().runs().iter().map(|planned| planned.run.queries).sum();
                let queries = of(queries, asked, 4);
                let states = block_on(twin.attend_states(layer, &queries)).unwrap();
                for (got, expected) in [(&tensors[layer].output, states.outputs), (&lse[layer], states.lse)] {
                    let expected: Vec<f64> = expected.to_f32().into_iter().map(f64::from).collect();
                    let got = block_on(backend.download(got)).unwrap();
                    let error = nmse(&got[..expected.len()], &expected);
                    assert!(error < 1e-3, "{name}, step {step}, layer {layer}: {error:.1e}");
                }
            }
            twin.commit().unwrap();
        }
    }
}
