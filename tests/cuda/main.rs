//! The CUDA backend: `cargo test --features cuda --test cuda -- --ignored` on a machine with an NVIDIA GPU.

#[path = "../any_backend/mod.rs"]
mod any_backend;
mod cache;
mod compress;
mod device;
mod model_step;
mod prompt_parts;
mod query_runs;
mod ranks;
mod shares;
mod step_launches;
mod step_states;
mod unpacked_prompts;
