//! The chunk search of Cocktail, and attention over chunks of three precisions.

use anyhow::{Result, bail, ensure};
use kvpack::backend::SpanWrite;
use kvpack::cpu::{CpuIndices, CpuStore, States, attend_plan, quantize, unfused_attention};
use kvpack::format::Calibration;
use kvpack::plan::{self, AttendPlan, Page, QueryRun, RowLayout, Rows, SpanView, Split, StoreView};
use kvpack::policy::{ChunkPrecision, ChunkSearch, chunk_search, reorder_plan};
use kvpack::{AttentionShape, Bits, SegmentFormat, TILE_TOKENS};

use super::file::{Elements, GoldenFile};
use super::kernels::Device;
use super::stored::check_size;
use super::{Computed, Outputs, doubles};

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
    let outputs = Outputs::from([
        ("scores", doubles(&similarities)),
        ("t_low", vec![thresholds.low]),
        ("t_high", vec![thresholds.high]),
        ("precision", precision.into_iter().map(code).collect()),
    ]);
    Ok(vec![(device.named(["chunk_similarity, chunk_search", "chunk_similarity, chunk_search (wgpu)"]), outputs)])
}

/// Tokens of a chunk.
const CHUNK: usize = 32;

/// `cocktail.decode`: chunks of three precisions brought together, attended by the fused kernel and in the steps of algorithm 1.
pub fn decode(file: &GoldenFile) -> Result<Computed> {
    let [query_heads, head_dim] = file.input("q")?.axes()?;
    let [kv_heads, tokens, _] = file.input("k")?.axes()?;
    let shape = AttentionShape::new(query_heads, kv_heads, head_dim)?;
    check_size(kv_heads, tokens, head_dim)?;
    let (query, keys, values) = (file.input("q")?.f32()?, file.input("k")?.f32()?, file.input("v")?.f32()?);
    let precision = precision(file)?;
    ensure!(precision.len() * CHUNK <= tokens, "{} chunks of {CHUNK} in {tokens} tokens", precision.len());
    let order = reorder_plan(&precision);
    let mut blocks = Vec::new();
    for (of_block, format) in [
        (ChunkPrecision::Int2, SegmentFormat::kivi(Bits::Two)),
        (ChunkPrecision::Int4, SegmentFormat::kivi(Bits::Four)),
        (ChunkPrecision::F16, SegmentFormat::F16),
    ] {
        let chunks = order.iter().map(|&chunk| chunk as usize).filter(|&chunk| precision[chunk] == of_block);
        let mut of_block_tokens: Vec<usize> = chunks.flat_map(|chunk| chunk * CHUNK..(chunk + 1) * CHUNK).collect();
        if of_block == ChunkPrecision::F16 {
            of_block_tokens.extend(precision.len() * CHUNK..tokens);
        }
        if !of_block_tokens.is_empty() {
            blocks.push(Block::new(shape, format, (&keys, &values), &of_block_tokens)?);
        }
    }
    let stores: Vec<&CpuStore> = blocks.iter().map(|block| &block.store).collect();
    let planned = |calibration| {
        let views: Vec<StoreView<'_>> = blocks.iter().map(|block| block.view(calibration)).collect();
        AttendPlan::new(shape, &[QueryRun::decode(0)], &views)
    };
    let query = plan::Elements::F32(&query);
    let fused = attend_plan(&planned(None)?, &stores, query, Split::default())?;
    let unfused = unfused_attention(&planned(Some(Calibration::IDENTITY))?, &stores, query)?;
    let outputs = |states: &States| {
        Outputs::from([
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

/// The tokens of one precision in a store.
struct Block {
    store: CpuStore,
    pages: Vec<Page>,
    tokens: usize,
}

impl Block {
    /// Packs these tokens of keys and values `[kv_heads, all tokens, head_dim]`.
    fn new(shape: AttentionShape, format: SegmentFormat, rows: (&[f32], &[f32]), tokens: &[usize]) -> Result<Self> {
        let (keys, values) = rows;
        let all = keys.len() / shape.kv_heads() / shape.head_dim();
        let mut store = CpuStore::new(shape, format)?;
        let pages: Vec<Page> =
            (0..tokens.len().div_ceil(TILE_TOKENS) as u32).map(|index| Page { shard: 0, index }).collect();
        store.add_shard(pages.len() as u32)?;
        let of_head: Vec<u32> = tokens.iter().map(|&token| token as u32).collect();
        let gathered = CpuIndices::new(&of_head.repeat(shape.kv_heads()), shape.kv_heads(), all as u32)?;
        let write = SpanWrite {
            rows: RowLayout::head_major(all, &shape),
            tokens: Rows::Gather(&gathered),
            pages: &pages,
            range_slot: 0,
            centre: None,
        };
        quantize(&mut store, plan::Elements::F32(keys), plan::Elements::F32(values), write)?;
        Ok(Self { store, pages, tokens: tokens.len() })
    }

    fn view(&self, calibration: Option<Calibration>) -> StoreView<'_> {
        let span = SpanView { sequence: 0, start: 0, tokens: self.tokens, pages: &self.pages, range_slot: 0 };
        StoreView { format: *self.store.format(), calibration, spans: vec![span] }
    }
}
