//! Kernels that write pages, and read them back.

use super::Cuda;
use crate::backend::{FlaggedToken, NewCentre, NonFinite, Packing, SpanRead, SpanWrite, StagedSpan, WriteInput};
use crate::cuda::device::indices::Indices;
use crate::cuda::device::store::Store;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::pack::non_finite_flags::NonFiniteFlags;
use crate::cuda::pack::store_step::StoreStep;
use crate::format::{AttentionShape, KeyOrValue};
use crate::plan::{
    Page, PageCopy, RowLayout, Rows, TokenWrite, WindowMove, WriteTable, append_table, copy_table, windows_table,
};
use crate::{Error, Result};

impl Cuda {
    /// Packs a part of a prompt that a step stored in f16.
    pub(in crate::cuda) fn pack_staged(&self, stores: &[&Store], span: &StagedSpan) -> Result<()> {
        let (Some(f16), Some(packed)) = (stores.first(), stores.get(span.store)) else {
            let reason = format!("a part of a prompt is packed into store {} of {}", span.store, stores.len());
            return Err(Error::Plan { what: "step", reason });
        };
        let (launcher, mut scratch) = (self.launcher(), self.scratch());
        let [keys, values] = launcher.dequantize(&mut scratch, f16, &span.read())?;
        launcher.quantize(&mut scratch, packed, &keys, &values, &span.write(packed.shape())?)
    }

    /// Uploads the table of a storing step, and launches the step.
    fn run_pack_step(
        &self,
        stores: &[&Store],
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<()> {
        let mut scratch = self.scratch();
        let memory = scratch.write_memory(&self.stream, table.layout())?;
        let step = StoreStep::new(table.layout()).bind_for(self, stores, &memory, input, table)?;
        memory.write(&self.stream, table)?;
        step.launch()
    }
}

impl Packing for Cuda {
    type NonFiniteFlags = NonFiniteFlags;

    async fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &Tensor,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> Result<Option<NonFinite>> {
        let what = match which {
            KeyOrValue::Key => "keys",
            KeyOrValue::Value => "values",
        };
        tensor.memory().check_stream(what, &self.stream)?;
        let Some(index) = self.launcher().find_non_finite(what, tensor, rows, shape, largest)? else { return Ok(None) };
        let (row, channel) = (index / shape.head_dim(), index % shape.head_dim());
        let (token, kv_head) = (row / shape.kv_heads(), row % shape.kv_heads());
        let value = tensor.download_part(&self.stream, rows.row(token, kv_head) + channel, 1)?;
        Ok(value.first().map(|&value| NonFinite { token, kv_head, channel, value }))
    }

    fn key_mean(&self, store: &mut Store, keys: &Tensor, centre: NewCentre) -> Result<()> {
        self.launcher_for("key mean", store, &[keys])?.key_mean(store, keys, centre)
    }

    fn quantize(&self, store: &mut Store, keys: &Tensor, values: &Tensor, write: SpanWrite<'_, Indices>) -> Result<()> {
        if let Rows::Gather(indices) = write.tokens {
            indices.memory().check_stream("quantize", &self.stream)?;
        }
        let launcher = self.launcher_for("quantize", store, &[keys, values])?;
        launcher.quantize(&mut self.scratch(), store, keys, values, &write)
    }

    fn pack_windows(&self, shape: &AttentionShape, from: &Store, to: &mut Store, windows: &[WindowMove]) -> Result<()> {
        let stores = [from.step_capacity(0, 0), to.step_capacity(0, 0)];
        self.run_pack_step(&[from, to], None, &windows_table(shape, stores, windows)?)
    }

    fn append(
        &self,
        store: &mut Store,
        keys: &Tensor,
        values: &Tensor,
        rows: RowLayout,
        writes: &[TokenWrite],
    ) -> Result<()> {
        let table = append_table(store.shape(), store.step_capacity(writes.len(), 0), rows.tokens, writes)?;
        let flags = self.scratch().flags(&self.stream)?;
        self.run_pack_step(&[store], Some(WriteInput { keys, values, rows, flags: &flags, layer: 0 }), &table)
    }

    fn copy_page(&self, store: &mut Store, from: Page, to: Page) -> Result<()> {
        let table = copy_table(store.shape(), store.step_capacity(0, 1), PageCopy { from, to })?;
        self.run_pack_step(&[store], None, &table)
    }

    fn write_step(
        &self,
        stores: &mut [&mut Store],
        input: Option<WriteInput<'_, Tensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<()> {
        let stores: Vec<&Store> = stores.iter().map(|store| &**store).collect();
        self.run_pack_step(&stores, input, table)
    }

    fn create_non_finite_flags(&self, layers: usize) -> Result<NonFiniteFlags> {
        NonFiniteFlags::new(&self.stream, layers)
    }

    async fn read_non_finite_flags(&self, flags: &NonFiniteFlags) -> Result<Vec<FlaggedToken>> {
        flags.read(&self.stream)
    }

    fn clear_non_finite_flags(&self, flags: &NonFiniteFlags) -> Result<()> {
        flags.clear(&self.stream)
    }

    fn dequantize(&self, store: &Store, read: SpanRead<'_>) -> Result<(Tensor, Tensor)> {
        let [keys, values] =
            self.launcher_for("dequantize", store, &[])?.dequantize(&mut self.scratch(), store, &read)?;
        Ok((keys, values))
    }
}
