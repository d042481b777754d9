//! Plans of which sequences got a token more, within the pages that they had: most steps of decoding. Their work is
//! that of the step before, but for the tokens of a few items.

use super::attend::{AttendPlan, PlannedSpan, StorePart};
use super::runs::PlannedRun;
use super::visible::{Seen, Visible};
use super::work::{Dispatch, StoreWork, Work, WorkItem};
use crate::format::TILE_TOKENS;

impl AttendPlan {
    /// Whether another plan is this one with more tokens within the last pages of spans, for queries that are alone and
    /// see all of their sequence.
    pub(crate) fn grows_to(&self, other: &Self) -> bool {
        let alone = |run: &PlannedRun| run.run.queries == 1 && run.run.visible == Visible::All;
        let same_run = |(one, other): (&PlannedRun, &PlannedRun)| {
            alone(one) && alone(other) && one.run.sequence == other.run.sequence && one.first_row == other.first_row
        };
        if self.origin.is_before(other.origin) {
            return self.runs.iter().all(alone) && self.scoring == other.scoring;
        }
        let runs = self.runs.len() == other.runs.len() && self.runs.iter().zip(&other.runs).all(same_run);
        let segments = self.segments.len() == other.segments.len()
            && self.segments.iter().zip(&other.segments).all(|(one, segment)| one.grows_to(segment, &other.runs));
        runs && segments && self.shape == other.shape && self.scoring == other.scoring
    }

    /// Becomes the other plan, without taking memory.
    fn grow(&mut self, other: &Self) {
        self.origin = other.origin;
        self.runs.clone_from_slice(&other.runs);
        for (segment, other) in self.segments.iter_mut().zip(&other.segments) {
            segment.spans.copy_from_slice(&other.spans);
        }
    }
}

impl StorePart {
    fn grows_to(&self, other: &Self, runs: &[PlannedRun]) -> bool {
        let same_span = |(one, other): (&PlannedSpan, &PlannedSpan)| {
            let seen = Seen { from: 0, to: other.tokens, tree: other.tokens };
            let same_page = one.tokens.div_ceil(TILE_TOKENS) == other.tokens.div_ceil(TILE_TOKENS);
            PlannedSpan { tokens: other.tokens, ..*one } == *other
                && same_page
                && runs.get(other.run).is_some_and(|run| run.seen(0, other) == seen)
        };
        (self.store(), self.format(), self.calibration()) == (other.store(), other.format(), other.calibration())
            && self.pages == other.pages
            && self.spans.len() == other.spans.len()
            && self.spans.iter().zip(&other.spans).all(same_span)
    }
}

impl Work {
    /// Makes the work of a plan that of another which it [grows to](AttendPlan::grows_to), and notes so in the plan, if
    /// items have the same order. Otherwise the work is of no use any more.
    pub(crate) fn grow(&mut self, plan: &mut AttendPlan, other: &AttendPlan) -> bool {
        let segments = other.segments.iter().zip(&plan.segments).zip(&mut self.segments);
        let grows = segments.into_iter().all(|((to, from), work)| work.grow(from, to));
        if grows {
            plan.grow(other);
        }
        grows
    }
}

impl StoreWork {
    fn grow(&mut self, from: &StorePart, to: &StorePart) -> bool {
        let grown = from.spans.iter().zip(&to.spans).filter(|(from, to)| from.tokens != to.tokens);
        let grown: Vec<&PlannedSpan> = grown.map(|(_, to)| to).collect();
        if grown.is_empty() {
            return true;
        }
        let Self { items, dispatches, .. } = self;
        dispatches.iter().all(|dispatch| grow_items(&mut items[range(dispatch)], &grown))
    }
}

const fn range(dispatch: &Dispatch) -> std::ops::Range<usize> {
    dispatch.first_item..dispatch.first_item + dispatch.items
}

/// Gives the items that hold the last tiles of spans the tokens of these. False if their order would be another then:
/// those of the most tokens are first.
fn grow_items(items: &mut [WorkItem], spans: &[&PlannedSpan]) -> bool {
    let mut before: Option<(u32, u32)> = None;
    for item in items {
        let old = item.tokens;
        let first_tile = item.page_offset as usize;
        let tiles = first_tile..first_tile + (old as usize).div_ceil(TILE_TOKENS);
        let last_tile = |span: &PlannedSpan| span.first_page + span.tokens.div_ceil(TILE_TOKENS) - 1;
        if let Some(span) = spans.iter().find(|span| tiles.contains(&last_tile(span))) {
            item.tokens = (span.tokens - (first_tile - span.first_page) * TILE_TOKENS) as u32;
        }
        // Items of as many tokens are in the order in which they were cut, which is not known here.
        let in_order = before.is_none_or(|(old_before, new_before)| {
            new_before > item.tokens || (new_before == item.tokens && old_before == old)
        });
        if !in_order {
            return false;
        }
        before = Some((old, item.tokens));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AttentionShape, SegmentFormat};
    use crate::plan::{Page, QueryRun, SpanView, Split, StoreView};
    use proptest::prelude::*;

    fn plan(lengths: &[Vec<usize>], pages: &[Page], runs: &[QueryRun]) -> AttendPlan {
        let mut stores = [Vec::new(), Vec::new()];
        let mut at = 0;
        for (sequence, spans) in lengths.iter().enumerate() {
            let mut start = 0;
            for (place, &tokens) in spans.iter().enumerate() {
                // Room for a page more than it has, so that pages stay what they are.
                let of_span = &pages[at..][..tokens.div_ceil(TILE_TOKENS)];
                at += 5;
                stores[place % 2].push(SpanView {
                    sequence,
                    start,
                    tokens,
                    gathered: None,
                    pages: of_span,
                    range_slot: 0,
                });
                start += tokens;
            }
        }
        let stores = stores.map(|spans| StoreView { format: SegmentFormat::F16, calibration: None, spans });
        AttendPlan::new(AttentionShape::new(8, 2, 64).unwrap(), runs, &stores).unwrap()
    }

    proptest! {
        /// Work that grew is the work of the longer sequences; where it cannot, it says so.
        #[test]
        fn grown_work_is_that_of_the_plan(
            mut lengths in prop::collection::vec(prop::collection::vec(1usize..500, 1..4), 1..6),
            shard_pages in 1u32..9,
            steps in prop::collection::vec(prop::collection::vec(0usize..3, 6), 1..20),
            target_items in prop_oneof![1usize..60, Just(usize::MAX)],
        ) {
            let pages: Vec<Page> =
                (0..90).map(|at| Page { shard: at / shard_pages % 3, index: at }).collect();
            let runs = QueryRun::decode_batch(lengths.len());
            let split = Split { target_items, tile_step: 1, max_tiles: 3 };
            let mut before = plan(&lengths, &pages, &runs);
            let mut work = Work::new(&before, split, 1).unwrap();
            for step in steps {
                let mut crossed = false;
                for (spans, more) in lengths.iter_mut().zip(&step) {
                    let last = spans.last_mut().unwrap();
                    let more = (*more).min(640 - *last);
                    crossed |= last.div_ceil(TILE_TOKENS) != (*last + more).div_ceil(TILE_TOKENS);
                    *last += more;
                }
                let after = plan(&lengths, &pages, &runs);
                let expected = Work::new(&after, split, 1).unwrap();
                let grew = before.grows_to(&after) && work.grow(&mut before, &after);
                prop_assert!(!(grew && crossed), "another page");
                if grew {
                    prop_assert_eq!(&work, &expected);
                    prop_assert_eq!(&before, &after);
                } else {
                    (before, work) = (after, expected);
                }
            }
        }
    }

    /// Steps of decoding do grow, unless a sequence takes another page or overtakes another.
    #[test]
    fn most_steps_grow() {
        let pages: Vec<Page> = (0..90).map(|index| Page { shard: 0, index }).collect();
        let runs = QueryRun::decode_batch(4);
        let lengths = |step: usize| [300, 40, 170, 5].map(|tokens| vec![70, 90, tokens + step]).to_vec();
        let mut before = plan(&lengths(0), &pages, &runs);
        let mut work = Work::new(&before, Split::default(), 1).unwrap();
        let mut grew = 0;
        for step in 1..200 {
            let after = plan(&lengths(step), &pages, &runs);
            if before.grows_to(&after) && work.grow(&mut before, &after) {
                grew += 1;
            } else {
                (work, before) = (Work::new(&after, Split::default(), 1).unwrap(), after);
            }
        }
        assert!(grew > 170, "{grew} of 199");
        let chunk = [QueryRun::causal(0, 2), QueryRun::decode(1), QueryRun::decode(2), QueryRun::decode(3)];
        assert!(!before.grows_to(&plan(&lengths(200), &pages, &chunk)), "causal queries see other tokens");
        let swapped = [QueryRun::decode(1), QueryRun::decode(0), QueryRun::decode(2), QueryRun::decode(3)];
        assert!(!before.grows_to(&plan(&lengths(200), &pages, &swapped)), "rows of other sequences");
        let other: Vec<Page> = (1..91).map(|index| Page { shard: 0, index }).collect();
        assert!(!before.grows_to(&plan(&lengths(199), &other, &runs)), "other pages");
    }
}
