//! The chunk search of Cocktail, and attention over chunks of three precisions.

use anyhow::{Result, bail, ensure};
use kvpack::backend::{Device as _, FilledStores, NewSpan, SpanSource};
use kvpack::cpu::{Cpu, CpuIndices, States, attend_plan, unfused_attention};
use kvpack::format::Calibration;
use kvpack::plan::{self, QueryRun, RowLayout, Rows, Split};
use kvpack::policy::{ChunkPrecision, ChunkSearch, chunk_search, reorder_plan};
use kvpack::{AttentionShape, Bits, SegmentFormat};
use pollster::block_on;

use super::file::{Elements, GoldenFile};
use super::kernels::Device;
use super::stored::check_size;
use super::{Computed, doubles, named};

/// `cocktail.search`: eq. 1-3 and the assignment of algorithm 1.
pub fn search(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let similarities = device.chunk_similarity(&file.input("query")?.f32()?, &file.input("chunks")?.f32()?)?;
    let search = ChunkSearch { alpha: file.number("alpha")?, beta: file.number("beta")? };
    let (thresholds, precision) = chunk_search(&similarities, search)?;
    let code = |precision| match precision {
        ChunkPrecision::Int2 => 0.0,
        ChunkPrecision::Int4 => 1.0,
        ChunkPrecision::F16 => 2.0,
    };
    let outputs = named([
        ("scores", doubles(&similarities)),
        ("t_low", vec![thresholds.low]),
        ("t_high", vec![thresholds.high]),
        ("precision", precision.into_iter().map(code).collect()),
    ]);
    Ok(vec![(device.named(["chunk_similarity, chunk_search", "chunk_similarity, chunk_search (wgpu)"]), outputs)])
}

/// Tokens of a chunk.
const CHUNK: usize = 32;

/// `cocktail.decode`: chunks of three precisions brought together, attended by the fused kernel and in the steps
/// of algorithm 1.
pub fn decode(file: &GoldenFile) -> Result<Computed> {
    let [query_heads, head_dim] = file.input("q")?.axes()?;
    let [kv_heads, tokens, _] = file.input("k")?.axes()?;
    let shape = AttentionShape::new(query_heads, kv_heads, head_dim)?;
    check_size(kv_heads, tokens, head_dim)?;
    let (query, keys, values) = (file.input("q")?.f32()?, file.input("k")?.f32()?, file.input("v")?.f32()?);
    let precision = precision(file)?;
    ensure!(precision.len() * CHUNK <= tokens, "{} chunks of {CHUNK} in {tokens} tokens", precision.len());
    let order = reorder_plan(&precision)?;
    let formats = [
        (ChunkPrecision::Int2, SegmentFormat::kivi(Bits::Two)),
        (ChunkPrecision::Int4, SegmentFormat::kivi(Bits::Four)),
        (ChunkPrecision::F16, SegmentFormat::F16),
    ];
    // The tokens of every store, in the order in which they are stored.
    let mut gathered = Vec::new();
    for (store, (of_store, _)) in formats.iter().enumerate() {
        let chunks = order.iter().copied().filter(|&chunk| precision[chunk as usize] == *of_store);
        let mut of_head: Vec<u32> = chunks.flat_map(|chunk| chunk * CHUNK as u32..(chunk + 1) * CHUNK as u32).collect();
        if *of_store == ChunkPrecision::F16 {
            of_head.extend((precision.len() * CHUNK) as u32..tokens as u32);
        }
        if !of_head.is_empty() {
            let indices = CpuIndices::new(&of_head.repeat(kv_heads), kv_heads, tokens as u32)?;
            gathered.push((NewSpan { store, sequence: 0, start: 0, tokens: of_head.len() }, indices));
        }
    }

    let cpu = Cpu::new();
    let [keys, values] =
        [block_on(cpu.upload(keys.as_slice().into()))?, block_on(cpu.upload(values.as_slice().into()))?];
    let rows = RowLayout::head_major(tokens, &shape);
    let source = |indices| SpanSource { rows, tokens: Rows::Gather(indices), keys: &keys, values: &values };
    let new: Vec<_> = gathered.iter().map(|(span, indices)| (*span, source(indices))).collect();
    let mut stores = FilledStores::new(&cpu, shape, &formats.map(|(_, format)| format))?;
    let spans = block_on(stores.fill(&cpu, &new))?;
    let planned = |calibration| stores.plan(&[QueryRun::decode(0)], spans.iter(), &[calibration; 3]);
    let query = plan::Elements::F32(&query);
    let fused = attend_plan(&planned(None)?, &stores.stores(), query, Split::default())?;
    let unfused = unfused_attention(&planned(Some(Calibration::IDENTITY))?, &stores.stores(), query)?;
    let outputs = |states: &States| {
        named([
            ("output", doubles(states.outputs())),
            ("lse", doubles(states.lse())),
            ("order", order.iter().map(|&chunk| f64::from(chunk)).collect()),
        ])
    };
    Ok(vec![("attend", outputs(&fused)), ("unfused_attention", outputs(&unfused))])
}

fn precision(file: &GoldenFile) -> Result<Vec<ChunkPrecision>> {
    let Elements::U8(codes) = &file.input("precision")?.elements else { bail!("the precisions are no bytes") };
    let precision = |code: &u8| match code {
        0 => Ok(ChunkPrecision::Int2),
        1 => Ok(ChunkPrecision::Int4),
        2 => Ok(ChunkPrecision::F16),
        other => bail!("precision {other} of a chunk"),
    };
    codes.iter().map(precision).collect()
}
