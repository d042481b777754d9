//! The kernels of a model's steps, compiled before it is served.

use super::{LayerTensors, ModelStep};
use crate::Result;
use crate::backend::{StepKind, StepKinds};
use crate::format::TILE_TOKENS;
use crate::plan::{AttendPlan, LayerAttention, Page, QueryRun, SpanView, StoreFormat, StoreView, Visible};
use crate::wgpu::attend::{AttendStep, LEAST_SPREAD, full_runs};
use crate::wgpu::device::Variant;
use crate::wgpu::pack::{StoreStep, staged};

impl ModelStep {
    /// Compiles every kernel that decode steps of a cache can use, however long their sequences become, so that serving
    /// a model never compiles. It takes a `&ModelCache`, or the kind of some of its layers
    /// ([`ModelCache::step_kind`](crate::cache::ModelCache::step_kind)). [`ModelStep::prepare_chunks`] does so for
    /// prompts in chunks.
    ///
    /// # Errors
    /// As [`AttendStep::new`], and [`Error::Gpu`](crate::Error::Gpu) when the device refuses a kernel.
    pub async fn prepare(&self, of: impl StepKinds) -> Result<()> {
        self.prepare_runs(&of.step_kinds(), |_| vec![QueryRun::decode(0)], &[1, MANY_TILES]).await
    }

    /// As [`ModelStep::prepare`], for steps with chunks of up to `longest` tokens, or as many as the tensors have rows:
    /// compiles kernels that take several queries of a sequence at a time.
    ///
    /// # Errors
    /// As [`ModelStep::prepare`].
    pub async fn prepare_chunks(&self, of: impl StepKinds, longest: usize) -> Result<()> {
        let (kinds, longest) = (of.step_kinds(), longest.min(self.tensors.rows().tokens));
        let causal = |tokens| QueryRun::causal(0, tokens);
        // Kernels of longer runs take their queries from items of many queries.
        let spread = Some(LEAST_SPREAD).filter(|&least| least <= longest);
        let short = |_: &StepKind<'_>| (2..=longest.min(MOST_CHUNK_KINDS)).chain(spread).map(causal).collect();
        self.prepare_runs(&kinds, short, &[1, MANY_TILES]).await?;
        let staged: Vec<Vec<Variant>> = kinds.iter().map(|&kind| staged::variants_of(kind)).collect::<Result<_>>()?;
        self.backend.kernels().prepare(&staged.concat()).await?;
        if !self.backend.capabilities().matrices {
            return Ok(());
        }
        let long = |kind: &StepKind<'_>| {
            let full = full_runs(kind.layout.shape()).map(|queries| queries.min(longest)).into_iter();
            full.filter(|&queries| queries > MOST_CHUNK_KINDS).map(causal).collect()
        };
        // With few tokens they have one state each, with many they are merged.
        self.prepare_runs(&kinds, long, &[RUN_TILES, MANY_TILES]).await
    }

    /// Compiles the kernels that some query runs of each kind can use, over spans of the given numbers of tiles.
    async fn prepare_runs(
        &self,
        kinds: &[StepKind<'_>],
        runs: impl Fn(&StepKind<'_>) -> Vec<QueryRun>,
        spans: &[u32],
    ) -> Result<()> {
        let mut variants = Vec::new();
        for kind in kinds {
            variants.extend(self.variants_of(*kind, &runs(kind), spans)?);
        }
        variants.sort_unstable();
        variants.dedup();
        self.backend.kernels().prepare(&variants).await
    }

    /// The kernels of a kind of steps that each of these query runs can use.
    fn variants_of(&self, kind: StepKind<'_>, runs: &[QueryRun], spans: &[u32]) -> Result<Vec<Variant>> {
        let StepKind { layout, stores, query, attention } = kind;
        let LayerTensors { keys, values, .. } = &self.tensors.layers()[0];
        let buffers = self.backend.kernels().storage_buffers();
        let mut variants = StoreStep::new(layout).variants(buffers, keys.element_type(), values.element_type());
        for &tiles in spans {
            let pages: Vec<Page> = (0..tiles).map(|index| Page { shard: 0, index }).collect();
            let tokens = pages.len() * TILE_TOKENS;
            // All stores of one sequence. With one tile each, there are few states. With many, there are too many to be
            // merged without a launch.
            let view = |(place, &StoreFormat { format, calibration }): (usize, &StoreFormat)| {
                let span = SpanView {
                    sequence: 0,
                    start: place * tokens,
                    tokens,
                    gathered: None,
                    pages: &pages,
                    range_slot: 0,
                };
                StoreView { format, calibration, spans: vec![span] }
            };
            let alone = stores.iter().map(|store| vec![view((0, store))]);
            let together = stores.iter().enumerate().map(view).collect();
            for views in alone.chain([together]) {
                for run in runs.iter().flat_map(|run| masked_runs(attention, run, views.len() * tokens)) {
                    let plan = AttendPlan::new(*layout.shape(), &[run], &views)?;
                    let (capabilities, options) = (self.backend.capabilities(), self.options(query, 1));
                    let plan = attention.score(plan)?;
                    variants
                        .extend(AttendStep::with_options(capabilities, &plan, options, std::iter::empty())?.variants());
                }
            }
        }
        Ok(variants)
    }
}

/// A run over sequences of `tokens` tokens as a layer sees it: all of what is before, where a window ends at the border
/// of a tile, and where it cuts one.
fn masked_runs(attention: &LayerAttention, run: &QueryRun, tokens: usize) -> Vec<QueryRun> {
    let mut runs = vec![run.clone()];
    if let (Some(left), true) = (attention.window(), run.queries + 1 < tokens) {
        let ending = |end| QueryRun { visible: Visible::Window { left }, end: Some(end), ..run.clone() };
        runs.extend([ending(tokens), ending(tokens - 1)]);
    }
    runs
}

/// Tiles of a span that is cut into more items than can be merged without a launch of its own.
const MANY_TILES: u32 = 256;

/// Tiles of a span in which the queries of the longest block together see more than one tile.
const RUN_TILES: u32 = 4;

/// Length of the longest chunk whose kernels differ from those of shorter ones, except for those of `attend_run`: it
/// has more queries than a workgroup of the other kernels takes at a time.
const MOST_CHUNK_KINDS: usize = 16;
