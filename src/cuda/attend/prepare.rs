//! Compiles what steps over a cache may use, before the first of them.

use super::logits::{Logits, TokenMask};
use super::parts::few_queries;
use super::run_variant::{LEAST_PACKED_ROWS, RunVariant, item_rows};
use super::variant::{AttendVariant, ScorePass};
use super::variant_sizes::most_moving;
use crate::Result;
use crate::cuda::Cuda;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::page_format::PageFormat;
use crate::format::{AttentionShape, SegmentFormat};
use crate::plan::{LayerAttention, Scoring, StoreFormat};

/// Compiles every attention kernel that steps over these stores may use, for runs of up to `longest` queries.
///
/// # Errors
/// As [`AttendStep::new`], and errors from compiling kernels.
pub(in crate::cuda) fn prepare(
    backend: &Cuda,
    shape: &AttentionShape,
    (stores, attention): (&[StoreFormat], &LayerAttention),
    longest: usize,
) -> Result<()> {
    let scoring = attention.scoring().cloned().unwrap_or_else(|| Scoring::of(shape));
    // Items that the window cuts, and items that it does not.
    let masks = [Some(TokenMask::None), attention.window().map(|_| TokenMask::Window)];
    let logits: Vec<Logits> = masks.into_iter().flatten().map(|mask| Logits::new(&scoring, mask)).collect();
    let facts = backend.kernels().facts();
    let moves = stores.iter().all(|store| store.calibration.is_none())
        && stores.iter().any(|store| store.format != SegmentFormat::F16);
    let pages = stores.iter().map(|store| PageFormat::new(shape, &store.format)).collect::<Result<Vec<_>>>()?;
    let most_moving = if moves { most_moving(&pages, shape.group(), facts) } else { 1 };
    for (store, pages) in stores.iter().zip(pages) {
        let passes = ScorePass::of(store.calibration.is_some());
        let attends = few_variants(shape, (pages, passes), longest, facts)?;
        let moving = moving_variants(shape, pages, longest.min(most_moving), facts);
        for &logits in &logits {
            let storing = attends.iter().filter_map(|variant| variant.storing(shape.group(), facts));
            // While a sequence has tokens in one store alone, its step may be one launch.
            let stores = store.calibration.is_none() && store.format.takes_single_tokens();
            let storing: Vec<AttendVariant> = storing.filter(|_| stores).collect();
            for variant in
                attends.iter().chain(&moving).chain(&storing).map(|&variant| AttendVariant { logits, ..variant })
            {
                passes.iter().try_for_each(|&pass| variant.function(backend, pass).map(drop))?;
            }
            for variant in run_variants(shape, (pages, passes), longest, facts) {
                variant.with_logits(logits).prepare(backend, passes)?;
            }
        }
    }
    Ok(())
}

/// The variants of `attend` for queries that see the same tokens.
fn few_variants(
    shape: &AttentionShape,
    (pages, passes): (PageFormat, &[ScorePass]),
    longest: usize,
    facts: &DeviceFacts,
) -> Result<Vec<AttendVariant>> {
    // A calibrated query has extremes of its own.
    let queries = if passes.len() == 1 { longest.min(few_queries(shape)) } else { 1 };
    let of_queries = |queries| AttendVariant::all(pages, shape.group(), queries, facts);
    Ok((1..=queries).map(of_queries).collect::<Result<Vec<_>>>()?.concat())
}

/// The variants of `attend` for up to `most` queries that move.
fn moving_variants(shape: &AttentionShape, pages: PageFormat, most: usize, facts: &DeviceFacts) -> Vec<AttendVariant> {
    let mut variants: Vec<AttendVariant> =
        (2..=most).filter_map(|queries| AttendVariant::moving(pages, shape.group(), queries, facts)).collect();
    variants.dedup();
    variants
}

/// The variants of `attend_run`.
fn run_variants(
    shape: &AttentionShape,
    (pages, passes): (PageFormat, &[ScorePass]),
    longest: usize,
    facts: &DeviceFacts,
) -> Vec<RunVariant> {
    let most = item_rows(shape.head_dim(), facts) / shape.group();
    if longest == 1 || most <= 1 {
        return Vec::new();
    }
    let rows = longest.min(most) * shape.group();
    if passes.len() > 1 {
        return RunVariant::pipelined(pages, facts).filter(|_| rows >= LEAST_PACKED_ROWS).into_iter().collect();
    }
    if rows < RunVariant::least_rows(pages, facts) {
        return Vec::new();
    }
    let in_block = RunVariant::all(pages, rows, facts);
    let unpacks = in_block.is_empty() || RunVariant::unpacks_for(longest, most);
    let unpacked = RunVariant::over_unpacked(pages, facts).filter(|_| unpacks);
    in_block.into_iter().chain(unpacked).collect()
}
