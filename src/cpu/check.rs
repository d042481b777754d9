//! Checks of a plan against the stores, queries and states it is run with.

use super::store::CpuStore;
use crate::format::TILE_TOKENS;
use crate::plan::{DecodePlan, Elements, Page, SegmentPlan};
use crate::{Error, Result};

/// Checks that queries are `[sequences, query_heads, head_dim]` of a plan.
pub(super) fn check_queries(plan: &DecodePlan, queries: Elements<'_>) -> Result<()> {
    let expected = plan.sequences() * plan.shape.query_heads() * plan.shape.head_dim();
    if queries.len() == expected {
        return Ok(());
    }
    Err(Error::Elements {
        what: "queries",
        given: queries.len(),
        expected,
        shape: format!(
            "{} sequences × {} query heads × {} channels",
            plan.sequences(),
            plan.shape.query_heads(),
            plan.shape.head_dim()
        ),
    })
}

/// Checks that everything a segment plan names exists in its store and its queries.
pub(super) fn check_segment(segment: &SegmentPlan, store: &CpuStore, queries: Option<Elements<'_>>) -> Result<()> {
    let reject = |reason: String| Err(Error::Plan { what: "attend", reason });
    if segment.format != *store.format() {
        return reject(format!("the plan is for {}, the store holds {}", segment.format, store.format()));
    }
    let shape = store.shape();
    for span in &segment.spans {
        store.check_slot("attend", span.range_slot as usize)?;
        let needed = (span.sequence as usize + 1) * shape.query_heads() * shape.head_dim();
        if queries.is_some_and(|queries| queries.len() < needed) {
            return reject(format!("there is no query for sequence {}", span.sequence));
        }
    }
    for dispatch in &segment.dispatches {
        let items = dispatch.first_item..dispatch.first_item.saturating_add(dispatch.items);
        let Some(items) = segment.items.get(items) else {
            return reject("a dispatch names items that the plan does not have".into());
        };
        for item in items {
            let tiles = (item.tokens as usize).div_ceil(TILE_TOKENS);
            let Some(table) = segment.page_table.get(item.page_offset as usize..).and_then(|t| t.get(..tiles)) else {
                return reject("an item lies outside the page table".into());
            };
            if item.tokens == 0 || item.span as usize >= segment.spans.len() {
                return reject("an item has no tokens or no span".into());
            }
            store.check_slot("attend", item.range_slot as usize)?;
            let pages: Vec<Page> = table.iter().map(|&index| Page { shard: dispatch.shard, index }).collect();
            store.check_pages("attend", &pages)?;
        }
    }
    Ok(())
}
