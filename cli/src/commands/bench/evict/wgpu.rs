//! Timing of the kernels of selection through wgpu.

use kvpack::Result;
use kvpack::backend::{Device, QueriesAndKeys};
use kvpack::plan::TokenIndices;
use kvpack::policy::StatsRequest;
use kvpack::wgpu::measure::{self, Clock, Encode, Repeats};
use kvpack::wgpu::{
    AttentionStatsPlan, GatherPlan, Indices, Launches, MergePlan, ReorderChunksPlan, Tensor, TopKPlan, Variant, Wgpu,
};
use kvpack_report::Median;

use super::kernels::{Call, TimedSelection};

/// How often: several calls between two looks at the clock.
const REPEATS: Repeats = Repeats { warm_up: 3, timed: 8, together: 4 };

impl TimedSelection for Wgpu {
    fn kernel_names(&self, call: &Call<'_, Self>) -> Result<Vec<&'static str>> {
        let Call::Measure { input, request, .. } = call else { return Ok(Vec::new()) };
        let plan = stats_plan(self, input, *request)?;
        let variants = plan.variants(input.queries.tensor.element_type(), input.keys.tensor.element_type());
        Ok(variants.iter().map(Variant::kernel).collect())
    }

    async fn time_kernels(&self, calls: &[Call<'_, Self>]) -> Result<Option<Median>> {
        let bound = calls.iter().map(|call| bind(self, call)).collect::<Result<Vec<_>>>()?;
        let encode: Vec<_> =
            bound.iter().map(|launches| |pass: &mut wgpu::ComputePass<'_>| launches.encode(pass)).collect();
        let work: Vec<Encode<'_>> = encode.iter().map(|encode| encode as Encode<'_>).collect();
        let timing = measure::time(self, &work, REPEATS).await?;
        // The wall clock is taken of whole calls.
        let median = || Median::of_durations(&timing.sorted);
        Ok((timing.clock == Clock::Gpu).then(median))
    }
}

fn stats_plan(backend: &Wgpu, input: &QueriesAndKeys<'_, Tensor>, request: StatsRequest) -> Result<AttentionStatsPlan> {
    let layouts = [input.queries.layout, input.keys.layout];
    let plan = AttentionStatsPlan::new(&input.shape, input.rows.clone(), layouts, request)?;
    Ok(plan.for_device(backend.capabilities()))
}

fn bind(backend: &Wgpu, call: &Call<'_, Wgpu>) -> Result<Launches> {
    let (kernels, device) = (backend.kernels(), backend.device());
    match call {
        Call::Measure { input, request, known_lse } => {
            let plan = stats_plan(backend, input, *request)?;
            Ok(plan.bind(kernels, input.queries.tensor, input.keys.tensor, *known_lse)?.launches)
        }
        Call::TopK { scores, kv_heads, k } => {
            let plan = TopKPlan::new(*kv_heads, backend.elements(scores) / kv_heads, *k)?;
            plan.bind(kernels, scores, &Indices::zeroed(device, plan.indices())?)
        }
        Call::Gather { shape, rows, kept } => {
            let plan = GatherPlan::new(shape, rows.layout, kept.shape().count())?;
            let to = Tensor::zeroed(device, plan.elements(), rows.tensor.element_type())?;
            plan.bind(kernels, rows.tensor, kept, &to)
        }
        Call::Merge { input, merging } => {
            let counts = [input.kept.shape().count(), input.evicted.shape().count()];
            let plan = MergePlan::new(&input.shape, input.rows, counts, *merging)?;
            Ok(plan.bind(kernels, [input.keys, input.values], input.kept, input.evicted)?.launches)
        }
        Call::Reorder { shape, rows, chunk_tokens, order } => {
            let plan = ReorderChunksPlan::new(shape, rows.layout, *chunk_tokens, order)?;
            let to = Tensor::zeroed(device, plan.elements(), rows.tensor.element_type())?;
            plan.bind(kernels, rows.tensor, &to)
        }
    }
}
