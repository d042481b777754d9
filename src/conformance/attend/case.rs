//! A case of attention: everything that one run depends on, as plain data.

use crate::backend::AttendOptions;
use crate::format::{AttentionShape, Calibration, SegmentFormat};
use crate::plan::{ElementType, QueryRun, Scoring};

/// A case of attention: a batch of sequences, how each is stored, and how it is attended to.
///
/// ```
/// use kvpack::conformance;
/// for case in conformance::attend_cases() {
///     let tokens: usize = case.sequences.iter().flatten().map(|span| span.tokens).sum();
///     println!("{}: {} sequences, {tokens} tokens", case.name, case.sequences.len());
/// }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct AttendCase {
    /// Unique name: lower case letters, digits and dashes.
    pub name: String,
    /// Heads of the layer.
    pub shape: AttentionShape,
    /// The stores of the case; a [`SpanCase`] refers to them by index.
    pub segments: Vec<StoreCase>,
    /// The spans of each sequence, in token order. A span may be empty, a sequence may not.
    pub sequences: Vec<Vec<SpanCase>>,
    /// The kind of keys and values.
    pub data: DataKind,
    /// The place of the sink token in each sequence.
    pub sink: SinkPlace,
    /// Layout of keys and values in the tensors that the backend receives.
    pub input: InputLayout,
    /// Whether keys are centred, with the mean of the first keys of their sequence, in every store.
    pub centred: bool,
    /// How the stores are cut into pages.
    pub paging: Paging,
    /// Which queries attend.
    pub queries: Queries,
    /// How scores become logits.
    pub scoring: Scoring,
    /// Options of the attend call, with how finely it is cut.
    pub options: AttendOptions,
    /// Seed of the data.
    pub seed: u64,
    /// Whether the case belongs to the set that covers every kernel once in the least time, which tests run on software
    /// drivers.
    pub quick: bool,
}

/// One store of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreCase {
    /// Its format.
    pub format: SegmentFormat,
    /// Calibration of the scores of its spans.
    pub calibration: Option<Calibration>,
    /// How tokens enter it.
    pub fill: Fill,
}

/// How tokens enter a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Whole spans, by [`Packing::quantize`](crate::backend::Packing::quantize).
    Quantize,
    /// Single tokens, by [`Packing::append`](crate::backend::Packing::append). Only for formats that take them.
    Append,
}

/// The queries of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Queries {
    /// One for each sequence. It sees the whole sequence.
    Decode,
    /// Query runs, up to one for each sequence.
    Runs(Vec<QueryRun>),
}

/// Consecutive tokens of one sequence in one store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanCase {
    /// Index of the store among [`AttendCase::segments`].
    pub segment: usize,
    /// Tokens; 0 is an empty span.
    pub tokens: usize,
}

/// The kind of keys and values. Queries are Gaussian, and some heads also look for the sink (see [`SinkPlace`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataKind {
    /// Gaussian around an offset per channel. Every sixteenth channel has a large offset and three times the spread,
    /// like keys of real models.
    ChannelOffsets,
    /// As [`DataKind::ChannelOffsets`], and one element in 500 is twenty times as large.
    Outliers,
    /// As [`DataKind::ChannelOffsets`], but every third channel is constant, some of them zero: groups without spread.
    ConstantChannels,
    /// As [`DataKind::ChannelOffsets`], with a bias of 300 in three channels of every key, like keys from projections
    /// with biases.
    BiasedKeys,
    /// Every token has the same key and the same value, except for the sink's key.
    ConstantTokens,
    /// As [`DataKind::ChannelOffsets`], but the sink's value is zero: the output of heads that see it is made of tokens
    /// whose weights are far below the largest.
    EmptySink,
    /// The same as [`DataKind::ChannelOffsets`] times 2^-12, and queries times 2^12: most steps of codes are at the
    /// smallest that f16 ranges hold ([`CodeRange::SMALLEST_STEP`](crate::format::CodeRange::SMALLEST_STEP)).
    Small,
    /// The same as [`DataKind::ChannelOffsets`], each run of 32 tokens times a power of ten from 10^-6 to 10^3, in
    /// turn. For packing only: the largest keys would have all the weight of attention.
    Magnitudes,
    /// Halves from 0 to 15, both of which occur in every eight tokens and channels: in ranges of 2 and 4 bits half of
    /// the elements lie in the middle between two levels. For packing only.
    Ties,
    /// The same, each channel times a factor of its own, as f32 rounds it: quotients of elements and steps then lie
    /// next to the middle between two levels, and only the products tell. For ranges of channels in f32.
    UnevenTies,
}

/// The place of the sink: a token whose score lies 14 nats above the level of all others (see
/// [`SINK_NATS`](crate::conformance::SINK_NATS)) for every other query head. The remaining heads do not see it, because
/// a sink hides mistakes elsewhere. They give about a seventh of their weight to the token at the other end of the
/// sequence, which reveals a token lost at the edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SinkPlace {
    /// The first token, where language models have theirs.
    First,
    /// The middle token.
    Middle,
    /// The last token.
    Last,
}

/// How the dense keys and values of a sequence are passed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputLayout {
    /// Element type of keys, values and queries.
    pub elements: ElementType,
    /// Order of tokens and heads.
    pub order: RowOrder,
}

/// Order of the axes of a dense tensor of keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// `[tokens, kv_heads, head_dim]`.
    TokenMajor,
    /// `[kv_heads, tokens, head_dim]`.
    HeadMajor,
}

/// How a store is cut into pages and shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging {
    /// One shard, pages in token order.
    InOrder,
    /// Shards of this many pages, and the pages of all sequences shuffled.
    Scattered {
        /// Pages of a shard, at least 1.
        shard_pages: u32,
    },
}

impl StoreCase {
    /// A segment filled by whole spans, without calibration.
    pub const fn new(format: SegmentFormat) -> Self {
        Self { format, calibration: None, fill: Fill::Quantize }
    }
}

impl AttendCase {
    /// The runs of its queries.
    pub fn runs(&self) -> Vec<QueryRun> {
        match &self.queries {
            Queries::Decode => QueryRun::decode_batch(self.sequences.len()),
            Queries::Runs(runs) => runs.clone(),
        }
    }

    /// Queries of a sequence.
    pub(crate) fn queries_of(&self, sequence: usize) -> usize {
        self.runs().iter().filter(|run| run.sequence == sequence).map(|run| run.queries).sum()
    }

    /// Tokens of a sequence, all spans together.
    pub fn tokens(&self, sequence: usize) -> usize {
        self.sequences[sequence].iter().map(|span| span.tokens).sum()
    }

    /// The formats of its stores, for people.
    pub fn formats(&self) -> String {
        let format = |segment: &StoreCase| match segment.calibration {
            Some(calibration) => {
                format!("{} calibrated ({}, {})", segment.format, calibration.tau1(), calibration.tau2())
            }
            None => segment.format.to_string(),
        };
        self.segments.iter().map(format).collect::<Vec<_>>().join(" + ")
    }
}
