//! Plans of decoding that go on from step to step.

use std::sync::atomic::{AtomicU64, Ordering};

use super::attend::AttendPlan;
use super::runs::PlannedRun;

/// Where a plan comes from: the plan that was made of spans, and the number of tokens that each of its runs got since.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    #[cfg_attr(not(feature = "wgpu"), expect(dead_code, reason = "steps through wgpu alone compare origins"))]
    plan: u64,
    tokens: u64,
}

impl Origin {
    /// That of a plan which is made of spans.
    pub(super) fn new() -> Self {
        static PLANS: AtomicU64 = AtomicU64::new(0);
        Self { plan: PLANS.fetch_add(1, Ordering::Relaxed), tokens: 0 }
    }

    /// Whether another plan is this one with more tokens, or is like it.
    #[cfg(feature = "wgpu")]
    pub(super) const fn is_before(self, other: Self) -> bool {
        self.plan == other.plan && self.tokens <= other.tokens
    }
}

impl AttendPlan {
    /// Becomes the plan of the same queries once every sequence has another token at the end of its last span, within
    /// the page there. `last` returns the store of that span and the position where it begins. False if it cannot: the
    /// plan is of no use any more then.
    pub(crate) fn grow_each(&mut self, last: impl Fn(usize) -> Option<(usize, usize)>) -> bool {
        let Self { runs, segments, origin, .. } = self;
        let mut grown = 0;
        for segment in segments {
            let store = segment.store();
            for span in segment.spans.iter_mut().filter(|span| span.gathered.is_none()) {
                if last(runs[span.run].run.sequence) == Some((store, span.start)) {
                    span.tokens += 1;
                    grown += 1;
                }
            }
        }
        runs.iter_mut().for_each(PlannedRun::move_on);
        origin.tokens += 1;
        grown == runs.len()
    }
}
