//! The wgpu backend on a device. `gpu_device` says on which adapter. A module is run by its name:
//! `cargo test --test gpu -- kernels::`.

mod adapter;
mod cache;
mod cache_edges;
mod compress;
mod devices;
mod gpu_device;
mod in_bounds;
mod kept_together;
mod kernels;
mod mixture;
mod model_step;
mod non_finite_queries;
mod not_submitted;
mod parts_of_a_step;
mod prompt_parts;
mod query_runs;
mod rotated_windows;
mod round_trips;
mod select;
mod serving;
mod shares;
mod step_states;
mod steps_ahead;
mod swap_out;
mod unpacked_prompts;
#[cfg(target_os = "linux")]
mod validation;
