//! The words of a step that kernels read.

use std::sync::Arc;

use super::check::{WriteCheck, reject};
use super::entry::{WriteEntry, centre_words, copy_words, token_words, window_words};
use super::layout::{ENTRY_WORDS, TableSection, WriteLayout};
use super::writes::LayerWrites;
#[cfg(feature = "cuda")]
use super::writes::{PageCopy, TokenWrite, WindowMove};
use crate::Result;
#[cfg(feature = "cuda")]
use crate::plan::Page;
use crate::plan::RowLayout;

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
    check: WriteCheck,
}

impl WriteTable {
    /// The table of a step that writes nothing.
    pub fn new(layout: &Arc<WriteLayout>) -> Self {
        let shards = layout.sections().map(|section| Vec::with_capacity(layout.capacity(section))).collect();
        let (words, check) = (vec![0; layout.words()], WriteCheck::new(layout));
        Self { layout: layout.clone(), words, shards, tokens_needed: 0, check }
    }

    /// Fills the table with the writes of a step.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) when they exceed the layout, [`Error::Plan`](crate::Error::Plan) when a
    /// token, page or slot does not exist, or one place is written twice. On an error the table is unchanged.
    pub fn set(&mut self, writes: &LayerWrites) -> Result<()> {
        let layout = self.layout.clone();
        self.check.run(&layout, writes)?;
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
    /// [`Error::Plan`](crate::Error::Plan).
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
    /// [`Error::Plan`](crate::Error::Plan).
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
}

#[cfg(test)]
mod tests {
    use super::super::examples::{layout, page, writes};
    use super::super::writes::TokenWrite;
    use super::super::{KeyMean, StoreCapacity};
    use super::*;
    use crate::format::KeyOrValue;
    use crate::plan::TokenRange;
    use crate::{AttentionShape, Error, SegmentFormat};

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
}
