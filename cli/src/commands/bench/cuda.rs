//! Timing through CUDA.

use std::time::Duration;

use kvpack::Result;
use kvpack::backend::AttendOptions;
use kvpack::backend::Device;
use kvpack::conformance::{DecodeData, Workload};
use kvpack::cuda::{BoundStep, Cuda, StepPlan, StepTensors, Tensor, compute_guard, read_bandwidth, time_steps};
use kvpack::plan::ElementType;
use kvpack_report::StepTimes;

use super::append::TimedStores;
use super::timed::{Sizes, Timed};

/// Steps of one graph, at least: its own start costs some microseconds.
const STEPS_PER_GRAPH: usize = 64;

/// Steps before those that count, until the device has raised its clock.
const WARM_UP: Duration = Duration::from_millis(200);

/// Replays of a graph, at most.
const MOST_REPLAYS: usize = 200;

impl TimedStores for Cuda {}

impl Timed for Cuda {
    fn guard_tolerance(&self) -> Option<f64> {
        Some(0.03)
    }

    /// CUDA itself only tells the version of its interface.
    fn driver(&self) -> String {
        let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
        text.split_whitespace().find(is_version).map_or("unknown".into(), |version| format!("NVIDIA {version}"))
    }

    fn sizes(&self) -> Sizes {
        Sizes { largest_shape: u64::MAX, footprint: 1 << 30, seconds: 0.1 }
    }

    async fn time_steps(
        &self,
        workload: &Workload<Self>,
        data: &DecodeData<Self>,
        _options: AttendOptions,
        seconds: f64,
    ) -> Result<StepTimes> {
        let queries = data.queries();
        let stores = workload.stores();
        let mut labels = Vec::new();
        let mut bound: Vec<BoundStep> = Vec::with_capacity(workload.plans.len());
        for plan in &workload.plans {
            let step = StepPlan::new(self, plan)?;
            let output = Tensor::zeroed(self.stream(), self.elements(queries), ElementType::F32)?;
            bound.push(step.bind(self, &stores, StepTensors { queries, output: &output, lse: None })?);
            labels = step.launch_labels();
        }
        let steps = bound.len() * STEPS_PER_GRAPH.div_ceil(bound.len());
        let first = time_steps(self, &bound, steps, Duration::ZERO, 1)?;
        let graph_seconds = first.median().as_secs_f64() * steps as f64;
        let replays = ((seconds / graph_seconds.max(1e-9)) as usize).clamp(5, MOST_REPLAYS);
        let timing = time_steps(self, &bound, steps, WARM_UP, replays)?;
        let seconds = timing.median().as_secs_f64();
        Ok(StepTimes { timer: "CUDA graph, events", launches: labels, seconds })
    }

    async fn read_bandwidth(&self) -> Result<f64> {
        read_bandwidth(self, 1 << 30)
    }

    async fn guard_rate(&self) -> Result<f64> {
        Ok(1.0 / compute_guard(self)?.as_secs_f64())
    }

    fn plain_step(&self, _data: &DecodeData<Self>) -> Result<Option<f64>> {
        Ok(None)
    }
}
