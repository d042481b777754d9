//! How scores become logits in a launch: what its kernel is compiled with in addition to the format.

use crate::plan::Scoring;

/// How the scores of a launch become logits: `cuda/common/logits.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct Logits {
    /// Scores are capped.
    pub(super) capped: bool,
    /// Outputs have a sink.
    pub(super) sinks: bool,
    /// Which tokens of an item are hidden.
    pub(super) mask: TokenMask,
}

/// Which tokens of an item are hidden from its queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) enum TokenMask {
    /// None, or the last of many queries.
    #[default]
    None = 0,
    /// The first.
    Window = 1,
    /// From one on those that bits hide.
    Tree = 2,
}

impl Logits {
    pub(super) fn new(scoring: &Scoring, mask: TokenMask) -> Self {
        Self { capped: scoring.soft_cap().is_some(), sinks: scoring.sinks().is_some(), mask }
    }

    /// What kernels are compiled with.
    pub(super) const fn defines(self) -> [(&'static str, usize); 3] {
        [("CAPPED", self.capped as usize), ("SINKS", self.sinks as usize), ("MASKED", self.mask as usize)]
    }
}
