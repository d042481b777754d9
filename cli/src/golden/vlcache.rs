//! The ops of VL-Cache.

use anyhow::{Result, ensure};
use kvpack::policy::{HeadAggregation, VlCacheLimits, keep, layer_sparsity, sparsity, vlcache_budgets};

use super::file::{GoldenFile, part};
use super::kernels::{Attention, Device};
use super::{Computed, doubles, named};

/// `vlcache.sparsity`: counts under the threshold, per head and layer.
pub fn layer(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let attention = attention(file, 0)?;
    let measured = attention.measure(device, HeadAggregation::Mean, Some(file.number("p")? as f32))?;
    let counts: Vec<u32> = measured.counts.chunks(attention.rows.len()).map(|counts| counts.iter().sum()).collect();
    let heads = sparsity(&measured.counts, &attention.rows)?;
    let layer = vec![layer_sparsity(&heads)];
    let outputs = named([("kept_count", doubles(&counts)), ("sparsity", heads), ("layer_sparsity", layer)]);
    Ok(vec![(device.named(["attention_column_stats, sparsity", "attention_column_stats, sparsity (wgpu)"]), outputs)])
}

/// `vlcache.scores`: column sums, the mean over the query heads of a group.
pub fn scores(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let sums = attention(file, 0)?.measure(device, HeadAggregation::Mean, None)?.sums;
    Ok(vec![(
        device.named(["attention_column_stats", "attention_column_stats (wgpu)"]),
        named([("scores", doubles(&sums))]),
    )])
}

/// `vlcache.budget`.
pub fn budget(file: &GoldenFile) -> Result<Computed> {
    let sparsity: Vec<f64> = file.input("sparsity")?.f32()?.into_iter().map(f64::from).collect();
    let budgets = vlcache_budgets(&sparsity, file.count("length")?, file.number("alpha")?, limits(file, 0)?)?;
    let tokens = budgets.tokens.iter().map(|&tokens| tokens as f64).collect();
    let outputs =
        named([("raw_ratio", budgets.raw_ratios), ("clipped_ratio", budgets.clipped_ratios), ("budgets", tokens)]);
    Ok(vec![("vlcache_budgets", outputs)])
}

/// `vlcache.plan`: from attention to the kept tokens of every layer.
pub fn plan(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let [layers, query_heads, _, tokens] = file.input("attn")?.axes()?;
    let kv_heads = query_heads / file.divisor("group")?;
    let (mut sparsities, mut scores) = (Vec::new(), Vec::new());
    for layer in 0..layers {
        let attention = attention(file, layer)?;
        let measured = attention.measure(device, HeadAggregation::Mean, Some(file.number("p")? as f32))?;
        sparsities.push(layer_sparsity(&sparsity(&measured.counts, &attention.rows)?));
        scores.push(measured.sums);
    }
    let mandatory = file.counts("mandatory")?;
    let limits = limits(file, mandatory.len())?;
    let budgets = vlcache_budgets(&sparsities, tokens, file.number("alpha")?, limits)?.tokens;
    let mut outputs =
        named([("layer_sparsity", sparsities), ("budgets", budgets.iter().map(|&tokens| tokens as f64).collect())]);
    for (layer, (&count, scores)) in budgets.iter().zip(&scores).enumerate() {
        let recent = (file.number("recent_fraction")? * count as f64) as usize;
        ensure!(recent <= tokens, "recent_fraction protects {recent} of its tokens, of which there are {tokens}");
        let mut protected = mandatory.clone();
        protected.extend(tokens as u32 - recent as u32..tokens as u32);
        protected.sort_unstable();
        protected.dedup();
        let mut kept = Vec::new();
        for head in 0..kv_heads {
            kept.extend(keep(part(scores, head, tokens)?, &protected, count)?);
        }
        outputs.insert(format!("kept_l{layer}"), doubles(&kept));
    }
    Ok(vec![(
        device.named([
            "attention_column_stats, vlcache_budgets, keep",
            "attention_column_stats, vlcache_budgets, keep (wgpu)",
        ]),
        outputs,
    )])
}

fn limits(file: &GoldenFile, mandatory: usize) -> Result<VlCacheLimits> {
    Ok(VlCacheLimits { min_ratio: file.number("min_ratio")?, max_ratio: file.number("max_ratio")?, mandatory })
}

/// Attention of a layer, from queries and keys or from weights.
fn attention(file: &GoldenFile, layer: usize) -> Result<Attention> {
    let most = file.optional_count("max_queries")?.unwrap_or(usize::MAX);
    if !file.has_input("attn") {
        return Attention::of_file(file, "q", layer, most);
    }
    let attn = file.input("attn")?;
    let [query_heads, rows, tokens] = attn.last_axes()?;
    let weights = attn.f32()?;
    let weights = part(&weights, layer, query_heads * rows * tokens)?;
    Attention::of_weights(weights, query_heads, file.divisor("group")?, tokens, most)
}
