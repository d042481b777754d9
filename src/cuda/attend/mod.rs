//! The kernel of a decode step: planned from lengths, bound to memory, launched.

pub(super) mod launch;
mod split;
pub(super) mod step;
mod variant;
