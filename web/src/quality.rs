//! Quality: what packing costs on real keys and values, those in `cli/data/smollm2_kv.safetensors`.

use half::f16;
use kvpack::cache::PromptSpan;
use kvpack::cpu::{DenseSegment, exact_attention};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::{AttentionShape, Backend, Bits, Error, KvCache, Recipe, Result, SegmentFormat};
use kvpack_report::recipes;
use safetensors::SafeTensors;
use serde::Serialize;

/// The layer that is measured, the middle one of the data's three.
const LAYER: usize = 15;
/// First and last tokens that stay in f16, as people use it: a tile each.
const KEPT: usize = 128;

/// What was measured, in the words of `kvpack eval --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QualityReport {
    /// Where the attention ran.
    pub backend: String,
    /// First tokens kept in f16 whatever the format.
    pub kept_first: usize,
    /// Last tokens kept in f16 whatever the format.
    pub kept_last: usize,
    /// The layer.
    pub layer: usize,
    /// Tokens of it.
    pub tokens: usize,
    /// Queries on which the errors were measured.
    pub evaluation_queries: usize,
    /// One row for each format.
    pub formats: Vec<QualityRow>,
}

/// One format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QualityRow {
    /// The recipe that packs so; none where the format has no recipe.
    pub recipe: Option<String>,
    /// The format.
    pub format: String,
    /// Relative L2 error of the attention outputs against exact attention over the original data.
    pub error: f64,
    /// Bytes of the pages and ranges in use.
    pub bytes: u64,
    /// The same in bits per element of keys and values.
    pub bits_per_element: f64,
    /// How many times smaller than f16.
    pub times_smaller: f64,
}

/// A layer of real data, and the outputs of exact attention over it.
pub struct Quality<B: Backend> {
    shape: AttentionShape,
    tokens: usize,
    keys: B::Tensor,
    values: B::Tensor,
    queries: Vec<B::Tensor>,
    /// The outputs of all queries, `[queries, query_heads, head_dim]`.
    exact: Vec<f64>,
    report: QualityReport,
}

/// The formats that the page measures: f16, and every width with one range per channel.
pub fn formats() -> Vec<SegmentFormat> {
    [SegmentFormat::F16].into_iter().chain(Bits::ALL.into_iter().rev().map(SegmentFormat::calibquant)).collect()
}

impl<B: Backend + Clone> Quality<B> {
    /// Reads the data.
    ///
    /// # Errors
    /// [`Error::Plan`] when the file is not what the page ships; whatever the backend reports.
    pub async fn new(backend: &B, file: &[u8]) -> Result<Self> {
        let file = SafeTensors::deserialize(file).map_err(|error| broken(error.to_string()))?;
        let (key_shape, keys) = tensor(&file, "key")?;
        let (_, values) = tensor(&file, "value")?;
        let (query_shape, queries) = tensor(&file, "query_prompt")?;
        let [kv_heads, tokens, head_dim] = key_shape;
        let [query_heads, count, _] = query_shape;
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim)?;
        let (mut uploaded, mut exact) = (Vec::with_capacity(count), Vec::new());
        for query in 0..count {
            let row = |head: usize| &queries[(head * count + query) * head_dim..][..head_dim];
            let query: Vec<f32> = (0..query_heads).flat_map(row).copied().collect();
            let segment = DenseSegment { keys: &keys, values: &values, tokens, calibration: None };
            exact.extend(exact_attention(&shape, &[segment], &query)?.outputs);
            uploaded.push(backend.upload(query.as_slice().into()).await?);
        }
        let report = QualityReport {
            backend: backend.name(),
            kept_first: KEPT,
            kept_last: KEPT,
            layer: LAYER,
            tokens,
            evaluation_queries: count,
            formats: Vec::new(),
        };
        let keys = backend.upload(keys.as_slice().into()).await?;
        let values = backend.upload(values.as_slice().into()).await?;
        Ok(Self { shape, tokens, keys, values, queries: uploaded, exact, report })
    }

    /// Stores the layer in a format, attends to it, and adds the row to the report.
    ///
    /// # Errors
    /// Whatever the backend reports, and outputs whose error is not finite.
    pub async fn row(&mut self, backend: &B, format: SegmentFormat) -> Result<&QualityRow> {
        let cache = self.stored(backend, format).await?;
        let mut outputs = Vec::with_capacity(self.exact.len());
        for query in &self.queries {
            let output = cache.attend(query, ElementType::F32).await?;
            outputs.extend(cache.backend().download(&output).await?);
        }
        let error = relative_error(&outputs, &self.exact);
        if !error.is_finite() {
            let message = format!("attention over {format} has an error of {error}, so the device computes wrongly");
            return Err(Error::Gpu { message });
        }
        let memory = cache.memory();
        let protected = |name| format!("{name}+sink={KEPT}+window={KEPT}");
        self.report.formats.push(QualityRow {
            recipe: match format {
                SegmentFormat::F16 => Some("f16".into()),
                _ => recipes::of_format(&format, &self.shape).map(protected),
            },
            format: format.to_string(),
            error,
            bytes: memory.in_use_bytes(),
            bits_per_element: memory.bits_per_element(),
            times_smaller: 16.0 / memory.bits_per_element(),
        });
        Ok(&self.report.formats[self.report.formats.len() - 1])
    }

    async fn stored(&self, backend: &B, format: SegmentFormat) -> Result<KvCache<B>> {
        let mut cache = KvCache::new(backend.clone(), self.shape, 1, Recipe::pack_all(format))?;
        let rows = RowLayout::head_major(self.tokens, &self.shape);
        let (begin, end) = (KEPT, self.tokens - KEPT);
        let prompt = [
            PromptSpan::f16(TokenRange::new(0, begin)?),
            PromptSpan::packed(TokenRange::new(begin, end)?),
            PromptSpan::f16(TokenRange::new(end, self.tokens)?),
        ];
        cache.prefill(0, rows, &self.keys, &self.values, &prompt).await?;
        Ok(cache)
    }

    /// What was measured so far.
    pub fn report(&self) -> &QualityReport {
        &self.report
    }
}

fn relative_error(outputs: &[f32], exact: &[f64]) -> f64 {
    let error: f64 = outputs.iter().zip(exact).map(|(&got, want)| (f64::from(got) - want).powi(2)).sum();
    let size: f64 = exact.iter().map(|want| want * want).sum();
    (error / size).sqrt()
}

/// A tensor of the layer: three axes of f16.
fn tensor(file: &SafeTensors<'_>, name: &str) -> Result<([usize; 3], Vec<f32>)> {
    let name = format!("layer{LAYER}.{name}");
    let view = file.tensor(&name).map_err(|error| broken(format!("{name}: {error}")))?;
    let shape = view.shape().try_into().map_err(|_| broken(format!("{name} has the shape {:?}", view.shape())))?;
    if view.dtype() != safetensors::Dtype::F16 {
        return Err(broken(format!("{name} has elements of {:?}, F16 is expected", view.dtype())));
    }
    let data = view.data().chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
    Ok((shape, data))
}

fn broken(reason: String) -> Error {
    Error::Plan { what: "real keys and values", reason: format!("{reason}; reload the page, its data are incomplete") }
}

#[cfg(test)]
mod tests {
    use kvpack::backend::Device;
    use kvpack::cpu::Cpu;

    use super::*;

    #[test]
    fn fewer_bits_are_smaller_and_lose_more() {
        let file = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../cli/data/smollm2_kv.safetensors")).unwrap();
        let cpu = Cpu::new();
        let mut quality = pollster::block_on(Quality::new(&cpu, &file)).unwrap();
        for format in [SegmentFormat::F16, SegmentFormat::calibquant(Bits::Eight), SegmentFormat::calibquant(Bits::Two)]
        {
            pollster::block_on(quality.row(&cpu, format)).unwrap();
        }
        let rows = &quality.report().formats;
        assert!(rows[0].error < 1e-3 && rows[0].error < rows[1].error && rows[1].error < rows[2].error, "{rows:?}");
        assert!(rows[2].bytes < rows[1].bytes && rows[1].bytes < rows[0].bytes, "{rows:?}");
        assert!((rows[0].times_smaller - 1.0).abs() < 1e-9, "{rows:?}");
        assert!(pollster::block_on(Quality::new(&cpu, b"nothing")).is_err());
        let nan = vec![f32::NAN; quality.queries[0].elements().len()];
        quality.queries[0] = pollster::block_on(cpu.upload(nan.as_slice().into())).unwrap();
        let error = pollster::block_on(quality.row(&cpu, SegmentFormat::F16)).unwrap_err();
        assert!(error.to_string().contains("an error of NaN"), "{error}");
        assert_eq!(quality.report().formats.len(), 3);
    }
}
