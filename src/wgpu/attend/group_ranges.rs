//! The parts of `attend` for ranges of groups with a one-byte query: one range per channel and group of tokens of the
//! keys and one per token and group of channels of the values (KIVI), or one per channel and tile of both.
//!
//! With a 16-bit query these are multiplied as floats: on an H200 two byte planes for every group took 418 µs, and
//! floats 278 µs (2 bits, `g4-b8-32k`).

use super::recipe::{Exchange, QueryMemory};
use super::specialisation::{STEP_TILES, Specialisation, WEIGHT_BLOCKS, is_dot};
use crate::TILE_TOKENS;
use crate::backend::QueryBytes;
use crate::format::{Grouping, TileLayout};

/// Workgroup memory of `attend` up to which the bytes of queries have memory of their own: every WebGPU device has this
/// much.
const MOST_SEPARATE_BYTES: usize = 16 << 10;
/// Maximum number of vectors of a token's keys that are loaded together. Each takes 16 registers of a lane.
const MOST_KEYS_AHEAD: usize = 4;

impl Specialisation<'_> {
    /// Whether keys have one range per channel and group of tokens that is multiplied into a one-byte query in
    /// `attend`. If values are multiplied as floats, keys are too, except where a KV head has one query head: on an
    /// H200 integers (4 bits per channel and 128 tokens) took 101 µs on `g1-b8-8k`, floats 157; on `g4-b8-32k` they
    /// took 317 and 232.
    pub(super) fn has_key_groups(&self) -> bool {
        let integer_values =
            is_dot(&self.format.value) || self.value_channel_groups().is_some() || self.values_have_tile_ranges();
        self.query == QueryBytes::One && self.has_key_groups_of_tokens() && (integer_values || self.shape.group() == 1)
    }

    /// Number of groups of channels whose values have ranges that are multiplied into one-byte weights, unless keys are
    /// multiplied as floats.
    pub(super) fn value_groups(&self) -> Option<usize> {
        let integer_keys = is_dot(&self.format.key) || self.has_key_groups_of_tokens();
        self.value_channel_groups().filter(|_| self.query == QueryBytes::One && integer_keys)
    }

    fn has_key_groups_of_tokens(&self) -> bool {
        matches!(self.format.key.grouping(), Some(Grouping::ChannelTokens(_)))
    }

    /// Number of groups of channels of the values, if the channels of a lane can lie in one group: lanes take one, two
    /// or four channels.
    fn value_channel_groups(&self) -> Option<usize> {
        let head_dim = self.shape.head_dim();
        match self.format.value.grouping() {
            Some(Grouping::TokenChannels(channels))
                if channels.is_multiple_of(32) && head_dim.div_ceil(32).is_power_of_two() =>
            {
                Some(head_dim / channels)
            }
            _ => None,
        }
    }

    /// Whether values have one range per channel and tile that is applied to the sums of a tile, unless keys are
    /// multiplied as floats.
    pub(super) fn has_value_tiles(&self) -> bool {
        let integer_keys = is_dot(&self.format.key) || self.has_key_groups_of_tokens();
        self.query == QueryBytes::One && integer_keys && self.values_have_tile_ranges()
    }

    fn values_have_tile_ranges(&self) -> bool {
        self.format.value.grouping() == Some(Grouping::ChannelTokens(TILE_TOKENS))
    }

    /// How the totals of a query over the channels are computed for such keys.
    pub(super) fn key_totals(&self) -> Exchange {
        match self.capabilities.subgroups {
            Some(sizes) if (sizes.min, sizes.max) == (32, 32) => Exchange::Subgroup,
            _ => Exchange::Memory,
        }
    }

    /// Number of groups of tokens in a tile whose keys have ranges that are multiplied into a one-byte query.
    fn key_token_groups(&self) -> Option<usize> {
        match self.format.key.grouping() {
            Some(Grouping::ChannelTokens(tokens)) if self.has_key_groups() => Some(TILE_TOKENS / tokens),
            _ => None,
        }
    }

    /// The memory of the bytes of a step's queries. A barrier is cheaper than workgroup memory that keeps workgroups
    /// from sharing a multiprocessor: on an H200 KIVI (2 bits, `g4-b8-32k`) took 163 µs with 23.6 KB and, with nothing
    /// else changed, 130 µs with 15.3 KB. With one query head both need 8.2 KB, and the two extra barriers would be
    /// wasted.
    pub(super) fn query_memory(&self, heads: usize) -> QueryMemory {
        match (self.step_query_vectors(heads), self.value_groups()) {
            (Some(vectors), Some(_)) if self.separate_bytes(heads) > MOST_SEPARATE_BYTES => {
                QueryMemory::OfWeights { vectors }
            }
            _ => QueryMemory::Own,
        }
    }

    /// How many of `vectors` vectors of a token's keys are loaded together. More than one has not been measured for a
    /// range per channel and tile.
    pub(super) fn keys_ahead(&self, vectors: usize) -> usize {
        let most = if self.key_token_groups() > Some(1) { MOST_KEYS_AHEAD } else { 1 };
        (1..=most).rev().find(|ahead| vectors.is_multiple_of(*ahead)).unwrap_or(1)
    }

    /// Workgroup memory with two uses.
    pub(super) fn shared_bytes(&self, heads: usize) -> usize {
        match (self.query_memory(heads), self.value_groups()) {
            (QueryMemory::OfWeights { vectors }, Some(groups)) => {
                vectors.min(groups * (heads * STEP_TILES * 8 + groups / 2)) * 16
            }
            _ => 0,
        }
    }

    /// Number of vectors of 16 bytes that hold the queries of a step: bytes for every group of a tile, and a vector
    /// that keeps groups in banks of their own.
    fn step_query_vectors(&self, heads: usize) -> Option<usize> {
        let channels = TileLayout::of(&self.format.key, self.shape.head_dim()).key_row_channels();
        self.key_token_groups().map(|groups| STEP_TILES * groups * (heads * channels / 16 + 1))
    }

    /// Workgroup memory of three things: a step's queries (bytes for every group of tokens, with their unit and their
    /// bias), the weights of all groups of channels except the first, and the weights of every block.
    pub(super) fn group_bytes(&self, heads: usize) -> usize {
        let queries = |groups: usize| {
            let maxima = match self.key_totals() {
                Exchange::Memory => heads * 4,
                Exchange::Subgroup => 0,
            };
            STEP_TILES * (groups * (heads * 4 + maxima) + heads * 4)
        };
        let weights = |groups: usize| {
            let bytes = heads * STEP_TILES * (8 * 16 + WEIGHT_BLOCKS * 4);
            let maxima = heads * STEP_TILES * WEIGHT_BLOCKS * 2 * 4;
            // Groups lie in banks of their own, and have common sums for their outputs.
            (groups - 1) * bytes + groups * (maxima + groups / 2 * 16 + heads * 4)
        };
        let tiles = usize::from(self.has_value_tiles()) * 2 * heads * STEP_TILES * WEIGHT_BLOCKS * 4;
        let bytes = self.step_query_vectors(heads).map_or(0, |vectors| vectors * 16);
        bytes + self.key_token_groups().map_or(0, queries) + self.value_groups().map_or(0, weights) + tiles
    }
}
