//! Timing on a GPU.

use std::time::Duration;

use kvpack::Result;
use kvpack::backend::Device;
use kvpack::backend::{AttendOptions, TokenWrite};
use kvpack::conformance::{DecodeData, Workload};
use kvpack::plan::{AttendPlan, ElementType};
use kvpack::wgpu::measure::{self, Clock, ComputeGuard, Encode, Repeats};
use kvpack::wgpu::{AppendPlan, Launches, PackWindowsPlan, Scratch, StepPlan, StepTensors, Store, Tensor, Wgpu};
use kvpack_report::StepTimes;

use super::append::{Batch, TimedStores};
use super::timed::{Sizes, Timed};

/// Most measurements of a row, and most steps between two looks at the clock, which takes a while of its own.
const MOST_MEASUREMENTS: usize = 2000;
const STEPS_TOGETHER: usize = 32;
/// Fewest measurements of a row.
const FEWEST_MEASUREMENTS: usize = 8;

/// How often the read bandwidth is measured; like steps, several reads between two looks at the clock.
const READ_REPEATS: Repeats = Repeats { warm_up: 5, timed: 8, together: 8 };

impl Timed for Wgpu {
    // A GPU that is let alone keeps its clock; one that idles between submissions lowers it by tens of percent.
    fn guard_tolerance(&self) -> Option<f64> {
        // A software driver shares the processor with everything else.
        (self.device().adapter_info().device_type != wgpu::DeviceType::Cpu).then_some(0.03)
    }

    fn driver(&self) -> String {
        let info = self.device().adapter_info();
        format!("{} {}", info.driver, info.driver_info).trim().into()
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
        let mut bound: Vec<BoundStep> = Vec::with_capacity(workload.plans.len());
        for plan in &workload.plans {
            let before = bound.first().map(|step| (step.scratch.clone(), step.output.clone()));
            bound.push(BoundStep::new(self, plan, workload, (data, options), before).await?);
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
        Ok(StepTimes {
            timer: match timing.clock {
                Clock::Gpu => "GPU timestamps",
                Clock::Wall => "wall clock",
            },
            launches: bound.swap_remove(0).labels,
            seconds: timing.median().as_secs_f64(),
        })
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

    async fn time_append(&self, batch: &mut Batch<Self>, steps: &[Vec<TokenWrite>]) -> Result<f64> {
        let format = *batch.open.format();
        let bind = |writes: &Vec<TokenWrite>| {
            let plan = AppendPlan::new(&batch.shape, &format, batch.rows, writes)?;
            plan.bind(self.kernels(), &batch.open, &batch.keys, &batch.values)
        };
        let launches = steps.iter().map(bind).collect::<Result<Vec<_>>>()?;
        median_of(self, &launches).await
    }

    async fn time_pack(&self, batch: &mut Batch<Self>, packed: &mut Store) -> Result<f64> {
        let plan = PackWindowsPlan::new(&batch.shape, batch.open.format(), packed.format(), &batch.windows())?;
        let launches = plan.bind(self.kernels(), &batch.open, packed)?;
        let all = |pass: &mut wgpu::ComputePass<'_>| launches.encode(pass);
        let timing = measure::time(self, &[&all], Repeats { warm_up: 3, timed: 20, together: 1 }).await?;
        Ok(timing.median().as_secs_f64())
    }
}

/// Seconds of one of several works, which are gone round.
async fn median_of(backend: &Wgpu, launches: &[Launches]) -> Result<f64> {
    let encode = launches.iter().map(|launches| |pass: &mut wgpu::ComputePass<'_>| launches.encode(pass));
    let encode: Vec<_> = encode.collect();
    let work: Vec<Encode<'_>> = encode.iter().map(|encode| encode as Encode<'_>).collect();
    let timing =
        measure::time(backend, &work, Repeats { warm_up: work.len(), timed: 4 * work.len(), together: 1 }).await?;
    Ok(timing.median().as_secs_f64())
}

/// The step over one copy, with tables of its own. All steps write the same states and output, so that each waits for the
/// one before, as the steps of a model's layers do.
struct BoundStep {
    launches: Launches,
    labels: Vec<String>,
    scratch: Scratch,
    output: Tensor,
}

impl BoundStep {
    async fn new(
        backend: &Wgpu,
        plan: &AttendPlan,
        workload: &Workload<Wgpu>,
        (data, options): (&DecodeData<Wgpu>, AttendOptions),
        before: Option<(Scratch, Tensor)>,
    ) -> Result<Self> {
        let device = backend.device();
        let queries = data.queries();
        let step = StepPlan::new(backend.capabilities(), plan, queries.element_type(), options)?;
        let own = Scratch::new(device, step.scratch()).await?;
        let (scratch, output) = match before {
            Some((scratch, output)) if scratch.holds(step.scratch()) => {
                (Scratch { tables: own.tables, ..scratch }, output)
            }
            _ => (own, Tensor::zeroed(device, backend.elements(queries), ElementType::F32)?),
        };
        let tensors = StepTensors { queries, output: &output, lse: None };
        let stores: Vec<&Store> = workload.stores();
        let launches = step.bind(backend.kernels(), &stores, &scratch, tensors)?;
        backend.queue().write_buffer(&scratch.tables, 0, step.tables());
        Ok(Self { launches, labels: step.launch_labels(), scratch, output })
    }
}
