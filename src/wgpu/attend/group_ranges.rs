//! Which parts of `attend` serve ranges of groups beside a query of one byte: one range per channel and group of tokens
//! of the keys, one per token and group of channels of the values (KIVI), or one per channel and tile of both.
//!
//! With a query of 16 bits these are multiplied as floats: on an H200 two byte planes for every group took 418 µs where
//! floats took 278 (2 bits, `g4-b8-32k`).

use super::recipe::{Exchange, QueryMemory};
use super::specialisation::{STEP_TILES, Specialisation, WEIGHT_BLOCKS, is_dot};
use crate::TILE_TOKENS;
use crate::backend::QueryBytes;
use crate::format::{Grouping, TileLayout};

/// Workgroup memory of `attend` up to which the bytes of queries have their own: what every device of WebGPU has.
const MOST_SEPARATE_BYTES: usize = 16 << 10;
/// Most vectors of a token's keys that are asked for together: 16 registers of a lane each.
const MOST_KEYS_AHEAD: usize = 4;

impl Specialisation<'_> {
    /// True if keys have one range per channel and group of tokens, which goes into a query of one byte in `attend`.
    /// Beside values that are multiplied as floats they are floats too, but where a KV head has one query head: on an
    /// H200 integers (4 bits per channel and 128 tokens) took 101 µs on `g1-b8-8k`, floats 157; on `g4-b8-32k` they
    /// took 317 and 232.
    pub(super) fn has_key_groups(&self) -> bool {
        let integer_values =
            is_dot(&self.format.value) || self.value_channel_groups().is_some() || self.values_have_tile_ranges();
        self.query == QueryBytes::One && self.has_key_groups_of_tokens() && (integer_values || self.shape.group() == 1)
    }

    /// Groups of channels whose values have ranges of their own that go into weights of one byte, unless keys are
    /// multiplied as floats.
    pub(super) fn value_groups(&self) -> Option<usize> {
        let integer_keys = is_dot(&self.format.key) || self.has_key_groups_of_tokens();
        self.value_channel_groups().filter(|_| self.query == QueryBytes::One && integer_keys)
    }

    fn has_key_groups_of_tokens(&self) -> bool {
        matches!(self.format.key.grouping(), Some(Grouping::ChannelTokens(_)))
    }

    /// Groups of channels of the values if those of a lane can lie in one group: lanes take one, two or four channels.
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

    /// True if values have one range per channel and tile, which is applied to the sums of a tile: unless keys are
    /// multiplied as floats.
    pub(super) fn has_value_tiles(&self) -> bool {
        let integer_keys = is_dot(&self.format.key) || self.has_key_groups_of_tokens();
        self.query == QueryBytes::One && integer_keys && self.values_have_tile_ranges()
    }

    fn values_have_tile_ranges(&self) -> bool {
        self.format.value.grouping() == Some(Grouping::ChannelTokens(TILE_TOKENS))
    }

    /// How such keys find the totals of a query over the channels.
    pub(super) fn key_totals(&self) -> Exchange {
        match self.capabilities.subgroups {
            Some(sizes) if (sizes.min, sizes.max) == (32, 32) => Exchange::Subgroup,
            _ => Exchange::Memory,
        }
    }

    /// Groups of tokens of a tile whose keys have ranges of their own that go into a query of one byte.
    fn key_token_groups(&self) -> Option<usize> {
        match self.format.key.grouping() {
            Some(Grouping::ChannelTokens(tokens)) if self.has_key_groups() => Some(TILE_TOKENS / tokens),
            _ => None,
        }
    }

    /// Where the bytes of a step's queries lie. A barrier is cheaper than workgroup memory that keeps workgroups from
    /// sharing a multiprocessor: on an H200 KIVI (2 bits, `g4-b8-32k`) took 163 µs with 23.6 KB and, with nothing else
    /// changed, 130 with 15.3. With one query head both need 8.2 KB, and two barriers more would be lost.
    pub(super) fn query_memory(&self, heads: usize) -> QueryMemory {
        match (self.step_query_vectors(heads), self.value_groups()) {
            (Some(vectors), Some(_)) if self.separate_bytes(heads) > MOST_SEPARATE_BYTES => {
                QueryMemory::OfWeights { vectors }
            }
            _ => QueryMemory::Own,
        }
    }

    /// How many of so many vectors of a token's keys are asked for together. A range per channel and tile has not been
    /// measured with more than one.
    pub(super) fn keys_ahead(&self, vectors: usize) -> usize {
        let most = if self.key_token_groups() > Some(1) { MOST_KEYS_AHEAD } else { 1 };
        (1..=most).rev().find(|ahead| vectors.is_multiple_of(*ahead)).unwrap_or(1)
    }

    /// Workgroup memory that two things share.
    pub(super) fn shared_bytes(&self, heads: usize) -> usize {
        match (self.query_memory(heads), self.value_groups()) {
            (QueryMemory::OfWeights { vectors }, Some(groups)) => {
                vectors.min(groups * (heads * STEP_TILES * 8 + groups / 2)) * 16
            }
            _ => 0,
        }
    }

    /// Vectors of 16 bytes that hold the queries of a step: bytes for every group of a tile, and a vector that keeps
    /// groups in banks of their own.
    fn step_query_vectors(&self, heads: usize) -> Option<usize> {
        let channels = TileLayout::of(&self.format.key, self.shape.head_dim()).key_row_channels();
        self.key_token_groups().map(|groups| STEP_TILES * groups * (heads * channels / 16 + 1))
    }

    /// Workgroup memory of a step's queries, bytes for every group of tokens with their unit and their bias, of the
    /// weights of all groups of channels but the first, and of the weights of every block.
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
            let maxima = STEP_TILES * WEIGHT_BLOCKS * 2 * 4;
            // Groups lie in banks of their own, and have sums that their outputs share.
            (groups - 1) * bytes + groups * (maxima + groups / 2 * 16 + heads * 4)
        };
        let tiles = usize::from(self.has_value_tiles()) * 2 * heads * STEP_TILES * WEIGHT_BLOCKS * 4;
        let bytes = self.step_query_vectors(heads).map_or(0, |vectors| vectors * 16);
        bytes + self.key_token_groups().map_or(0, queries) + self.value_groups().map_or(0, weights) + tiles
    }
}
