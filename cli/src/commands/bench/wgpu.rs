//! Timing on a GPU.

use std::time::Duration;

use kvpack::Result;
use kvpack::backend::Device;
use kvpack::backend::{AttendOptions, WriteInput};
use kvpack::conformance::{DecodeData, Workload};
use kvpack::plan::{AttendPlan, ElementType, TokenWrite, WriteTable};
use kvpack::wgpu::measure::{self, Clock, ComputeGuard, Encode, Repeats};
use kvpack::wgpu::{
    AttendStep, AttendTensors, BoundStoreStep, Launches, NonFiniteFlags, Scratch, Store, StoreStep, Tensor, Wgpu,
    WriteMemory,
};
use kvpack_report::{Median, StepTimes};

use super::append::{Batch, PackTimes, SEQUENCES, TimedStores};
use super::timed::{Sizes, Timed, WALL_CLOCK};

/// Most measurements of a row, and most steps between two looks at the clock, which takes a while of its own.
const MOST_MEASUREMENTS: usize = 2000;
const STEPS_TOGETHER: usize = 32;
/// Fewest measurements of a row.
const FEWEST_MEASUREMENTS: usize = 8;

/// How often the read bandwidth is measured; like steps, several reads between two looks at the clock.
const READ_REPEATS: Repeats = Repeats { warm_up: 5, timed: 8, together: 8 };

/// The clock, as reports name it.
pub const fn timer(clock: Clock) -> &'static str {
    match clock {
        Clock::Gpu => "GPU timestamps",
        Clock::Wall => WALL_CLOCK,
    }
}

impl Timed for Wgpu {
    // A GPU that is let alone keeps its clock; one that idles between submissions lowers it by tens of percent.
    fn guard_tolerance(&self) -> Option<f64> {
        // A software driver shares the processor with everything else.
        (self.device().adapter_info().device_type != wgpu::DeviceType::Cpu).then_some(0.03)
    }

    fn sizes(&self) -> Sizes {
        match self.device().adapter_info().device_type {
            wgpu::DeviceType::Cpu => Sizes { largest_shape: 32 << 20, footprint: 64 << 20, seconds: 0.1 },
            _ => Sizes { largest_shape: u64::MAX, footprint: 1 << 30, seconds: 0.1 },
        }
    }

    async fn time_steps(
        &self,
        workload: &Workload<Self>,
        data: &DecodeData<Self>,
        options: AttendOptions,
        seconds: f64,
    ) -> Result<StepTimes> {
        let mut bound: Vec<BoundAttendStep> = Vec::with_capacity(workload.plans.len());
        for plan in &workload.plans {
            let before = bound.first().map(|step| (step.scratch.clone(), step.output.clone()));
            bound.push(BoundAttendStep::new(self, plan, workload, (data, options), before).await?);
        }
        let encode = bound.iter().map(|step| |pass: &mut wgpu::ComputePass<'_>| step.launches.encode(pass));
        let encode: Vec<_> = encode.collect();
        let work: Vec<Encode<'_>> = encode.iter().map(|encode| encode as Encode<'_>).collect();

        let once_around = work.len().clamp(3, MOST_MEASUREMENTS);
        let repeats = Repeats { warm_up: once_around, timed: once_around, together: 1 };
        let first = measure::time(self, &work, repeats).await?;
        let steps = (seconds / first.median().as_secs_f64().max(1e-9)) as usize;
        let together = (steps / FEWEST_MEASUREMENTS).clamp(1, STEPS_TOGETHER);
        let timed = steps.div_ceil(together).clamp(once_around.div_ceil(together).max(3), MOST_MEASUREMENTS);
        let timing = measure::time(self, &work, Repeats { warm_up: 2, timed, together }).await?;
        let samples = timing.sorted.iter().map(Duration::as_secs_f64).collect();
        Ok(StepTimes::new(timer(timing.clock), bound.swap_remove(0).labels, samples))
    }

    async fn read_bandwidth(&self) -> Result<f64> {
        let read = measure::read_bandwidth(self, self.sizes().footprint / 2, READ_REPEATS).await?;
        Ok(read.gigabytes_per_second() * 1e9)
    }

    async fn guard_rate(&self) -> Result<f64> {
        if self.device().adapter_info().device_type == wgpu::DeviceType::Cpu {
            // Software has no clock of its own, and the guard would take seconds of the processor's.
            return Ok(1.0);
        }
        let shortest = ComputeGuard::new(self)?.read(self).await?.sorted.first().copied();
        Ok(1.0 / shortest.unwrap_or(Duration::MAX).as_secs_f64())
    }

    fn plain_step(&self, _data: &DecodeData<Self>) -> Result<Option<f64>> {
        Ok(None)
    }
}

impl TimedStores for Wgpu {
    const CLOCK: &'static str = "GPU timestamps where the device has them";

    async fn time_append(&self, batch: &mut Batch<Self>, steps: &[Vec<TokenWrite>]) -> Result<Median> {
        let tables = batch.append_tables(batch.open.step_capacity(SEQUENCES, 0), steps)?;
        let flags = NonFiniteFlags::new(self.device(), 1)?;
        // Steps that are measured together are submitted together, so that each has a table of its own on the device.
        let bind = |table: &WriteTable| {
            let (keys, values, rows) = (&batch.keys, &batch.values, batch.rows);
            let input = WriteInput { keys, values, rows, flags: &flags, layer: 0 };
            let memory = WriteMemory::new(self.device(), table.layout())?;
            memory.write(self.queue(), table)?;
            StoreStep::new(table.layout()).bind(self.kernels(), &[&batch.open], &memory, Some(input))
        };
        let bound = tables.iter().map(bind).collect::<Result<Vec<_>>>()?;
        median_of(self, &bound, &tables).await
    }

    async fn time_pack(&self, batch: &mut Batch<Self>, packed: &mut Store) -> Result<PackTimes> {
        let [table, _] = batch.pack_tables([batch.open.step_capacity(0, 0), packed.step_capacity(0, 0)])?;
        let memory = WriteMemory::new(self.device(), table.layout())?;
        memory.write(self.queue(), &table)?;
        let bound = StoreStep::new(table.layout()).bind(self.kernels(), &[&batch.open, &*packed], &memory, None)?;
        // A step without full windows encodes nothing.
        Ok(PackTimes { full: median_of(self, &[bound], &[table]).await?, idle: 0.0 })
    }
}

/// One of several steps, which are gone round.
async fn median_of(backend: &Wgpu, bound: &[BoundStoreStep], tables: &[WriteTable]) -> Result<Median> {
    for (step, table) in bound.iter().zip(tables) {
        // What encoding could refuse, it refuses now.
        let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        step.encode(table, &mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()))?;
    }
    let encode = |(step, table)| {
        move |pass: &mut wgpu::ComputePass<'_>| {
            let step: &BoundStoreStep = step;
            step.encode(table, pass).unwrap_or(());
        }
    };
    let encode: Vec<_> = bound.iter().zip(tables).map(encode).collect();
    let work: Vec<Encode<'_>> = encode.iter().map(|encode| encode as Encode<'_>).collect();
    // Steps that are measured together write the same pages, so that each waits for the one before.
    let together = work.len().min(STEPS_TOGETHER);
    let repeats = Repeats { warm_up: work.len().max(3), timed: (4 * work.len() / together).max(20), together };
    let timing = measure::time(backend, &work, repeats).await?;
    Ok(Median::of_durations(&timing.sorted))
}

/// The step over one copy, with tables of its own. All steps write the same states and output, so that each waits for
/// the one before, as the steps of a model's layers do.
struct BoundAttendStep {
    launches: Launches,
    labels: Vec<String>,
    scratch: Scratch,
    output: Tensor,
}

impl BoundAttendStep {
    async fn new(
        backend: &Wgpu,
        plan: &AttendPlan,
        workload: &Workload<Wgpu>,
        (data, options): (&DecodeData<Wgpu>, AttendOptions),
        before: Option<(Scratch, Tensor)>,
    ) -> Result<Self> {
        let device = backend.device();
        let queries = data.queries();
        let step = AttendStep::new(backend.capabilities(), plan, queries.element_type(), options)?;
        let own = Scratch::new(device, step.scratch()).await?;
        let (scratch, output) = match before {
            Some((scratch, output)) if scratch.holds(step.scratch()) => {
                (Scratch { tables: own.tables, ..scratch }, output)
            }
            _ => (own, Tensor::zeroed(device, backend.elements(queries), ElementType::F32)?),
        };
        let tensors = AttendTensors { queries, output: &output, lse: None };
        let stores: Vec<&Store> = workload.stores();
        let launches = step.bind(backend.kernels(), &stores, &scratch, tensors)?;
        backend.queue().write_buffer(&scratch.tables, 0, step.tables());
        Ok(Self { launches, labels: step.launch_labels(), scratch, output })
    }
}
