//! SnapKV, H2O, PyramidKV and StreamingLLM.

use anyhow::{Result, bail};
use kvpack::policy::{
    HeadAggregation, Pool, Pooling, PyramidShape, ScoreRequest, ScoreRule, Spans, TextRule, Weighing, pyramid_budgets,
    sink_and_recent,
};

use super::file::{GoldenFile, part};
use super::kernels::{Attention, Device};
use super::{Computed, doubles, named};

/// What measures and chooses, on the CPU and through wgpu.
const KERNELS: [&str; 2] =
    ["attention_column_stats, token_scores, top_k", "attention_column_stats, token_scores, top_k (wgpu)"];

/// The mean over a group's heads of the sums over all rows.
const ACCUMULATED: ScoreRule = ScoreRule { aggregation: HeadAggregation::Mean, weighing: Weighing::Sum, pooling: None };

/// `snapkv.select`: a window of rows, the mean over the group, pooling, the best.
pub fn snapkv(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let [batch, _, window, _] = file.input("q_window")?.axes()?;
    let pool = match file.text("pooling")? {
        "avgpool" => Pool::Average,
        "maxpool" => Pool::Max,
        other => bail!("unknown pooling: {other}"),
    };
    let pooling = Pooling::new(pool, file.count("kernel")?)?;
    let scores = ScoreRule { pooling: Some(pooling), ..ACCUMULATED };
    let capacity = file.count("capacity")?;
    let (mut kept, mut pooled) = (Vec::new(), Vec::new());
    for sequence in 0..batch {
        let attention = Attention::of_file(file, "q_window", sequence, usize::MAX)?;
        let sums = attention.measure(device, scores.aggregation, None)?.sums;
        let (rows, tokens) = (&attention.rows, attention.rows.tokens());
        let spans = Spans::new(tokens, &[])?;
        let request = ScoreRequest { rows, spans: &spans, scores, group: 1, text: TextRule::Equal, recent: window };
        let chosen = device.choose(&sums, attention.shape.kv_heads(), &request, capacity)?;
        kept.extend(chosen.kept);
        pooled.extend(chosen.scores.chunks(tokens).flat_map(|scores| doubles(&scores[..tokens - window])));
    }
    let outputs = named([("kept", doubles(&kept)), ("scores", pooled)]);
    Ok(vec![(device.named(KERNELS), outputs)])
}

/// `h2o.select`: accumulated scores of all rows, the best and the recent.
pub fn h2o(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let recent = file.count("recent")?;
    let capacity = file.count("capacity")?;
    let sequences = if file.has_input("attn") { 1 } else { file.input("q")?.axes::<4>()?[0] };
    let (mut kept, mut scores) = (Vec::new(), Vec::new());
    for sequence in 0..sequences {
        let attention = match file.has_input("attn") {
            false => Attention::of_file(file, "q", sequence, usize::MAX)?,
            true => {
                let [heads, _, tokens] = file.input("attn")?.axes()?;
                let weights = file.input("attn")?.f32()?;
                let weights = part(&weights, sequence, heads * tokens * tokens)?;
                Attention::of_weights(weights, heads, file.divisor("group")?, tokens, usize::MAX)?
            }
        };
        let sums = attention.measure(device, ACCUMULATED.aggregation, None)?.sums;
        let (rows, spans) = (&attention.rows, Spans::new(attention.rows.tokens(), &[])?);
        let request =
            ScoreRequest { rows, spans: &spans, scores: ACCUMULATED, group: 1, text: TextRule::Equal, recent };
        kept.extend(device.choose(&sums, attention.shape.kv_heads(), &request, capacity)?.kept);
        scores.extend(doubles(&sums));
    }
    let outputs = named([("kept", doubles(&kept)), ("scores", scores)]);
    Ok(vec![(device.named(KERNELS), outputs)])
}

/// `pyramidkv.budget`.
pub fn pyramidkv(file: &GoldenFile) -> Result<Computed> {
    let [capacity, window, beta] = [file.count("capacity")?, file.count("window")?, file.count("beta")?];
    let shape = PyramidShape { capacity, recent: window, beta };
    let layers = file.count("layers")?;
    file.check_asked("kept_total", Some(layers))?;
    let kept = pyramid_budgets(layers, file.count("length")?, shape)?;
    let kept = kept.into_iter().map(|tokens| tokens as f64).collect();
    Ok(vec![("pyramid_budgets", named([("kept_total", kept)]))])
}

/// `streamingllm.select`.
pub fn streamingllm(file: &GoldenFile) -> Result<Computed> {
    let (length, start, recent) = (file.count("length")?, file.count("start")?, file.count("recent")?);
    let heads = file.count("batch")?.saturating_mul(file.count("heads")?);
    file.check_asked("kept", heads.checked_mul(length.min(start.saturating_add(recent))))?;
    let kept = sink_and_recent(length, start, recent)?;
    Ok(vec![("sink_and_recent", named([("kept", doubles(&kept).repeat(heads))]))])
}
