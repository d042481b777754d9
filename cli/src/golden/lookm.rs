//! The ops of LOOK-M.

use anyhow::{Result, bail, ensure};
use kvpack::AttentionShape;
use kvpack::cpu::KeptTokens;
use kvpack::plan::TokenRange;
use kvpack::policy::{
    HeadAggregation, Merging, QueryPositions, ScoreRequest, ScoreRule, Spans, TextRule, Weighing, evicted, merge_plan,
    text_prior,
};

use super::file::{GoldenFile, part};
use super::kernels::Device;
use super::{Computed, doubles, named};

/// `lookm.evict`: text prior (eq. 4-8), by the host and by the kernels.
pub fn evict(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let [heads, tokens] = file.input("scores")?.axes()?;
    let (scores, spans) = (file.input("scores")?.f32()?, spans(file.input("text_mask")?.mask()?)?);
    let (recent, best) = (file.count("recent")?, file.count("important")?);
    let mut kept = Vec::new();
    for head in 0..heads {
        kept.extend(text_prior(part(&scores, head, tokens)?, &spans, TextRule::Raised, recent, best)?);
    }
    // The rows are not looked at.
    let rows = QueryPositions::last(1, tokens)?;
    let scores_of = ScoreRule { aggregation: HeadAggregation::Mean, weighing: Weighing::Sum, pooling: None };
    let request =
        ScoreRequest { rows: &rows, spans: &spans, scores: scores_of, group: 1, text: TextRule::Raised, recent };
    let chosen = device.choose(&scores, heads, &request, recent + best)?.kept;
    Ok(vec![
        ("text_prior", named([("kept", doubles(&kept))])),
        (device.named(["token_scores, top_k", "token_scores, top_k (wgpu)"]), named([("kept", doubles(&chosen))])),
    ])
}

/// `lookm.merge`: nearest kept keys and what is merged into them (eq. 9-12), by the kernels and by a merge plan.
pub fn merge(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let [heads, tokens, head_dim] = file.input("k")?.axes()?;
    let [_, count] = file.input("kept")?.axes()?;
    ensure!(count <= tokens, "{count} of {tokens} tokens are kept");
    let shape = AttentionShape::new(heads, heads, head_dim)?;
    let kept = file.input("kept")?.indices()?;
    let gone = kept.chunks(count).map(|kept| evicted(kept, tokens)).collect::<kvpack::Result<Vec<_>>>()?.concat();
    let merging = match file.text("strategy")? {
        "averaged" => Merging::Averaged,
        "pivotal" => Merging::Pivotal,
        "weighted" => Merging::Weighted,
        other => bail!("unknown way to merge: {other}"),
    };
    let (keys, values) = (file.input("k")?.f32()?, file.input("v")?.f32()?);
    let indices = KeptTokens { kept: &kept, evicted: &gone };
    let merged = device.merge(&shape, [&keys, &values], indices, merging)?;
    let nearest = &merged.nearest;
    let pivot: Vec<u32> = nearest.iter().map(|nearest| nearest.kept).collect();
    let similarity: Vec<f32> = nearest.iter().map(|nearest| nearest.similarity).collect();
    let outputs = |keys: &[f32], values: &[f32]| {
        named([
            ("pivot", doubles(&pivot)),
            ("similarity", doubles(&similarity)),
            ("k_merged", doubles(keys)),
            ("v_merged", doubles(values)),
        ])
    };
    let by_kernel = outputs(&merged.keys, &merged.values);

    let planned = |rows: &[f32]| -> Result<Vec<f32>> {
        let mut merged = Vec::new();
        for head in 0..heads {
            let (kept, gone) = (part(&kept, head, count)?, part(&gone, head, tokens - count)?);
            let merges = merge_plan(kept, gone, part(nearest, head, tokens - count)?, merging)?;
            let rows = part(rows, head, tokens * head_dim)?;
            for &token in kept {
                let own = part(rows, token as usize, head_dim)?;
                let mut of_token = merges.iter().filter(|merge| merge.into == token).peekable();
                if of_token.peek().is_none() {
                    merged.extend(own);
                    continue;
                }
                let mut sum = vec![0.0f64; head_dim];
                for merge in of_token {
                    let from = part(rows, merge.from as usize, head_dim)?;
                    sum.iter_mut().zip(from).for_each(|(sum, &x)| *sum += f64::from(merge.weight) * f64::from(x));
                }
                merged.extend(sum.iter().map(|&x| x as f32));
            }
        }
        Ok(merged)
    };
    let by_plan = outputs(&planned(&keys)?, &planned(&values)?);
    Ok(vec![
        (device.named(["nearest_kept, merge_tokens", "nearest_kept, merge_tokens (wgpu)"]), by_kernel),
        ("merge_plan", by_plan),
    ])
}

/// Spans of a prompt whose text is masked.
fn spans(text: &[bool]) -> Result<Spans> {
    let mut images = Vec::new();
    let mut start = 0;
    for run in text.chunk_by(|a, b| a == b) {
        let end = start + run.len();
        if !run[0] {
            images.push(TokenRange::new(start, end)?);
        }
        start = end;
    }
    Ok(Spans::new(text.len(), &images)?)
}
