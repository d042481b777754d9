//! Attention statistics of the query rows of a part, added to the sums of their prompt.

use super::{DenseRows, StatsInput, attention_column_stats, attention_row_stats};
use crate::Result;
use crate::backend::NewQueries;
use crate::counts::filled;
use crate::cpu::CpuTensor;
use crate::cpu::dense::read_row;
use crate::format::AttentionShape;
use crate::plan::{Elements, RowLayout, TokenRange};
use crate::policy::ColumnRequest;

/// Adds the attention that keys receive from some rows of a step to `sums`, `[heads, tokens]` of the whole prompt, and
/// returns counts `[query_heads, rows]` if they are requested.
///
/// # Errors
/// Those of [`NewQueries::check`] and of [`attention_column_stats()`].
pub(in crate::cpu) fn add_attention(
    input: NewQueries<'_, CpuTensor>,
    columns: ColumnRequest,
    sums: &mut Option<CpuTensor>,
) -> Result<Option<Vec<u32>>> {
    input.check(&columns, |tensor| tensor.elements().len())?;
    let of_sums = input.sums(&columns);
    let NewQueries { shape, scale, rows, queries, first_row, log_sum_exps, keys, tokens } = input;
    let (heads, head_dim) = (shape.query_heads(), shape.head_dim());
    let mut own = vec![0.0; rows.len() * heads * head_dim];
    for (at, row) in own.chunks_exact_mut(head_dim).enumerate() {
        read_row(queries.tensor.elements(), queries.layout.row(first_row + at / heads, at % heads), row);
    }
    let layout = RowLayout::token_major(rows.len(), &AttentionShape::new(heads, heads, head_dim)?);
    let queries = DenseRows { elements: Elements::F32(&own), layout };
    let keys = DenseRows { elements: keys.tensor.elements(), layout: keys.layout };
    let input = StatsInput { shape, scale, rows, queries, keys };
    let all = TokenRange::new(0, rows.tokens())?;
    let found = match log_sum_exps {
        Some(of_step) => {
            let of_step = of_step.to_f32();
            let of_head = |head: usize| (0..rows.len()).map(move |row| (first_row + row) * heads + head);
            let lse: Vec<f32> = (0..heads).flat_map(of_head).map(|at| of_step[at]).collect();
            attention_column_stats(&input, all, columns, &lse, &[])?
        }
        None => {
            let measured = attention_row_stats(&input, all)?;
            attention_column_stats(&input, all, columns, &measured.lse, &measured.max)?
        }
    };
    let mut added = match sums {
        Some(sums) => sums.to_f32(),
        None => filled("sums of a prompt", of_sums, 0.0)?,
    };
    for (sums, found) in added.chunks_exact_mut(tokens).zip(found.sums.chunks_exact(rows.tokens())) {
        sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
    }
    *sums = Some(CpuTensor::F32(added));
    Ok(columns.threshold.map(|_| found.counts))
}
