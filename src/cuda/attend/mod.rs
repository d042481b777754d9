//! The kernel of a decode step: planned from lengths, bound to memory, launched.

pub(super) mod launch;
pub(super) mod merge_pair;
mod split;
pub(super) mod step;
mod variant;
