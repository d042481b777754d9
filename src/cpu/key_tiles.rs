//! Scores of one tile: the part that `scores` and `attend` share.

use super::prepare_query::GroupQueries;
use super::simd::{Kernel, dispatch};
use super::store::Tile;
use super::tile_lines::{BLOCK, Factor, TileLines, Unpacked};
use crate::format::sketch::FieldLevels;
use crate::format::{CodeRange, Grouping, TILE_TOKENS, TensorFormat};

/// Multiplies the queries of one KV head with tiles of keys. Holds the buffers for one thread.
pub(super) struct KeyTiles<'a> {
    grouping: Option<Grouping>,
    /// What codes stand for, relative to the norms of their token; nothing where they stand for themselves.
    levels: FieldLevels,
    head_dim: usize,
    lines: &'a TileLines,
    unpacked: Unpacked,
    /// The signs of sketches.
    signs: Unpacked,
    /// The query scaled for one group of tokens.
    scaled: Vec<Factor>,
    ranges: Vec<CodeRange>,
}

impl<'a> KeyTiles<'a> {
    pub(super) fn new(format: TensorFormat, head_dim: usize, lines: &'a TileLines) -> Self {
        Self {
            grouping: format.grouping(),
            levels: levels(&format, head_dim),
            head_dim,
            lines,
            unpacked: vec![[0.0; BLOCK]; lines.steps()],
            signs: vec![[0.0; BLOCK]; lines.steps()],
            scaled: vec![Factor::default(); lines.steps()],
            ranges: Vec::new(),
        }
    }

    /// Scores `[query head of the group][128]` of the first `tokens` tokens of a tile; the others are left alone.
    pub(super) fn score(&mut self, tile: Tile<'_>, tokens: usize, queries: GroupQueries<'_>, scores: &mut [f32]) {
        self.ranges.clear();
        self.ranges.extend(tile.ranges.iter().map(|&word| CodeRange::from_word(word)));
        for (block, first) in (0..tokens).step_by(self.lines.block_lines()).enumerate() {
            self.lines.unpack(tile.codes, block, &mut self.unpacked);
            if !self.levels.signs.is_empty() {
                self.signs.copy_from_slice(&self.unpacked);
                look_up(&self.levels.signs, &mut self.signs);
            }
            look_up(&self.levels.levels, &mut self.unpacked);
            self.apply_channel_groups(first);
            let end = tokens.min(first + self.lines.block_lines());
            for (head, scores) in scores.chunks_exact_mut(TILE_TOKENS).enumerate() {
                let factor = &queries.factors[head * self.lines.steps()..][..self.lines.steps()];
                self.score_block(first, factor, queries.biases[head], &mut scores[first..end]);
                if !self.levels.signs.is_empty() {
                    let factor = &queries.sketch_factors[head * self.lines.steps()..][..self.lines.steps()];
                    self.add_sketch_scores(first, factor, &mut scores[first..end]);
                }
            }
        }
    }

    /// Scores of one block of tokens for one query head.
    fn score_block(&mut self, first: usize, factor: &[Factor], bias: f32, scores: &mut [f32]) {
        let mut products = [0.0; BLOCK];
        let sketched = !self.levels.signs.is_empty();
        match self.grouping {
            Some(Grouping::ChannelTokens(group_tokens)) => {
                // A block may span several groups of tokens, each with a query of its own.
                let group_end = |token: usize| (token / group_tokens + 1) * group_tokens;
                let mut start = first;
                while start < first + scores.len() {
                    let end = group_end(start).min(first + scores.len());
                    let ranges = &self.ranges[start / group_tokens * self.head_dim..][..self.head_dim];
                    let bias = scale_query(self.lines, factor, ranges, &mut self.scaled);
                    self.lines.products(&self.unpacked, &self.scaled, &mut products);
                    for token in start - first..end - first {
                        scores[token] = products[token] + bias;
                    }
                    start = end;
                }
            }
            Some(Grouping::Token) => {
                self.lines.products(&self.unpacked, factor, &mut products);
                for ((score, product), range) in scores.iter_mut().zip(products).zip(&self.ranges[first..]) {
                    *score = range.scale * product + if sketched { 0.0 } else { range.min * bias };
                }
            }
            Some(Grouping::Channel | Grouping::TokenChannels(_)) | None => {
                self.lines.products(&self.unpacked, factor, &mut products);
                scores.iter_mut().zip(products).for_each(|(score, product)| *score = product + bias);
            }
        }
    }

    /// Adds what the sketches say of what the levels left.
    fn add_sketch_scores(&self, first: usize, factor: &[Factor], scores: &mut [f32]) {
        let mut products = [0.0; BLOCK];
        self.lines.products(&self.signs, factor, &mut products);
        for ((score, product), range) in scores.iter_mut().zip(products).zip(&self.ranges[first..]) {
            *score += range.min * product;
        }
    }

    /// With ranges per token and group of channels the scale changes within a line: the codes become values.
    fn apply_channel_groups(&mut self, first: usize) {
        let Some(Grouping::TokenChannels(channels)) = self.grouping else { return };
        for (step, unpacked) in self.unpacked.iter_mut().enumerate() {
            let elements = self.lines.elements(step);
            for (line, values) in unpacked.chunks_exact_mut(elements.len()).enumerate() {
                for (value, &channel) in values.iter_mut().zip(elements) {
                    let group = channel.min(self.head_dim - 1) / channels; // padding: any group, its query is 0
                    let range = self.ranges[group * TILE_TOKENS + first + line];
                    *value = range.scale * *value + range.min;
                }
            }
        }
    }
}

/// What the fields of a codebook stand for, or nothing.
pub(super) fn levels(format: &TensorFormat, head_dim: usize) -> FieldLevels {
    match format {
        TensorFormat::Codebook(codebook) => codebook.field_levels(head_dim),
        _ => FieldLevels { levels: Vec::new(), signs: Vec::new() },
    }
}

/// Replaces unpacked codes by their levels, where there are levels.
pub(super) fn look_up(levels: &[f32], unpacked: &mut Unpacked) {
    if !levels.is_empty() {
        dispatch(LookUp { levels, unpacked });
    }
}

struct LookUp<'a> {
    levels: &'a [f32],
    unpacked: &'a mut [[f32; BLOCK]],
}

impl Kernel for LookUp<'_> {
    /// By comparing all codes of an array with one level after the other, in vectors; an index per code would take
    /// them one by one.
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for codes in self.unpacked {
            let mut values = [self.levels[0]; BLOCK];
            for (code, &level) in self.levels.iter().enumerate().skip(1) {
                let code = code as f32;
                for (value, &at) in values.iter_mut().zip(codes.iter()) {
                    *value = if at >= code { level } else { *value };
                }
            }
            *codes = values;
        }
    }
}

/// Post-scaling by the ranges of a group of tokens: writes `q⊙s` and returns `q·m`.
fn scale_query(lines: &TileLines, query: &[Factor], ranges: &[CodeRange], scaled: &mut [Factor]) -> f32 {
    let mut bias = 0.0;
    for (step, (scaled, query)) in scaled.iter_mut().zip(query).enumerate() {
        let elements = lines.elements(step);
        for (i, (scaled, q)) in scaled.iter_mut().zip(query).enumerate() {
            let range = ranges.get(elements[i % elements.len()]).copied().unwrap_or_default();
            *scaled = q * range.scale;
            if i < elements.len() {
                bias += q * range.min;
            }
        }
    }
    bias
}
