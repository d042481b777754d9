//! Statistics of attention, and the merge of attention states.

use anyhow::Result;
use kvpack::AttentionShape;
use kvpack::cpu::{States, merge_pair};
use kvpack::policy::HeadAggregation;

use super::file::{GoldenFile, part};
use super::kernels::{Attention, Device};
use super::{Computed, doubles, named};

/// `attention.column_sums`: by the three statistics kernels, per query head and summed over the heads of a group.
pub fn column_sums(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let attention = Attention::of_file(file, "q", 0, usize::MAX)?;
    let threshold = Some(file.number("p")? as f32);
    let each = attention.measure(device, HeadAggregation::Each, threshold)?;
    let sum = attention.measure(device, HeadAggregation::Sum, None)?;
    let outputs = named([
        ("row_max", doubles(&each.row_stats.max)),
        ("row_lse", doubles(&each.row_stats.lse)),
        ("column_sums", doubles(&each.sums)),
        ("counts", doubles(&each.counts)),
        ("group_sums", doubles(&sum.sums)),
    ]);
    Ok(vec![(
        device.named([
            "attention_row_stats, attention_column_stats, sum_partials",
            "attention_row_stats, attention_column_stats, sum_partials (wgpu)",
        ]),
        outputs,
    )])
}

/// `attention.merge`: the parts joined one after the other.
pub fn merge(file: &GoldenFile) -> Result<Computed> {
    let [parts, tokens, heads, head_dim] = file.input("o")?.axes()?;
    let shape = AttentionShape::new(heads, heads, head_dim)?;
    let (outputs, lse) = (file.input("o")?.f32()?, file.input("lse")?.f32()?);
    let part = |index: usize| {
        let (outputs, lse) = (part(&outputs, index, tokens * heads * head_dim)?, part(&lse, index, tokens * heads)?);
        anyhow::Ok(States::from_parts(&shape, outputs.to_vec(), lse.to_vec())?)
    };
    let mut merged = part(0)?;
    for index in 1..parts {
        merged = merge_pair(&merged, &part(index)?)?;
    }
    let outputs = named([("o", doubles(merged.outputs())), ("lse", doubles(merged.lse()))]);
    Ok(vec![("merge_pair", outputs)])
}
