//! What ranks tell each other between steps: whether a call succeeded on all, and numbers.

use super::context_parallel::ContextParallel;
use super::purpose::Purpose;
use super::transport::{Reduction, TensorOf, Transport};
use crate::backend::{Backend, Device};
use crate::counts::{filled, whole};
use crate::plan::Elements;
use crate::{Error, Result};

/// Words of 16 bits that carry a number: an f32 holds each exactly.
const WORDS: usize = size_of::<u64>() / size_of::<u16>();

/// Elements before those of a rank: what they are for, and whether it brings none.
const HEAD: usize = 2;
const CODE_AT: usize = 0;
const FAILED_AT: usize = 1;

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
/// The error of the call; [`Error::Plan`] when it failed on another rank; [`Error::Transport`], also where another rank
/// makes another call.
pub(super) async fn agree<T: Transport>(
    transport: &mut T,
    purpose: Purpose,
    mine: std::result::Result<(), &Error>,
) -> Result<()> {
    let flags = gather(transport, purpose, &[u64::from(mine.is_err())]).await?;
    mine.map_err(Clone::clone)?;
    let refused: Vec<usize> = (0..flags.len()).filter(|&rank| flags[rank][0] > 0).collect();
    if refused.is_empty() {
        return Ok(());
    }
    Err(self::refused(purpose, &refused))
}

/// The error for what other ranks could not do.
fn refused(purpose: Purpose, ranks: &[usize]) -> Error {
    let reason = format!("ranks {ranks:?} could not; their own errors say why, and this one is as it was or has room");
    Error::Plan { what: purpose.what(), reason }
}

/// The numbers of every rank, in the order of the ranks. All bring as many.
async fn gather<T: Transport>(transport: &mut T, purpose: Purpose, numbers: &[u64]) -> Result<Vec<Vec<u64>>> {
    let mine = to_elements(&[&[purpose.code()], numbers].concat());
    let all = filled("numbers of all ranks", mine.len().saturating_mul(transport.ranks()), 0.0f32)?;
    let part: TensorOf<T> = transport.backend().upload(Elements::F32(&mine)).await?;
    let mut all = transport.backend().upload(Elements::F32(&all)).await?;
    transport.all_gather(&part, mine.len(), &mut all)?;
    // A device that waits for a rank would wait in a download too, but without a deadline.
    transport.wait()?;
    let all = from_elements(&transport.backend().download(&all).await?);
    let of_ranks = all.chunks(numbers.len() + 1);
    purpose.check(transport, of_ranks.clone().map(|of| of[0]).enumerate())?;
    Ok(of_ranks.map(|of| of[1..].to_vec()).collect())
}

impl<T: Transport> ContextParallel<T>
where
    T::Backend: Backend,
{
    /// Tells the other ranks whether a call succeeded here: see [`agree`].
    pub(super) async fn agree(&mut self, purpose: Purpose, mine: Result<()>) -> Result<()> {
        agree(&mut self.transport, purpose, mine.as_ref().copied()).await
    }

    /// The numbers of every rank, in the order of the ranks. All bring as many.
    pub(super) async fn gather_numbers(&mut self, purpose: Purpose, numbers: &[u64]) -> Result<Vec<Vec<u64>>> {
        gather(&mut self.transport, purpose, numbers).await
    }

    /// The elements of every rank, in the order of the ranks. All bring `elements`, or their error.
    ///
    /// # Errors
    /// The error of this rank; [`Error::Plan`] when another rank brought one; [`Error::Transport`].
    pub(super) async fn gather_floats(
        &mut self,
        purpose: Purpose,
        mine: Result<Vec<f32>>,
        elements: usize,
    ) -> Result<Vec<Vec<f32>>> {
        let (ranks, each) = (self.transport.ranks(), elements.saturating_add(HEAD));
        let part = self.headed(purpose, &mine, elements).await?;
        let all = filled("elements of all ranks", each.saturating_mul(ranks), 0.0f32)?;
        let mut all = self.transport.backend().upload(Elements::F32(&all)).await?;
        self.transport.all_gather(&part, each, &mut all)?;
        self.transport.wait()?;
        let all = self.transport.backend().download(&all).await?;
        let codes = all.chunks(each).map(|of| whole(f64::from(of[CODE_AT])) as u64);
        purpose.check(&self.transport, codes.enumerate())?;
        mine?;
        let failed: Vec<usize> = (0..ranks).filter(|rank| all[rank * each + FAILED_AT] != 0.0).collect();
        match failed.is_empty() {
            true => Ok(all.chunks(each).map(|of| of[HEAD..].to_vec()).collect()),
            false => Err(refused(purpose, &failed)),
        }
    }

    /// The sums of the elements of all ranks. All bring `elements`, or their error.
    ///
    /// # Errors
    /// The error of this rank; [`Error::Plan`] when another rank brought one; [`Error::Transport`].
    pub(super) async fn sum_floats(
        &mut self,
        purpose: Purpose,
        mine: Result<Vec<f32>>,
        elements: usize,
    ) -> Result<Vec<f32>> {
        let mut sums = self.headed(purpose, &mine, elements).await?;
        self.transport.all_reduce(&mut sums, elements.saturating_add(HEAD), Reduction::Sum)?;
        self.transport.wait()?;
        let mut sums = self.transport.backend().download(&sums).await?;
        if sums[CODE_AT] != (purpose.code() * self.transport.ranks() as u64) as f32 {
            let reason = "another rank makes another call; make the same calls in the same order on every rank".into();
            return Err(purpose.parted(&self.transport, Vec::new(), reason));
        }
        mine?;
        if sums[FAILED_AT] != 0.0 {
            let reason = "another rank could not; its own error says why, and this one is as it was".into();
            return Err(Error::Plan { what: purpose.what(), reason });
        }
        Ok(sums.split_off(HEAD))
    }

    /// The elements of this rank, behind those that say what they are for and whether there are any.
    async fn headed(&self, purpose: Purpose, mine: &Result<Vec<f32>>, elements: usize) -> Result<TensorOf<T>> {
        let mut part = filled("elements of a rank", elements.saturating_add(HEAD), 0.0f32)?;
        part[CODE_AT] = purpose.code() as f32;
        match mine {
            Ok(mine) => part[HEAD..].copy_from_slice(mine),
            Err(_) => part[FAILED_AT] = 1.0,
        }
        self.transport.backend().upload(Elements::F32(&part)).await
    }

    /// The numbers of rank 0. All bring as many.
    pub(super) async fn numbers_of_first(&mut self, purpose: Purpose, numbers: &[u64]) -> Result<Vec<u64>> {
        let elements = to_elements(&[&[purpose.code()], numbers].concat());
        let mut tensor = self.transport.backend().upload(Elements::F32(&elements)).await?;
        self.transport.broadcast(&mut tensor, elements.len(), 0)?;
        self.transport.wait()?;
        let mut numbers = from_elements(&self.transport.backend().download(&tensor).await?);
        let mine = (self.rank(), purpose.code());
        purpose.check(&self.transport, [(0, numbers[0]), mine].into_iter())?;
        Ok(numbers.split_off(1))
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
