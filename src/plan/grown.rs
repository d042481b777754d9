//! Plans of decoding that go on from step to step.

use std::sync::atomic::{AtomicU64, Ordering};

use super::attend::{AttendPlan, PlannedSpan, StorePart};
use super::runs::PlannedRun;

/// A span of a plan: the place of its segment, and its place there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpanIndex {
    segment: usize,
    span: usize,
}

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

    /// How many further tokens another plan has in every run; `None` unless it equals this one or grew from it.
    #[cfg(feature = "wgpu")]
    pub(super) fn tokens_until(self, other: Self) -> Option<u64> {
        other.tokens.checked_sub(self.tokens).filter(|_| self.plan == other.plan)
    }
}

impl AttendPlan {
    /// Becomes the plan of the same queries once every sequence has another token at the end of its last span, within
    /// the page there. `last` returns the store of that span and the position where it begins; `ends` is where the plan
    /// has these spans, and is filled if it is empty. False if it cannot: the plan is of no use any more then.
    pub(crate) fn grow_each(
        &mut self,
        ends: &mut Vec<SpanIndex>,
        last: impl Fn(usize) -> Option<(usize, usize)>,
    ) -> bool {
        if ends.is_empty() {
            ends.extend(self.last_spans(last));
        }
        if ends.len() != self.runs.len() {
            return false;
        }
        for &SpanIndex { segment, span } in ends.iter() {
            let Some(span) = self.segments.get_mut(segment).and_then(|of| of.spans.get_mut(span)) else { return false };
            span.tokens += 1;
        }
        self.runs.iter_mut().for_each(PlannedRun::move_on);
        self.origin.tokens += 1;
        true
    }

    /// Where the plan has the last span of every run.
    fn last_spans(&self, last: impl Fn(usize) -> Option<(usize, usize)>) -> impl Iterator<Item = SpanIndex> {
        let is_last = move |store: usize, span: &PlannedSpan| {
            span.gathered.is_none() && last(self.runs[span.run].run.sequence) == Some((store, span.start))
        };
        let of_segment = move |(segment, of): (usize, &StorePart)| {
            let spans = of.spans.iter().enumerate().filter(|(_, span)| is_last(of.store(), span));
            spans.map(|(span, _)| SpanIndex { segment, span }).collect::<Vec<_>>()
        };
        self.segments.iter().enumerate().flat_map(of_segment)
    }
}
