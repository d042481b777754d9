//! Launches of `attend` whose blocks also store the tokens of their step.

use super::kernel::SegmentKernel;
use super::launch::{AttendCall, Launch};
use super::scratch::SegmentTables;
use super::segment::PlannedLaunch;
use super::variant::ScorePass;
use crate::Result;
use crate::cuda::Cuda;
use crate::format::TILE_TOKENS;

impl PlannedLaunch {
    /// Whether a launch that stores takes less time than two, by what was measured on an H200 (lab/cuda.md): where no
    /// states are merged through memory, or where the rings hold a part of the longest item: two fifths, and a seventh
    /// where steps are halved.
    fn gains_by_storing(&self) -> bool {
        let SegmentKernel::Attend(variant) = &self.kernel else { return false };
        let longest = self.items.iter().map(|item| item.tokens as usize).max().unwrap_or(0);
        let bytes = longest.div_ceil(TILE_TOKENS) * variant.pages.head_bytes();
        let merges = self.items.iter().any(|item| item.states > 1);
        let enough = if variant.in_half_steps().is_some() { bytes / 7 } else { 2 * bytes / 5 };
        !merges || variant.ring_bytes() >= enough
    }

    /// The launch whose blocks also store the tokens of the step, if its kernel has such a variant.
    pub(super) fn storing_launch(
        &self,
        backend: &Cuda,
        call: AttendCall,
        tables: &SegmentTables,
    ) -> Result<Option<Launch>> {
        let facts = backend.kernels().facts();
        let stores = self.format.takes_single_tokens() && self.calibration.is_none() && self.gains_by_storing();
        let storing = self.kernel.storing(call.group as usize, facts).filter(|_| stores);
        let Some(kernel) = storing else { return Ok(None) };
        Self { kernel, ..self.clone() }.launch(backend, ScorePass::Plain, call, tables.item_count).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::super::attend_step::AttendStep;
    use super::*;
    use crate::cuda::device::driver::DeviceFacts;
    use crate::format::{AttentionShape, SegmentFormat};
    use crate::plan::{AttendPlan, Page, QueryRun, SpanView, StoreView};

    const H200: DeviceFacts = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };

    /// As the table of lab/cuda.md says.
    #[test]
    fn launches_store_where_that_was_faster() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let pages: Vec<Page> = (0..1100).map(|index| Page { shard: 0, index }).collect();
        let (codes, halves) = (SegmentFormat::saw_int4(), SegmentFormat::F16);
        for (sequences, tokens, format, gains) in [
            (1, 8192, codes, true),
            (1, 8192, halves, true),
            (1, 32_768, codes, true),
            (1, 32_768, halves, false),
            (8, 32_768, codes, true),
            (1, 16_384, codes, true),
            (1, 65_536, codes, true),
            (1, 98_304, codes, true),
            (1, 131_072, codes, false),
            (1, 131_072, halves, false),
        ] {
            for tokens in [tokens + 1usize, tokens + 60] {
                let pages = &pages[..tokens.div_ceil(TILE_TOKENS)];
                let span =
                    |sequence| SpanView { sequence, start: 0, tokens, gathered: None, pages, range_slot: sequence };
                let store = StoreView { format, calibration: None, spans: (0..sequences).map(span).collect() };
                let plan = AttendPlan::new(shape, &QueryRun::decode_batch(sequences), &[store]).unwrap();
                let step = AttendStep::for_device(&H200, &plan).unwrap();
                let kernel = step.segments()[0].kernel;
                assert!(
                    matches!(kernel, SegmentKernel::Attend(of) if of.blocks == 1),
                    "{sequences} × {tokens} {format}"
                );
                assert_eq!(step.segments()[0].gains_by_storing(), gains, "{sequences} × {tokens} {format}");
            }
        }
    }
}
