//! Checks of work against its stores and queries.

use super::store::CpuStore;
use crate::plan::{Elements, StoreWork};
use crate::{Error, Result};

/// Checks that a segment is calibrated. Only then do its items have places for scores.
pub(super) fn check_calibrated(segment: &StoreWork) -> Result<()> {
    match segment.calibration() {
        Some(_) => Ok(()),
        None => {
            let reason = "the segment is not calibrated and keeps no scores; plan it with a calibration".into();
            Err(Error::Plan { what: "scores", reason })
        }
    }
}

/// Checks that everything that the work of a segment names exists in its store and its queries.
pub(super) fn check_segment(segment: &StoreWork, store: &CpuStore, queries: Option<Elements<'_>>) -> Result<()> {
    let reject = |reason: String| Err(Error::Plan { what: "attend", reason });
    if segment.format() != store.format() {
        return reject(format!("the plan is for {}, but the store holds {}", segment.format(), store.format()));
    }
    let shape = store.shape();
    for query in segment.queries() {
        let needed = (query.row as usize + 1) * shape.query_heads() * shape.head_dim();
        if queries.is_some_and(|queries| queries.len() < needed) {
            return reject(format!("there is no query {}", query.row));
        }
    }
    for dispatch in segment.dispatches() {
        for item in segment.items_of(dispatch) {
            store.check_slot("attend", item.range_slot as usize)?;
            store.check_pages("attend", &segment.pages_of(dispatch, item).collect::<Vec<_>>())?;
        }
    }
    Ok(())
}
