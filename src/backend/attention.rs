//! Attention over stores.

use std::fmt;
use std::future::Future;

use super::{Device, Storage};
use crate::format::{AttentionShape, SegmentFormat, TensorFormat};
use crate::plan::{AttendPlan, ElementType, Split};
use crate::{Error, Result};

/// The precision of the query in products with packed keys, and of the weights in products with packed values.
///
/// Through wgpu, long query runs that cooperative matrices take have their queries rounded to f16 in every case.
/// Relative to f32 queries this adds a mean square error of about 3e-8 of the output's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum QueryPrecision {
    /// [`QueryBytes::of`] decides for each segment: one byte if the format's own error hides the added error, otherwise
    /// two.
    #[default]
    ByFormat,
    /// Two byte planes each, which is 16 bits. The error stays far below that of f16 keys.
    Int16,
    /// One byte per channel of the query. Through wgpu, where values have one range per channel, also one byte per
    /// weight, relative to the largest weight of its block of 32 tokens. This takes about half the arithmetic and adds
    /// an error of about 1 % of the informative part of the output. Nearly all of that error comes from the query: on
    /// the shipped data, weights of one byte instead of 16 bits raise the mean square error by 0.3 to 9 %. Where
    /// cooperative matrices take f16 keys, an f32 query is rounded to f16.
    ///
    /// Through wgpu two kinds of ranges are multiplied into the query and the weights before these become bytes: those
    /// of groups of tokens (keys), and those of groups of channels that are a multiple of 32 (values, at `head_dim` 64,
    /// 128 and 256). A range per channel and tile of values is applied to the sums of the tile. Such keys and values
    /// are multiplied as floats in two cases: with 16 bits, and if the other tensor has other groups or none, except
    /// for keys where a KV head has one query head. The query is rounded separately for every group, so the errors of
    /// different groups do not cancel: on the shipped data KIVI at 2 bits has a mean square error of 0.07 %, and ranges
    /// per channel have 0.01 %.
    Int8,
}

/// Bytes of an element of a query, and of a weight, in integer products with codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QueryBytes {
    /// [`QueryPrecision::Int8`].
    One,
    /// [`QueryPrecision::Int16`].
    Two,
}

impl QueryBytes {
    /// The fewest bytes that add no more than 5 % to the relative L2 error of the format itself, on real keys and
    /// values. One byte where keys have 4 bits or fewer, and, for f16 keys, where values do; the byte then concerns the
    /// weights. Two bytes where keys have 8 bits or everything is f16. `docs/query-precision.md` has the measurements
    /// for every format.
    ///
    /// ```
    /// use kvpack::backend::QueryBytes;
    /// use kvpack::{Bits, SegmentFormat};
    /// assert_eq!(QueryBytes::of(&SegmentFormat::per_channel(Bits::Four)), QueryBytes::One);
    /// assert_eq!(QueryBytes::of(&SegmentFormat::per_channel(Bits::Eight)), QueryBytes::Two);
    /// ```
    pub const fn of(format: &SegmentFormat) -> Self {
        let SegmentFormat { key, value } = format;
        match (key.element_bits(), value.element_bits()) {
            (1..=4, _) => Self::One,
            (_, 1..=4) if matches!(key, TensorFormat::F16) => Self::One,
            _ => Self::Two,
        }
    }
}

impl QueryPrecision {
    /// The bytes for a segment of this format.
    pub const fn bytes(self, format: &SegmentFormat) -> QueryBytes {
        match self {
            Self::ByFormat => QueryBytes::of(format),
            Self::Int16 => QueryBytes::Two,
            Self::Int8 => QueryBytes::One,
        }
    }
}

/// Options of one attend call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendOptions {
    /// Precision of query and weights where packed keys and values are multiplied as integers. The CPU backend always
    /// uses the f32 query and f32 weights. CUDA always uses the 16-bit query and f16 weights.
    pub query: QueryPrecision,
    /// Element type of the output.
    pub output: ElementType,
    /// How finely the CPU and wgpu cut the work. Results differ only by rounding. CUDA chooses its own cut.
    pub split: Split,
}

impl Default for AttendOptions {
    fn default() -> Self {
        Self { query: QueryPrecision::ByFormat, output: ElementType::F32, split: Split::default() }
    }
}

/// The arithmetic that multiplies the elements of keys or of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Multiply-adds of floats.
    Floats,
    /// Dot products of four signed bytes.
    Integers,
    /// Matrix instructions on 16-bit floats.
    HalfMatrices,
    /// Matrix instructions on bytes.
    ByteMatrices,
}

/// The arithmetic with which a backend attends to a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttendArithmetic {
    /// Of the scores.
    pub keys: Arithmetic,
    /// Of the weighted values.
    pub values: Arithmetic,
}

impl AttendArithmetic {
    /// Floats throughout.
    pub const FLOATS: Self = Self { keys: Arithmetic::Floats, values: Arithmetic::Floats };
}

impl fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Floats => "floats",
            Self::Integers => "integers",
            Self::HalfMatrices => "f16 matrices",
            Self::ByteMatrices => "byte matrices",
        })
    }
}

impl fmt::Display for AttendArithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keys, values } = self;
        if keys == values { write!(f, "{keys}") } else { write!(f, "{keys}, {values}") }
    }
}

/// The attention states of queries, `[rows, query_heads]`: the result of attention over some tokens. It can be merged
/// with attention over other tokens, from another cache, another GPU or an engine's own kernel.
#[derive(Clone, Debug)]
pub struct AttentionStates<T> {
    /// Softmax-weighted means of the values, f32 `[rows, query_heads, head_dim]`.
    pub outputs: T,
    /// Natural logarithms of the sums of the exponentials of the logits, f32 `[rows, query_heads]`; −∞ where there are
    /// none. Logits are the scores as [`Scoring`](crate::plan::Scoring) makes them, and the sink.
    pub lse: T,
}

/// The states of the same queries over several parts of their tokens: one part after the other in the same tensors.
#[derive(Debug)]
pub struct StateParts<'a, T> {
    /// Outputs f32 `[parts, rows, query_heads, head_dim]` and log-sum-exps f32 `[parts, rows, query_heads]`. The
    /// tensors may be longer.
    pub states: &'a AttentionStates<T>,
    /// Parts, at least 1. They share no tokens.
    pub parts: usize,
    /// Rows of queries of every part, at least 1.
    pub rows: usize,
}

impl<T> Clone for StateParts<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for StateParts<'_, T> {}

impl<T> StateParts<'_, T> {
    /// Checks that the tensors hold the parts, and those for the result their rows.
    ///
    /// # Errors
    /// [`NoTokens`](crate::Error::NoTokens) for no parts or no rows, [`Elements`](crate::Error::Elements) for tensors
    /// that are too short.
    pub fn check<B: Device<Tensor = T> + ?Sized>(
        &self,
        backend: &B,
        shape: &AttentionShape,
        output: &T,
        lse: Option<&T>,
    ) -> Result<()> {
        let (heads, head_dim) = (shape.query_heads(), shape.head_dim());
        if self.parts == 0 || self.rows == 0 {
            return Err(Error::NoTokens { what: "merge of states", hint: "merge at least one part of one row" });
        }
        for (what, tensor, parts, channels) in [
            ("outputs of the parts", Some(&self.states.outputs), self.parts, head_dim),
            ("log-sum-exps of the parts", Some(&self.states.lse), self.parts, 1),
            ("merged outputs", Some(output), 1, head_dim),
            ("merged log-sum-exps", lse, 1, 1),
        ] {
            let expected = [self.rows, heads, channels].iter().fold(parts, |all, &n| all.saturating_mul(n));
            let given = tensor.map_or(expected, |tensor| backend.elements(tensor));
            if given < expected {
                let shape = format!("{parts} parts × {} rows × {heads} query heads × {channels}", self.rows);
                return Err(Error::Elements { what, given, expected, shape });
            }
        }
        Ok(())
    }
}

/// The centres of the keys that rows of queries attend to.
#[derive(Clone, Copy, Debug)]
pub struct RowCentres<'a> {
    /// The slot of every row's centre.
    pub slots: &'a [u32],
    /// The softmax scale of the scores.
    pub scale: f32,
}

/// A device that attends to the contents of its stores.
///
/// Through wgpu, a method that reads or writes stores returns [`NotSubmitted`](crate::Error::NotSubmitted) as long as an
/// engine has encoded steps over them and not submitted these.
pub trait Attention: Storage {
    /// How the backend multiplies the keys and values of a format in long contexts, where scores are not calibrated.
    ///
    /// # Errors
    /// [`Format`](crate::Error::Format) or [`Unsupported`](crate::Error::Unsupported) when the backend does not support
    /// the format.
    fn arithmetic(
        &self,
        shape: &AttentionShape,
        format: &SegmentFormat,
        query: QueryPrecision,
    ) -> Result<AttendArithmetic>;

    /// Every query of the plan over every segment: kernels `prepare_query`, `attend` (or `scores` and `weighted_values`
    /// where scores are calibrated) and `merge_states`. Queries and output are `[rows, query_heads, head_dim]`; the
    /// plan says how scores are made.
    ///
    /// `stores[i]` is the store that the plan calls `i`.
    ///
    /// # Errors
    /// When the queries do not fit the plan or the device has no room for the output.
    fn attend(
        &self,
        plan: &AttendPlan,
        stores: &[&Self::Store],
        queries: &Self::Tensor,
        options: AttendOptions,
    ) -> impl Future<Output = Result<Self::Tensor>>;

    /// [`attend`](Attention::attend) into a tensor of the caller, `[rows, query_heads, head_dim]`. Its element type
    /// replaces that of the options. No element is written if a length does not fit.
    ///
    /// # Errors
    /// As [`attend`](Attention::attend), and [`Elements`](crate::Error::Elements) when the output does not have the
    /// plan's rows.
    fn attend_into(
        &self,
        plan: &AttendPlan,
        stores: &[&Self::Store],
        queries: &Self::Tensor,
        output: &mut Self::Tensor,
        options: AttendOptions,
    ) -> impl Future<Output = Result<()>>;

    /// [`attend`](Attention::attend) that also returns the log-sum-exp of every query and head. The outputs are f32,
    /// whatever the options request.
    ///
    /// # Errors
    /// As [`attend`](Attention::attend).
    fn attend_states(
        &self,
        plan: &AttendPlan,
        stores: &[&Self::Store],
        queries: &Self::Tensor,
        options: AttendOptions,
    ) -> impl Future<Output = Result<AttentionStates<Self::Tensor>>>;

    /// Kernel `uncentre_lse`: adds `scale · q·m` to the log-sum-exp of every query and head, so that states over
    /// centred keys become those over the keys as they were. Row `i` of the queries takes the centre `m` in the slot
    /// `centres.slots[i]` of the store.
    ///
    /// Calibration moves with the scores: an offset that all of them have is the offset of their extremes too.
    ///
    /// # Errors
    /// [`Elements`](crate::Error::Elements) when the states or the queries do not have one row per slot,
    /// [`Plan`](crate::Error::Plan) when a slot does not exist.
    fn uncentre_lse(
        &self,
        store: &Self::Store,
        queries: &Self::Tensor,
        centres: RowCentres<'_>,
        states: AttentionStates<Self::Tensor>,
    ) -> impl Future<Output = Result<AttentionStates<Self::Tensor>>>;

    /// Kernel `merge_pair`: merges the states of the same queries over two parts that share no tokens.
    ///
    /// The result equals attention over all tokens at once, except for rounding. A part with a log-sum-exp of −∞ is
    /// empty and has no weight, whatever its output. If both parts are empty, the output is 0.
    ///
    /// # Errors
    /// [`Elements`](crate::Error::Elements) when the parts are not f32 states of the same queries and of this shape.
    fn merge(
        &self,
        shape: &AttentionShape,
        first: &AttentionStates<Self::Tensor>,
        second: &AttentionStates<Self::Tensor>,
    ) -> impl Future<Output = Result<AttentionStates<Self::Tensor>>>;

    /// Kernel `merge_parts`: merges the states of the same queries over parts that share no tokens, into the first rows
    /// of tensors of the caller. `output` is `[rows, query_heads, head_dim]`, and its element type is used; `lse` is
    /// f32 `[rows, query_heads]`. They share no memory with the parts. It is enqueued. On CUDA it allocates nothing
    /// once it ran.
    ///
    /// Parts count in their order, so that the same parts give the same bits. A part with a log-sum-exp of −∞ is empty
    /// and has no weight, whatever its output, NaN included. If all parts are empty, the output is 0 and the
    /// log-sum-exp −∞. One part alone is copied. [`Attention::merge`] is the same with two parts in tensors of their
    /// own.
    ///
    /// # Errors
    /// Those of [`StateParts::check`]; [`Buffer`](crate::Error::Buffer) for states that are not f32;
    /// [`Plan`](crate::Error::Plan) where a device cannot read and write tensors that share a buffer. Nothing was
    /// written.
    fn merge_parts(
        &self,
        shape: &AttentionShape,
        parts: StateParts<'_, Self::Tensor>,
        output: &mut Self::Tensor,
        lse: Option<&mut Self::Tensor>,
    ) -> Result<()>;
}
