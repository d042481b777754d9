//! The properties that determine how a segment is attended to, and the consequences for all its kernels.

use super::code_bytes::CodeBytes;
use super::recipe::{ChannelSplit, Exchange, GivenQuery, HeadSplit, QueryFields, Work};
use crate::backend::QueryBytes;
use crate::format::{AttentionShape, Bits, Grouping, SegmentFormat, TensorFormat, TileLayout};
use crate::plan::{ElementType, ItemMask, Scoring};
use crate::wgpu::device::Capabilities;

/// The inputs that choose the attend variant of one segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Specialisation<'a> {
    pub shape: &'a AttentionShape,
    pub format: &'a SegmentFormat,
    pub query: QueryBytes,
    pub capabilities: &'a Capabilities,
    /// Whether `attend_matrix` may take the segment: not where it is calibrated, and not where the kernel could
    /// merge its states, which one with matrices cannot. `attend_run`, which blocks of queries take, does not ask.
    pub may_use_matrices: bool,
    /// How scores become logits.
    pub scoring: ItemScoring,
    /// Most queries of an item. More than one share a workgroup with all their heads: see
    /// [`Specialisation::most_queries`].
    pub queries: usize,
}

/// How the scores of a dispatch's items become logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ItemScoring {
    /// What queries are multiplied with for scores in units of log2.
    pub scale: f32,
    /// Largest magnitude of a score, in natural units.
    pub soft_cap: Option<f32>,
    /// Which tokens of the items are hidden from their queries.
    pub mask: ItemMask,
}

impl ItemScoring {
    pub fn new(scoring: &Scoring, shape: &AttentionShape, mask: ItemMask) -> Self {
        Self { scale: scoring.log2_scale(shape), soft_cap: scoring.soft_cap(), mask }
    }

    /// That of a shape that says nothing else.
    pub fn plain(shape: &AttentionShape) -> Self {
        Self::new(&Scoring::of(shape), shape, ItemMask::None)
    }

    /// True where the kernels that neither bend nor hide scores serve.
    pub fn is_plain(&self) -> bool {
        self.soft_cap.is_none() && self.mask == ItemMask::None
    }
}

/// Most tiles of a work item: what `tile_bases` in workgroup memory holds.
pub(super) const MAX_TILES: usize = 64;
/// The same in `attend_run`.
pub(super) const MAX_RUN_TILES: usize = 128;
pub(super) const STEP_TILES: usize = 4;
pub(super) const INVOCATIONS: usize = 128;
/// Blocks of a tile; one-byte weights are relative to the largest of their block.
pub(super) const WEIGHT_BLOCKS: usize = 4;
/// Maximum number of query heads in a workgroup. The other heads of a KV head go to further workgroups, which start
/// together and share keys and values in the device's cache: on an H200 eight heads took 373 µs in two workgroups and
/// 506 µs in one at f16, 145 and 153 µs at 2 bits.
const MOST_HEADS: usize = 4;
/// The maximum if codes are decoded to floats, which every workgroup would repeat. More would not fit the registers.
const MOST_DECODED_HEADS: usize = 8;
/// The maximum of several queries over levels of 4 bits. Looking these up takes most of the time, and every workgroup
/// repeats it: on an H200 a prompt of 16k tokens took 82.9 ms with four heads in a workgroup, 74.3 with 8, 67.0 with 12
/// and 92.4 with 16. Codes of a range per token took 40.4 ms with four and 42.1 with 8.
const MOST_LEVEL_HEADS: usize = 12;

impl Specialisation<'_> {
    /// Whether every workgroup of `attend` can prepare the query itself. Rotations would take too many barriers.
    pub fn prepares_own_query(&self) -> bool {
        self.format.key.rotation().is_none()
    }

    /// Number of neighbouring queries that a workgroup of `attend` can take with all their heads, limited by its heads.
    pub fn most_queries(&self) -> usize {
        if self.uses_matrices() {
            return 1;
        }
        let most = if self.looks_up_levels() { self.most_fitting(MOST_LEVEL_HEADS) } else { self.most_heads() };
        (most / self.shape.group()).max(1)
    }

    /// The most heads per workgroup that fit its memory, spread evenly.
    pub fn head_split(&self) -> HeadSplit {
        if let Some(rows) = self.run_rows() {
            return HeadSplit { heads: self.run_queries(rows) * self.shape.group(), chunks: 1 };
        }
        if self.uses_matrices() {
            return self.matrix_head_split();
        }
        let group = self.shape.group();
        if self.queries > 1 {
            return HeadSplit { heads: self.queries * group, chunks: 1 };
        }
        let chunks = group.div_ceil(self.most_heads().min(group));
        HeadSplit { heads: group.div_ceil(chunks), chunks }
    }

    /// Maximum number of heads in a workgroup.
    fn most_heads(&self) -> usize {
        let decoded_keys = self.format.key != TensorFormat::F16 && !self.integer_keys() && !self.has_key_groups();
        let decoded_values = self.format.value != TensorFormat::F16 && !self.integer_values();
        let most = if decoded_keys || decoded_values { MOST_DECODED_HEADS } else { MOST_HEADS };
        self.most_fitting(most)
    }

    /// Maximum number of heads up to `most` whose workgroup fits its memory.
    fn most_fitting(&self, most: usize) -> usize {
        let fits = |heads: &usize| self.workgroup_bytes(*heads) <= self.capabilities.limits.workgroup_memory as usize;
        (1..=most).rev().find(fits).unwrap_or(1)
    }

    /// Whether keys and values are both levels of codebooks of 4 bits.
    fn looks_up_levels(&self) -> bool {
        let levels = |format: &TensorFormat| {
            matches!(format, TensorFormat::Codebook(_))
                && format.sketched().is_none()
                && format.code_bits() == Some(Bits::Four)
        };
        levels(&self.format.key) && levels(&self.format.value)
    }

    /// Measured on an H200: few heads favour many channels per lane, many heads favour few, so that the running sums
    /// (heads · channels) stay in registers. f16 favours many, so that a weight read from workgroup memory is used
    /// often, except where several workgroups read the same values.
    pub(super) fn channel_split(&self, heads: usize) -> ChannelSplit {
        let blocks = match heads {
            1 | 2 => 1,
            _ if *self.format == SegmentFormat::F16 && heads == self.shape.group() => 1,
            3..=5 => 2,
            _ => 4,
        };
        ChannelSplit::new(self.shape.head_dim(), blocks)
    }

    /// Whether the prepared query consists of integers.
    pub fn integer_keys(&self) -> bool {
        is_dot(&self.format.key)
    }

    /// Whether weights are integers.
    fn integer_values(&self) -> bool {
        is_dot(&self.format.value) || self.value_groups().is_some() || self.has_value_tiles()
    }

    /// Byte planes of the prepared query.
    pub fn query_planes(&self) -> usize {
        match self.query {
            QueryBytes::Two => 2,
            QueryBytes::One => 1,
        }
    }

    /// Whether weights are integers of one byte.
    pub(super) fn byte_weights(&self) -> bool {
        let by_channel = self.format.value.grouping() == Some(Grouping::Channel);
        self.query == QueryBytes::One && (by_channel || self.value_groups().is_some() || self.has_value_tiles())
    }

    /// 32-bit words of the prepared rows of one query.
    pub fn query_row_words(&self) -> usize {
        let channels = TileLayout::of(&self.format.key, self.shape.head_dim()).key_row_channels();
        let words = if self.integer_keys() { self.query_planes() * channels / 4 + 4 } else { channels + 4 };
        self.query_parts() * words
    }

    /// Workgroup memory of the attend variant with `heads` heads, as the shaders declare it.
    pub(super) fn workgroup_bytes(&self, heads: usize) -> usize {
        self.separate_bytes(heads) - self.shared_bytes(heads)
    }

    /// The workgroup memory if nothing shared its place.
    pub(super) fn separate_bytes(&self, heads: usize) -> usize {
        let query = heads * self.query_row_words() * 4;
        let weights = match self.integer_values() {
            true if self.byte_weights() => heads * STEP_TILES * (8 * 16 + WEIGHT_BLOCKS * (4 + 2 * 4)),
            true => heads * 2 * STEP_TILES * 8 * 16,
            false if self.capabilities.f16 => heads * STEP_TILES * 32 * 8,
            false => heads * STEP_TILES * 32 * 16,
        };
        let split = self.channel_split(heads);
        let block_sums = STEP_TILES * 32 * split.channels * 4;
        // Of scores, and of their sums with the exponents of scales of tokens.
        let maxima = (4 + 2) * heads * 4;
        let last = heads * 4;
        let ranges = if self.format.value.has_span_ranges() { self.shape.head_dim() * 8 } else { 0 };
        let rotated = self.format.value.rotation().map_or(0, |_| self.shape.head_dim() * 4);
        let groups = self.group_bytes(heads);
        MAX_TILES * 4
            + rotated
            + query
            + weights
            + block_sums
            + heads * INVOCATIONS * 4
            + maxima
            + last
            + ranges
            + groups
    }

    pub(super) fn work(&self, heads: HeadSplit) -> Work {
        let (head_dim, kv_heads) = (self.shape.head_dim(), self.shape.kv_heads());
        Work { head_dim, kv_heads, query_heads: self.shape.query_heads(), queries: self.queries, heads }
    }

    /// How the maximum of a step is found.
    pub(super) fn softmax(&self) -> Exchange {
        match self.capabilities.subgroups {
            Some(_) => Exchange::Subgroup,
            None => Exchange::Memory,
        }
    }

    /// By subgroups if a workgroup consists of whole subgroups of at least `lanes` lanes.
    pub(super) fn exchange_among(&self, lanes: usize) -> Exchange {
        match self.capabilities.subgroups {
            Some(sizes) if sizes.min as usize >= lanes && sizes.max as usize <= INVOCATIONS => Exchange::Subgroup,
            _ => Exchange::Memory,
        }
    }

    /// Rows in which a query is prepared: one, or one for the signs of sketches and one for the levels.
    pub fn query_parts(&self) -> usize {
        match self.format.key.sketched() {
            Some(format) if format.level_bits().is_some() => 2,
            _ => 1,
        }
    }

    /// The bytes of packed keys.
    pub(super) fn key_bytes(&self) -> CodeBytes {
        CodeBytes::new(&self.format.key, self.shape.head_dim())
    }

    /// How a query becomes integers: in `prepare_query`, or in `attend` if that prepares its own.
    pub(super) fn query_fields(&self) -> QueryFields {
        let layout = TileLayout::of(&self.format.key, self.shape.head_dim());
        let bytes = self.key_bytes();
        QueryFields {
            span_middle: self.format.key.has_span_ranges().then_some(bytes.middle),
            largest: match self.query_planes() {
                1 => 127.0,
                _ => 32639.0,
            },
            // Scores of sketched keys have units of their own.
            code_unit: match self.format.key.sketched() {
                Some(_) => 1.0,
                None => bytes.unit / bytes.step,
            },
            place: match self.format.key.code_bits() {
                Some(Bits::Three) => (1, 8),
                bits => (layout.key_vector(), bits.map_or(1, Bits::planes)),
            },
        }
    }

    /// Queries of this type and what they are multiplied with.
    pub(super) fn given_query(&self, input: ElementType) -> GivenQuery {
        GivenQuery { input, scale: self.scoring.scale }
    }
}

impl ChannelSplit {
    /// Up to `wanted` blocks, and as few as needed for lanes of no more than four channels.
    fn new(head_dim: usize, wanted: usize) -> Self {
        let blocks_of_32 = head_dim.div_ceil(32);
        let blocks =
            [4, 2, 1].into_iter().find(|&blocks| blocks <= wanted && blocks_of_32.is_multiple_of(blocks)).unwrap_or(1);
        // A lane with more than four channels would need more registers than it saves loads.
        let blocks = if blocks_of_32 / blocks > 4 { blocks * 2 } else { blocks };
        Self { channels: blocks_of_32 / blocks, blocks }
    }
}

/// Whether a product with the tensor is a sum of integer dot products: one range covers the whole sum, or each token
/// has one.
pub(super) fn is_dot(format: &TensorFormat) -> bool {
    matches!(format.grouping(), Some(Grouping::Channel | Grouping::Token))
}
