//! Weighted values of tiles: the part that `weighted_values` and `attend` share.

use super::softmax::OnlineSoftmax;
use super::store::Tile;
use super::tile_lines::{LINE_BLOCK, LineProducts, TileLines};
use crate::format::{CodeRange, Grouping, TILE_TOKENS, TensorFormat};

/// Sums `weight · value` over the tokens of tiles for the query heads of one KV head, in f64. Holds the buffers for one
/// thread.
pub(super) struct ValueTiles<'a> {
    format: TensorFormat,
    head_dim: usize,
    lines: &'a TileLines,
    /// `[query head of the group][head_dim]`, before span ranges.
    sums: Vec<f64>,
    unpacked: Vec<f32>,
    /// `[query head of the group][128]`, in the order of lines.
    factors: Vec<f32>,
    /// Per query head, per byte lane: what every channel gets beside its products.
    biases: Vec<[f32; 4]>,
    ranges: Vec<CodeRange>,
}

impl<'a> ValueTiles<'a> {
    pub(super) fn new(format: TensorFormat, head_dim: usize, group: usize, lines: &'a TileLines) -> Self {
        Self {
            format,
            head_dim,
            lines,
            sums: vec![0.0; group * head_dim],
            unpacked: vec![0.0; LINE_BLOCK * TILE_TOKENS],
            factors: vec![0.0; group * TILE_TOKENS],
            biases: vec![[0.0; 4]; group],
            ranges: Vec::new(),
        }
    }

    /// Starts over with sums of 0.
    pub(super) fn clear(&mut self) {
        self.sums.fill(0.0);
    }

    /// Multiplies the sums of one query head, when the reference of its weights changes.
    pub(super) fn rescale(&mut self, head: usize, factor: f64) {
        self.sums[head * self.head_dim..][..self.head_dim].iter_mut().for_each(|sum| *sum *= factor);
    }

    /// Adds a tile with weights `[query head of the group][128]`, 0 for tokens that are not there.
    pub(super) fn add(&mut self, tile: Tile<'_>, weights: &[f32]) {
        self.ranges.clear();
        self.ranges.extend(tile.ranges.iter().map(|&word| CodeRange::from_word(word)));
        let channels_alike = match self.format.affine().map(|affine| affine.grouping) {
            Some(Grouping::TokenChannels(channels)) => channels,
            _ => self.head_dim,
        };
        for (group, first) in (0..self.head_dim).step_by(channels_alike).enumerate() {
            self.prepare_factors(group, weights);
            let end = first + channels_alike;
            for block in (first..end).step_by(LINE_BLOCK) {
                self.add_channels(tile, block, LINE_BLOCK.min(end - block));
            }
        }
    }

    /// Writes the states: outputs normalised and with span ranges applied, and log-sum-exps.
    pub(super) fn finish(
        &self,
        softmax: &[OnlineSoftmax],
        span_ranges: &[CodeRange],
        outputs: &mut [f32],
        lse: &mut [f32],
    ) {
        let sums = self.sums.chunks_exact(self.head_dim).zip(outputs.chunks_exact_mut(self.head_dim));
        for ((sums, outputs), (softmax, lse)) in sums.zip(softmax.iter().zip(lse)) {
            *lse = softmax.log_sum_exp();
            for (channel, (output, sum)) in outputs.iter_mut().zip(sums).enumerate() {
                let mean = sum / softmax.sum();
                // Post-scaling: Σ p·(s·c + m) / Σ p = s · mean + m.
                let value = match span_ranges.get(channel) {
                    Some(range) => f64::from(range.scale) * mean + f64::from(range.min),
                    None => mean,
                };
                *output = value as f32;
            }
        }
    }

    /// Weights in the order of lines, with per-token ranges of channel group `group` folded in.
    fn prepare_factors(&mut self, group: usize, weights: &[f32]) {
        let grouping = self.format.affine().map(|affine| affine.grouping);
        let heads = weights.chunks_exact(TILE_TOKENS).zip(self.factors.chunks_exact_mut(TILE_TOKENS));
        for ((weights, factor), bias) in heads.zip(&mut self.biases) {
            *bias = [0.0; 4];
            match grouping {
                Some(Grouping::Token | Grouping::TokenChannels(_)) => {
                    let ranges = &self.ranges[group * TILE_TOKENS..][..TILE_TOKENS];
                    for (factor, &token) in factor.iter_mut().zip(self.lines.order()) {
                        *factor = weights[token] * ranges[token].scale;
                        bias[0] += weights[token] * ranges[token].min;
                    }
                }
                Some(Grouping::ChannelTokens(_)) => {
                    self.lines.permute(weights, factor);
                    for (bias, weights) in bias.iter_mut().zip(weights.chunks_exact(TILE_TOKENS / 4)) {
                        *bias = weights.iter().sum();
                    }
                }
                Some(Grouping::Channel) | None => self.lines.permute(weights, factor),
            }
        }
    }

    /// Adds a block of channels of a tile for all query heads.
    fn add_channels(&mut self, tile: Tile<'_>, first: usize, count: usize) {
        self.lines.unpack(tile.codes, first, count, &mut self.unpacked);
        let unpacked = &self.unpacked[..count * TILE_TOKENS];
        let mut products = [[0.0; 4]; LINE_BLOCK];
        for (head, factor) in self.factors.chunks_exact(TILE_TOKENS).enumerate() {
            LineProducts { lines: unpacked, factor, sums: &mut products[..count] }.compute();
            let sums = &mut self.sums[head * self.head_dim + first..][..count];
            let bias = self.biases[head];
            if let Some(Grouping::ChannelTokens(tokens)) = self.format.affine().map(|affine| affine.grouping) {
                for (i, (sum, product)) in sums.iter_mut().zip(&products).enumerate() {
                    // Lane `l` holds tokens 32·l to 32·l + 31, which are all of one group.
                    for lane in 0..4 {
                        let group = TILE_TOKENS / 4 * lane / tokens;
                        let range = self.ranges[group * self.head_dim + first + i];
                        *sum += f64::from(range.scale * product[lane] + range.min * bias[lane]);
                    }
                }
            } else {
                for (sum, [a, b, c, d]) in sums.iter_mut().zip(&products) {
                    *sum += f64::from(((a + b) + (c + d)) + bias[0]);
                }
            }
        }
    }
}
