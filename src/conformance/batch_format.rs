//! How the batch of a timed decode step is stored.

use std::fmt;
use std::ops::Range;

use crate::format::{Bits, SegmentFormat, TILE_TOKENS};

/// Parts that a sequence is cut into.
const PARTS: usize = 8;

/// The formats of the sequences of a batch: one format throughout, or several parts.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchFormat(Vec<BatchPart>);

/// Some eighths of every sequence in one format.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchPart {
    /// The format.
    pub format: SegmentFormat,
    first: usize,
    eighths: usize,
}

impl BatchFormat {
    /// Consecutive parts, each with its format and the number of eighths of a sequence that it takes.
    pub(super) fn of_parts<const N: usize>(parts: [(SegmentFormat, usize); N]) -> Self {
        let place = |first: &mut usize, (format, eighths)| {
            let part = BatchPart { format, first: *first, eighths };
            *first += eighths;
            Some(part)
        };
        Self(parts.into_iter().scan(0, place).collect())
    }

    /// A context in Cocktail's formats (arXiv 2503.23294), an eighth in f16, three in 4 bits and four in 2.
    pub fn cocktail() -> Self {
        Self::of_parts([
            (SegmentFormat::F16, 1),
            (SegmentFormat::kivi(Bits::Four), 3),
            (SegmentFormat::kivi(Bits::Two), 4),
        ])
    }

    /// The parts.
    pub fn parts(&self) -> &[BatchPart] {
        &self.0
    }

    /// Each part without the others.
    pub fn parts_alone(&self) -> impl Iterator<Item = Self> {
        self.0.iter().map(|part| Self(vec![part.clone()]))
    }
}

impl From<SegmentFormat> for BatchFormat {
    fn from(format: SegmentFormat) -> Self {
        Self::of_parts([(format, PARTS)])
    }
}

impl BatchPart {
    /// The tokens of a sequence of this length that belong to the part: whole tiles, except at the end of the sequence.
    pub fn tokens(&self, length: usize) -> Range<usize> {
        let edge =
            |eighths| if eighths == PARTS { length } else { length * eighths / PARTS / TILE_TOKENS * TILE_TOKENS };
        edge(self.first)..edge(self.first + self.eighths)
    }
}

impl fmt::Display for BatchFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |part: &BatchPart| match part.eighths {
            PARTS => part.format.to_string(),
            eighths => format!("{eighths}/{PARTS} {}", part.format),
        };
        f.write_str(&self.0.iter().map(text).collect::<Vec<_>>().join(" + "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bits;

    /// Parts cover every token once, whatever the length.
    #[test]
    fn parts_cover_a_sequence() {
        let (four, two) = (SegmentFormat::per_channel(Bits::Four), SegmentFormat::per_channel(Bits::Two));
        let format = BatchFormat::of_parts([(SegmentFormat::F16, 1), (four, 3), (two, 4)]);
        assert_eq!(format.to_string(), "1/8 f16 + 3/8 4-bit per channel + 4/8 2-bit per channel");
        for length in [1, 127, 128, 1000, 32_768, 32_767] {
            let mut end = 0;
            for part in format.parts() {
                let tokens = part.tokens(length);
                assert_eq!(tokens.start, end);
                assert!(tokens.is_empty() || tokens.start.is_multiple_of(TILE_TOKENS));
                end = tokens.end;
            }
            assert_eq!(end, length);
        }
        assert_eq!(format.parts()[1].tokens(32_768).len(), 3 * 4096);
        assert_eq!(BatchFormat::from(four).parts()[0].tokens(77).len(), 77);
    }
}
