//! The command `bridge`. A decode loop reads candle's tensors in place, and its outputs are compared with candle's own
//! attention.
//!
//! A batch gets a prompt, then a token for every sequence and step. Queries, keys and values of a step are parts of one
//! tensor, as the fused projection of a model leaves them; kvpack reads them there and writes its output into a
//! tensor of candle. The program fails if an output is too far from candle's attention in f32 over the same keys and
//! values.

use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::{D, DType, Device, Tensor};
use kvpack::cache::{KvCache, PromptSpan, Recipe};
use kvpack::cuda::{AttendStep, AttendTensors, Cuda};
use kvpack::plan::{QueryLayout, QueryRun, RowLayout, TokenRange};
use kvpack::{AttentionShape, Bits, SegmentFormat};
use pollster::block_on;

use crate::attention::lend;

const SEQUENCES: usize = 8;
const PROMPT: usize = 4096;
const STEPS: usize = 140; // past a tile, so that windows are packed
const QUERY_HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
/// Elements of a row of queries, keys and values.
const FUSED: usize = (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM;
/// Repeats of what is timed.
const REPEATS: usize = 200;

/// Keys and values of every sequence so far, `[sequences, tokens, kv_heads · head_dim]`, as candle keeps them.
struct History {
    keys: Tensor,
    values: Tensor,
}

impl History {
    /// candle's attention of `[sequences, query_heads · head_dim]` queries, in the type of `of`.
    fn attend(&self, queries: &Tensor, of: DType) -> Result<Tensor> {
        let heads = |x: &Tensor| -> Result<Tensor> {
            let x = x.to_dtype(of)?.reshape((SEQUENCES, (), KV_HEADS, HEAD_DIM))?;
            Ok(x.transpose(1, 2)?.contiguous()?)
        };
        self.attend_heads(queries, &heads(&self.keys)?, &heads(&self.values)?)
    }

    /// The same with keys and values `[sequences, kv_heads, tokens, head_dim]`.
    fn attend_heads(&self, queries: &Tensor, keys: &Tensor, values: &Tensor) -> Result<Tensor> {
        let queries = queries.to_dtype(keys.dtype())?;
        let queries = queries.reshape((SEQUENCES, KV_HEADS, QUERY_HEADS / KV_HEADS, HEAD_DIM))?;
        let scores = (queries.matmul(&keys.t()?)? / (HEAD_DIM as f64).sqrt())?;
        let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        Ok(weights.matmul(values)?.reshape((SEQUENCES, QUERY_HEADS * HEAD_DIM))?)
    }
}

/// What came of one type and recipe.
struct Outcome {
    nmse: f64,
    kvpack: f64,
    candle: f64,
}

fn run(backend: &Cuda, device: &Device, dtype: DType, recipe: Recipe) -> Result<Outcome> {
    let shape = AttentionShape::new(QUERY_HEADS, KV_HEADS, HEAD_DIM)?;
    let random = |tokens, row| -> Result<Tensor> {
        Ok(Tensor::randn(0f32, 1f32, (SEQUENCES, tokens, row), device)?.to_dtype(dtype)?)
    };
    let mut cache = KvCache::new(backend.clone(), shape, SEQUENCES, recipe)?;
    let mut history =
        History { keys: random(PROMPT, KV_HEADS * HEAD_DIM)?, values: random(PROMPT, KV_HEADS * HEAD_DIM)? };
    let prompt = [PromptSpan::packed(TokenRange::new(0, PROMPT)?)];
    for sequence in 0..SEQUENCES {
        let (keys, values) = (history.keys.get(sequence)?, history.values.get(sequence)?);
        let rows = RowLayout::token_major(PROMPT, &shape);
        block_on(cache.prefill(sequence, rows, &lend(&keys)?, &lend(&values)?, &prompt))?;
    }

    // Rows of queries, keys and values begin in the same row of the projection, behind one another.
    let rows = RowLayout { tokens: SEQUENCES, token_stride: FUSED, head_stride: HEAD_DIM };
    let query_rows = QueryLayout { first: 0, stride: FUSED };
    let (first_key, first_value) = (QUERY_HEADS * HEAD_DIM, (QUERY_HEADS + KV_HEADS) * HEAD_DIM);
    let all = QueryRun::decode_batch(SEQUENCES);
    let mut last = None;
    for _ in 0..STEPS {
        let projected = random(1, FUSED)?;
        let lent = lend(&projected)?;
        let part = |first| lent.slice(first, rows.elements_needed(&shape));
        block_on(cache.append(rows, &part(first_key)?, &part(first_value)?))?;
        let output = Tensor::zeros((SEQUENCES, QUERY_HEADS * HEAD_DIM), dtype, device)?;
        let step = AttendStep::new(backend, &cache.plan(&all)?)?.with_query_layout(query_rows);
        let tensors = AttendTensors { queries: &lent, output: &lend(&output)?, lse: None };
        let bound = step.bind(backend, &cache.stores(), tensors)?;
        bound.launch()?;

        let narrow = |first| projected.narrow(2, first, KV_HEADS * HEAD_DIM);
        history.keys = Tensor::cat(&[&history.keys, &narrow(first_key)?], 1)?;
        history.values = Tensor::cat(&[&history.values, &narrow(first_value)?], 1)?;
        last = Some((bound, projected.narrow(2, 0, QUERY_HEADS * HEAD_DIM)?.contiguous()?, output));
    }
    let Some((bound, queries, output)) = last else { anyhow::bail!("there were no steps") };

    let expected = history.attend(&queries, DType::F32)?;
    let output = output.to_dtype(DType::F32)?;
    let sum = |x: Tensor| -> Result<f64> { Ok(f64::from(x.sqr()?.sum_all()?.to_scalar::<f32>()?)) };
    let nmse = sum((output - &expected)?)? / sum(expected)?;

    let timed = |work: &dyn Fn() -> Result<()>| -> Result<f64> {
        work()?;
        device.synchronize()?;
        let start = Instant::now();
        (0..REPEATS).try_for_each(|_| work())?;
        device.synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / REPEATS as f64)
    };
    let heads = |x: &Tensor| x.reshape((SEQUENCES, (), KV_HEADS, HEAD_DIM))?.transpose(1, 2)?.contiguous();
    let (keys, values) = (heads(&history.keys)?, heads(&history.values)?);
    let kvpack = timed(&|| Ok(bound.launch()?))?;
    let candle = timed(&|| history.attend_heads(&queries, &keys, &values).map(drop))?;
    Ok(Outcome { nmse, kvpack, candle })
}

/// Compares and times both.
pub fn check(backend: &Cuda, device: &Device) -> Result<()> {
    println!(
        "{SEQUENCES} sequences of {} tokens, {QUERY_HEADS} query over {KV_HEADS} KV heads of {HEAD_DIM}",
        PROMPT + STEPS
    );
    // The largest errors: of rounding the output; of four bits, on data without structure.
    let formats = [
        (SegmentFormat::F16, [1e-6, 1e-5]),
        (SegmentFormat::saw_int4(), [0.1; 2]),
        (SegmentFormat::per_channel(Bits::Four), [0.1; 2]),
    ];
    let mut failed = false;
    for (format, limits) in formats {
        for (dtype, limit) in [DType::F16, DType::BF16].into_iter().zip(limits) {
            let Outcome { nmse, kvpack, candle } = run(backend, device, dtype, Recipe::pack_all(format))?;
            let passed = nmse <= limit;
            failed |= !passed;
            let verdict = if passed { "ok" } else { "FAILED" };
            println!(
                "{dtype:?} {format}: NMSE {nmse:.1e} (at most {limit:.0e}) {verdict}; kvpack {kvpack:.1} µs, candle {candle:.1} µs"
            );
        }
    }
    ensure!(!failed, "an output is too far from that of candle");
    Ok(())
}
