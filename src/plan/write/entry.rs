//! The words of an entry of a step's table.

use super::layout::{ENTRY_WORDS, TableSection};
use super::writes::{KeyMean, PageCopy, TokenWrite, WindowMove};
use crate::plan::{Page, TokenRange};

/// First bit of the centre's slot in the word of a token or of a centre.
const CENTRE_SHIFT: u32 = 8;

/// An entry of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteEntry {
    /// An entry of [`TableSection::Copies`].
    Copy(PageCopy),
    /// An entry of [`TableSection::Centres`].
    Centre(KeyMean),
    /// An entry of [`TableSection::Tokens`].
    Token(TokenWrite),
    /// An entry of [`TableSection::Windows`].
    Window(WindowMove),
}

impl WriteEntry {
    /// Decodes one table entry. Tokens carry a centre if their store has centres. `None` only for malformed words,
    /// which no valid table contains.
    pub(super) fn read(
        section: TableSection,
        [first, second, third, shards]: [u32; ENTRY_WORDS],
        centred: bool,
    ) -> Option<Self> {
        let (from, to) = (Page { shard: shards & 0xffff, index: first }, Page { shard: shards >> 16, index: second });
        let (low, high) = ((third % (1 << CENTRE_SHIFT)) as usize, (third >> CENTRE_SHIFT) as usize);
        Some(match section {
            TableSection::Copies(_) => Self::Copy(PageCopy { from, to }),
            TableSection::Windows(_) => Self::Window(WindowMove { from, to, range_slot: third as usize }),
            TableSection::Centres(_) => {
                let tokens = TokenRange::new(first as usize, first as usize + low).ok()?;
                Self::Centre(KeyMean { tokens, slot: high })
            }
            TableSection::Tokens(_) => Self::Token(TokenWrite {
                token: first as usize,
                page: Page { shard: shards, index: second },
                slot: low,
                centre: centred.then_some(high),
            }),
        })
    }
}

pub(super) fn copy_words(copy: &PageCopy) -> [u32; ENTRY_WORDS] {
    [copy.from.index, copy.to.index, 0, both_shards(copy.from, copy.to)]
}

pub(super) fn centre_words(mean: &KeyMean) -> [u32; ENTRY_WORDS] {
    let tokens = mean.tokens.len();
    // Divisions on devices need not round as this one does.
    let factor = 1.0 / tokens as f32;
    [mean.tokens.start() as u32, factor.to_bits(), tokens as u32 | (mean.slot as u32) << CENTRE_SHIFT, 0]
}

pub(super) fn token_words(write: &TokenWrite) -> [u32; ENTRY_WORDS] {
    let slots = write.slot as u32 | (write.centre.unwrap_or(0) as u32) << CENTRE_SHIFT;
    [write.token as u32, write.page.index, slots, write.page.shard]
}

/// The slot of a token's entry.
pub(super) const fn slot_of_token([_, _, slots, _]: [u32; ENTRY_WORDS]) -> usize {
    (slots % (1 << CENTRE_SHIFT)) as usize
}

/// Makes it the entry of the next slot, which its page has.
pub(super) const fn move_token_on([_, _, slots, _]: &mut [u32; ENTRY_WORDS]) {
    *slots += 1;
}

pub(super) fn window_words(window: &WindowMove) -> [u32; ENTRY_WORDS] {
    let WindowMove { from, to, range_slot } = *window;
    [from.index, to.index, range_slot as u32, both_shards(from, to)]
}

const fn both_shards(from: Page, to: Page) -> u32 {
    from.shard | to.shard << 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::MOST_MEAN_TOKENS;

    /// Kernels multiply by this factor, whatever the number of tokens.
    #[test]
    fn means_are_divided_by_their_tokens() {
        for count in [1, 3, 64, 65, MOST_MEAN_TOKENS] {
            let mean = KeyMean { tokens: TokenRange::new(7, 7 + count).unwrap(), slot: 300 };
            let words = centre_words(&mean);
            assert_eq!(f32::from_bits(words[1]), 1.0 / count as f32);
            assert_eq!(WriteEntry::read(TableSection::Centres(0), words, true), Some(WriteEntry::Centre(mean)));
        }
    }
}
