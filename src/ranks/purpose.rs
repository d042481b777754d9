//! What ranks meet for, so that they notice where one meets for something else.

use super::transport::Transport;
use crate::{Error, Result};

/// What ranks exchange numbers for. Every rank sends the code of its own along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Caches,
    StepRoom,
    Windows,
    Centres,
    Rejoin,
    Appended,
    CompressionDue,
    Choice,
    Compressed,
    Kept,
    Held,
    Statistics,
    KeptRoom,
    KeptRows,
    KeptAgain,
}

impl Purpose {
    const ALL: [Self; 15] = [
        Self::Caches,
        Self::StepRoom,
        Self::Windows,
        Self::Centres,
        Self::Rejoin,
        Self::Appended,
        Self::CompressionDue,
        Self::Choice,
        Self::Compressed,
        Self::Kept,
        Self::Held,
        Self::Statistics,
        Self::KeptRoom,
        Self::KeptRows,
        Self::KeptAgain,
    ];

    /// The call of [`ContextParallel`](super::ContextParallel), and what it needs of all ranks.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Caches => ("new", "caches of ranks"),
            Self::StepRoom => ("reserve_for_append", "room for a step"),
            Self::Windows => ("pack_windows", "windows to pack"),
            Self::Centres => ("set_centres", "centres"),
            Self::Rejoin => ("rejoin", "lengths of sequences"),
            Self::Appended => ("appended", "appended tokens"),
            Self::CompressionDue => ("compression_due", "appended tokens"),
            Self::Choice => ("compress", "choice of a policy"),
            Self::Compressed => ("compress", "tokens to keep"),
            Self::Kept => ("keep", "tokens to keep"),
            Self::Held => ("compress_again", "positions of a sequence"),
            Self::Statistics => ("observe_layer or compress_again", "statistics of attention"),
            Self::KeptRoom => ("compress_again", "room for kept tokens"),
            Self::KeptRows => ("compress_again", "rows of kept tokens"),
            Self::KeptAgain => ("compress_again", "tokens to keep"),
        }
    }

    /// What the call needs of all ranks.
    pub(super) const fn what(self) -> &'static str {
        self.names().1
    }

    /// The number that stands for it. An f32 holds it exactly, and so the sum of those of all ranks; it is never 0.
    pub(super) const fn code(self) -> u64 {
        self as u64 + 1
    }

    fn text(code: u64) -> String {
        let of_code = Self::ALL.into_iter().find(|purpose| purpose.code() == code).map(Self::names);
        of_code.map_or("something else".into(), |(call, what)| format!("{call} ({what})"))
    }

    /// Checks that ranks sent this code. Rank 0 is the first of them.
    ///
    /// # Errors
    /// [`Error::Transport`] names those that differ from rank 0, so that it is the same on all ranks.
    pub(super) fn check<T: Transport>(self, transport: &T, codes: impl Iterator<Item = (usize, u64)>) -> Result<()> {
        let codes: Vec<(usize, u64)> = codes.collect();
        if codes.iter().all(|&(_, code)| code == self.code()) {
            return Ok(());
        }
        let first = codes.first().map_or(0, |&(_, code)| code);
        let differ: Vec<(usize, u64)> = codes.into_iter().filter(|&(_, code)| code != first).collect();
        let others = differ.iter().map(|&(rank, code)| format!(", rank {rank} {}", Self::text(code)));
        let others: String = others.collect();
        let reason =
            format!("rank 0 calls {}{others}; make the same calls in the same order on every rank", Self::text(first));
        Err(self.parted(transport, differ.into_iter().map(|(rank, _)| rank).collect(), reason))
    }

    /// The error of ranks that called different things.
    pub(super) fn parted<T: Transport>(self, transport: &T, failed: Vec<usize>, reason: String) -> Error {
        let (rank, ranks) = (transport.rank(), transport.ranks());
        Error::Transport { operation: self.names().0, rank, ranks, failed, reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_purpose_has_a_code_of_its_own() {
        for (place, purpose) in Purpose::ALL.into_iter().enumerate() {
            assert_eq!(purpose.code(), place as u64 + 1);
            assert!(Purpose::text(purpose.code()).contains(purpose.what()));
        }
        assert_eq!(Purpose::text(0), "something else");
    }
}
