//! Counts that callers name, checked before memory is asked for or a number is narrowed by them.
//!
//! A position of a token has 32 bits. A [`TokenCount`] is a number of tokens whose positions all fit: ranges of
//! positions come from it without a cast. A vector whose length a caller decides comes from [`filled`], [`collected`]
//! or [`reserved`]: they return an error where the allocator refuses, and the process goes on.

use std::ops::Range;

use crate::{Error, Result};

/// Most tokens of a sequence: kernels count positions in 32 bits with a sign.
pub const MOST_TOKENS: usize = i32::MAX as usize;

/// Most layers of a model.
pub const MOST_LAYERS: usize = 1 << 16;

/// A number of tokens, at most [`MOST_TOKENS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TokenCount(u32);

impl TokenCount {
    /// Checks and makes a count.
    ///
    /// # Errors
    /// [`Error::Limit`] when there are more than [`MOST_TOKENS`].
    pub(crate) fn new(tokens: usize) -> Result<Self> {
        match u32::try_from(tokens) {
            Ok(count) if tokens <= MOST_TOKENS => Ok(Self(count)),
            _ => Err(Error::Limit {
                what: "tokens of a sequence".into(),
                needed: tokens as u64,
                allowed: MOST_TOKENS as u64,
                hint: "split the sequence",
            }),
        }
    }

    pub(crate) const fn get(self) -> usize {
        self.0 as usize
    }

    /// All positions.
    pub(crate) const fn positions(self) -> Range<u32> {
        0..self.0
    }

    /// The first `count` positions, or all of fewer.
    pub(crate) fn first(self, count: usize) -> Range<u32> {
        0..self.0.min(saturated(count))
    }

    /// The last `count` positions, or all of fewer.
    pub(crate) fn last(self, count: usize) -> Range<u32> {
        self.0.saturating_sub(saturated(count))..self.0
    }
}

/// A number in 32 bits.
///
/// # Errors
/// [`Error::Limit`] for a larger one.
pub(crate) fn in_32_bits(what: &str, count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::Limit {
        what: what.into(),
        needed: count as u64,
        allowed: u32::MAX.into(),
        hint: "pass fewer at once",
    })
}

/// A number in 32 bits; the largest for all that are larger.
pub(crate) fn saturated(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The whole part of a number; 0 for NaN and what is negative, the largest for what is larger.
#[expect(clippy::cast_possible_truncation, reason = "a float saturates where it is cast to an integer")]
pub(crate) const fn whole(x: f64) -> usize {
    x as usize
}

/// An empty vector with room for `count` elements.
///
/// # Errors
/// [`Error::OutOfMemory`] when the allocator has no room for them.
pub(crate) fn reserved<T>(what: &'static str, count: usize) -> Result<Vec<T>> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(count).map_err(|error| out_of_memory::<T>(what, count, &error))?;
    Ok(elements)
}

/// A vector of `count` equal elements.
///
/// # Errors
/// As [`reserved`].
pub(crate) fn filled<T: Clone>(what: &'static str, count: usize, element: T) -> Result<Vec<T>> {
    let mut elements = reserved(what, count)?;
    elements.resize(count, element);
    Ok(elements)
}

/// Grows a vector to `length` elements, new ones equal to `element`; a longer one stays as it is.
///
/// # Errors
/// As [`reserved`]; the vector is as it was.
pub(crate) fn grow<T: Clone>(what: &'static str, elements: &mut Vec<T>, length: usize, element: T) -> Result<()> {
    let more = length.saturating_sub(elements.len());
    elements.try_reserve_exact(more).map_err(|error| out_of_memory::<T>(what, more, &error))?;
    elements.resize(elements.len() + more, element);
    Ok(())
}

/// The elements of an iterator that knows an upper bound of their number.
///
/// # Errors
/// As [`reserved`].
pub(crate) fn collected<T>(what: &'static str, iterator: impl Iterator<Item = T>) -> Result<Vec<T>> {
    let (least, most) = iterator.size_hint();
    let mut elements = reserved(what, most.unwrap_or(least))?;
    elements.extend(iterator);
    Ok(elements)
}

fn out_of_memory<T>(what: &'static str, count: usize, error: &std::collections::TryReserveError) -> Error {
    let bytes = (count as u64).saturating_mul(size_of::<T>() as u64);
    Error::OutOfMemory { what, bytes, message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_a_count() {
        let seven = TokenCount::new(7).unwrap();
        assert_eq!((seven.get(), seven.positions()), (7, 0..7));
        assert_eq!([seven.first(2), seven.last(2)], [0..2, 5..7]);
        for beyond in [8, 1 << 32, usize::MAX] {
            assert_eq!([seven.first(beyond), seven.last(beyond)], [0..7, 0..7]);
        }
        assert_eq!(TokenCount::new(MOST_TOKENS).unwrap().positions().len(), MOST_TOKENS);
        for absurd in [MOST_TOKENS + 1, 1 << 32, usize::MAX] {
            let refused = TokenCount::new(absurd);
            assert!(matches!(refused, Err(Error::Limit { needed, .. }) if needed == absurd as u64), "{refused:?}");
        }
    }

    #[test]
    fn what_no_memory_holds_is_refused() {
        for count in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert!(matches!(reserved::<u32>("test", count), Err(Error::OutOfMemory { .. })), "{count}");
            assert!(matches!(filled("test", count, 1u32), Err(Error::OutOfMemory { .. })), "{count}");
            let refused = collected("test", std::iter::repeat_n(1u32, count));
            assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{count}");
        }
        assert_eq!(filled("test", 3, 1).unwrap(), [1, 1, 1]);
        assert_eq!(collected("test", (0..9).filter(|x| x % 4 == 0)).unwrap(), [0, 4, 8]);
    }

    #[test]
    fn whole_parts_saturate() {
        assert_eq!([2.9, -1.0, f64::NAN, f64::INFINITY].map(whole), [2, 0, 0, usize::MAX]);
    }
}
