//! The widths of packed codes.

use std::fmt;

/// Bits of one packed code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Bits {
    /// Two levels.
    One = 1,
    /// Four levels.
    Two = 2,
    /// Eight levels.
    Three = 3,
    /// Sixteen levels.
    Four = 4,
    /// 256 levels.
    Eight = 8,
}

impl Bits {
    /// All widths, narrow to wide.
    pub const ALL: [Self; 5] = [Self::One, Self::Two, Self::Three, Self::Four, Self::Eight];

    /// The width with this many bits, if there is one.
    pub const fn from_count(count: u32) -> Option<Self> {
        match count {
            1 => Some(Self::One),
            2 => Some(Self::Two),
            3 => Some(Self::Three),
            4 => Some(Self::Four),
            8 => Some(Self::Eight),
            _ => None,
        }
    }

    /// The number of bits.
    pub const fn count(self) -> u32 {
        self as u32
    }

    /// The largest code, `2^bits - 1`.
    pub const fn max_code(self) -> u32 {
        (1 << self.count()) - 1
    }

    /// Whole codes in one 32-bit word. At 3 bits this is 10, although tiles hold 32 codes in three words instead.
    pub const fn codes_per_word(self) -> usize {
        32 / self.count() as usize
    }

    /// Bit planes of a byte lane, which are groups of four codes in one word. At 3 bits, those of the words that hold
    /// the low pairs of bits.
    pub const fn planes(self) -> usize {
        match self {
            Self::Three => 4,
            _ => 8 / self.count() as usize,
        }
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.count())
    }
}
