//! Compiles what steps over a cache may use, before the first of them.

use super::logits::{Logits, TokenMask};
use super::parts::few_queries;
use super::run_variant::{RunVariant, item_rows};
use super::variant::{AttendVariant, ScorePass};
use crate::Result;
use crate::cuda::Cuda;
use crate::cuda::device::page_format::PageFormat;
use crate::format::AttentionShape;
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
    for StoreFormat { format, calibration } in stores {
        let pages = PageFormat::new(shape, format)?;
        // A query has extremes of its own.
        let (passes, queries): (&[ScorePass], _) = match calibration {
            None => (&[ScorePass::Plain], longest.min(few_queries(shape))),
            Some(_) => (&[ScorePass::Extremes, ScorePass::Mapped], 1),
        };
        for queries in 1..=queries {
            for variant in AttendVariant::all(pages, shape.group(), queries, backend.kernels().facts())? {
                for &logits in &logits {
                    let variant = AttendVariant { logits, ..variant };
                    passes.iter().try_for_each(|&pass| variant.function(backend, pass).map(drop))?;
                }
            }
        }
        let facts = backend.kernels().facts();
        let most = item_rows(shape.head_dim(), facts) / shape.group();
        if calibration.is_none() && longest > 1 && most > 1 {
            let in_block = RunVariant::all(pages, longest.min(most) * shape.group(), facts);
            let unpacks = in_block.is_empty() || RunVariant::unpacks_for(longest, most);
            let unpacked = RunVariant::over_unpacked(pages, facts).filter(|_| unpacks);
            for variant in in_block.into_iter().chain(unpacked) {
                if variant.least_rows() <= longest.min(most) * shape.group() {
                    logits.iter().try_for_each(|&logits| variant.with_logits(logits).prepare(backend))?;
                }
            }
        }
    }
    Ok(())
}
