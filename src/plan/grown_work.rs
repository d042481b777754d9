//! Plans whose sequences got one more token, within the pages that they had: most steps of decoding. Their work is
//! that of the step before, but for the tokens of a few items.

use super::attend::{AttendPlan, PlannedSpan, StorePart};
use super::grown::Origin;
use super::runs::PlannedRun;
use super::visible::{Seen, Visible};
use super::work::{Dispatch, StoreWork, Work, WorkItem};
use crate::format::TILE_TOKENS;

impl AttendPlan {
    /// Whether another plan only adds tokens to this one, within the last pages of spans, for queries that are alone
    /// and see all of their sequence.
    fn grows_to(&self, other: &Self) -> bool {
        let alone = |run: &PlannedRun| run.run.queries == 1 && run.run.visible == Visible::All;
        let same_run = |(one, other): (&PlannedRun, &PlannedRun)| {
            alone(one) && alone(other) && one.run.sequence == other.run.sequence && one.first_row == other.first_row
        };
        if self.origin.tokens_until(other.origin).is_some() {
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

/// A plan that work was cut from, while both grow from step to step.
#[derive(Clone, Debug)]
pub(crate) struct GrowingWork {
    /// The plan of the work. Its tokens may be those of an earlier step, which `origin` tells.
    plan: AttendPlan,
    /// Of the plan that the work is of.
    origin: Origin,
    /// What grew in the last step that was compared span by span; empty if none was.
    ends: Ends,
}

/// What grows in a step that goes on from the one before.
#[derive(Clone, Debug, Default)]
struct Ends {
    /// The last spans of runs: places of segments, and places there.
    spans: Vec<(usize, usize)>,
    /// The items that hold their last tiles, in the order of the work.
    items: Vec<EndItem>,
}

#[derive(Clone, Copy, Debug)]
struct EndItem {
    segment: usize,
    item: usize,
    /// Whether the item before it is of the same dispatch.
    follows: bool,
}

impl GrowingWork {
    /// For work that was cut from this plan.
    pub(crate) fn new(plan: &AttendPlan) -> Self {
        Self { plan: plan.clone(), origin: plan.origin, ends: Ends::default() }
    }

    /// Makes the work that of another plan, which is its own with more tokens within the last pages of spans, if items
    /// keep their order. Otherwise neither is of any use any more, and this returns false.
    pub(crate) fn grow(&mut self, work: &mut Work, other: &AttendPlan) -> bool {
        let more = self.origin.tokens_until(other.origin);
        if let Some(more) = more.filter(|_| !self.ends.spans.is_empty() && self.plan.scoring == other.scoring) {
            self.origin = other.origin;
            return work.grow_evenly(&self.ends.items, more as u32);
        }
        self.catch_up();
        if !self.plan.grows_to(other) {
            return false;
        }
        self.ends.clear();
        let grows = work.grow(&self.plan, other, &mut self.ends);
        if more.is_none_or(|more| more == 0) {
            self.ends.clear(); // other spans may grow in the next step
        }
        self.origin = other.origin;
        self.plan.grow(other);
        grows
    }

    /// Gives the plan the tokens that the work has.
    fn catch_up(&mut self) {
        let Self { plan, origin, ends } = self;
        let more = plan.origin.tokens_until(*origin).unwrap_or(0);
        for &(segment, span) in &ends.spans {
            plan.segments[segment].spans[span].tokens += more as usize;
        }
        for _ in 0..more {
            plan.runs.iter_mut().for_each(PlannedRun::move_on);
        }
        plan.origin = *origin;
    }
}

impl Ends {
    fn clear(&mut self) {
        self.spans.clear();
        self.items.clear();
    }
}

impl Work {
    /// Makes the work of a plan that of another which it [grows to](AttendPlan::grows_to), if items have the same
    /// order, and lists what grew. Otherwise the work is of no use any more.
    fn grow(&mut self, plan: &AttendPlan, other: &AttendPlan, ends: &mut Ends) -> bool {
        let segments = other.segments.iter().zip(&plan.segments).zip(&mut self.segments).enumerate();
        segments.into_iter().all(|(segment, ((to, from), work))| work.grow(segment, (from, to), ends))
    }

    /// Gives these items as many more tokens each. False if items would have another order then: those of the most
    /// tokens are first.
    fn grow_evenly(&mut self, ends: &[EndItem], more: u32) -> bool {
        let mut grew = None;
        for &EndItem { segment, item, follows } in ends {
            let items = &mut self.segments[segment].items;
            let old = items[item].tokens;
            items[item].tokens += more;
            if follows {
                let before = items[item - 1].tokens;
                let old_before = if grew == Some((segment, item - 1)) { before - more } else { before };
                if !in_order((old_before, before), (old, old + more)) {
                    return false;
                }
            }
            grew = Some((segment, item));
        }
        true
    }
}

/// Whether an item stays behind the one before it, by the old and the new number of tokens of both. Items of as many
/// tokens are in the order in which they were cut, which is not known here.
const fn in_order((old_before, before): (u32, u32), (old, new): (u32, u32)) -> bool {
    before > new || (before == new && old_before == old)
}

impl StoreWork {
    fn grow(&mut self, segment: usize, (from, to): (&StorePart, &StorePart), ends: &mut Ends) -> bool {
        let first = ends.spans.len();
        let spans = from.spans.iter().zip(&to.spans).enumerate();
        ends.spans.extend(spans.filter(|(_, (from, to))| from.tokens != to.tokens).map(|(span, _)| (segment, span)));
        let Ends { spans, items: grown } = ends;
        let spans: Vec<&PlannedSpan> = spans[first..].iter().map(|&(_, span)| &to.spans[span]).collect();
        if spans.is_empty() {
            return true;
        }
        let Self { items, dispatches, .. } = self;
        dispatches.iter().all(|dispatch| grow_items((segment, dispatch), items, &spans, grown))
    }
}

/// Gives the items of a dispatch that hold the last tiles of spans the tokens of these, and lists them. False if their
/// order would be another then.
fn grow_items(
    (segment, dispatch): (usize, &Dispatch),
    items: &mut [WorkItem],
    spans: &[&PlannedSpan],
    grown: &mut Vec<EndItem>,
) -> bool {
    let mut before: Option<(u32, u32)> = None;
    for (at, item) in items.iter_mut().enumerate().skip(dispatch.first_item).take(dispatch.items) {
        let old = item.tokens;
        let first_tile = item.page_offset as usize;
        let tiles = first_tile..first_tile + (old as usize).div_ceil(TILE_TOKENS);
        let last_tile = |span: &PlannedSpan| span.first_page + span.tokens.div_ceil(TILE_TOKENS) - 1;
        if let Some(span) = spans.iter().find(|span| tiles.contains(&last_tile(span))) {
            item.tokens = (span.tokens - (first_tile - span.first_page) * TILE_TOKENS) as u32;
            grown.push(EndItem { segment, item: at, follows: before.is_some() });
        }
        if before.is_some_and(|before| !in_order(before, (old, item.tokens))) {
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
            let before = plan(&lengths, &pages, &runs);
            let mut work = Work::new(&before, split, 1).unwrap();
            let mut growing = GrowingWork::new(&before);
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
                let grew = growing.grow(&mut work, &after);
                prop_assert!(!(grew && crossed), "another page");
                if grew {
                    prop_assert_eq!(&work, &expected);
                    prop_assert_eq!(&growing.plan, &after);
                } else {
                    (growing, work) = (GrowingWork::new(&after), expected);
                }
            }
        }
    }

    proptest! {
        /// Work goes on with a plan whose runs all get tokens, whatever happens between: steps that it does not see,
        /// plans that are made of spans again, and of fewer tokens.
        #[test]
        fn work_goes_on_with_its_plan(
            mut lengths in prop::collection::vec(prop::collection::vec(1usize..500, 1..4), 1..6),
            shard_pages in 1u32..9,
            steps in prop::collection::vec((0usize..4, 0usize..12), 1..40),
            target_items in prop_oneof![1usize..60, Just(usize::MAX)],
        ) {
            let pages: Vec<Page> = (0..90).map(|at| Page { shard: at / shard_pages % 3, index: at }).collect();
            let runs = QueryRun::decode_batch(lengths.len());
            let split = Split { target_items, tile_step: 1, max_tiles: 3 };
            let of = |plan: &AttendPlan| (GrowingWork::new(plan), Work::new(plan, split, 1).unwrap());
            let mut now = plan(&lengths, &pages, &runs);
            let (mut growing, mut work) = of(&now);
            let mut ends = Vec::new();
            for (again, tokens) in steps {
                let page = |tokens: usize| tokens.div_ceil(TILE_TOKENS);
                let begins_page = |spans: &Vec<usize>| page(spans[spans.len() - 1]) != page(spans[spans.len() - 1] + 1);
                if again == 0 || lengths.iter().any(begins_page) {
                    lengths.iter_mut().for_each(|spans| {
                        let last = spans.last_mut().unwrap();
                        // Some tokens more or less, within the page.
                        let pages = page(*last);
                        *last = (*last + tokens).saturating_sub(6).clamp((pages - 1) * TILE_TOKENS + 1, pages * TILE_TOKENS - 1);
                    });
                    now = plan(&lengths, &pages, &runs);
                    ends.clear();
                } else {
                    let last = |sequence: usize| {
                        let spans: &Vec<usize> = &lengths[sequence];
                        let at = spans.len() - 1;
                        Some((at % 2, spans[..at].iter().sum()))
                    };
                    prop_assert!(now.grow_each(&mut ends, last));
                    lengths.iter_mut().for_each(|spans| *spans.last_mut().unwrap() += 1);
                    prop_assert_eq!(&now, &plan(&lengths, &pages, &runs));
                    if again == 1 {
                        continue;
                    }
                }
                if growing.grow(&mut work, &now) {
                    prop_assert_eq!(&work, &Work::new(&now, split, 1).unwrap());
                } else {
                    (growing, work) = of(&now);
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
        let mut growing = GrowingWork::new(&before);
        let mut grew = 0;
        for step in 1..200 {
            let after = plan(&lengths(step), &pages, &runs);
            if growing.grow(&mut work, &after) {
                grew += 1;
            } else {
                (work, growing) = (Work::new(&after, Split::default(), 1).unwrap(), GrowingWork::new(&after));
            }
            before = after;
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
