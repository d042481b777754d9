//! Commands that the backend submits by itself, for calls that are not encoded into an engine's pass.

use std::sync::PoisonError;

use super::Wgpu;
use crate::Result;
use crate::backend::{AttendOptions, WriteInput};
use crate::plan::{AttendPlan, ElementType, WriteTable};
use crate::wgpu::attend::{AttendStep, AttendTensors, LseOutput, Scratch, ScratchBytes, StepOptions};
use crate::wgpu::device::guard::Request;
use crate::wgpu::device::{Launches, Store, Tensor, guard};
use crate::wgpu::pack::{NonFiniteFlags, StoreStep, WriteMemory};

impl Wgpu {
    /// The scratch of the last step if it is large enough, otherwise new scratch. Steps run in the order of the queue,
    /// so one may overwrite memory that an earlier one has read.
    async fn scratch(&self, bytes: ScratchBytes) -> Result<Scratch> {
        let kept = self.scratch.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(scratch) = kept.filter(|scratch| scratch.holds(bytes)) {
            return Ok(scratch);
        }
        let scratch = Scratch::new(self.device(), bytes).await?;
        *self.scratch.lock().unwrap_or_else(PoisonError::into_inner) = Some(scratch.clone());
        Ok(scratch)
    }

    /// Checks that an engine has submitted all steps that it encoded over stores, before commands go before them. What is
    /// recorded goes behind them.
    pub(super) fn check_all_submitted(&self, what: &'static str, stores: &[&Store]) -> Result<()> {
        if self.records_over(stores) {
            return Ok(());
        }
        stores.iter().try_for_each(|store| store.encoders().check_submitted(self.device(), what))
    }

    /// The step of a call, with the launches of an earlier call where it was like it.
    pub(super) fn planned_step(
        &self,
        plan: &AttendPlan,
        input: ElementType,
        attend: AttendOptions,
        lse: LseOutput,
    ) -> Result<AttendStep> {
        let options = StepOptions::of_call(input, attend, lse);
        let step = AttendStep::with_options(&self.capabilities, plan, options, self.recent.kept().iter())?;
        self.recent.keep(step.decided());
        Ok(step)
    }

    /// Uploads the tables of a step and submits its launches.
    pub(super) async fn run_step(
        &self,
        step: &AttendStep,
        stores: &[&Store],
        tensors: AttendTensors<'_>,
    ) -> Result<()> {
        self.check_not_recording("attention")?;
        self.check_all_submitted("attention", stores)?;
        let scratch = self.scratch(step.scratch()).await?;
        let launches = step.bind(&self.kernels, stores, &scratch, tensors)?;
        // Scratch is shared: no other thread may write its own tables between this step's tables and its submission.
        {
            let _turn = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
            guard::captured_now(self.device(), Request::call("tables of a step"), || {
                self.queue.write_buffer(&scratch.tables, 0, step.tables());
            })?;
            self.run("kvpack attend", &launches)?;
        }
        guard::settled(self.device()).await
    }

    /// Uploads the table of a storing step, and submits the step.
    pub(super) fn run_pack_step(
        &self,
        stores: &[&Store],
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<()> {
        self.check_not_recording("writes of a step")?;
        self.check_all_submitted("writes of a step", stores)?;
        let memory = WriteMemory::new(self.device(), table.layout())?;
        let step = StoreStep::new(table.layout()).bind_for(&self.kernels, stores, &memory, input, table)?;
        memory.write(&self.queue, table)?;
        guard::encode_and_submit(self.device(), &self.queue, "kvpack write_step", |encoder| {
            let descriptor = wgpu::ComputePassDescriptor { label: Some("kvpack write_step"), timestamp_writes: None };
            step.encode(table, &mut encoder.begin_compute_pass(&descriptor))
        })
    }

    /// Encodes dispatches into one compute pass and submits it, unless calls are recorded.
    pub(super) fn run(&self, what: &'static str, launches: &Launches) -> Result<()> {
        if self.recorded(launches) {
            return Ok(());
        }
        guard::submit(self.device(), &self.queue, what, |encoder| {
            let descriptor = wgpu::ComputePassDescriptor { label: Some(what), timestamp_writes: None };
            launches.encode(&mut encoder.begin_compute_pass(&descriptor));
        })
        .map(drop)
    }
}
