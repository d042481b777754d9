//! The kernels that measure attention and carry decisions out, as calls that can be timed.

use std::time::Instant;

use kvpack::backend::{KeptAndEvicted, QueriesAndKeys, TensorRows};
use kvpack::cpu::Cpu;
use kvpack::policy::{Merging, StatsRequest};
use kvpack::{AttentionShape, Backend, Result};
use kvpack_report::Median;

use super::super::timed::Timed;

/// A call of [`kvpack::backend::TokenSelection`].
pub enum Call<'a, B: Backend> {
    /// `measure_attention`.
    Measure { input: QueriesAndKeys<'a, B::Tensor>, request: StatsRequest, known_lse: Option<&'a B::Tensor> },
    /// `top_k`.
    TopK { scores: &'a B::Tensor, kv_heads: usize, k: usize },
    /// `gather`.
    Gather { shape: AttentionShape, rows: TensorRows<'a, B::Tensor>, kept: &'a B::Indices },
    /// `merge_tokens`.
    Merge { input: KeptAndEvicted<'a, B::Tensor, B::Indices>, merging: Merging },
    /// `reorder_chunks`.
    Reorder { shape: AttentionShape, rows: TensorRows<'a, B::Tensor>, chunk_tokens: usize, order: &'a [u32] },
}

/// A backend whose kernels of selection can be timed by themselves.
pub trait TimedSelection: Timed {
    /// The kernels of a call, going round like calls over other memory; `None` where a device has no
    /// clock for them.
    ///
    /// # Errors
    /// Whatever the backend reports.
    async fn time_kernels(&self, calls: &[Call<'_, Self>]) -> Result<Option<Median>>;

    /// The kernels of a call in order, where a device chooses among several; otherwise none.
    ///
    /// # Errors
    /// Whatever the backend reports.
    fn kernel_names(&self, _: &Call<'_, Self>) -> Result<Vec<&'static str>> {
        Ok(Vec::new())
    }
}

impl TimedSelection for Cpu {
    async fn time_kernels(&self, _: &[Call<'_, Self>]) -> Result<Option<Median>> {
        Ok(None)
    }
}

impl<B: Backend> Call<'_, B> {
    /// Makes the call, as an engine does.
    ///
    /// # Errors
    /// Whatever the backend reports.
    pub fn make(&self, backend: &B) -> Result<()> {
        match self {
            Self::Measure { input, request, known_lse } => {
                backend.measure_attention(*input, *request, *known_lse).map(drop)
            }
            Self::TopK { scores, kv_heads, k } => backend.top_k(scores, *kv_heads, *k).map(drop),
            Self::Gather { shape, rows, kept } => backend.gather(shape, *rows, kept).map(drop),
            Self::Merge { input, merging } => backend.merge_tokens(*input, *merging).map(drop),
            Self::Reorder { shape, rows, chunk_tokens, order } => {
                backend.reorder_chunks(shape, *rows, *chunk_tokens, order).map(drop)
            }
        }
    }
}

/// Calls that are queued on a GPU before the host waits for them.
const QUEUED: usize = 8;

/// Measurements of a call by the wall clock on a GPU.
const MEASUREMENTS: usize = 5;

/// Seconds of a call by the wall clock: [`QUEUED`] of them one after the other, then a wait for all. Where software
/// computes, one call is measured once.
///
/// # Errors
/// Whatever the backend reports.
pub async fn time_calls<B: Timed>(
    backend: &B,
    last: &B::Tensor,
    mut call: impl FnMut(usize) -> Result<()>,
) -> Result<Median> {
    let (queued, measurements) = if backend.sizes().is_gpu() { (QUEUED, MEASUREMENTS) } else { (1, 1) };
    let mut seconds = Vec::with_capacity(measurements);
    // The first round compiles kernels.
    for round in 0..=measurements {
        let start = Instant::now();
        (0..queued).try_for_each(&mut call)?;
        // What comes to the host comes after all that was queued before it.
        backend.download(last).await?;
        if round > 0 {
            seconds.push(start.elapsed().as_secs_f64() / queued as f64);
        }
    }
    Ok(Median::of(seconds))
}
