//! The words of a step that kernels read.

use std::sync::Arc;

use super::MOST_MEAN_TOKENS;
use super::entry::{WriteEntry, centre_words, copy_words, token_words, window_words};
use super::layout::{ENTRY_WORDS, TableSection, WriteLayout, at_most};
use super::writes::{KeyMean, LayerWrites};
#[cfg(feature = "cuda")]
use super::writes::{PageCopy, TokenWrite, WindowMove};
use crate::format::TILE_TOKENS;
use crate::plan::{Page, RowLayout};
use crate::{Error, Result};

/// The writes of a step as words, checked against its layout: one small upload for all layers.
///
/// Every section of the layout begins with four words. The first is the number of entries that follow. Each entry has
/// four words:
///
/// | entry | words |
/// | --- | --- |
/// | copy | page to read, page to write, 0, shards: the first in the low half, the second in the high half |
/// | centre | first token of the dense tensors, bits of 1 / tokens in f32, tokens and from bit 8 on the slot, 0 |
/// | token | token of the dense tensors, page, slot and from bit 8 on the slot of the centre, shard |
/// | window | page to read, page to write, range slot, shards as those of a copy |
///
/// A table can be filled again and again ([`WriteTable::set`]) without allocating.
#[derive(Clone, Debug)]
pub struct WriteTable {
    pub(super) layout: Arc<WriteLayout>,
    pub(super) words: Vec<u32>,
    /// For each section, the shards (or pairs of shards) that its entries name, each once.
    shards: Vec<Vec<u32>>,
    /// Number of tokens that the dense keys and values need: the largest token that is named, plus one.
    tokens_needed: usize,
    /// The places that the step writes so far, to detect a place that is written twice.
    seen: Vec<(Page, usize)>,
}

impl WriteTable {
    /// The table of a step that writes nothing.
    pub fn new(layout: &Arc<WriteLayout>) -> Self {
        let most = layout.sections().map(|section| layout.capacity(section)).max().unwrap_or(0);
        let shards = layout.sections().map(|section| Vec::with_capacity(layout.capacity(section))).collect();
        let (layout, words, seen) = (layout.clone(), vec![0; layout.words()], Vec::with_capacity(most));
        Self { layout, words, shards, tokens_needed: 0, seen }
    }

    /// Fills the table with the writes of a step.
    ///
    /// # Errors
    /// [`Error::Limit`] when they exceed the layout, [`Error::Plan`] when a token, page or slot does not exist, or one
    /// place is written twice. On an error the table is unchanged.
    pub fn set(&mut self, writes: &LayerWrites) -> Result<()> {
        self.check(writes)?;
        let layout = self.layout.clone();
        let mut first = 0;
        for (at, section) in layout.sections().enumerate() {
            let entries = first + 1;
            let count = match section {
                TableSection::Copies(store) => {
                    self.fill(at, entries, writes.stores[store].copies.iter().map(copy_words))
                }
                TableSection::Centres(store) => {
                    self.fill(at, entries, writes.stores[store].centres.iter().map(centre_words))
                }
                TableSection::Tokens(store) => {
                    self.fill(at, entries, writes.stores[store].tokens.iter().map(token_words))
                }
                TableSection::Windows(pair) => self.fill(at, entries, writes.windows[pair].iter().map(window_words)),
            };
            self.words[first * ENTRY_WORDS] = count;
            first = entries + layout.capacity(section);
        }
        let tokens = writes.stores.iter().flat_map(|store| &store.tokens).map(|write| write.token + 1);
        let means = writes.stores.iter().flat_map(|store| &store.centres).map(|mean| mean.tokens.end());
        self.tokens_needed = tokens.chain(means).max().unwrap_or(0);
        Ok(())
    }

    fn fill(&mut self, section: usize, first: usize, entries: impl Iterator<Item = [u32; ENTRY_WORDS]>) -> u32 {
        let shards = &mut self.shards[section];
        shards.clear();
        let mut count = 0;
        for (words, entry) in self.words[first * ENTRY_WORDS..].chunks_exact_mut(ENTRY_WORDS).zip(entries) {
            words.copy_from_slice(&entry);
            if !shards.contains(&entry[3]) {
                shards.push(entry[3]);
            }
            count += 1;
        }
        count
    }

    /// The layout.
    pub const fn layout(&self) -> &Arc<WriteLayout> {
        &self.layout
    }

    /// Checks that the table belongs to this layout.
    ///
    /// # Errors
    /// [`Error::Plan`].
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) fn check_layout(&self, layout: &Arc<WriteLayout>) -> Result<()> {
        if Arc::ptr_eq(layout, &self.layout) || *layout == self.layout {
            return Ok(());
        }
        reject("the table belongs to another layout than the bound stores; bind again after a store has grown".into())
    }

    /// The words.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Number of tokens that the step needs in dense keys and values, 0 if it reads none.
    pub const fn tokens_needed(&self) -> usize {
        self.tokens_needed
    }

    /// Checks that dense keys and values hold the tokens of the step.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub(crate) fn check_rows(&self, rows: &RowLayout) -> Result<()> {
        if rows.tokens >= self.tokens_needed {
            return Ok(());
        }
        reject(format!("it reads token {} of keys and values with {} tokens", self.tokens_needed - 1, rows.tokens))
    }

    /// Number of entries of a section.
    pub fn count(&self, section: TableSection) -> usize {
        self.words.get(self.layout.first_entry(section) * ENTRY_WORDS).map_or(0, |&count| count as usize)
    }

    /// The entries of a section.
    pub fn entries(&self, section: TableSection) -> impl Iterator<Item = WriteEntry> + '_ {
        let first = (self.layout.first_entry(section) + 1) * ENTRY_WORDS;
        let words = self.words.get(first..).unwrap_or_default();
        let words = &words.as_chunks::<ENTRY_WORDS>().0[..self.count(section)];
        let centred = matches!(section, TableSection::Tokens(store) if self.layout.has_centres(store));
        words.iter().filter_map(move |&entry| WriteEntry::read(section, entry, centred))
    }

    /// The pages of a store that the step writes to. A page may appear more than once.
    #[cfg(feature = "cuda")]
    pub(crate) fn pages_written(&self, store: usize) -> impl Iterator<Item = Page> + '_ {
        let windows = self.layout.windows().iter().enumerate().filter(move |(_, pair)| pair.to == store);
        let windows = windows.map(|(pair, _)| TableSection::Windows(pair));
        let sections = [TableSection::Copies(store), TableSection::Tokens(store)].into_iter().chain(windows);
        sections.flat_map(|section| self.entries(section)).filter_map(|entry| match entry {
            WriteEntry::Copy(PageCopy { to, .. }) | WriteEntry::Window(WindowMove { to, .. }) => Some(to),
            WriteEntry::Token(TokenWrite { page, .. }) => Some(page),
            WriteEntry::Centre(_) => None,
        })
    }

    /// Whether the step stores one token for each of `queries` queries, in their order and all in one store.
    #[cfg(feature = "cuda")]
    pub(crate) fn decodes(&self, queries: usize) -> bool {
        let stores = self.layout.stores().len();
        let mut filled = (0..stores).map(TableSection::Tokens).filter(|&section| self.count(section) > 0);
        let (Some(section), None) = (filled.next(), filled.next()) else { return false };
        let in_order = |(query, entry)| matches!(entry, WriteEntry::Token(of) if of.token == query);
        self.count(section) == queries && self.entries(section).enumerate().all(in_order)
    }

    /// Whether the step has entries in sections that decoding a token leaves empty.
    #[cfg(feature = "cuda")]
    pub(crate) fn begins(&self) -> bool {
        self.layout.sections().any(|section| self.layout.is_of_prompts(section) && self.count(section) > 0)
    }

    /// Whether entries of a section name this shard, or this pair of shards: `from | to << 16`.
    #[cfg(feature = "wgpu")]
    pub(crate) fn names_shards(&self, section: TableSection, shards: u32) -> bool {
        let at = self.layout.sections().position(|other| other == section);
        at.is_some_and(|at| self.shards[at].contains(&shards))
    }

    fn check(&mut self, writes: &LayerWrites) -> Result<()> {
        let layout = self.layout.clone();
        let (stores, pairs) = (layout.stores().len(), layout.windows().len());
        if (writes.stores.len(), writes.windows.len()) != (stores, pairs) {
            let given = format!("{} stores and {} pairs of them", writes.stores.len(), writes.windows.len());
            return reject(format!(
                "writes to {given} for a layout of {stores} and {pairs}; create them with LayerWrites::of"
            ));
        }
        for (index, (store, store_layout)) in writes.stores.iter().zip(layout.stores()).enumerate() {
            at_most("the pages that a step copies", store.copies.len(), layout.capacity(TableSection::Copies(index)))?;
            at_most("the tokens of a step", store.tokens.len(), layout.capacity(TableSection::Tokens(index)))?;
            for copy in &store.copies {
                layout.check_page(index, copy.from).and_then(|()| layout.check_page(index, copy.to))?;
                if store.copies.iter().any(|other| other.to == copy.from) {
                    return reject(format!("{:?} of store {index} is both copied and written by a copy", copy.from));
                }
            }
            at_most(
                "the centres that a step makes",
                store.centres.len(),
                layout.capacity(TableSection::Centres(index)),
            )?;
            for mean in &store.centres {
                check_mean(index, store_layout.centre_slots, layout.rows(), mean)?;
            }
            for write in &store.tokens {
                layout.check_page(index, write.page)?;
                if write.token >= layout.rows() || write.slot >= TILE_TOKENS {
                    let (token, slot, rows) = (write.token, write.slot, layout.rows());
                    return reject(format!("token {token} of {rows} into slot {slot} of {TILE_TOKENS}"));
                }
                check_centre(index, store_layout.centre_slots, write.centre)?;
            }
            self.check_distinct("copy to", store.copies.iter().map(|copy| (copy.to, 0)))?;
            self.check_distinct("centre in", store.centres.iter().map(|mean| (NO_PAGE, mean.slot)))?;
            self.check_distinct("token into", store.tokens.iter().map(|write| (write.page, write.slot)))?;
        }
        for (pair, (windows, of)) in writes.windows.iter().zip(layout.windows()).enumerate() {
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

fn reject<T>(reason: String) -> Result<T> {
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

/// Stands for a page where slots of a store are written.
const NO_PAGE: Page = Page { shard: 0, index: 0 };

#[cfg(test)]
mod tests {
    use super::super::{PageCopy, StoreCapacity, TokenWrite, WindowCapacity, WindowMove};
    use super::*;
    use crate::format::KeyOrValue;
    use crate::plan::TokenRange;
    use crate::{AttentionShape, Bits, SegmentFormat};

    fn layout() -> Arc<WriteLayout> {
        let shape = AttentionShape::new(2, 2, 64).unwrap();
        let of = |format, tokens| StoreCapacity {
            format,
            shard_pages: vec![5, 3],
            range_slots: 4,
            tokens,
            copies: 2,
            centres: 0,
            centre_slots: 0,
        };
        let stores = vec![of(SegmentFormat::F16, 3), of(SegmentFormat::per_channel(Bits::Four), 0)];
        let windows = vec![WindowCapacity { from: 0, to: 1, windows: 2, newer: 0 }];
        Arc::new(WriteLayout::new(shape, 8, stores, windows).unwrap())
    }

    const fn page(shard: u32, index: u32) -> Page {
        Page { shard, index }
    }

    /// Attention finds the token of a query by the query's number.
    #[cfg(feature = "cuda")]
    #[test]
    fn decoding_stores_a_token_for_each_query_in_their_order() {
        let layout = layout();
        let decodes = |tokens: &[usize], queries| {
            let mut writes = LayerWrites::of(&layout);
            let of = |&token| TokenWrite { token, page: page(0, token as u32), slot: 3, centre: None };
            writes.stores[0].tokens.extend(tokens.iter().map(of));
            let mut table = WriteTable::new(&layout);
            table.set(&writes).unwrap();
            table.decodes(queries)
        };
        assert!(decodes(&[0, 1, 2], 3));
        assert!(!decodes(&[0, 2, 1], 3) && !decodes(&[0, 1, 2], 2) && !decodes(&[0, 1], 3) && !decodes(&[], 0));
    }

    fn writes(layout: &WriteLayout) -> LayerWrites {
        let mut writes = LayerWrites::of(layout);
        writes.stores[0].copies.push(PageCopy { from: page(0, 4), to: page(1, 2) });
        writes.stores[0].tokens.push(TokenWrite { token: 7, page: page(1, 2), slot: 127, centre: None });
        writes.stores[0].tokens.push(TokenWrite { token: 0, page: page(0, 0), slot: 0, centre: None });
        writes.windows[0].push(WindowMove { from: page(1, 2), to: page(0, 1), range_slot: 3 });
        writes
    }

    /// Tables return the entries that were put in, and keep nothing of an earlier step.
    #[test]
    fn tables_say_what_a_step_writes() {
        let layout = layout();
        let mut table = WriteTable::new(&layout);
        let full = writes(&layout);
        for writes in [&full, &LayerWrites::of(&layout), &full] {
            table.set(writes).unwrap();
            let tokens: Vec<_> = writes.stores[0].tokens.iter().map(|&write| WriteEntry::Token(write)).collect();
            assert_eq!(table.entries(TableSection::Tokens(0)).collect::<Vec<_>>(), tokens);
            let windows: Vec<_> = writes.windows[0].iter().map(|&window| WriteEntry::Window(window)).collect();
            assert_eq!(table.entries(TableSection::Windows(0)).collect::<Vec<_>>(), windows);
            let copies: Vec<_> = writes.stores[0].copies.iter().map(|&copy| WriteEntry::Copy(copy)).collect();
            assert_eq!(table.entries(TableSection::Copies(0)).collect::<Vec<_>>(), copies);
            assert_eq!((table.count(TableSection::Copies(1)), table.count(TableSection::Tokens(1))), (0, 0));
            #[cfg(feature = "cuda")]
            for (store, pages) in [(0, vec![page(1, 2), page(1, 2), page(0, 0)]), (1, vec![page(0, 1)])] {
                let written: Vec<Page> = table.pages_written(store).collect();
                assert_eq!(written, if writes.is_empty() { vec![] } else { pages });
            }
        }
        assert_eq!(table.words().len(), 4 * (3 + 3 + 1 + 1 + 4 + 1 + 3));
    }

    #[test]
    fn sections_do_not_overlap() {
        let layout = layout();
        let firsts: Vec<usize> = layout.sections().map(|section| layout.first_entry(section)).collect();
        assert_eq!(firsts, [0, 3, 6, 7, 8, 12, 13]);
    }

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

    /// A token's word has room for its slot and for its centre's slot.
    #[test]
    fn centres_stand_beside_slots() {
        let shape = AttentionShape::new(2, 2, 64).unwrap();
        let of = |centre_slots| {
            let (format, shard_pages) = (SegmentFormat::F16, vec![1]);
            StoreCapacity { format, shard_pages, range_slots: 0, tokens: 2, copies: 0, centres: 0, centre_slots }
        };
        let layout = |slots| Arc::new(WriteLayout::new(shape, 8, vec![of(slots)], vec![]).unwrap());
        let write = |slot, centre| TokenWrite { token: 3, page: page(0, 0), slot, centre };
        let set = |slots, tokens: &[TokenWrite]| {
            let layout = layout(slots);
            let mut writes = LayerWrites::of(&layout);
            writes.stores[0].tokens.extend_from_slice(tokens);
            let mut table = WriteTable::new(&layout);
            table.set(&writes).map(|()| table.entries(TableSection::Tokens(0)).collect::<Vec<_>>())
        };
        let tokens = [write(127, Some(70_000)), write(0, Some(0))];
        assert_eq!(set(70_001, &tokens).unwrap(), tokens.map(WriteEntry::Token));
        assert_eq!(set(0, &[write(5, None)]).unwrap(), [WriteEntry::Token(write(5, None))]);
        for (slots, centre) in [(70_000, Some(70_000)), (1, None), (0, Some(0))] {
            assert!(matches!(set(slots, &[write(5, centre)]), Err(Error::Plan { .. })), "{slots} {centre:?}");
        }
        assert!(WriteLayout::new(shape, 8, vec![of(1 << 25)], vec![]).is_err());
        let halved = layout(1).largest_element(0, KeyOrValue::Key);
        assert_eq!((halved, layout(1).largest_element(0, KeyOrValue::Value)), (32752.0, 65504.0));
    }

    /// Means name their keys and their slot, and need those keys.
    #[test]
    fn sequences_that_begin_have_their_centres_made() {
        let shape = AttentionShape::new(2, 2, 64).unwrap();
        let of = |centres, centre_slots| {
            let (format, shard_pages) = (SegmentFormat::F16, vec![1]);
            StoreCapacity { format, shard_pages, range_slots: 0, tokens: 2, copies: 0, centres, centre_slots }
        };
        let layout = Arc::new(WriteLayout::new(shape, 300, vec![of(2, 70_001)], vec![]).unwrap());
        let mean = |start, end, slot| KeyMean { tokens: TokenRange::new(start, end).unwrap(), slot };
        let mut table = WriteTable::new(&layout);
        let mut set = |centres: &[KeyMean]| {
            let mut writes = LayerWrites::of(&layout);
            writes.stores[0].centres.extend_from_slice(centres);
            assert_eq!(writes.is_empty(), centres.is_empty());
            let entries = |table: &WriteTable| table.entries(TableSection::Centres(0)).collect::<Vec<_>>();
            table.set(&writes).map(|()| (entries(&table), table.tokens_needed()))
        };
        let means = [mean(7, 10, 70_000), mean(45, 300, 0)];
        assert_eq!(set(&means).unwrap(), (means.map(WriteEntry::Centre).to_vec(), 300));
        assert_eq!(set(&[mean(0, 1, 5)]).unwrap(), (vec![WriteEntry::Centre(mean(0, 1, 5))], 1));
        let refused = [
            ("a token", vec![mean(290, 301, 0)]),
            ("tokens", vec![mean(0, 256, 0)]),
            ("a slot", vec![mean(0, 1, 70_001)]),
            ("a slot twice", vec![mean(0, 1, 5), mean(1, 2, 5)]),
        ];
        for (what, means) in refused {
            assert!(matches!(set(&means), Err(Error::Plan { .. })), "{what}");
        }
        let three = [0, 1, 2].map(|slot| mean(0, 1, slot));
        assert!(matches!(set(&three), Err(Error::Limit { needed: 3, allowed: 2, .. })));
        assert_eq!(set(&[]).unwrap(), (vec![], 0));
        assert!(WriteLayout::new(shape, 1, vec![of(1, 0)], vec![]).is_err(), "no slots");
    }

    #[test]
    fn layouts_that_no_kernel_can_serve_are_refused() {
        let shape = AttentionShape::new(2, 2, 64).unwrap();
        let of = |format, tokens| StoreCapacity {
            format,
            shard_pages: vec![1],
            range_slots: 1,
            tokens,
            copies: 0,
            centres: 0,
            centre_slots: 0,
        };
        let channels = SegmentFormat::per_channel(Bits::Four);
        let new = |stores: Vec<StoreCapacity>, from, to| {
            WriteLayout::new(shape, 1, stores, vec![WindowCapacity { from, to, windows: 1, newer: 0 }])
        };
        let f16 = SegmentFormat::F16;
        assert!(new(vec![of(f16, 1), of(channels, 0)], 0, 1).is_ok());
        assert!(new(vec![of(f16, 1), of(channels, 1)], 0, 1).is_err(), "ranges over tokens take no single ones");
        assert!(new(vec![of(channels, 0), of(f16, 0)], 0, 1).is_err(), "windows are f16");
        assert!(new(vec![of(f16, 1)], 0, 0).is_err() && new(vec![of(f16, 1)], 0, 1).is_err());
    }

    /// A window must not hold anything that its packed form cannot.
    #[test]
    fn the_largest_element_is_that_of_all_stores_on_the_way() {
        let layout = layout();
        assert_eq!(layout.largest_element(0, KeyOrValue::Key), 32752.0);
        assert_eq!(layout.largest_element(1, KeyOrValue::Value), 32752.0);
    }
}
