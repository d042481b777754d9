//! The one error type of the crate.

use crate::format::{HEAD_DIMS, KeyOrValue, MOST_HEADS};

/// A result with kvpack's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong, found before any work is encoded wherever that is possible.
///
/// A call that returns an error leaves the cache as it was.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The head counts do not form groups.
    #[error(
        "{query_heads} query heads over {kv_heads} KV heads: both must be from 1 to {MOST_HEADS} and the query heads a \
         multiple of the KV heads, since query head h reads KV head h / (query_heads / kv_heads)"
    )]
    HeadCounts {
        /// Query heads given.
        query_heads: usize,
        /// KV heads given.
        kv_heads: usize,
    },

    /// No kernel variant serves this head dimension.
    #[error(
        "head_dim {given} has no kernel; the head dims served are {HEAD_DIMS:?}. Pad the head to the next one with zeros"
    )]
    HeadDim {
        /// The head dimension given.
        given: usize,
    },

    /// A format that its shape cannot hold, or whose parameters contradict each other.
    #[error("format {format}: {reason}")]
    Format {
        /// The format, printed.
        format: String,
        /// What is wrong with it and what would be allowed.
        reason: String,
    },

    /// A recipe that cannot be read.
    #[error("recipe '{given}': {reason}")]
    Recipe {
        /// The text given.
        given: String,
        /// What is wrong with it and what is allowed.
        reason: String,
    },

    /// Something that other backends have kernels for, and this one has not.
    #[error("{what} is not supported: {hint}")]
    Unsupported {
        /// What there is no kernel for.
        what: String,
        /// What there is instead.
        hint: String,
    },

    /// A tensor has the wrong number of elements.
    #[error("{what} has {given} elements, {expected} are needed for {shape}")]
    Elements {
        /// Which tensor.
        what: &'static str,
        /// Elements given.
        given: usize,
        /// Elements needed.
        expected: usize,
        /// The shape that asks for them.
        shape: String,
    },

    /// There is nothing to store or to attend to.
    #[error("{what}: zero tokens; {hint}")]
    NoTokens {
        /// The call.
        what: &'static str,
        /// What to do.
        hint: &'static str,
    },

    /// A key or value that is NaN, infinite or too large for the formats of the cache.
    #[error(
        "{tensor} holds {value} at token {token}, KV head {kv_head}, channel {channel}: keys and values must be finite \
         and, in the formats of this cache, within ±{largest}. The cache was not changed"
    )]
    NotFinite {
        /// Keys or values.
        tensor: KeyOrValue,
        /// Token within the call.
        token: usize,
        /// KV head.
        kv_head: usize,
        /// Channel within the head.
        channel: usize,
        /// The element, printed (NaN compares unequal to itself).
        value: String,
        /// The largest element that the cache takes, see
        /// [`TensorFormat::largest_element`](crate::format::TensorFormat::largest_element).
        largest: f32,
    },

    /// A sequence index outside the batch.
    #[error("sequence {given} of a cache with {sequences} sequences; use 0..{sequences}")]
    Sequence {
        /// The index given.
        given: usize,
        /// Sequences in the cache.
        sequences: usize,
    },

    /// Prompt spans that do not cover the prompt once and in order.
    #[error("prompt spans must cover tokens 0..{tokens} in order, without gaps or overlap: {reason}")]
    PromptSpans {
        /// Tokens of the prompt.
        tokens: usize,
        /// The first thing found wrong.
        reason: String,
    },

    /// Images that do not lie in order, disjoint and inside the prompt.
    #[error("images of a prompt of {tokens} tokens must lie in order, disjoint and inside it: {reason}")]
    ImageSpans {
        /// Tokens of the prompt.
        tokens: usize,
        /// The first thing found wrong.
        reason: String,
    },

    /// A prompt that ends with an image has no text that could say what of the image matters.
    #[error(
        "no text after the image: the last image ends at token {image_end} of {tokens}. Put the question after it, or \
         measure another window"
    )]
    NoTextAfterImage {
        /// One past the last token of the last image.
        image_end: usize,
        /// Tokens of the prompt.
        tokens: usize,
    },

    /// A budget, or a parameter that budgets are made from, outside its range.
    #[error("{what} is {given}, allowed is {allowed}")]
    Budget {
        /// Which one.
        what: &'static str,
        /// What was given.
        given: String,
        /// What is allowed.
        allowed: String,
    },

    /// More of the best scores were asked for than there are.
    #[error("the {k} best of {n} scores: ask for at most as many as there are")]
    TopK {
        /// How many were asked for.
        k: usize,
        /// How many there are.
        n: usize,
    },

    /// Something that is compared and is no number.
    #[error("{what} hold NaN at {index}: nothing can be ranked by it")]
    NotANumber {
        /// What was to be compared.
        what: &'static str,
        /// Where in it.
        index: usize,
    },

    /// Chunks of a context that cannot be compared, ranked or reordered.
    #[error("chunks of a context: {reason}")]
    Chunks {
        /// What is wrong and what is needed.
        reason: String,
    },

    /// A selection of tokens that contradicts itself or its prompt.
    #[error("selection of tokens: {reason}")]
    Selection {
        /// What is wrong and what is needed.
        reason: String,
    },

    /// Something does not fit a limit of the device.
    #[error("{what} needs {needed}, the device allows {allowed}: {hint}")]
    Limit {
        /// What is too large.
        what: String,
        /// How much it needs.
        needed: u64,
        /// How much there is.
        allowed: u64,
        /// What to do.
        hint: &'static str,
    },

    /// No adapter, or not the one that was asked for.
    #[error("no usable GPU adapter: {reason}")]
    Adapter {
        /// What was looked for, what there is, and what to do.
        reason: String,
    },

    /// A buffer handed in by the caller does not suit the plan.
    #[error("buffer for {what}: {reason}")]
    Buffer {
        /// Which buffer.
        what: &'static str,
        /// What is wrong and what is needed.
        reason: String,
    },

    /// A call does not suit what it is made on: a plan with another store, pool of kernels or path; a layer, step or
    /// sequence that is not in the state that the call needs.
    #[error("{what}: {reason}")]
    Plan {
        /// What was attempted.
        what: &'static str,
        /// Why it cannot be done and what to do.
        reason: String,
    },

    /// The device could not give the memory.
    #[error(
        "the device has no room for {bytes} more bytes ({what}): {message}. The cache was not changed; evict, pack to fewer bits or free sequences"
    )]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// The device's own words.
        message: String,
    },

    /// The device is gone.
    #[error(
        "the GPU device was lost: {message}. Its buffers are gone: make a new device, a new backend and a new cache, and prefill again"
    )]
    DeviceLost {
        /// The device's own words.
        message: String,
    },

    /// The GPU stack refused a call that kvpack believed valid.
    #[error(
        "the GPU stack refused a call: {message}. Check that the buffers, tensors and streams handed in are of the \
         device, and were not destroyed, mapped or lent elsewhere; if they are in order this is a bug in kvpack or in \
         the driver, please report it with the output of `kvpack list`"
    )]
    Gpu {
        /// The message of wgpu or the driver.
        message: String,
    },
}
