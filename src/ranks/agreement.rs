//! What ranks tell each other between steps: whether a call succeeded on all, and numbers.

use super::context_parallel::ContextParallel;
use super::transport::{Reduction, TensorOf, Transport};
use crate::backend::{Backend, Device};
use crate::counts::{filled, whole};
use crate::plan::Elements;
use crate::{Error, Result};

/// Words of 16 bits that carry a number: an f32 holds each exactly.
const WORDS: usize = size_of::<u64>() / size_of::<u16>();

/// Numbers as f32 elements that a transport carries unchanged.
fn to_elements(numbers: &[u64]) -> Vec<f32> {
    let bytes: Vec<[u8; 8]> = numbers.iter().map(|number| number.to_le_bytes()).collect();
    bytes.as_flattened().as_chunks().0.iter().map(|&word| f32::from(u16::from_le_bytes(word))).collect()
}

fn from_elements(elements: &[f32]) -> Vec<u64> {
    let number = |words: &[f32; WORDS]| {
        words.iter().rev().fold(0u64, |number, &word| number << u16::BITS | whole(f64::from(word)) as u64)
    };
    elements.as_chunks::<WORDS>().0.iter().map(number).collect()
}

/// Tells the other ranks whether a call succeeded here.
///
/// # Errors
/// The error of the call; [`Error::Plan`] when it failed on another rank; [`Error::Transport`].
pub(super) async fn agree<T: Transport>(
    transport: &mut T,
    what: &'static str,
    mine: std::result::Result<(), &Error>,
) -> Result<()> {
    let flags = gather(transport, &[u64::from(mine.is_err())]).await?;
    mine.map_err(Clone::clone)?;
    let refused: Vec<usize> = (0..flags.len()).filter(|&rank| flags[rank][0] > 0).collect();
    if refused.is_empty() {
        return Ok(());
    }
    Err(self::refused(what, &refused))
}

/// The error for what other ranks could not do.
fn refused(what: &'static str, ranks: &[usize]) -> Error {
    let reason = format!("ranks {ranks:?} could not; their own errors say why, and this one is as it was or has room");
    Error::Plan { what, reason }
}

/// The numbers of every rank, in the order of the ranks. All bring as many.
async fn gather<T: Transport>(transport: &mut T, numbers: &[u64]) -> Result<Vec<Vec<u64>>> {
    let mine = to_elements(numbers);
    let all = filled("numbers of all ranks", mine.len().saturating_mul(transport.ranks()), 0.0f32)?;
    let part: TensorOf<T> = transport.backend().upload(Elements::F32(&mine)).await?;
    let mut all = transport.backend().upload(Elements::F32(&all)).await?;
    transport.all_gather(&part, mine.len(), &mut all)?;
    // A device that waits for a rank would wait in a download too, but without a deadline.
    transport.wait()?;
    let all = from_elements(&transport.backend().download(&all).await?);
    Ok(all.chunks(numbers.len().max(1)).map(<[u64]>::to_vec).collect())
}

impl<T: Transport> ContextParallel<T>
where
    T::Backend: Backend,
{
    /// Tells the other ranks whether a call succeeded here: see [`agree`].
    pub(super) async fn agree(&mut self, what: &'static str, mine: Result<()>) -> Result<()> {
        agree(&mut self.transport, what, mine.as_ref().copied()).await
    }

    /// The numbers of every rank, in the order of the ranks. All bring as many, and at least one.
    pub(super) async fn gather_numbers(&mut self, numbers: &[u64]) -> Result<Vec<Vec<u64>>> {
        gather(&mut self.transport, numbers).await
    }

    /// The elements of every rank, in the order of the ranks. All bring `elements`, or their error.
    ///
    /// # Errors
    /// The error of this rank; [`Error::Plan`] when another rank brought one; [`Error::Transport`].
    pub(super) async fn gather_floats(
        &mut self,
        what: &'static str,
        mine: Result<Vec<f32>>,
        elements: usize,
    ) -> Result<Vec<Vec<f32>>> {
        let (ranks, each) = (self.transport.ranks(), elements.saturating_add(1));
        let part = self.flagged(&mine, elements).await?;
        let all = filled("elements of all ranks", each.saturating_mul(ranks), 0.0f32)?;
        let mut all = self.transport.backend().upload(Elements::F32(&all)).await?;
        self.transport.all_gather(&part, each, &mut all)?;
        self.transport.wait()?;
        let all = self.transport.backend().download(&all).await?;
        mine?;
        let failed: Vec<usize> = (0..ranks).filter(|rank| all[rank * each] != 0.0).collect();
        match failed.is_empty() {
            true => Ok(all.chunks(each).map(|of| of[1..].to_vec()).collect()),
            false => Err(refused(what, &failed)),
        }
    }

    /// The sums of the elements of all ranks. All bring `elements`, or their error.
    ///
    /// # Errors
    /// The error of this rank; [`Error::Plan`] when another rank brought one; [`Error::Transport`].
    pub(super) async fn sum_floats(
        &mut self,
        what: &'static str,
        mine: Result<Vec<f32>>,
        elements: usize,
    ) -> Result<Vec<f32>> {
        let mut sums = self.flagged(&mine, elements).await?;
        self.transport.all_reduce(&mut sums, elements.saturating_add(1), Reduction::Sum)?;
        self.transport.wait()?;
        let mut sums = self.transport.backend().download(&sums).await?;
        mine?;
        if sums[0] != 0.0 {
            let reason = "another rank could not; its own error says why, and this one is as it was".into();
            return Err(Error::Plan { what, reason });
        }
        Ok(sums.split_off(1))
    }

    /// The elements of this rank, behind one that says whether there are any.
    async fn flagged(&self, mine: &Result<Vec<f32>>, elements: usize) -> Result<TensorOf<T>> {
        let mut part = filled("elements of a rank", elements.saturating_add(1), 0.0f32)?;
        match mine {
            Ok(mine) => part[1..].copy_from_slice(mine),
            Err(_) => part[0] = 1.0,
        }
        self.transport.backend().upload(Elements::F32(&part)).await
    }

    /// The numbers of rank 0. All bring as many, and at least one.
    pub(super) async fn numbers_of_first(&mut self, numbers: &[u64]) -> Result<Vec<u64>> {
        let elements = to_elements(numbers);
        let mut tensor = self.transport.backend().upload(Elements::F32(&elements)).await?;
        self.transport.broadcast(&mut tensor, elements.len(), 0)?;
        self.transport.wait()?;
        Ok(from_elements(&self.transport.backend().download(&tensor).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_travel_unchanged() {
        let numbers = [0, 1, 65_535, 65_536, (1 << 31) - 1, u64::from(u32::MAX), 1 << 40, u64::MAX];
        assert_eq!(from_elements(&to_elements(&numbers)), numbers);
    }
}
