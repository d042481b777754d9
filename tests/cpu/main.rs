//! What needs no device: the CPU backend, caches over it, policies, and what wrong arguments are refused with.

mod adding;
#[path = "../any_backend/mod.rs"]
mod any_backend;
mod cache;
mod cache_budget;
mod cache_edges;
mod cache_errors;
mod calibration_search;
mod centre;
mod compress;
mod conformance_finds;
mod given_back;
mod kept_together;
mod kernels;
mod mixture;
mod model_cache;
mod non_finite_queries;
mod plain_arguments;
mod policy;
mod policy_examples;
mod prefixes;
mod prompt_parts;
mod query_runs;
mod recipe_texts;
mod recompress;
mod recompress_choice;
mod select;
mod serving;
mod sliding_window;
mod step;
mod step_queries;
mod stored_error;
mod swap_out;
mod swapped_bytes;
mod unfused_attention;
