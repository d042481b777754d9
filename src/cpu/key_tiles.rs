//! Scores of one tile: the part that `scores` and `attend` share.

use super::prepare_query::GroupQueries;
use super::store::Tile;
use super::tile_lines::{LINE_BLOCK, LineProducts, TileLines};
use crate::format::{CodeRange, Grouping, TILE_TOKENS, TensorFormat};

/// Multiplies the queries of one KV head with tiles of keys. Holds the buffers for one thread.
pub(super) struct KeyTiles<'a> {
    format: TensorFormat,
    head_dim: usize,
    lines: &'a TileLines,
    unpacked: Vec<f32>,
    factor: Vec<f32>,
    ranges: Vec<CodeRange>,
    sums: [[f32; 4]; LINE_BLOCK],
}

impl<'a> KeyTiles<'a> {
    pub(super) fn new(format: TensorFormat, head_dim: usize, lines: &'a TileLines) -> Self {
        Self {
            format,
            head_dim,
            lines,
            unpacked: vec![0.0; LINE_BLOCK * lines.positions()],
            factor: vec![0.0; lines.positions()],
            ranges: Vec::new(),
            sums: [[0.0; 4]; LINE_BLOCK],
        }
    }

    /// Scores `[query head of the group][128]` of the first `tokens` tokens of a tile; the others are left alone.
    pub(super) fn score(&mut self, tile: Tile<'_>, tokens: usize, queries: GroupQueries<'_>, scores: &mut [f32]) {
        self.ranges.clear();
        self.ranges.extend(tile.ranges.iter().map(|&word| CodeRange::from_word(word)));
        for first in (0..tokens).step_by(LINE_BLOCK) {
            let count = LINE_BLOCK.min(tokens - first);
            self.lines.unpack(tile.codes, first, count, &mut self.unpacked);
            self.apply_channel_groups(first, count);
            for (head, scores) in scores.chunks_exact_mut(TILE_TOKENS).enumerate() {
                let factor = &queries.factors[head * self.lines.positions()..][..self.lines.positions()];
                self.score_block(first, count, factor, queries.biases[head], &mut scores[first..first + count]);
            }
        }
    }

    /// Scores of one block of tokens for one query head.
    fn score_block(&mut self, first: usize, count: usize, factor: &[f32], bias: f32, scores: &mut [f32]) {
        let (mut factor, mut bias) = (factor, bias);
        let grouping = self.format.affine().map(|affine| affine.grouping);
        if let Some(Grouping::ChannelTokens(tokens)) = grouping {
            let ranges = &self.ranges[first / tokens * self.head_dim..][..self.head_dim];
            bias = scale_factor(factor, ranges, self.lines.order(), &mut self.factor);
            factor = &self.factor;
        }
        let positions = self.lines.positions();
        let sums = &mut self.sums[..count];
        LineProducts { lines: &self.unpacked[..count * positions], factor, sums }.compute();
        let products = self.sums.iter().map(|[a, b, c, d]| (a + b) + (c + d));
        if grouping == Some(Grouping::Token) {
            let query_sum: f32 = factor.iter().sum();
            for ((score, product), range) in scores.iter_mut().zip(products).zip(&self.ranges[first..]) {
                *score = range.scale * product + range.min * query_sum;
            }
        } else {
            scores.iter_mut().zip(products).for_each(|(score, product)| *score = product + bias);
        }
    }

    /// With ranges per token and group of channels the scale changes within a line: the codes become values.
    fn apply_channel_groups(&mut self, first: usize, count: usize) {
        let Some(Grouping::TokenChannels(channels)) = self.format.affine().map(|affine| affine.grouping) else {
            return;
        };
        let positions = self.lines.positions();
        for (i, line) in self.unpacked.chunks_exact_mut(positions).take(count).enumerate() {
            for (value, &channel) in line.iter_mut().zip(self.lines.order()) {
                let group = channel.min(self.head_dim - 1) / channels; // padding: any group, its query is 0
                let range = self.ranges[group * TILE_TOKENS + first + i];
                *value = range.scale * *value + range.min;
            }
        }
    }
}

/// Post-scaling by the ranges of a group of tokens: writes `q⊙s` and returns `q·m`.
fn scale_factor(factor: &[f32], ranges: &[CodeRange], order: &[usize], scaled: &mut [f32]) -> f32 {
    let mut bias = 0.0;
    for ((scaled, q), &channel) in scaled.iter_mut().zip(factor).zip(order) {
        let range = ranges.get(channel).copied().unwrap_or_default();
        *scaled = q * range.scale;
        bias += q * range.min;
    }
    bias
}
