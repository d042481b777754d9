//! The two passes over the keys, of rows and of columns: what they read and make, and their launches.

use super::AttentionStatsPlan;
use crate::Result;
use crate::backend::RowStatistics;
use crate::format::AttentionShape;
use crate::plan::ElementType;
use crate::policy::RowStatsSource;
use crate::wgpu::device::launch::flat_grid;
use crate::wgpu::device::{ElementBinding, Kernels, Launch, Tensor, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::select::stats_matrix::{self, MatrixCall, MatrixCut};
use crate::wgpu::select::upload_call;
use crate::wgpu::select::words::Words;
use crate::wgpu::sources::SHADERS;

/// `StatsCall` of `select/calls.wgsl#stats_call`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct StatsCall {
    first_key: u32,
    key_token_stride: u32,
    key_head_stride: u32,
    first_query: u32,
    query_token_stride: u32,
    query_head_stride: u32,
    tokens: u32,
    rows: u32,
    kv_heads: u32,
    group: u32,
    part_tiles: u32,
    first_lse: u32,
    lse_row_stride: u32,
    lse_head_stride: u32,
    sum_stride: u32,
    scale: f32,
    log_threshold: f32,
}

/// `SumCall` of `select/sum_partials.wgsl`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SumCall {
    rows: u32,
    parts: u32,
}

/// What both passes read.
pub(super) struct StatsTensors<'a> {
    query_rows: ElementBinding<'a>,
    key_rows: ElementBinding<'a>,
    /// Of queries and keys.
    types: [ElementType; 2],
    cut: Option<MatrixCut>,
    call: wgpu::Buffer,
    sum_call: wgpu::Buffer,
    prepared: Option<(Tensor, Tensor)>,
    parts: usize,
    grid: [u32; 3],
}

impl StatsTensors<'_> {
    /// The buffers that both measuring kernels read.
    fn buffers(&self) -> Vec<(&'static str, wgpu::BufferBinding<'_>)> {
        let call = ("call", self.call.as_entire_buffer_binding());
        match &self.prepared {
            Some((rows, units)) => {
                vec![
                    call,
                    ("keys", self.key_rows.buffer.clone()),
                    ("prepared", rows.binding()),
                    ("units", units.binding()),
                ]
            }
            None => vec![call, ("rows", self.key_rows.buffer.clone()), ("queries", self.query_rows.buffer.clone())],
        }
    }
}

impl AttentionStatsPlan {
    /// What both passes read: the call and the tensors. Adds the launch that prepares query rows for matrices.
    pub(super) fn input<'a>(
        &self,
        kernels: &Kernels,
        [queries, keys]: [&'a Tensor; 2],
        launches: &mut Vec<Launch>,
    ) -> Result<StatsTensors<'a>> {
        let (shape, device) = (&self.shape, kernels.device());
        let limits = device.limits();
        let query_shape = AttentionShape::new(shape.query_heads(), shape.query_heads(), shape.head_dim())?;
        self.queries.check("query rows", queries.elements(), &query_shape)?;
        self.keys.check("keys", keys.elements(), shape)?;
        let (query_rows, key_rows) = (queries.element_binding(&limits)?, keys.element_binding(&limits)?);
        let types = [queries.element_type(), keys.element_type()];
        let cut = self.uses_matrices(types[1]).filter(|_| stats_matrix::begins_at_vector(&key_rows));
        let call = match &cut {
            Some(cut) => upload_call(device, &self.matrix_call(cut, &key_rows, &query_rows), self.rows.positions())?,
            None => upload_call(device, &self.call(&key_rows, &query_rows), self.rows.positions())?,
        };
        let (parts, grid) = match &cut {
            Some(cut) => (cut.parts, cut.grid()),
            None => (self.parts, [self.parts as u32, shape.kv_heads() as u32, 1]),
        };
        let sum_call = SumCall { rows: self.head_rows() as u32, parts: parts as u32 };
        let sum_call = upload_call(device, &sum_call, &[])?;
        let prepared = cut.map(|cut| cut.prepared(device, types[0])).transpose()?;
        let input = StatsTensors { query_rows, key_rows, types, cut, call, sum_call, prepared, parts, grid };
        if let (Some(cut), Some((rows, units))) = (&input.cut, &input.prepared) {
            let buffers = [
                ("call", input.call.as_entire_buffer_binding()),
                ("queries", input.query_rows.buffer.clone()),
                ("prepared", rows.binding()),
                ("units", units.binding()),
            ];
            launches.push(planned(kernels, &cut.prepare_variant(types[0]), &buffers, cut.prepare_grid())?);
        }
        Ok(input)
    }

    /// Adds the launches that measure rows, and returns their results.
    pub(super) fn measure_rows(
        &self,
        kernels: &Kernels,
        input: &StatsTensors<'_>,
        launches: &mut Vec<Launch>,
    ) -> Result<RowStatistics<Tensor>> {
        let (device, head_rows) = (kernels.device(), self.head_rows());
        let f32s = |elements| Tensor::zeroed(device, elements, ElementType::F32);
        let partials = f32s(input.parts * head_rows * 2)?;
        let (max, lse) = (f32s(head_rows)?, f32s(head_rows)?);
        let [queries, keys] = input.types;
        let variant = self.row_variant(input.cut.as_ref(), queries, keys);
        let buffers = [input.buffers().as_slice(), &[("partials", partials.binding())]].concat();
        launches.push(planned(kernels, &variant, &buffers, input.grid)?);
        let buffers = [
            ("call", input.sum_call.as_entire_buffer_binding()),
            ("partials", partials.binding()),
            ("row_max", max.binding()),
            ("row_lse", lse.binding()),
        ];
        let grid = flat_grid(head_rows as u64, &device.limits())?;
        launches.push(planned(kernels, &Variant::new(&SHADERS, "sum_partials"), &buffers, grid)?);
        Ok(RowStatistics { max, lse })
    }

    /// Adds the launches that measure columns, and returns their results: sums, and counts where they are requested.
    pub(super) fn measure_columns(
        &self,
        kernels: &Kernels,
        input: &StatsTensors<'_>,
        (lse, max): (&Tensor, Option<&Tensor>),
        sums: Option<&Tensor>,
        launches: &mut Vec<Launch>,
    ) -> Result<(Tensor, Option<Words>)> {
        let (shape, device, head_rows) = (&self.shape, kernels.device(), self.head_rows());
        let rows = self.request.columns.aggregation.rows(shape.query_heads(), shape.kv_heads());
        let column_sums = match sums {
            Some(sums) => sums.clone(),
            None => Tensor::zeroed(device, rows * self.rows.tokens(), ElementType::F32)?,
        };
        let counted = match (self.log_threshold, max) {
            (Some(_), Some(max)) => {
                let partials = Words::zeroed(device, "counts of parts", input.parts * head_rows)?;
                Some((max, partials, Words::zeroed(device, "counts of rows", head_rows)?))
            }
            _ => None,
        };
        let mut buffers = input.buffers();
        buffers.extend([("row_lse", lse.binding()), ("column_sums", column_sums.binding())]);
        if let Some((max, partials, _)) = &counted {
            buffers.extend([("row_max", max.binding()), ("count_partials", partials.binding())]);
        }
        let [queries, keys] = input.types;
        let variant = self.column_variant(input.cut.as_ref(), queries, keys);
        launches.push(planned(kernels, &variant, &buffers, input.grid)?);
        let Some((_, partials, counts)) = counted else { return Ok((column_sums, None)) };
        let buffers = [
            ("call", input.sum_call.as_entire_buffer_binding()),
            ("partials", partials.binding()),
            ("counts", counts.binding()),
        ];
        let grid = flat_grid(head_rows as u64, &device.limits())?;
        launches.push(planned(kernels, &Variant::new(&SHADERS, "sum_counts"), &buffers, grid)?);
        Ok((column_sums, Some(counts)))
    }

    /// The cut with which cooperative matrices read keys of this type, if they can.
    pub(super) fn uses_matrices(&self, keys: ElementType) -> Option<MatrixCut> {
        self.matrices.filter(|_| stats_matrix::reads_keys(keys, &self.keys))
    }

    fn matrix_call(&self, cut: &MatrixCut, keys: &ElementBinding<'_>, queries: &ElementBinding<'_>) -> MatrixCall {
        let call = self.call(keys, queries);
        MatrixCall {
            first_key: stats_matrix::in_vectors(call.first_key),
            key_token_stride: stats_matrix::in_vectors(call.key_token_stride),
            key_head_stride: stats_matrix::in_vectors(call.key_head_stride),
            first_query: call.first_query,
            query_token_stride: call.query_token_stride,
            query_head_stride: call.query_head_stride,
            tokens: call.tokens,
            rows: call.rows,
            kv_heads: call.kv_heads,
            group: call.group,
            chunk_heads: cut.chunk_heads as u32,
            chunk_rows: cut.chunk_rows as u32,
            row_chunks: cut.row_chunks as u32,
            chunks: cut.chunks as u32,
            part_tiles: cut.part_tiles as u32,
            scale: call.scale,
            log_threshold: call.log_threshold,
        }
    }

    fn call(&self, keys: &ElementBinding<'_>, queries: &ElementBinding<'_>) -> StatsCall {
        let heads = self.shape.query_heads();
        // Steps write [row][query_head], and `sum_partials` [query_head][row].
        let (first_lse, lse_row_stride, lse_head_stride) = match (self.adding, self.request.rows) {
            (Some(adding), RowStatsSource::KnownLse) => (adding.first_row * heads, heads, 1),
            _ => (0, 1, self.rows.len()),
        };
        StatsCall {
            first_key: keys.first_element,
            key_token_stride: self.keys.token_stride as u32,
            key_head_stride: self.keys.head_stride as u32,
            first_query: queries.first_element,
            query_token_stride: self.queries.token_stride as u32,
            query_head_stride: self.queries.head_stride as u32,
            tokens: self.rows.tokens() as u32,
            rows: self.rows.len() as u32,
            kv_heads: self.shape.kv_heads() as u32,
            group: self.shape.group() as u32,
            part_tiles: self.part_tiles as u32,
            first_lse: first_lse as u32,
            lse_row_stride: lse_row_stride as u32,
            lse_head_stride: lse_head_stride as u32,
            sum_stride: self.adding.map_or(self.rows.tokens(), |adding| adding.tokens) as u32,
            scale: self.scale,
            log_threshold: self.log_threshold.unwrap_or(0.0),
        }
    }
}
