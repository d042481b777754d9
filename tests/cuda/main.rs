//! The CUDA backend: `cargo test --features cuda --test cuda -- --ignored --skip ranks::` on a machine with an NVIDIA
//! GPU. Tests of ranks need two.
//!
//! With an empty kernel cache the tests without ranks take more than 150 s on a machine with an H200 and 16 cores:
//! `steps_store_what_the_twin_stores` compiles the kernels of every format and head dimension, and had not ended by
//! then.

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
mod streams;
mod unpacked_prompts;
