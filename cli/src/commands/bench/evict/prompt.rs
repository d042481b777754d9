//! A prompt on a device, and what the host knows of it.

use anyhow::{Result, ensure};
use half::f16;
use kvpack::backend::{KeptAndEvicted, QueriesAndKeys, TensorRows};
use kvpack::cache::ModelCache;
use kvpack::cpu::nmse;
use kvpack::plan::{Elements, RowLayout, Scoring};
use kvpack::policy::{
    ColumnRequest, HeadAggregation, LayerSelection, Merging, QueryPositions, RowStatsSource, StatsRequest, evicted,
    top_k,
};
use kvpack::{AttentionShape, Backend, SegmentFormat};

use crate::outcome::Wrong;

/// What sums of weights may differ by from those of the host, which adds them in f64.
const MOST_NMSE: f64 = 1e-6;

/// How much less similar than the most similar one a kept token may be, by rounding.
const SIMILARITY_SLACK: f64 = 1e-4;

/// How far any stored row may be from what was to be stored: one of 4 bits is within 0.02, and another token's beyond
/// 0.5.
const MOST_STORED_NMSE: f64 = 0.1;

/// The same in f16, which rounds what was merged.
const MOST_STORED_F16: f64 = 1e-6;

/// What the place of a score on a threshold may be off by.
const THRESHOLD_SLACK: f64 = 1e-3;

/// Bytes of keys to go round, at least, where a prompt is shorter than that: more than a device's caches.
const FOOTPRINT: usize = 256 << 20;

/// The number of evicted tokens, and of kept tokens, that are compared with the host's.
const CHECKED: usize = 32;

/// Keys and values of a prompt for one layer, and the queries of its last tokens.
pub struct Prompt<B: Backend> {
    /// Heads.
    pub shape: AttentionShape,
    /// Where keys and values lie.
    pub rows: RowLayout,
    /// The measured rows.
    pub measured: QueryPositions,
    /// Keys and values, the same in every copy: those that go round them find cold caches.
    pub copies: Vec<[B::Tensor; 2]>,
    /// Log-sum-exp of the measured rows, `[query_heads, rows]`.
    pub lse: B::Tensor,
    queries: B::Tensor,
    /// The elements of keys and values, as they were uploaded.
    host_keys: Vec<f16>,
    host_values: Vec<f16>,
    host_queries: Vec<f16>,
}

impl<B: Backend> Prompt<B> {
    /// Random keys, values and queries, and the log-sum-exps of the queries.
    ///
    /// # Errors
    /// When they do not fit the device.
    pub async fn new(backend: &B, shape: AttentionShape, tokens: usize, measured: usize) -> Result<Self> {
        let elements = tokens * shape.kv_heads() * shape.head_dim();
        let (host_keys, host_values) = (random(elements, 4), random(elements, 5));
        let host_queries = random(measured * shape.query_heads() * shape.head_dim(), 6);
        let copies = if FOOTPRINT.div_ceil(2 * elements) > 8 { 1 } else { FOOTPRINT.div_ceil(2 * elements) };
        let mut prompt = Self {
            shape,
            rows: RowLayout::token_major(tokens, &shape),
            measured: QueryPositions::last(measured, tokens)?,
            copies: Vec::with_capacity(copies),
            lse: backend.upload((&[0.0f32][..]).into()).await?,
            queries: backend.upload(Elements::F16(&host_queries)).await?,
            host_keys,
            host_values,
            host_queries,
        };
        for _ in 0..copies {
            let copy = prompt.upload(backend).await?;
            prompt.copies.push(copy);
        }
        // Column sums made of it are compared with the host's.
        let columns = ColumnRequest { aggregation: HeadAggregation::Each, threshold: None };
        let request = StatsRequest { columns, rows: RowStatsSource::Measured };
        let found = backend.measure_attention(prompt.input(&prompt.copies[0][0]), request, None)?;
        if let Some(lse) = found.row_lse {
            prompt.lse = lse;
        }
        Ok(prompt)
    }

    /// One more copy of keys and values.
    ///
    /// # Errors
    /// When they do not fit the device.
    pub async fn upload(&self, backend: &B) -> kvpack::Result<[B::Tensor; 2]> {
        let keys = backend.upload(Elements::F16(&self.host_keys)).await?;
        Ok([keys, backend.upload(Elements::F16(&self.host_values)).await?])
    }

    /// The queries of the measured rows.
    pub fn queries(&self) -> TensorRows<'_, B::Tensor> {
        let (tokens, heads, head_dim) = (self.measured.len(), self.shape.query_heads(), self.shape.head_dim());
        let layout = RowLayout { tokens, token_stride: heads * head_dim, head_stride: head_dim };
        TensorRows { tensor: &self.queries, layout }
    }

    /// What statistics are made of, over one copy of the keys.
    pub fn input<'a>(&'a self, keys: &'a B::Tensor) -> QueriesAndKeys<'a, B::Tensor> {
        let keys = TensorRows { tensor: keys, layout: self.rows };
        let (shape, scale) = (self.shape, Scoring::of(&self.shape).scale());
        QueriesAndKeys { shape, scale, rows: &self.measured, queries: self.queries(), keys }
    }

    /// Scores of a measured row over the keys that it sees.
    fn scores(&self, query_head: usize, row: usize) -> Vec<f64> {
        let head_dim = self.shape.head_dim();
        let query = &self.host_queries[(row * self.shape.query_heads() + query_head) * head_dim..][..head_dim];
        let query: Vec<f32> = query.iter().map(|x| x.to_f32()).collect();
        let seen = self.measured.positions()[row] as usize + 1;
        let kv_head = query_head / self.shape.group();
        let score = |token: usize| {
            let key = &self.host_keys[self.rows.row(token, kv_head)..][..head_dim];
            // Products of halves are exact in f32; their sums are not far from it.
            let products = key.iter().zip(&query).map(|(k, q)| k.to_f32() * q);
            f64::from(products.sum::<f32>()) / (head_dim as f64).sqrt()
        };
        (0..seen).map(score).collect()
    }

    /// Holds the column sums of the first query head of the last KV head against the host's.
    ///
    /// # Errors
    /// [`Wrong`] when they differ; when the backend fails.
    pub async fn check_columns(
        &self,
        backend: &B,
        input: QueriesAndKeys<'_, B::Tensor>,
        request: StatsRequest,
        known_lse: Option<&B::Tensor>,
    ) -> Result<()> {
        let measured = backend.measure_attention(input, request, known_lse)?;
        let sums = backend.download(&measured.column_sums).await?;
        let (tokens, head) = (self.rows.tokens, self.shape.query_heads() - self.shape.group());
        let mut expected = vec![0.0f64; tokens];
        let counts = match &measured.counts {
            Some(counts) => Some(backend.download_words(counts).await?),
            None => None,
        };
        for row in 0..self.measured.len() {
            let scores = self.scores(head, row);
            let lse = log_sum_exp(&scores);
            scores.iter().zip(&mut expected).for_each(|(score, sum)| *sum += (score - lse).exp());
            if let Some(threshold) = request.columns.threshold {
                let most = scores.iter().copied().fold(f64::MIN, f64::max) + f64::from(threshold).ln();
                let above = |slack: f64| scores.iter().filter(|&&score| score >= most + slack).count();
                let allowed = above(THRESHOLD_SLACK)..=above(-THRESHOLD_SLACK);
                let count = counts.as_ref().map(|counts| counts[head * self.measured.len() + row] as usize);
                let wrong = || Wrong(format!("row {row}: {count:?} entries counted, the host counts {allowed:?}"));
                ensure!(count.is_some_and(|count| allowed.contains(&count)), wrong());
            }
        }
        let nmse = nmse(&sums[head * tokens..][..tokens], &expected);
        ensure!(nmse <= MOST_NMSE, Wrong(format!("column sums: NMSE {nmse:.1e} against the host's")));
        Ok(())
    }

    /// Scores of the tokens for every KV head, the `k` best of them, checked, and the others.
    ///
    /// # Errors
    /// [`Wrong`] when the device chooses others than the host; when it fails.
    pub async fn choose(&self, backend: &B, k: usize) -> Result<(B::Tensor, B::Indices, B::Indices)> {
        let (heads, tokens) = (self.shape.kv_heads(), self.rows.tokens);
        let mut random = fastrand::Rng::with_seed(7);
        // Sums of weights: few are large, and many alike.
        let scores: Vec<f32> = (0..heads * tokens).map(|_| (random.f32() * 64.0).floor().exp2() * 1e-12).collect();
        let on_device = backend.upload(scores.as_slice().into()).await?;
        let kept = backend.top_k(&on_device, heads, k)?;
        let chosen = backend.download_indices(&kept).await?;
        let mut others = Vec::with_capacity(heads * (tokens - k));
        for head in 0..heads {
            let best = top_k(&scores[head * tokens..][..tokens], k)?;
            let wrong = || Wrong(format!("top_k of KV head {head} chose other tokens than the host"));
            ensure!(chosen[head * k..][..k] == best[..], wrong());
            others.extend(evicted(&best, tokens)?);
        }
        let others = backend.upload_indices(&others, heads, tokens as u32).await?;
        Ok((on_device, kept, others))
    }

    /// Holds some of the nearest kept tokens, and of the merged keys, against the host's.
    ///
    /// # Errors
    /// [`Wrong`] when they differ; when the backend fails.
    pub async fn check_merge(
        &self,
        backend: &B,
        input: KeptAndEvicted<'_, B::Tensor, B::Indices>,
        merging: Merging,
    ) -> Result<()> {
        ensure!(merging == Merging::Pivotal, "only pivotal merging is checked here");
        let merged = backend.merge_tokens(input, merging)?;
        let (nearest, keys) = (backend.download_words(&merged.nearest).await?, backend.download(&merged.keys).await?);
        let kept = backend.download_indices(input.kept).await?;
        let evicted = backend.download_indices(input.evicted).await?;
        let (heads, head_dim) = (self.shape.kv_heads(), self.shape.head_dim());
        let (k, e) = (kept.len() / heads, evicted.len() / heads);
        let row = |token: u32| -> Vec<f64> {
            let key = &self.host_keys[self.rows.row(token as usize, 0)..][..head_dim];
            key.iter().map(|x| f64::from(x.to_f32())).collect()
        };
        let cosine = |a: &[f64], b: &[f64]| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
        let of_kept: Vec<Vec<f64>> = kept[..k].iter().map(|&token| row(token)).collect();
        for (&token, &found) in evicted[..e].iter().zip(&nearest).take(CHECKED) {
            let key = row(token);
            let best = of_kept.iter().map(|kept| cosine(&key, kept)).fold(f64::MIN, f64::max);
            let chosen = cosine(&key, &of_kept[found as usize]);
            let wrong = || Wrong(format!("token {token}: {chosen} is not the nearest, which has {best}"));
            ensure!(chosen >= best - SIMILARITY_SLACK, wrong());
        }
        for (index, pivot) in of_kept.iter().enumerate().take(CHECKED) {
            let members = evicted[..e].iter().zip(&nearest).filter(|(_, found)| **found as usize == index);
            let members: Vec<Vec<f64>> = members.map(|(&token, _)| row(token)).collect();
            let count = members.len() as f64 + 1.0;
            let sum =
                |channel: usize| members.iter().map(|member| (member[channel] + pivot[channel]) / 2.0).sum::<f64>();
            let expected: Vec<f64> = (0..head_dim).map(|c| (pivot[c] + sum(c)) / count).collect();
            let nmse = nmse(&keys[index * head_dim..][..head_dim], &expected);
            ensure!(nmse <= MOST_NMSE, Wrong(format!("merged key {index}: NMSE {nmse:.1e} against the host's")));
        }
        Ok(())
    }

    /// Holds stored keys and values of the tokens of `kept`, `[kv_heads, k]`, against the prompt's own.
    ///
    /// # Errors
    /// [`Wrong`] when they are others.
    pub fn check_stored(&self, format: &SegmentFormat, stored: [&[f32]; 2], kept: &[u32]) -> Result<()> {
        let (k, dim) = (kept.len() / self.shape.kv_heads(), self.shape.head_dim());
        let of_tensors = [("keys", &self.host_keys), ("values", &self.host_values)];
        for ((what, host), stored) in of_tensors.into_iter().zip(stored) {
            let row = |(i, &token): (usize, &u32)| host[self.rows.row(token as usize, i / k)..][..dim].iter();
            let expected: Vec<f64> = kept.iter().enumerate().flat_map(row).map(|x| f64::from(x.to_f32())).collect();
            check_rows(&format!("{what} of {k} tokens in {format}"), (format, dim), stored, &expected)?;
        }
        Ok(())
    }

    /// Holds what a cache stores in its first layer of this prompt, evicted, merged and packed, against what
    /// [`Prompt::check_merge`] checks.
    ///
    /// # Errors
    /// [`Wrong`] when it is something else; when the backend fails.
    pub async fn check_compressed(
        &self,
        backend: &B,
        cache: &ModelCache<B>,
        selected: &LayerSelection,
        merging: Merging,
    ) -> Result<()>
    where
        B: Clone,
    {
        let (heads, tokens) = (self.shape.kv_heads(), self.rows.tokens);
        let of_heads = (0..heads).map(|head| evicted(selected.kept(head), tokens));
        let others = of_heads.collect::<kvpack::Result<Vec<_>>>()?.concat();
        let kept = backend.upload_indices(&selected.indices(), heads, tokens as u32).await?;
        let evicted = backend.upload_indices(&others, heads, tokens as u32).await?;
        let [keys, values] = &self.copies[0];
        let (kept, evicted) = (&kept, &evicted);
        let input = KeptAndEvicted { shape: self.shape, rows: self.rows, keys, values, kept, evicted };
        let merged = backend.merge_tokens(input, merging)?;
        let stored = cache.dequantize(0, 0)?;
        ensure!(stored.len() == 1, Wrong(format!("a compressed prompt is {} spans", stored.len())));
        let of = (&stored[0].format, self.shape.head_dim());
        for (what, stored, merged) in
            [("keys", &stored[0].keys, &merged.keys), ("values", &stored[0].values, &merged.values)]
        {
            let expected: Vec<f64> = backend.download(merged).await?.into_iter().map(f64::from).collect();
            let what = format!("{what} of the compressed prompt");
            check_rows(&what, of, &backend.download(stored).await?, &expected)?;
        }
        Ok(())
    }
}

/// Holds every row, of `dim` channels, against what was to be stored in a format.
fn check_rows(what: &str, (format, dim): (&SegmentFormat, usize), stored: &[f32], expected: &[f64]) -> Result<()> {
    let (elements, of) = (stored.len(), expected.len());
    ensure!(elements == of, Wrong(format!("{what}: {elements} elements of {of}")));
    let most = if *format == SegmentFormat::F16 { MOST_STORED_F16 } else { MOST_STORED_NMSE };
    for (row, (stored, expected)) in stored.chunks(dim).zip(expected.chunks(dim)).enumerate() {
        let nmse = nmse(stored, expected);
        ensure!(
            nmse <= most,
            Wrong(format!("{what}: row {row} is stored with NMSE {nmse:.1e}; the limit is {most:.0e}"))
        );
    }
    Ok(())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn log_sum_exp(scores: &[f64]) -> f64 {
    let largest = scores.iter().copied().fold(f64::MIN, f64::max);
    largest + scores.iter().map(|score| (score - largest).exp()).sum::<f64>().ln()
}

/// Random numbers of a bell curve, with a channel that stands out.
pub fn random(elements: usize, seed: u64) -> Vec<f16> {
    let mut random = fastrand::Rng::with_seed(seed);
    let element = |at: usize| {
        let bell: f32 = (0..3).map(|_| random.f32() - 0.5).sum();
        f16::from_f32(if at % 128 == 17 { 6.0 + bell } else { bell })
    };
    (0..elements).map(element).collect()
}

#[cfg(test)]
mod tests {
    use kvpack::Bits;
    use kvpack::cpu::Cpu;

    use super::*;

    /// A last page that holds other tokens shows, in keys and in values, however many tokens there are.
    #[test]
    fn rows_of_other_tokens_are_found() {
        let shape = AttentionShape::new(2, 1, 128).unwrap();
        let prompt = pollster::block_on(Prompt::new(&Cpu::new(), shape, 3400, 1)).unwrap();
        let (tokens, kept): (usize, Vec<u32>) = (3276, (0..3276).collect());
        let rows = |of: &[f16]| of[..tokens * 128].iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let (keys, values) = (rows(&prompt.host_keys), rows(&prompt.host_values));
        let mut late = keys.clone();
        late[3200 * 128..].copy_from_slice(&keys[..76 * 128]);
        for format in [SegmentFormat::F16, SegmentFormat::calibquant(Bits::Four)] {
            prompt.check_stored(&format, [&keys, &values], &kept).unwrap();
            prompt.check_stored(&format, [&late, &values], &kept).unwrap_err();
            prompt.check_stored(&format, [&keys, &late], &kept).unwrap_err();
        }
    }
}
