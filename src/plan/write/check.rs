//! What a step may write: checked against its layout before it becomes words.

use super::MOST_MEAN_TOKENS;
use super::layout::{StoreCapacity, TableSection, WindowCapacity, WriteLayout, at_most};
use super::writes::{KeyMean, LayerWrites, StoreWrites, WindowMove};
use crate::format::TILE_TOKENS;
use crate::plan::Page;
use crate::{Error, Result};

/// Checks the writes of steps without allocating.
#[derive(Clone, Debug)]
pub(super) struct WriteCheck {
    /// The places of one kind that a step writes, to detect a place that is written twice.
    seen: Vec<(Page, usize)>,
}

/// Stands for a page where slots of a store are written.
const NO_PAGE: Page = Page { shard: 0, index: 0 };

impl WriteCheck {
    /// For steps of a layout.
    pub(super) fn new(layout: &WriteLayout) -> Self {
        let most = layout.sections().map(|section| layout.capacity(section)).max().unwrap_or(0);
        Self { seen: Vec::with_capacity(most) }
    }

    /// Checks the writes of a step.
    ///
    /// # Errors
    /// [`Error::Limit`] when they exceed the layout, [`Error::Plan`] when a token, page or slot does not exist, or one
    /// place is written twice.
    pub(super) fn run(&mut self, layout: &WriteLayout, writes: &LayerWrites) -> Result<()> {
        let (stores, pairs) = (layout.stores().len(), layout.windows().len());
        if (writes.stores.len(), writes.windows.len()) != (stores, pairs) {
            let given = format!("{} stores and {} pairs of them", writes.stores.len(), writes.windows.len());
            return reject(format!(
                "writes to {given} for a layout of {stores} and {pairs}; create them with LayerWrites::of"
            ));
        }
        for (index, (store, of)) in writes.stores.iter().zip(layout.stores()).enumerate() {
            self.check_store(layout, (index, of), store)?;
        }
        for (pair, of) in layout.windows().iter().enumerate() {
            self.check_windows(layout, (pair, of), writes)?;
        }
        Ok(())
    }

    fn check_store(
        &mut self,
        layout: &WriteLayout,
        (index, of): (usize, &StoreCapacity),
        store: &StoreWrites,
    ) -> Result<()> {
        at_most("the pages that a step copies", store.copies.len(), layout.capacity(TableSection::Copies(index)))?;
        at_most("the tokens of a step", store.tokens.len(), layout.capacity(TableSection::Tokens(index)))?;
        for copy in &store.copies {
            layout.check_page(index, copy.from).and_then(|()| layout.check_page(index, copy.to))?;
            if store.copies.iter().any(|other| other.to == copy.from) {
                return reject(format!("{:?} of store {index} is both copied and written by a copy", copy.from));
            }
        }
        at_most("the centres that a step makes", store.centres.len(), layout.capacity(TableSection::Centres(index)))?;
        for mean in &store.centres {
            check_mean(index, of.centre_slots, layout.rows(), mean)?;
        }
        for write in &store.tokens {
            layout.check_page(index, write.page)?;
            if write.token >= layout.rows() || write.slot >= TILE_TOKENS {
                let (token, slot, rows) = (write.token, write.slot, layout.rows());
                return reject(format!("token {token} of {rows} into slot {slot} of {TILE_TOKENS}"));
            }
            check_centre(index, of.centre_slots, write.centre)?;
        }
        self.check_distinct("copy to", store.copies.iter().map(|copy| (copy.to, 0)))?;
        self.check_distinct("centre in", store.centres.iter().map(|mean| (NO_PAGE, mean.slot)))?;
        self.check_distinct("token into", store.tokens.iter().map(|write| (write.page, write.slot)))
    }

    fn check_windows(
        &mut self,
        layout: &WriteLayout,
        (pair, of): (usize, &WindowCapacity),
        writes: &LayerWrites,
    ) -> Result<()> {
        let windows: &[WindowMove] = &writes.windows[pair];
        at_most("the windows of a step", windows.len(), layout.capacity(TableSection::Windows(pair)))?;
        let to = &layout.stores()[of.to];
        let filled_now = |page: Page| writes.stores[of.from].tokens.iter().any(|write| write.page == page);
        for window in windows {
            if of.newer > 0 && filled_now(window.from) {
                let Page { shard, index } = window.from;
                return reject(format!(
                    "page {index} of shard {shard} is packed in the step that stores a token there, and the layout keeps {} \
                     newer tokens",
                    of.newer
                ));
            }
            layout.check_page(of.from, window.from).and_then(|()| layout.check_page(of.to, window.to))?;
            if to.format.has_span_ranges() && window.range_slot >= to.range_slots {
                let (slot, slots) = (window.range_slot, to.range_slots);
                return reject(format!("there is no range slot {slot} in store {}, which has {slots}", of.to));
            }
            if u32::try_from(window.range_slot).is_err() {
                return reject(format!("range slot {} does not fit a word", window.range_slot));
            }
        }
        self.check_distinct("window into", windows.iter().map(|window| (window.to, 0)))?;
        if to.format.has_span_ranges() {
            self.check_distinct("range of a window in", windows.iter().map(|window| (NO_PAGE, window.range_slot)))?;
        }
        Ok(())
    }

    /// Two writes to one place would race.
    fn check_distinct(&mut self, what: &str, places: impl Iterator<Item = (Page, usize)>) -> Result<()> {
        self.seen.clear();
        self.seen.extend(places);
        self.seen.sort_unstable();
        match self.seen.windows(2).find(|pair| pair[0] == pair[1]) {
            None => Ok(()),
            Some(twice) => {
                let (page, slot) = twice[0];
                reject(format!("more than one {what} page {} of shard {}, slot {slot}", page.index, page.shard))
            }
        }
    }
}

pub(super) fn reject<T>(reason: String) -> Result<T> {
    Err(Error::Plan { what: "step", reason })
}

/// Checks that a token has a centre exactly if its store has centres.
fn check_centre(store: usize, slots: usize, centre: Option<usize>) -> Result<()> {
    match centre {
        None if slots == 0 => Ok(()),
        Some(slot) if slot < slots => Ok(()),
        None => {
            reject(format!("a token without a centre goes into store {store}, whose keys are centred ({slots} slots)"))
        }
        Some(slot) => reject(format!("there is no centre {slot} in store {store}, which has {slots}")),
    }
}

/// Checks that a mean covers existing tokens, few enough to count, and becomes an existing centre.
fn check_mean(store: usize, slots: usize, rows: usize, mean: &KeyMean) -> Result<()> {
    let (tokens, end) = (mean.tokens.len(), mean.tokens.end());
    if end > rows || tokens > MOST_MEAN_TOKENS {
        return reject(format!("the mean of {tokens} keys up to {end} of {rows}; it takes up to {MOST_MEAN_TOKENS}"));
    }
    check_centre(store, slots, Some(mean.slot))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::examples::{layout, page, writes};
    use super::super::{PageCopy, TokenWrite, WriteTable};
    use super::*;

    /// Whatever the layout lacks is refused, and the table stays unchanged.
    #[test]
    fn what_the_layout_does_not_have_is_refused() {
        type Change = fn(&mut LayerWrites);
        let changes: [(&str, Change); 13] = [
            ("page", |writes| writes.stores[0].tokens[0].page.index = 3),
            ("shard", |writes| writes.stores[0].tokens[0].page.shard = 2),
            ("slot", |writes| writes.stores[0].tokens[0].slot = 128),
            ("token", |writes| writes.stores[0].tokens[0].token = 8),
            ("slot twice", |writes| writes.stores[0].tokens[1] = TokenWrite { token: 1, ..writes.stores[0].tokens[0] }),
            ("copied page", |writes| writes.stores[0].copies[0].from.index = 5),
            ("page of a copy", |writes| writes.stores[0].copies[0].to.index = 5),
            ("copy of a copy", |writes| {
                writes.stores[0]
                    .copies
                    .push(PageCopy { from: Page { shard: 1, index: 2 }, to: Page { shard: 0, index: 0 } });
            }),
            ("window", |writes| writes.windows[0][0].from.index = 3),
            ("window's page", |writes| writes.windows[0][0].to = Page { shard: 0, index: 5 }),
            ("range slot", |writes| writes.windows[0][0].range_slot = 4),
            ("range slot twice", |writes| {
                let window = writes.windows[0][0];
                writes.windows[0].push(WindowMove { to: Page { shard: 0, index: 0 }, ..window });
            }),
            ("store", |writes| writes.stores.truncate(1)),
        ];
        let layout = layout();
        let mut table = WriteTable::new(&layout);
        table.set(&writes(&layout)).unwrap();
        let before = table.words().to_vec();
        for (what, change) in changes {
            let mut changed = writes(&layout);
            change(&mut changed);
            let refused = table.set(&changed);
            assert!(matches!(refused, Err(Error::Plan { .. })), "{what}: {refused:?}");
            assert_eq!(table.words(), before, "{what}");
        }
        let mut more = writes(&layout);
        more.stores[0].tokens.extend((1..3).map(|slot| TokenWrite { token: 0, page: page(0, 0), slot, centre: None }));
        assert!(matches!(table.set(&more), Err(Error::Limit { needed: 4, allowed: 3, .. })));
        let mut more = writes(&layout);
        let window = |index| WindowMove { from: page(0, 0), to: page(0, index), range_slot: index as usize };
        more.windows[0].extend([window(0), window(2)]);
        assert!(matches!(table.set(&more), Err(Error::Limit { needed: 3, allowed: 2, .. })));
        assert_eq!(table.words(), before);
    }

    /// Windows that were full before a step are not among the pages that it stores tokens in.
    #[test]
    fn windows_that_fill_now_are_refused_where_newer_tokens_stay() {
        let before = layout();
        let windows = vec![WindowCapacity { newer: 1, ..before.windows()[0] }];
        let newer =
            Arc::new(WriteLayout::new(*before.shape(), before.rows(), before.stores().to_vec(), windows).unwrap());
        let mut table = WriteTable::new(&newer);
        let refused = table.set(&writes(&newer)).unwrap_err().to_string();
        assert!(refused.contains("page 2 of shard 1") && refused.contains("1 newer tokens"), "{refused}");
        let mut earlier = writes(&newer);
        earlier.windows[0][0].from = page(0, 3);
        table.set(&earlier).unwrap();
    }
}
