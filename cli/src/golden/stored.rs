//! One head of a golden file in a store, packed by the kernel.

use anyhow::{Result, ensure};
use kvpack::backend::{Device, FilledStores, NewSpan, SpanSource};
use kvpack::cpu::Cpu;
use kvpack::format::interchange::msb_bytes;
use kvpack::format::{CodeRange, KeyOrValue, TensorFormat};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::{AttentionShape, SegmentFormat, TILE_TOKENS};
use pollster::block_on;

/// Elements of whole tiles that a file may ask to store: tiles are of 128 tokens and at least 64 channels, however few
/// of them the file fills.
const MOST_STORED: usize = 1 << 22;

/// Checks that the tiles of some rows are not too many.
pub fn check_size(heads: usize, tokens: usize, head_dim: usize) -> Result<()> {
    let of_head = tokens.div_ceil(TILE_TOKENS).saturating_mul(TILE_TOKENS * head_dim);
    let elements = heads.saturating_mul(of_head);
    ensure!(
        elements <= MOST_STORED,
        "{heads} heads of {tokens} tokens fill tiles of {elements} elements; at most {MOST_STORED} are stored"
    );
    Ok(())
}

/// What the kernel `quantize` makes of the rows of one head.
pub struct Packed {
    /// Codes `[tokens, head_dim]`.
    pub codes: Vec<u8>,
    /// What they decode to, `[tokens, head_dim]`.
    pub decoded: Vec<f32>,
    format: TensorFormat,
    head_dim: usize,
    /// The words of ranges next to each tile.
    ranges: Vec<Vec<u32>>,
}

impl Packed {
    /// Packs rows `[tokens, head_dim]` of one head in a format that has ranges next to the tiles.
    pub fn new(format: TensorFormat, which: KeyOrValue, head_dim: usize, rows: &[f32]) -> Result<Self> {
        let shape = AttentionShape::new(1, 1, head_dim)?;
        let tokens = rows.len() / head_dim;
        check_size(1, tokens, head_dim)?;
        let cpu = Cpu::new();
        let rows = block_on(cpu.upload(rows.into()))?;
        let (layout, all) = (RowLayout::token_major(tokens, &shape), TokenRange::new(0, tokens)?.into());
        let source = SpanSource { rows: layout, tokens: all, keys: &rows, values: &rows };
        let mut stores = FilledStores::new(&cpu, shape, &[SegmentFormat { key: format, value: format }])?;
        let filled = block_on(stores.fill(&cpu, &[(NewSpan { store: 0, sequence: 0, start: 0, tokens }, source)]))?;
        let (keys, values) = block_on(stores.read(&cpu, &filled[0]))?;
        let decoded = match which {
            KeyOrValue::Key => keys,
            KeyOrValue::Value => values,
        };
        let (mut codes, mut ranges) = (Vec::new(), Vec::new());
        for (tile, &page) in filled[0].pages.iter().enumerate() {
            let (words, beside) = stores.stores()[0].tile_words(which, page, 0)?;
            let in_tile = TILE_TOKENS.min(tokens - tile * TILE_TOKENS);
            codes.extend(msb_bytes::codes_from_tile(which, &format, head_dim, words, in_tile)?);
            ranges.push(beside.to_vec());
        }
        Ok(Self { codes, decoded, format, head_dim, ranges })
    }

    /// The stored range of an element.
    pub fn range(&self, token: usize, channel: usize) -> CodeRange {
        let at = self.format.range_index(self.head_dim, token % TILE_TOKENS, channel);
        CodeRange::from_word(self.ranges[token / TILE_TOKENS][at])
    }
}
