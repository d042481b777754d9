//! The kernel of a decode step: planned from lengths, bound to memory, launched.

pub(super) mod attend_step;
mod kernel;
pub(super) mod launch;
mod logits;
pub(super) mod merge_pair;
pub(super) mod merge_parts;
pub(super) mod model_tables;
mod page_table;
mod parts;
pub(super) mod prepare;
mod run_variant;
pub(super) mod scratch;
mod segment;
mod split;
mod storing;
pub(super) mod uncentre_lse;
mod unpack;
mod unseen;
mod variant;
mod variant_sizes;
