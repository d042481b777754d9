//! Attention to packed pages.

use super::Cuda;
use crate::Result;
use crate::backend::{
    Arithmetic, AttendArithmetic, AttendOptions, Attention, AttentionStates, QueryPrecision, RowCentres, StateParts,
};
use crate::cuda::attend::attend_step::{AttendStep, AttendTensors};
use crate::cuda::attend::merge_pair::merge_pair;
use crate::cuda::attend::merge_parts::merge_parts;
use crate::cuda::attend::uncentre_lse::uncentre_lse;
use crate::cuda::device::page_format::{PageFormat, TensorPages};
use crate::cuda::device::store::Store;
use crate::cuda::device::tensor::Tensor;
use crate::format::{AttentionShape, SegmentFormat};
use crate::plan::{AttendPlan, ElementType};

impl Cuda {
    fn zeroed_states(&self, shape: &AttentionShape, rows: usize) -> Result<AttentionStates<Tensor>> {
        let heads = rows * shape.query_heads();
        let outputs = heads * shape.head_dim();
        // One after the other, so that ranks can send them at once.
        let both = Tensor::zeroed(&self.stream, outputs + heads, ElementType::F32)?;
        Ok(AttentionStates { outputs: both.slice(0, outputs)?, lse: both.slice(outputs, heads)? })
    }
}

impl Attention for Cuda {
    fn arithmetic(
        &self,
        shape: &AttentionShape,
        format: &SegmentFormat,
        _: QueryPrecision,
    ) -> Result<AttendArithmetic> {
        format.check(shape)?;
        let pages = PageFormat::new(shape, format)?;
        let of = |tensor: &TensorPages| match tensor.bits == 16 || tensor.is_grouped(pages.head_dim) {
            true => Arithmetic::HalfMatrices,
            false => Arithmetic::ByteMatrices,
        };
        Ok(AttendArithmetic { keys: of(&pages.key), values: of(&pages.value) })
    }

    async fn attend(
        &self,
        plan: &AttendPlan,
        stores: &[&Store],
        queries: &Tensor,
        options: AttendOptions,
    ) -> Result<Tensor> {
        let mut output = Tensor::zeroed(&self.stream, plan.elements(), options.output)?;
        self.attend_into(plan, stores, queries, &mut output, options).await?;
        Ok(output)
    }

    async fn attend_into(
        &self,
        plan: &AttendPlan,
        stores: &[&Store],
        queries: &Tensor,
        output: &mut Tensor,
        _: AttendOptions,
    ) -> Result<()> {
        plan.check_elements("queries", queries.elements())?;
        plan.check_elements("output", output.elements())?;
        AttendStep::new(self, plan)?.run(self, stores, AttendTensors { queries, output, lse: None })
    }

    async fn attend_states(
        &self,
        plan: &AttendPlan,
        stores: &[&Store],
        queries: &Tensor,
        _: AttendOptions,
    ) -> Result<AttentionStates<Tensor>> {
        plan.check_elements("queries", queries.elements())?;
        let step = AttendStep::new(self, plan)?;
        let states = self.zeroed_states(plan.shape(), plan.rows())?;
        let tensors = AttendTensors { queries, output: &states.outputs, lse: Some(&states.lse) };
        step.run(self, stores, tensors)?;
        Ok(states)
    }

    async fn uncentre_lse(
        &self,
        store: &Store,
        queries: &Tensor,
        centres: RowCentres<'_>,
        states: AttentionStates<Tensor>,
    ) -> Result<AttentionStates<Tensor>> {
        store.check_stream("uncentring", &self.stream)?;
        self.check_tensors("uncentring", &[queries, &states.lse])?;
        uncentre_lse(self, store, queries, centres, &states.lse)?;
        Ok(states)
    }

    async fn merge(
        &self,
        shape: &AttentionShape,
        first: &AttentionStates<Tensor>,
        second: &AttentionStates<Tensor>,
    ) -> Result<AttentionStates<Tensor>> {
        let joined = self.zeroed_states(shape, first.lse.elements() / shape.query_heads())?;
        merge_pair(self, shape, [first, second, &joined])?;
        Ok(joined)
    }

    fn merge_parts(
        &self,
        shape: &AttentionShape,
        parts: StateParts<'_, Tensor>,
        output: &mut Tensor,
        lse: Option<&mut Tensor>,
    ) -> Result<()> {
        parts.check(self, shape, output, lse.as_deref())?;
        merge_parts(self, shape, parts, output, lse.as_deref())
    }
}
