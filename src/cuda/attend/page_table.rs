//! The pages of a launch.

use std::ops::Range;

use crate::format::TILE_TOKENS;
use crate::plan::{Page, Part, PlannedSpan, StorePart};

/// The pages that the items of a launch name by their place.
pub(super) struct PageTable {
    pub(super) pages: Vec<Page>,
    /// For every span: a tile of it and the place of its page. Those after it follow.
    places: Vec<(usize, usize)>,
}

impl PageTable {
    /// All pages of a segment.
    pub(super) fn whole(segment: &StorePart) -> Self {
        let places = segment.spans().iter().map(|span| (0, span.first_page)).collect();
        Self { pages: segment.pages().to_vec(), places }
    }

    /// Those of the tiles from the first to the last that parts have of every span: what is unpacked for them.
    pub(super) fn of_parts(segment: &StorePart, parts: &[(usize, Part)]) -> Self {
        let mut tiles: Vec<Option<Range<usize>>> = vec![None; segment.spans().len()];
        for (span, part) in parts {
            let (first, end) = (part.tokens.start / TILE_TOKENS, part.tokens.end.div_ceil(TILE_TOKENS));
            let of_span = tiles[*span].get_or_insert(first..end);
            *of_span = of_span.start.min(first)..of_span.end.max(end);
        }
        let mut pages = Vec::new();
        let mut place = |(span, tiles): (&PlannedSpan, Option<Range<usize>>)| {
            let tiles = tiles.unwrap_or_default();
            let at = (tiles.start, pages.len());
            pages.extend_from_slice(&segment.pages()[span.first_page..][tiles]);
            at
        };
        let places = segment.spans().iter().zip(tiles).map(&mut place).collect();
        Self { pages, places }
    }

    /// The place of a tile of a span.
    pub(super) fn place(&self, span: usize, tile: usize) -> usize {
        let (of, place) = self.places[span];
        place + tile - of
    }
}
