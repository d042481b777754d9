//! Steps after a prompt was compressed in layers that keep as many tokens: one part, through one `ModelStep`.

use kvpack::cache::TokenRun;
use pollster::block_on;

use crate::any_backend::compressed::Prompt;
use crate::any_backend::kept_together::{self, TOKENS, dense, selection};
use crate::any_backend::model_steps::{LAYERS, SEQUENCES, shape};
use crate::gpu_device;
use crate::model_step::Engine;

#[test]
fn layers_that_keep_as_many_tokens_stay_together() {
    kept_together::check(&gpu_device::shared());
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
