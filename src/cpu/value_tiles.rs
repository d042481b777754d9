//! Weighted values of tiles: the part that `weighted_values` and `attend` share.

use super::key_tiles::{levels, look_up};
use super::softmax::OnlineSoftmax;
use super::store::Tile;
use super::tile_lines::{BLOCK, Factor, TileLines, Unpacked};
use crate::format::{CodeRange, Direction, Grouping, Rotation, TILE_TOKENS, TensorFormat};

/// Sums `weight · value` over the tokens of tiles for the query heads of one KV head, in f64. Holds the buffers for one
/// thread.
pub(super) struct ValueTiles<'a> {
    grouping: Option<Grouping>,
    rotation: Option<Rotation>,
    levels: Vec<f32>,
    head_dim: usize,
    lines: &'a TileLines,
    /// `[query head of the group][head_dim]`, before span ranges.
    sums: Vec<f64>,
    unpacked: Unpacked,
    /// `[group of channels][query head of the group][step]`: the weights in the order of lines, with per-token ranges
    /// folded in. There is one group of channels, except for ranges per token and group of channels.
    factors: Vec<Factor>,
    /// `[group of channels][query head of the group]`, by byte lane: the factor of minima or, with per-token ranges,
    /// the amount that every channel gets in addition to its products.
    biases: Vec<[f32; 4]>,
    ranges: Vec<CodeRange>,
}

impl<'a> ValueTiles<'a> {
    pub(super) fn new(format: TensorFormat, head_dim: usize, group: usize, lines: &'a TileLines) -> Self {
        let grouping = format.grouping();
        let channel_groups = match grouping {
            Some(Grouping::TokenChannels(channels)) => head_dim / channels,
            _ => 1,
        };
        Self {
            grouping,
            rotation: format.rotation(),
            levels: levels(&format, head_dim).levels,
            head_dim,
            lines,
            sums: vec![0.0; group * head_dim],
            unpacked: vec![[0.0; BLOCK]; lines.steps()],
            factors: vec![Factor::default(); channel_groups * group * lines.steps()],
            biases: vec![[0.0; 4]; channel_groups * group],
            ranges: Vec::new(),
        }
    }

    /// Resets all sums to 0.
    pub(super) fn clear(&mut self) {
        self.sums.fill(0.0);
    }

    /// Multiplies the sums of one query head when the reference of its weights changes.
    pub(super) fn rescale(&mut self, head: usize, factor: f64) {
        self.sums[head * self.head_dim..][..self.head_dim].iter_mut().for_each(|sum| *sum *= factor);
    }

    /// Adds a tile with weights `[query head of the group][128]`, which are 0 for tokens that do not exist.
    pub(super) fn add(&mut self, tile: Tile<'_>, weights: &[f32]) {
        self.ranges.clear();
        self.ranges.extend(tile.ranges.iter().map(|&word| CodeRange::from_word(word)));
        self.prepare_factors(weights);
        for (block, first) in (0..self.head_dim).step_by(self.lines.block_lines()).enumerate() {
            self.lines.unpack(tile.codes, block, &mut self.unpacked);
            look_up(&self.levels, &mut self.unpacked);
            for head in 0..self.sums.len() / self.head_dim {
                self.add_block(first, head);
            }
        }
    }

    /// Writes the states: outputs normalised, with span ranges applied and rotated back, and log-sum-exps.
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
            if let Some(rotation) = self.rotation {
                rotation.turn_checked(Direction::Inverse, outputs);
            }
        }
    }

    /// Permutes the weights and folds per-token ranges into them.
    fn prepare_factors(&mut self, weights: &[f32]) {
        let mut scaled = [0.0; TILE_TOKENS];
        let heads = weights.len() / TILE_TOKENS;
        let rows = self.factors.chunks_exact_mut(self.lines.steps()).zip(&mut self.biases).enumerate();
        for (row, (factor, bias)) in rows {
            let weights = &weights[row % heads * TILE_TOKENS..][..TILE_TOKENS];
            match self.grouping {
                Some(Grouping::Token | Grouping::TokenChannels(_)) => {
                    let ranges = &self.ranges[row / heads * TILE_TOKENS..][..TILE_TOKENS];
                    let mut minima = 0.0;
                    for ((scaled, weight), range) in scaled.iter_mut().zip(weights).zip(ranges) {
                        *scaled = weight * range.scale;
                        minima += weight * range.min;
                    }
                    bias[0] = minima;
                    self.lines.permute(&scaled, factor);
                }
                Some(Grouping::ChannelTokens(_)) => {
                    for (bias, weights) in bias.iter_mut().zip(weights.chunks_exact(TILE_TOKENS / 4)) {
                        *bias = weights.iter().sum();
                    }
                    self.lines.permute(weights, factor);
                }
                Some(Grouping::Channel) | None => self.lines.permute(weights, factor),
            }
        }
    }

    /// Adds the unpacked block of channels for one query head.
    fn add_block(&mut self, first: usize, head: usize) {
        let (heads, steps) = (self.sums.len() / self.head_dim, self.lines.steps());
        let sums = &mut self.sums[head * self.head_dim + first..][..self.lines.block_lines()];
        let mut products = [0.0; BLOCK];
        match self.grouping {
            Some(Grouping::ChannelTokens(group_tokens)) => {
                let factor = &self.factors[head * steps..][..steps];
                for lane in 0..4 {
                    // The 32 tokens of a byte lane belong to one group.
                    let group = TILE_TOKENS / 4 * lane / group_tokens;
                    let ranges = &self.ranges[group * self.head_dim + first..];
                    let bias = self.biases[head][lane];
                    self.lines.products_of_byte_lane(lane, &self.unpacked, factor, &mut products);
                    for ((sum, product), range) in sums.iter_mut().zip(products).zip(ranges) {
                        *sum += f64::from(range.scale * product + range.min * bias);
                    }
                }
            }
            Some(Grouping::TokenChannels(channels)) => {
                // A block may span several groups of channels, each with weights of its own.
                let end = first + sums.len();
                for group in first / channels..=(end - 1) / channels {
                    let row = group * heads + head;
                    self.lines.products(&self.unpacked, &self.factors[row * steps..][..steps], &mut products);
                    let of_group = (group * channels).max(first) - first..((group + 1) * channels).min(end) - first;
                    for (sum, product) in sums[of_group.clone()].iter_mut().zip(&products[of_group]) {
                        *sum += f64::from(product + self.biases[row][0]);
                    }
                }
            }
            Some(Grouping::Channel | Grouping::Token) | None => {
                self.lines.products(&self.unpacked, &self.factors[head * steps..][..steps], &mut products);
                for (sum, product) in sums.iter_mut().zip(products) {
                    *sum += f64::from(product + self.biases[head][0]);
                }
            }
        }
    }
}
