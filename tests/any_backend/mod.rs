//! What tests of several backends share: cases, models and checks that are generic over the backend.
#![allow(missing_docs, reason = "the tests of this repository alone read it")]

pub mod cache_edges;
pub mod cache_model;
pub mod compressed;
pub mod exact;
pub mod growing_stores;
pub mod kept_together;
pub mod key_means;
pub mod mixed;
pub mod model_steps;
pub mod non_finite_queries;
pub mod parted_layers;
pub mod prompt_parts;
pub mod query_runs;
pub mod random_rows;
pub mod rounding;
pub mod scored_policies;
pub mod select_cases;
pub mod serving;
pub mod shares;
pub mod step_writes;
pub mod swap_out;
pub mod swapped_bytes;
pub mod unpacked_prompts;
