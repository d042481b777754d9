//! Plain attention.

use anyhow::Result;
use kvpack::backend::{Device, FilledStores, NewSpan, SpanSource};
use kvpack::cpu::{Cpu, DenseSegment, attend_plan, exact_attention, plain_attention};
use kvpack::plan::{self, QueryRun, RowLayout, Split, TokenRange};
use kvpack::{AttentionShape, SegmentFormat};
use pollster::block_on;

use super::file::{Elements, GoldenFile, part};
use super::stored::check_size;
use super::{Outputs, named};

/// `attention.decode`: by the f64 oracle, by plain f32 attention, and where the input is f16 (so that a cache holds it
/// without loss) by the f16 kernels.
pub fn decode(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    let [batch, query_heads, head_dim] = file.input("q")?.axes()?;
    let [_, kv_heads, tokens, _] = file.input("k")?.axes()?;
    let shape = AttentionShape::new(query_heads, kv_heads, head_dim)?;
    check_size(query_heads.saturating_mul(batch), tokens, head_dim)?;
    let is_f16 = matches!(file.input("k")?.elements, Elements::F16(_));
    let (queries, keys, values) = (file.input("q")?.f32()?, file.input("k")?.f32()?, file.input("v")?.f32()?);

    let (mut exact, mut plain, mut packed) = (Partial::default(), Partial::default(), Partial::default());
    let rows = kv_heads * tokens * head_dim;
    for sequence in 0..batch {
        let query = part(&queries, sequence, query_heads * head_dim)?;
        let (keys, values) = (part(&keys, sequence, rows)?, part(&values, sequence, rows)?);
        let state = exact_attention(&shape, &[DenseSegment { keys, values, tokens, calibration: None }], query)?;
        exact.add(state.outputs, state.lse);
        let state = plain_attention(&shape, keys, values, tokens, query)?;
        plain.add_f32(state.outputs(), state.lse());
        if is_f16 {
            let state = f16_attention(shape, keys, values, tokens, query)?;
            packed.add_f32(state.outputs(), state.lse());
        }
    }
    let mut kernels = vec![("exact_attention", exact.outputs()), ("plain_attention", plain.outputs())];
    if is_f16 {
        kernels.push(("attend f16", packed.outputs()));
    }
    Ok(kernels)
}

/// Attention through an f16 store.
fn f16_attention(
    shape: AttentionShape,
    keys: &[f32],
    values: &[f32],
    tokens: usize,
    query: &[f32],
) -> Result<kvpack::cpu::States> {
    let cpu = Cpu::new();
    let [keys, values] = [block_on(cpu.upload(keys.into()))?, block_on(cpu.upload(values.into()))?];
    let (rows, tokens_of) = (RowLayout::head_major(tokens, &shape), TokenRange::new(0, tokens)?.into());
    let source = SpanSource { rows, tokens: tokens_of, keys: &keys, values: &values };
    let mut stores = FilledStores::new(&cpu, shape, &[SegmentFormat::F16])?;
    let spans = block_on(stores.fill(&cpu, &[(NewSpan { store: 0, sequence: 0, start: 0, tokens }, source)]))?;
    let plan = stores.plan(&[QueryRun::decode(0)], spans.iter(), &[])?;
    Ok(attend_plan(&plan, &stores.stores(), plan::Elements::F32(query), Split::default())?)
}

/// Outputs and log-sum-exps, sequence after sequence.
#[derive(Default)]
struct Partial {
    outputs: Vec<f64>,
    lse: Vec<f64>,
}

impl Partial {
    fn add(&mut self, outputs: Vec<f64>, lse: Vec<f64>) {
        self.outputs.extend(outputs);
        self.lse.extend(lse);
    }

    fn add_f32(&mut self, outputs: &[f32], lse: &[f32]) {
        self.outputs.extend(outputs.iter().map(|&x| f64::from(x)));
        self.lse.extend(lse.iter().map(|&x| f64::from(x)));
    }

    fn outputs(self) -> Outputs {
        named([("output", self.outputs), ("lse", self.lse)])
    }
}
