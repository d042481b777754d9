//! Which rank stores which tokens of a sequence.

use std::ops::Range;

use crate::counts::MOST_TOKENS;
use crate::format::TILE_TOKENS;
use crate::{Error, Result};

/// Most ranks that share a sequence.
pub const MOST_RANKS: usize = 1 << 10;

/// Which rank stores which positions of every sequence: round robin, in turns of whole pages.
///
/// The positions of a sequence are cut into turns of 128 tokens, or of a multiple of it. Rank 0 stores the first turn,
/// rank 1 the second, and after the last rank follows the first. A token that is appended goes to the rank that stores
/// its position: until a turn is full this is the rank that stores the newest token.
///
/// ```
/// use kvpack::ranks::Placement;
/// let placement = Placement::new(3)?;
/// assert_eq!([0, 127, 128, 383, 384].map(|position| placement.rank_of(position)), [0, 0, 1, 2, 0]);
/// let stored = |rank| Ok::<_, kvpack::Error>(placement.share(rank)?.tokens(400));
/// assert_eq!([stored(0)?, stored(1)?, stored(2)?], [144, 128, 128]);
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    ranks: usize,
    turn: usize,
}

impl Placement {
    /// Turns of one page.
    ///
    /// # Errors
    /// [`Error::Limit`] unless there are 1 to [`MOST_RANKS`] ranks.
    pub fn new(ranks: usize) -> Result<Self> {
        if ranks == 0 || ranks > MOST_RANKS {
            let hint = "use at least one rank, and no more than may share a sequence";
            let (needed, allowed) = (ranks as u64, MOST_RANKS as u64);
            return Err(Error::Limit { what: "ranks of a sequence".into(), needed, allowed, hint });
        }
        Ok(Self { ranks, turn: TILE_TOKENS })
    }

    /// The same with turns of this many pages. Longer turns are fewer spans for the host to plan; up to a turn of
    /// tokens lies on one rank more than on another.
    ///
    /// # Errors
    /// [`Error::Limit`] unless a turn has at least one page and no more than a sequence.
    pub fn with_turn(self, pages: usize) -> Result<Self> {
        let most = MOST_TOKENS / TILE_TOKENS;
        if pages == 0 || pages > most {
            let hint = "use at least one page, and no more than a sequence has";
            let what = "pages of a turn".into();
            return Err(Error::Limit { what, needed: pages as u64, allowed: most as u64, hint });
        }
        Ok(Self { turn: pages * TILE_TOKENS, ..self })
    }

    /// Number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// Tokens of a turn.
    pub const fn turn(&self) -> usize {
        self.turn
    }

    /// The rank that stores a position.
    pub const fn rank_of(&self, position: usize) -> usize {
        position / self.turn % self.ranks
    }

    /// What one rank stores.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such rank.
    pub fn share(&self, rank: usize) -> Result<RankShare> {
        if rank >= self.ranks {
            let ranks = self.ranks;
            let reason = format!("rank {rank} of {ranks}; use 0..{ranks}");
            return Err(Error::Plan { what: "placement", reason });
        }
        Ok(RankShare { placement: *self, rank })
    }
}

/// The positions that one rank stores of every sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankShare {
    placement: Placement,
    rank: usize,
}

impl RankShare {
    /// That of one rank alone: all positions.
    pub(crate) const ALL: Self = Self { placement: Placement { ranks: 1, turn: TILE_TOKENS }, rank: 0 };

    /// The placement.
    pub const fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The rank.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Whether it stores a position.
    pub const fn holds(&self, position: usize) -> bool {
        self.placement.rank_of(position) == self.rank
    }

    /// Number of tokens that it stores of the first `tokens` positions of a sequence.
    pub const fn tokens(&self, tokens: usize) -> usize {
        let (turn, ranks) = (self.placement.turn, self.placement.ranks);
        let (turns, rest) = (tokens / turn, tokens % turn);
        let whole = turns / ranks + if self.rank < turns % ranks { 1 } else { 0 };
        whole * turn + if turns % ranks == self.rank { rest } else { 0 }
    }

    /// The last position before this one that it stores.
    pub(crate) fn last_held(&self, before: usize) -> Option<usize> {
        let (turn, ranks) = (self.placement.turn, self.placement.ranks);
        let last = before.checked_sub(1)?;
        // Turns since the last one of this rank.
        let since = (last / turn % ranks + ranks - self.rank) % ranks;
        match since {
            0 => Some(last),
            since => (last / turn).checked_sub(since).map(|of| (of + 1) * turn - 1),
        }
    }

    /// The first piece of some positions that one rank stores, and whether it is this one; none of no positions.
    pub fn first_piece(&self, positions: Range<usize>) -> Option<(Range<usize>, bool)> {
        if positions.is_empty() {
            return None;
        }
        if self.placement.ranks == 1 {
            return Some((positions, true));
        }
        let (start, turn) = (positions.start, self.placement.turn);
        let end = (start / turn).saturating_add(1).saturating_mul(turn).min(positions.end);
        Some((start..end, self.holds(start)))
    }

    /// The pieces of some positions, in order: those that this rank stores, and those that others store.
    pub fn pieces(self, positions: Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> {
        let first = self.first_piece(positions.clone());
        std::iter::successors(first, move |(piece, _)| self.first_piece(piece.end..positions.end))
    }

    /// The positions among these that it stores, in order.
    pub fn positions(self, positions: Range<usize>) -> impl Iterator<Item = usize> {
        self.pieces(positions).filter(|(_, holds)| *holds).flat_map(|(piece, _)| piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_no_placement_is_refused() {
        for ranks in [0, MOST_RANKS + 1, usize::MAX] {
            assert!(matches!(Placement::new(ranks), Err(Error::Limit { needed, .. }) if needed == ranks as u64));
        }
        let placement = Placement::new(4).unwrap();
        for pages in [0, MOST_TOKENS, usize::MAX] {
            assert!(matches!(placement.with_turn(pages), Err(Error::Limit { .. })), "{pages}");
        }
        assert!(matches!(placement.share(4), Err(Error::Plan { .. })));
        assert!(placement.share(3).unwrap().tokens(usize::MAX) > usize::MAX / 5);
        assert_eq!(placement.share(0).unwrap().first_piece(7..7), None);
    }

    proptest! {
        /// Every position lies on one rank, pages are not cut, and counts are those of the definition.
        #[test]
        fn every_position_lies_on_one_rank(
            ranks in 1usize..9,
            pages in 1usize..4,
            from in 0usize..3000,
            length in 0usize..3000,
        ) {
            let placement = Placement::new(ranks).unwrap().with_turn(pages).unwrap();
            let shares: Vec<RankShare> = (0..ranks).map(|rank| placement.share(rank).unwrap()).collect();
            let all = 0..from + length;
            for position in all.clone() {
                let turn = position / (pages * TILE_TOKENS);
                let holders: Vec<usize> = (0..ranks).filter(|&rank| shares[rank].holds(position)).collect();
                prop_assert_eq!(holders, vec![turn % ranks]);
                prop_assert_eq!(placement.rank_of(position), turn % ranks);
            }
            for share in &shares {
                let held = all.clone().filter(|&position| share.holds(position)).count();
                prop_assert_eq!(share.tokens(all.end), held);
                prop_assert_eq!(share.last_held(all.end), all.clone().rev().find(|&position| share.holds(position)));
                let pieces: Vec<_> = share.pieces(from..all.end).collect();
                let mut next = from;
                for (piece, holds) in &pieces {
                    prop_assert!(!piece.is_empty() && piece.start == next);
                    prop_assert!(piece.clone().all(|position| share.holds(position) == *holds));
                    prop_assert!(piece.end == all.end || piece.end.is_multiple_of(TILE_TOKENS));
                    next = piece.end;
                }
                prop_assert_eq!(next, all.end.max(from));
                let positions: Vec<usize> = share.positions(from..all.end).collect();
                let expected: Vec<usize> = (from..all.end).filter(|&position| share.holds(position)).collect();
                prop_assert_eq!(positions, expected);
            }
            // No rank holds more than a turn more than another.
            let counts: Vec<usize> = shares.iter().map(|share| share.tokens(all.end)).collect();
            prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= pages * TILE_TOKENS);
            prop_assert_eq!(counts.iter().sum::<usize>(), all.end);
        }
    }
}
