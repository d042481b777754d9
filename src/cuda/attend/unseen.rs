//! Queries that see no token, which no kernel takes: the output 0, and the log-sum-exp of no tokens or of a sink.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::result::{memcpy_dtod_async, memset_d8_async};

use super::attend_step::AttendStep;
use super::launch::BoundAttendStep;
use crate::Result;
use crate::cuda::device::driver::driver_error;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::tensor::Tensor;

/// The output and the log-sum-exps of a query that sees no token.
#[derive(Debug)]
pub(super) struct UnseenRow {
    output: u64,
    bytes: usize,
    lse: Option<u64>,
    /// The log-sum-exps of such a row.
    of_row: Arc<Memory>,
}

impl UnseenRow {
    pub(super) fn write(&self, stream: &Arc<CudaStream>) -> Result<()> {
        let failed = |error| driver_error("attend", 0, error);
        stream.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the row is one of an output that was checked to have it, and lives as long as the step.
        unsafe { memset_d8_async(self.output, 0, self.bytes, stream.cu_stream()) }.map_err(failed)?;
        let Some(lse) = self.lse else { return Ok(()) };
        // SAFETY: as above, of the log-sum-exps; both have one of every query head.
        unsafe { memcpy_dtod_async(lse, self.of_row.address(), self.of_row.bytes(), stream.cu_stream()) }
            .map_err(failed)
    }
}

impl AttendStep {
    /// What is written for queries that see no token, which no kernel takes: the output 0, and the log-sum-exp −∞ or
    /// that of the sink.
    pub(super) fn bind_unseen(&self, step: &mut BoundAttendStep, output: &Tensor, lse: Option<&Tensor>) -> Result<()> {
        if self.unseen.is_empty() {
            return Ok(());
        }
        let heads = self.shape.query_heads();
        let of_row: Vec<f32> = self.scoring.sinks().map_or(vec![f32::NEG_INFINITY; heads], <[f32]>::to_vec);
        let of_row = Memory::upload(&step.stream, "log-sum-exps of no tokens", bytemuck::cast_slice(&of_row))?;
        step.memory.push(of_row.clone());
        step.unseen = self
            .unseen
            .iter()
            .map(|&row| UnseenRow {
                output: output.address_of(self.output_rows.row(row)),
                bytes: heads * self.shape.head_dim() * output.element_type().bytes(),
                lse: lse.map(|lse| lse.address_of(row * heads)),
                of_row: of_row.clone(),
            })
            .collect();
        Ok(())
    }
}
