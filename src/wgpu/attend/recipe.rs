//! The parts of the kernels that attend to a segment, as plain data. [`Specialisation`] chooses them. They can be
//! printed, compared and tested without a shader, and [`AttendRecipe::variant`] turns them into one.
//!
//! [`Specialisation`]: super::specialisation::Specialisation

use crate::format::{Bits, Rotation};
use crate::plan::{ElementType, ItemMask};

/// A kernel that attends to a segment, or half of it where scores are calibrated in between.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AttendRecipe {
    /// `attend`: scores, softmax and weighted values.
    Attend { work: Work, scores: Scores, logits: Logits, values: Values, softmax: Exchange, merge: Merge },
    /// `attend_matrix`: the same of f16 by cooperative matrices. An element of the query is `query_parts`
    /// summands in f16.
    Matrix { work: Work, query_parts: usize, query: GivenQuery },
    /// `attend_run` or `attend_run_apart`: many queries of a run together, with cooperative matrices. `key_vector`
    /// words of a token's keys are contiguous. Outputs are rotated back if there is a rotation. Items with all that
    /// their queries see write them.
    Run {
        work: Work,
        rows: RunRows,
        keys: RunCodes,
        key_vector: usize,
        values: RunCodes,
        rotation: Option<Rotation>,
        arrivals: RunArrivals,
        items: RunItems,
        outputs: WrittenOutputs,
    },
    /// `scores`: stores the scores of keys.
    Scores { work: Work, scores: Scores },
    /// `weighted_values`: reads them, calibrated by (τ1, τ2).
    WeightedValues { work: Work, tau: (f32, f32), values: Values, softmax: Exchange, merge: Merge },
}

/// The outputs of a step, as a kernel writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrittenOutputs {
    pub element_type: ElementType,
    pub lse: LseOutput,
    pub sinks: Sinks,
}

/// Whether the log-sum-exp is returned in addition to the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LseOutput {
    /// It is not.
    None,
    /// It is, as f32.
    F32,
}

/// Whether query heads of the layer have sinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sinks {
    /// None has.
    None,
    /// Each has a logit.
    Logits,
}

/// The shape of the attention and how its query heads are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    pub head_dim: usize,
    pub kv_heads: usize,
    pub query_heads: usize,
    /// Maximum number of queries in an item.
    pub queries: usize,
    pub heads: HeadSplit,
}

/// Slot `logits`: what becomes of scores before the softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Logits {
    /// The soft cap, in units of log2.
    pub soft_cap: Option<f32>,
    /// Which tokens of the items are hidden.
    pub mask: ItemMask,
}

/// How the query heads of a KV head are spread over workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadSplit {
    /// Query heads of one workgroup.
    pub heads: usize,
    /// Workgroups per KV head and work item. Each reads the keys and values again.
    pub chunks: usize,
}

/// The rows of queries and query heads of a workgroup of `attend_run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunRows {
    pub subgroups: usize,
    /// Blocks of 16 rows that each subgroup owns.
    pub blocks: usize,
}

/// Slots `run_keys` and `run_values`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RunCodes {
    F16,
    /// Codes with one range per channel of the span.
    Channel(Bits),
    /// Codes with one range per token and group of channels, of which a row has this many.
    Token(Bits, usize),
    /// Codes with one range per channel and group of tokens, of which a tile has this many.
    ChannelTokens(Bits, usize),
    /// Levels of a codebook times the norm of the token. The halves of levels are multiplied with the unit.
    Levels(Bits, f32),
}

/// Where the ranges of values wait for their codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueRangesOfRun {
    /// In the registers of the invocations that load the codes, if the values have ranges at all.
    WithCodes,
    /// In workgroup memory: one range per token, which all channels of a step share.
    Staged,
}

impl ValueRangesOfRun {
    /// Kernels that read f16 and 4-bit codes alone have registers left. Only [`RunArrivals::Ahead`] stores staged ranges,
    /// and all other formats with a range per token arrive so.
    pub fn of([keys, values]: [RunCodes; 2]) -> Self {
        match values {
            RunCodes::Token(_, 1) if ![keys, values].iter().all(RunCodes::has_four_bits) => Self::Staged,
            _ => Self::WithCodes,
        }
    }
}

impl RunCodes {
    /// Whether a word holds eight codes, for kernels in which both tensors are such.
    pub fn has_four_bits(&self) -> bool {
        matches!(self, Self::F16 | Self::Channel(Bits::Four) | Self::Token(Bits::Four, 1))
    }
}

/// When loads are stored to workgroup memory: slot `run_arrivals` of `attend_run`, or `attend_run_apart`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunArrivals {
    /// Half of the subgroups store before they compute their weights, the others after.
    ByTurns,
    /// All subgroups store before they compute their weights.
    First,
    /// Everything is loaded a step ahead.
    Ahead,
    /// Subgroups do not wait for each other before they compute their weights. There is room for the keys and values of
    /// this many steps, `TILE_BUFFERS`: 1 or 2.
    Apart(usize),
}

/// What items of `attend_run` have: slots `run_queries` and `run_states`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RunItems {
    /// All that their queries see, or a part of it. Queries are prepared.
    Parts,
    /// All of it. Queries are read as the caller gave them, and no item writes states.
    Whole(GivenQuery),
}

/// How lanes exchange numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exchange {
    /// Through workgroup memory.
    Memory,
    /// By operations of subgroups.
    Subgroup,
}

/// What merges the states of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Merge {
    /// `merge_states`.
    Later,
    /// The workgroup that writes the last state of a query head, which writes the output in this type.
    Last(ElementType),
}

/// Slot `scores`, but for stored ones.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scores {
    /// Integer dot products; one range covers all that is summed, or each token has one.
    Dot { rows: KeyRows, bytes: SignedBytes, ranges: KeyRanges, query_planes: usize, query: IntegerQuery },
    /// Multiply-adds of floats.
    Fma { rows: KeyRows, field: Field, query: FloatQuery },
    /// Integer dot products of keys with a range per channel and group of tokens, by a query for every group.
    Groups { rows: KeyRows, bytes: SignedBytes, ranges: GroupedKeyRanges, totals: Exchange, query: FloatQuery },
    /// Integer dot products with the signs of sketches, and with levels if there are two rows of queries.
    Sketch { rows: KeyRows, bits: Bits, query_rows: usize, query_planes: usize, level_unit: f32, sketch_level: f32 },
}

/// A token's row of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyRows {
    /// Words of a vector.
    pub vector: usize,
    pub vectors: usize,
}

/// Slots `key_bytes` or `value_bytes`, with `three_bytes`: how codes become signed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SignedBytes {
    /// Affine codes, shifted to the top of their bytes.
    Top(Bits),
    /// Codes of a codebook.
    Levels(Bits),
    /// Affine codes of three bits.
    ThreeTop,
    /// Codes of a codebook of three bits.
    ThreeLevels,
}

/// Slot `key_ranges`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum KeyRanges {
    /// One per channel, folded into the query.
    Folded,
    /// One per token; `middle` is the value of byte 0.
    Token { middle: f32 },
}

/// One range per channel and group of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GroupedKeyRanges {
    /// Groups of tokens in a tile.
    pub groups: usize,
    /// The value of byte 0.
    pub middle: f32,
    /// How a query becomes integers for every group.
    pub fields: QueryFields,
    /// The memory of those integers.
    pub memory: QueryMemory,
    /// Vectors of a token that are loaded together. It divides their number.
    pub ahead: usize,
}

/// Slot `query_bytes`: the memory of the bytes of a query for a step's groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueryMemory {
    /// In workgroup memory of their own.
    Own,
    /// In the memory of the weights, which then has at least this many vectors of 16 bytes.
    OfWeights { vectors: usize },
}

/// Slots `key_field` or `value_field`, with `key_codes` or `value_codes`: elements as floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    F16,
    /// Codes with a range per channel and group of tokens, with this many groups in a tile.
    ChannelTokens(Bits, usize),
    /// Codes with a range per token and group of this many channels.
    TokenChannels(Bits, usize),
}

/// Slot `query` for integer dot products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum IntegerQuery {
    /// As written by `prepare_query`.
    Prepared,
    /// Prepared by every workgroup.
    Own { given: GivenQuery, fields: QueryFields, totals: Exchange },
}

/// Slot `query` for multiply-adds of floats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FloatQuery {
    /// As written by `prepare_query`.
    Prepared,
    /// Scaled by every workgroup.
    Own(GivenQuery),
}

/// A query as given by the caller, slot `input`, and its factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GivenQuery {
    pub input: ElementType,
    pub scale: f32,
}

/// How the elements of a query become integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct QueryFields {
    /// The value of byte 0 of keys, if ranges of the span are folded into the query: slot `query_ranges`.
    pub span_middle: Option<f32>,
    /// The largest integer.
    pub largest: f32,
    /// Factor of a product of integers and bytes of keys.
    pub code_unit: f32,
    /// Words of a vector of keys and bit planes of a word, which determine the order.
    pub place: (usize, usize),
}

/// The values of a segment: slots `values` and `output_rotation`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Values {
    pub channels: ChannelSplit,
    pub sums: Sums,
    /// How outputs are rotated back.
    pub rotation: Option<Rotation>,
}

/// How the channels of values are spread over the four teams of a workgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChannelSplit {
    /// Channels per lane.
    pub channels: usize,
    /// Blocks of `32 · channels` channels. The remaining teams share the tiles of a step.
    pub blocks: usize,
}

/// Slot `values`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Sums {
    /// Multiply-adds of floats.
    Fma { field: Field, weights: FloatWeights },
    /// Integer dot products, with weights of two bytes.
    Dot { bytes: SignedBytes, ranges: ValueRanges },
    /// Integer dot products, with weights of one byte relative to the largest of a block of tokens.
    Byte { bytes: SignedBytes, weights: ByteWeights, block_max: Exchange },
}

/// Type of the weights of a step in workgroup memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FloatWeights {
    F16,
    F32,
}

/// Slot `value_ranges`; `middle` is the value of byte 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ValueRanges {
    /// One per channel, applied to the outputs.
    Folded { middle: f32 },
    /// One per token, whose scales are multiplied into the weights; `unit` is that of a codebook's levels.
    Token { middle: f32, unit: f32 },
}

/// Slot `byte_weights`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ByteWeights {
    /// One set for all channels; `middle` is the value of byte -128.
    Shared { middle: f32 },
    /// One set for all channels, which have a range for every tile.
    Tiles,
    /// One for every group of channels with ranges of their own; `centre` is the middle code.
    Groups { groups: usize, centre: f32 },
}
