//! SnapKV, H2O, PyramidKV and StreamingLLM.

use anyhow::{Result, bail};
use kvpack::policy::{HeadAggregation, Pool, Pooling, PyramidShape, pyramid_budgets, sink_and_recent};

use super::file::{GoldenFile, part};
use super::kernels::{Attention, Device};
use super::{Computed, Outputs, doubles};

/// `snapkv.select`: a window of rows, the mean over the group, pooling, the best.
pub fn snapkv(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let [batch, _, window, _] = file.input("q_window")?.axes()?;
    let pool = match file.text("pooling")? {
        "avgpool" => Pool::Average,
        "maxpool" => Pool::Max,
        other => bail!("unknown pooling: {other}"),
    };
    let pooling = Pooling::new(pool, file.count("kernel")?)?;
    let best = file.count("capacity")? - window;
    let (mut kept, mut pooled) = (Vec::new(), Vec::new());
    for sequence in 0..batch {
        let attention = Attention::of_file(file, "q_window", sequence, usize::MAX)?;
        let sums = attention.measure(device, HeadAggregation::Mean, None)?.sums;
        let tokens = attention.rows.tokens();
        for sums in sums.chunks(tokens) {
            let mut scores = pooling.apply(&sums[..tokens - window]);
            pooled.extend(doubles(&scores));
            scores.resize(tokens, 0.0);
            kept.extend(device.recent_and_best(&scores, window, best)?);
        }
    }
    let outputs = Outputs::from([("kept", doubles(&kept)), ("scores", pooled)]);
    Ok(vec![(device.named(["attention_column_stats, top_k", "attention_column_stats, top_k (wgpu)"]), outputs)])
}

/// `h2o.select`: accumulated scores of all rows, the best and the recent.
pub fn h2o(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let recent = file.count("recent")?;
    let best = file.count("capacity")? - recent;
    let sequences = if file.has_input("attn") { 1 } else { file.input("q")?.axes::<4>()?[0] };
    let (mut kept, mut scores) = (Vec::new(), Vec::new());
    for sequence in 0..sequences {
        let attention = match file.has_input("attn") {
            false => Attention::of_file(file, "q", sequence, usize::MAX)?,
            true => {
                let [heads, _, tokens] = file.input("attn")?.axes()?;
                let weights = file.input("attn")?.f32()?;
                let weights = part(&weights, sequence, heads * tokens * tokens)?;
                Attention::of_weights(weights, heads, file.count("group")?, tokens, usize::MAX)?
            }
        };
        let sums = attention.measure(device, HeadAggregation::Mean, None)?.sums;
        for sums in sums.chunks(attention.rows.tokens()) {
            scores.extend(doubles(sums));
            kept.extend(device.recent_and_best(sums, recent, best)?);
        }
    }
    let outputs = Outputs::from([("kept", doubles(&kept)), ("scores", scores)]);
    Ok(vec![(device.named(["attention_column_stats, top_k", "attention_column_stats, top_k (wgpu)"]), outputs)])
}

/// `pyramidkv.budget`.
pub fn pyramidkv(file: &GoldenFile) -> Result<Computed> {
    let [capacity, window, beta] = [file.count("capacity")?, file.count("window")?, file.count("beta")?];
    let shape = PyramidShape { capacity, recent: window, beta };
    let kept = pyramid_budgets(file.count("layers")?, file.count("length")?, shape)?;
    let kept = kept.into_iter().map(|tokens| tokens as f64).collect();
    Ok(vec![("pyramid_budgets", Outputs::from([("kept_total", kept)]))])
}

/// `streamingllm.select`.
pub fn streamingllm(file: &GoldenFile) -> Result<Computed> {
    let kept = sink_and_recent(file.count("length")?, file.count("start")?, file.count("recent")?);
    let heads = file.count("batch")? * file.count("heads")?;
    Ok(vec![("sink_and_recent", Outputs::from([("kept", doubles(&kept).repeat(heads))]))])
}
