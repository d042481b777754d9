//! Statistics of attention, and the merge of attention states.

use anyhow::Result;
use kvpack::AttentionShape;
use kvpack::cpu::{States, merge_states};
use kvpack::plan::DecodePlan;
use kvpack::policy::HeadAggregation;

use super::file::GoldenFile;
use super::kernels::{Attention, Device};
use super::{Computed, Outputs, doubles};

/// `attention.column_sums`: by the three statistics kernels, per query head and summed over the heads of a group.
pub fn column_sums(file: &GoldenFile, device: Device) -> Result<Computed> {
    let attention = Attention::of_file(file, "q", 0, usize::MAX)?;
    let threshold = Some(file.number("p")? as f32);
    let each = attention.measure(device, HeadAggregation::Each, threshold)?;
    let sum = attention.measure(device, HeadAggregation::Sum, None)?;
    let outputs = Outputs::from([
        ("row_max", doubles(&each.row_stats.max)),
        ("row_lse", doubles(&each.row_stats.lse)),
        ("column_sums", doubles(&each.sums)),
        ("counts", doubles(&each.counts)),
        ("group_sums", doubles(&sum.sums)),
    ]);
    Ok(vec![(device.named("attention_row_stats, attention_column_stats, sum_partials"), outputs)])
}

/// `attention.merge`: the parts of a token are the states of a sequence.
pub fn merge(file: &GoldenFile) -> Result<Computed> {
    let [parts, tokens, heads, head_dim] = file.input("o")?.axes()?;
    let shape = AttentionShape::new(heads, heads, head_dim)?;
    let (outputs, lse) = (file.input("o")?.f32()?, file.input("lse")?.f32()?);
    // From [part][token] to [token][part].
    let rows = || (0..tokens).flat_map(|token| (0..parts).map(move |part| part * tokens + token));
    let of = |x: &[f32], width: usize| rows().flat_map(|row| x[row * width..][..width].to_vec()).collect();
    let states = States::from_parts(&shape, of(&outputs, heads * head_dim), of(&lse, heads))?;
    let first_state = (0..=tokens).map(|token| (token * parts) as u32).collect();
    let merged = merge_states(&DecodePlan { shape, segments: Vec::new(), first_state }, &states)?;
    let outputs = Outputs::from([("o", doubles(merged.outputs())), ("lse", doubles(merged.lse()))]);
    Ok(vec![("merge_states", outputs)])
}
