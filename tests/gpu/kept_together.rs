//! Steps after a prompt was compressed in layers that keep as many tokens: one part, through one `ModelStep`.

use kvpack::cache::TokenRun;
use kvpack::plan::{ElementType, RowLayout};
use kvpack::wgpu::{LayerTensors, ModelStep, STATE_BUFFERS};
use pollster::block_on;

use crate::gpu_device;
use crate::model_step::{Engine, made};
use any_backend::compressed::Prompt;
use any_backend::kept_together::{self, TOKENS, dense, selection};
use any_backend::model_steps::{LAYERS, ROWS, SEQUENCES, recipe, shape};
use any_backend::swapped_bytes;

#[test]
fn layers_that_keep_as_many_tokens_stay_together() {
    kept_together::check(&gpu_device::shared());
}

#[test]
fn layers_join_when_nothing_holds_them_apart() {
    kept_together::check_joining(&gpu_device::shared());
}

#[test]
fn sequences_come_back_from_bytes() {
    swapped_bytes::check(&gpu_device::shared());
}

/// Every layer attends to its own tokens, and what was bound before serves on.
#[test]
fn they_take_one_step() {
    for recipe in ["saw-int4", "f16"] {
        let mut engine = Engine::new(gpu_device::fresh(), recipe);
        let all: Vec<TokenRun> = (0..SEQUENCES).map(TokenRun::decode).collect();
        engine.step(&all[1..]);
        let prompt = Prompt::new(shape(), LAYERS, TOKENS, 5);
        let kept = selection(|_| 50);
        block_on(engine.cache.keep(0, dense(&prompt, &engine.backend), &kept)).unwrap();
        block_on(engine.twin.keep(0, dense(&prompt, engine.twin.backend()), &kept)).unwrap();
        for _ in 0..5 {
            engine.step(&all); // it has one part, of all layers
        }
        assert_eq!(engine.cache.length(0), Ok(TOKENS + 5));
    }
}

/// Layers that part have steps of their own, whose scratch is one: only tables are made for each.
#[test]
fn steps_of_one_device_share_scratch() {
    let backend = gpu_device::fresh();
    let prompt = Prompt::new(shape(), LAYERS, TOKENS, 5);
    let mut cache = prompt.cache(&backend, &recipe("saw-int4"));
    block_on(cache.keep(0, dense(&prompt, &backend), &selection(|layer| 50 + layer))).unwrap();
    let rows = RowLayout::token_major(ROWS, &shape());
    let of = LayerTensors::zeroed(backend.device(), &shape(), ROWS, ElementType::F32).unwrap();
    let runs = [TokenRun::decode(0)];
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    let open = cache.open_steps().unwrap();
    let mut kept = Vec::new();
    let buffers = open.iter().map(|part| {
        let [before, ..] = made(backend.device());
        let mut steps = ModelStep::new(&backend, rows, vec![of.clone()]).unwrap();
        assert!(steps.write(std::slice::from_ref(part)).unwrap().bound_anew());
        kept.push(steps);
        made(backend.device())[0] - before
    });
    let buffers: Vec<isize> = buffers.collect();
    // Prepared queries, scores, states and counters, and a word that stands for their tables.
    let shared = 4 + STATE_BUFFERS as isize;
    assert_eq!(buffers[1..], [buffers[0] - shared; LAYERS - 1]);
    // Once no step is bound, the next makes them again.
    kept.clear();
    let [before, ..] = made(backend.device());
    let mut steps = ModelStep::new(&backend, rows, vec![of]).unwrap();
    steps.write(&open[..1]).unwrap();
    assert_eq!(made(backend.device())[0] - before, buffers[0]);
}
