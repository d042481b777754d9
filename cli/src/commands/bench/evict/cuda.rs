//! Timing of the kernels of selection through CUDA.

use std::time::Duration;

use kvpack::Result;
use kvpack::backend::Device;
use kvpack::cuda::{
    AttentionStatsPlan, Cuda, GatherPlan, Indices, Launches, MergePlan, ReorderChunksPlan, Tensor, TopKPlan,
    time_launches,
};
use kvpack::plan::TokenIndices;
use kvpack_report::Median;

use super::kernels::{Call, TimedSelection};

/// Launches of one graph, at least.
const CALLS_PER_GRAPH: usize = 16;

/// Calls before those that count, until the device has raised its clock.
const WARM_UP: Duration = Duration::from_millis(200);

/// Replays of a graph.
const REPLAYS: usize = 20;

impl TimedSelection for Cuda {
    async fn time_kernels(&self, calls: &[Call<'_, Self>]) -> Result<Option<Median>> {
        let bound = calls.iter().map(|call| bind(self, call)).collect::<Result<Vec<_>>>()?;
        let together = bound.len() * CALLS_PER_GRAPH.div_ceil(bound.len());
        let launch = |index: usize| bound[index % bound.len()].launch(self.stream());
        let timing = time_launches(self, launch, together, WARM_UP, REPLAYS)?;
        Ok(Some(Median::of_durations(&timing.sorted)))
    }
}

fn bind(backend: &Cuda, call: &Call<'_, Cuda>) -> Result<Launches> {
    let stream = backend.stream();
    match call {
        Call::Measure { input, request, known_lse } => {
            let layouts = [input.queries.layout, input.keys.layout];
            let plan = AttentionStatsPlan::new(&input.shape, input.rows.clone(), layouts, *request)?;
            Ok(plan.bind(backend, input.queries.tensor, input.keys.tensor, *known_lse)?.launches)
        }
        Call::TopK { scores, kv_heads, k } => {
            let plan = TopKPlan::new(*kv_heads, backend.elements(scores) / kv_heads, *k)?;
            plan.bind(backend, scores, &Indices::zeroed(stream, plan.indices())?)
        }
        Call::Gather { shape, rows, kept } => {
            let plan = GatherPlan::new(shape, rows.layout, kept.shape().count())?;
            let to = Tensor::zeroed(stream, plan.elements(), rows.tensor.element_type())?;
            plan.bind(backend, rows.tensor, kept, &to)
        }
        Call::Merge { input, merging } => {
            let counts = [input.kept.shape().count(), input.evicted.shape().count()];
            let plan = MergePlan::new(&input.shape, input.rows, counts, *merging)?;
            Ok(plan.bind(backend, [input.keys, input.values], input.kept, input.evicted)?.launches)
        }
        Call::Reorder { shape, rows, chunk_tokens, order } => {
            let plan = ReorderChunksPlan::new(shape, rows.layout, *chunk_tokens, order)?;
            let to = Tensor::zeroed(stream, plan.elements(), rows.tensor.element_type())?;
            plan.bind(backend, rows.tensor, &to)
        }
    }
}
