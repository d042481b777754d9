//! The buffers of attention states. Launches that write different ones run side by side.

use super::scratch::Sizing;
use crate::plan::{Dispatch, StateRows, StoreWork, Work, WorkItem};

/// Buffers of states in [`Scratch`](super::Scratch). The merge binds all of them, and with everything else that it may
/// need, no more than the eight storage buffers that every device has.
pub const STATE_BUFFERS: usize = 4;

/// Most bytes of states of a step that uses all buffers: scratch then takes four times as many.
const MOST_BYTES: u64 = 64 << 20;

/// The states of a query by buffer, in the layout of the kernel: its first state, and for every buffer one past the last
/// of those that lie in it or in the buffers before.
pub(super) type BufferRows = [u32; 1 + STATE_BUFFERS];

/// The buffer that a dispatch writes, of all dispatches of a step counted in order. The last buffer takes all that are
/// left: these wait for each other.
pub(super) const fn buffer_of(dispatch: usize) -> usize {
    if dispatch < STATE_BUFFERS { dispatch } else { STATE_BUFFERS - 1 }
}

/// The states of every query by buffer, for a step of several launches that is to use several buffers. `None` for one
/// that keeps all states in the first.
///
/// wgpu puts a barrier before a launch that writes a buffer which the same command buffer has used before, and a barrier
/// waits for all launches before it. A call that submits its own commands uses every buffer once. In an engine's pass
/// over many layers only the first layer would gain, so that such steps keep to one buffer.
pub(super) fn buffer_rows(work: &Work, room: Sizing, state_row_bytes: u64) -> Option<Vec<BufferRows>> {
    let bytes = work.states() as u64 * state_row_bytes;
    if room != Sizing::Exact || bytes > MOST_BYTES || dispatches(work).nth(1).is_none() {
        return None;
    }
    let mut of_queries: Vec<BufferRows> = work.rows().iter().map(|rows| [rows.first; 1 + STATE_BUFFERS]).collect();
    for (dispatch, (segment, of)) in dispatches(work).enumerate() {
        for (row, state) in segment.items_of(of).iter().flat_map(states_of) {
            let ends = &mut of_queries[row][1 + buffer_of(dispatch)..];
            // A query of a block may have states of its own behind those that it shares.
            if ends[0] != state {
                return None;
            }
            ends.fill(state + 1);
        }
    }
    let is_complete = |(of, rows): (&BufferRows, &StateRows)| of[STATE_BUFFERS] == rows.end;
    of_queries.iter().zip(work.rows()).all(is_complete).then_some(of_queries)
}

fn dispatches(work: &Work) -> impl Iterator<Item = (&StoreWork, &Dispatch)> {
    work.segments().iter().flat_map(|segment| segment.dispatches().iter().map(move |of| (segment, of)))
}

/// The rows of an item's queries, and the state that each writes.
fn states_of(item: &WorkItem) -> impl Iterator<Item = (usize, u32)> {
    (0..item.queries).map(|query| ((item.row + query) as usize, item.state + query * item.stride))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AttentionShape, SegmentFormat};
    use crate::plan::{AttendPlan, Page, QueryRun, SpanView, Split, StoreView};

    /// Work over a span of five tiles, three in one shard and two in another.
    fn work(queries: usize, block_queries: usize) -> Work {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let pages: Vec<Page> = (0..5).map(|page| Page { shard: page / 3, index: page % 3 }).collect();
        let span = SpanView { sequence: 0, start: 0, tokens: 600, gathered: None, pages: &pages, range_slot: 0 };
        let view = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span] };
        let plan = AttendPlan::new(shape, &[QueryRun::causal(0, queries)], &[view]).unwrap();
        Work::new(&plan, Split { tile_step: 1, ..Split::default() }, block_queries).unwrap()
    }

    #[test]
    fn every_shard_has_a_buffer() {
        assert_eq!(buffer_rows(&work(1, 1), Sizing::Exact, 1), Some(vec![[0, 3, 5, 5, 5]]));
        let of_two = [[0, 3, 5, 5, 5], [5, 8, 10, 10, 10]];
        assert_eq!(buffer_rows(&work(2, 1), Sizing::Exact, 1), Some(of_two.to_vec()));
    }

    #[test]
    fn other_steps_keep_to_one() {
        assert_eq!(buffer_rows(&work(1, 1), Sizing::Classes { parts: 1 }, 1), None);
        assert_eq!(buffer_rows(&work(1, 1), Sizing::Exact, MOST_BYTES), None);
        // Both queries share all tiles but the last, which each has alone, in a dispatch before that of the others.
        assert_eq!(buffer_rows(&work(2, 2), Sizing::Exact, 1), None);
        assert_eq!([0, 3, 4, 9].map(buffer_of), [0, 3, 3, 3]);
    }
}
