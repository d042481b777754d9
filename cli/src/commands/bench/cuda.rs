//! Timing through CUDA.

use std::time::Duration;

use kvpack::Result;
use kvpack::backend::{AttendOptions, Device, WriteInput};
use kvpack::conformance::{DecodeData, Workload};
use kvpack::cuda::{
    AttendStep, AttendTensors, BoundAttendStep, Cuda, NonFiniteFlags, Store, StoreStep, Tensor, WriteMemory,
    compute_guard, read_bandwidth, time_launches, time_steps,
};
use kvpack::plan::{ElementType, TokenWrite, WriteTable};
use kvpack_report::{Median, StepTimes};

use super::append::{Batch, PackTimes, SEQUENCES, TimedStores};
use super::timed::{Sizes, Timed};

/// Steps of one graph, at least: its own start costs some microseconds.
const STEPS_PER_GRAPH: usize = 64;

/// Steps before those that count, until the device has raised its clock.
const WARM_UP: Duration = Duration::from_millis(200);

/// Replays of a graph of steps that store.
const STORE_REPLAYS: usize = 50;

/// The maximum number of replays of a graph.
const MOST_REPLAYS: usize = 200;

impl TimedStores for Cuda {
    const CLOCK: &'static str = "CUDA graph, events";

    async fn time_append(&self, batch: &mut Batch<Self>, steps: &[Vec<TokenWrite>]) -> Result<Median> {
        let tables = batch.append_tables(batch.open.step_capacity(SEQUENCES, 0), steps)?;
        let flags = NonFiniteFlags::new(self.stream(), 1)?;
        // The steps of one graph have a table each; those of an engine are replays with one.
        let bind = |table: &WriteTable| {
            let (keys, values, rows) = (&batch.keys, &batch.values, batch.rows);
            let input = WriteInput { keys, values, rows, flags: &flags, layer: 0 };
            let memory = WriteMemory::new(self.stream(), table.layout())?;
            memory.write(self.stream(), table)?;
            StoreStep::new(table.layout()).bind(self, &[&batch.open], &memory, Some(input))
        };
        let bound = tables.iter().map(bind).collect::<Result<Vec<_>>>()?;
        let timing = time_launches(self, |step| bound[step].launch(), bound.len(), WARM_UP, STORE_REPLAYS)?;
        Ok(Median::of_durations(&timing.sorted))
    }

    async fn time_pack(&self, batch: &mut Batch<Self>, packed: &mut Store) -> Result<PackTimes> {
        let [full, idle] = batch.pack_tables([batch.open.step_capacity(0, 0), packed.step_capacity(0, 0)])?;
        let memory = WriteMemory::new(self.stream(), full.layout())?;
        let bound = StoreStep::new(full.layout()).bind(self, &[&batch.open, &*packed], &memory, None)?;
        let time = |table: &WriteTable| {
            memory.write(self.stream(), table)?;
            let timing = time_launches(self, |_| bound.launch(), STEPS_PER_GRAPH, WARM_UP, STORE_REPLAYS)?;
            Ok::<_, kvpack::Error>(Median::of_durations(&timing.sorted))
        };
        let idle = time(&idle)?.seconds;
        Ok(PackTimes { full: time(&full)?, idle })
    }
}

impl Timed for Cuda {
    fn guard_tolerance(&self) -> Option<f64> {
        Some(0.03)
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
        let mut bound: Vec<BoundAttendStep> = Vec::with_capacity(workload.plans.len());
        for plan in &workload.plans {
            let step = AttendStep::new(self, plan)?;
            let output = Tensor::zeroed(self.stream(), self.elements(queries), ElementType::F32)?;
            bound.push(step.bind(self, &stores, AttendTensors { queries, output: &output, lse: None })?);
            labels = step.launch_labels();
        }
        let steps = bound.len() * STEPS_PER_GRAPH.div_ceil(bound.len());
        let first = time_steps(self, &bound, steps, Duration::ZERO, 1)?;
        let graph_seconds = first.median().as_secs_f64() * steps as f64;
        let replays = ((seconds / graph_seconds.max(1e-9)) as usize).clamp(5, MOST_REPLAYS);
        let timing = time_steps(self, &bound, steps, WARM_UP, replays)?;
        let samples = timing.sorted.iter().map(Duration::as_secs_f64).collect();
        Ok(StepTimes::new("CUDA graph, events", labels, samples))
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
