//! The launches of a step with what they were decided from. A step like an earlier one takes its launches.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use super::attend_buffers::PlannedLaunch;
use super::attend_launches::{Builder, Decisions};
use super::attend_step::StepOptions;
use crate::wgpu::device::Capabilities;

/// Launches that depend on nothing but these fields. Their grids come from the work of a step.
#[derive(Clone, Debug)]
pub(in crate::wgpu) struct DecidedLaunches {
    pub(super) capabilities: Capabilities,
    pub(super) options: StepOptions,
    pub(super) decisions: Decisions,
    pub(super) launches: Vec<PlannedLaunch>,
}

impl DecidedLaunches {
    /// Those of `kept` that were decided alike, or else new ones. Launches name kernels by constants in text. Most decode
    /// steps are like the one before, and need not write that text again.
    pub(super) fn like<'a>(
        mut kept: impl Iterator<Item = &'a Arc<Self>>,
        builder: &Builder<'_>,
        options: StepOptions,
        decisions: Decisions,
    ) -> Arc<Self> {
        let capabilities = *builder.capabilities;
        let is_alike =
            |of: &&Arc<Self>| of.options == options && of.decisions == decisions && of.capabilities == capabilities;
        let fresh = || builder.with_rows(builder.launches(&decisions), options.rows);
        match kept.find(is_alike) {
            Some(of) => {
                debug_assert!(of.launches == fresh(), "decisions leave something out");
                of.clone()
            }
            None => {
                let launches = fresh();
                Arc::new(Self { capabilities, options, decisions, launches })
            }
        }
    }
}

/// What the last different calls decided. It holds no memory of the device.
#[derive(Debug, Default)]
pub(in crate::wgpu) struct RecentLaunches(Mutex<VecDeque<Arc<DecidedLaunches>>>);

/// Calls that are kept: as many as a model has kinds of layers, and its prompts next to its decode steps.
const KEPT: usize = 4;

impl RecentLaunches {
    /// All of them, the last first.
    pub fn kept(&self) -> Vec<Arc<DecidedLaunches>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// Keeps those of a call.
    pub fn keep(&self, of: &Arc<DecidedLaunches>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|kept| !Arc::ptr_eq(kept, of));
        kept.push_front(of.clone());
        kept.truncate(KEPT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::AttendOptions;
    use crate::format::{AttentionShape, SegmentFormat};
    use crate::plan::{AttendPlan, ElementType, Page, QueryRun, SpanView, StoreView};
    use crate::wgpu::attend::{AttendStep, LseOutput};
    use crate::wgpu::device::{KernelLimits, Path, SubgroupSizes, Timestamps};

    fn capabilities() -> Capabilities {
        let limits = KernelLimits {
            binding_bytes: 128 << 20,
            binding_alignment: 256,
            storage_buffers: 8,
            workgroup_memory: 32 << 10,
            invocations: 1024,
            workgroups: 65535,
        };
        let subgroups = Some(SubgroupSizes { min: 32, max: 32 });
        Capabilities { f16: true, subgroups, coherent: true, matrices: false, timestamps: Timestamps::None, limits }
    }

    /// A call over some tokens, which takes and keeps launches.
    fn call(recent: &RecentLaunches, of: &Capabilities, tokens: usize, lse: LseOutput) -> Arc<DecidedLaunches> {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let pages: Vec<Page> = (0..20).map(|index| Page { shard: 0, index }).collect();
        let pages = &pages[..tokens.div_ceil(128)];
        let span = SpanView { sequence: 0, start: 0, tokens, gathered: None, pages, range_slot: 0 };
        let view = StoreView { format: SegmentFormat::saw_int4(), calibration: None, spans: vec![span] };
        let plan = AttendPlan::new(shape, &[QueryRun::causal(0, 1)], &[view]).unwrap();
        let options = StepOptions::of_call(ElementType::F32, AttendOptions::default(), lse);
        let step = AttendStep::with_options(of, &plan, options, recent.kept().iter()).unwrap();
        recent.keep(step.decided());
        step.decided().clone()
    }

    #[test]
    fn calls_like_earlier_ones_take_their_launches() {
        let (recent, of) = (RecentLaunches::default(), capabilities());
        let first = call(&recent, &of, 1000, LseOutput::None);
        let states = call(&recent, &of, 1000, LseOutput::F32);
        assert!(!Arc::ptr_eq(&first, &states));
        assert!(Arc::ptr_eq(&first, &call(&recent, &of, 1001, LseOutput::None)));
        assert!(Arc::ptr_eq(&states, &call(&recent, &of, 1001, LseOutput::F32)));
        assert_eq!(recent.kept().len(), 2);
    }

    #[test]
    fn kernels_of_another_path_are_not_taken() {
        let (recent, of) = (RecentLaunches::default(), capabilities());
        let first = call(&recent, &of, 1000, LseOutput::None);
        let floor = call(&recent, &of.restricted_to(Path::Floor), 1000, LseOutput::None);
        assert!(first.decisions == floor.decisions, "only the device tells them apart");
        assert_ne!(first.launches, floor.launches);
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let (recent, of) = (RecentLaunches::default(), capabilities());
        let first = call(&recent, &of, 100, LseOutput::None);
        for tokens in (1..=KEPT).map(|tiles| 256 * tiles) {
            call(&recent, &of, tokens, LseOutput::None);
        }
        assert_eq!(recent.kept().len(), KEPT);
        assert!(!recent.kept().iter().any(|kept| Arc::ptr_eq(kept, &first)));
    }
}
