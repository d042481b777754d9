//! How a plan is cut into blocks of queries.

use super::specialisation::{ItemScoring, Specialisation};
use crate::backend::AttendOptions;
use crate::plan::{AttendPlan, BlockQueries, ItemMask, OnlyStates, PlannedRun, StorePart};
use crate::wgpu::device::Capabilities;

/// Number of neighbouring queries that every segment's kernel can take together, if a run has several: as many as
/// `attend_run` takes, if every segment supports it and a run is long enough, otherwise as many as `attend` takes.
pub(super) fn block_queries(capabilities: &Capabilities, plan: &AttendPlan, options: AttendOptions) -> BlockQueries {
    let longest = plan.runs().iter().map(|planned| planned.run.queries).max().unwrap_or(1);
    if longest == 1 {
        return BlockQueries::up_to(1);
    }
    let specials: Vec<Specialisation<'_>> = plan
        .segments()
        .iter()
        .map(|segment| Specialisation {
            shape: plan.shape(),
            format: segment.format(),
            query: options.query.bytes(segment.format()),
            capabilities,
            may_use_matrices: false,
            scoring: ItemScoring::new(plan.scoring(), plan.shape(), ItemMask::None),
            queries: 1,
        })
        .collect();
    // The kernel of many queries has no limits of its own rows: it takes what all of them see.
    let by_prefix = plan.runs().iter().all(PlannedRun::sees_prefixes);
    let of_run = |(segment, special): (&StorePart, &Specialisation<'_>)| match segment.calibration() {
        None if by_prefix => special.run_block_queries(),
        _ => None,
    };
    let wide: Option<Vec<[usize; 2]>> = plan.segments().iter().zip(&specials).map(of_run).collect();
    let wide = wide.and_then(|of| of.into_iter().reduce(|a, b| [a[0].min(b[0]), a[1].max(b[1])]));
    match wide {
        Some([most, least]) if longest >= least => {
            // Smaller blocks may be left to `attend`.
            let of_attend = specials.iter().map(Specialisation::most_queries).max().unwrap_or(1);
            let only_states = OnlyStates::Outputs;
            BlockQueries { least, least_limited: of_attend + 1, only_states, ..BlockQueries::up_to(most) }
        }
        _ => {
            let most = specials.iter().map(Specialisation::most_queries).min().unwrap_or(1);
            BlockQueries { least_spread: LEAST_SPREAD, ..BlockQueries::up_to(most.min(longest)) }
        }
    }
}

/// Fewest queries of a run that workgroups take one by one, or a few at a time, from one item for many queries. Shorter
/// ones have few items anyway, and share a launch with the queries of other sequences.
pub(in crate::wgpu) const LEAST_SPREAD: usize = 32;
