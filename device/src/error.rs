//! The one error type of the crate.

use crate::{HEAD_DIMS, KeyOrValue, MOST_HEADS};

/// A result with kvpack's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong. Errors are found before any work is encoded wherever that is possible.
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

    /// No kernel supports this head dimension.
    #[error(
        "head_dim {given} has no kernel; supported are {HEAD_DIMS:?}. Pad the keys, values and queries of a head to the \
         next one with zeros, and multiply the queries by √(that one / {given}), since scores are divided by its root"
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

    /// This backend lacks kernels that other backends have.
    #[error("{what} is not supported: {hint}")]
    Unsupported {
        /// What has no kernel.
        what: String,
        /// The alternative.
        hint: String,
    },

    /// A tensor has the wrong number of elements.
    #[error("{what} has {given} elements; it needs {expected} for {shape}")]
    Elements {
        /// Which tensor.
        what: &'static str,
        /// Number of elements given.
        given: usize,
        /// Number of elements needed.
        expected: usize,
        /// The shape that needs them.
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

    /// A key or value is NaN, infinite or too large for the formats of the cache.
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
        /// The element, printed, because NaN is not equal to itself.
        value: String,
        /// The largest element that the cache can store, see
        /// `TensorFormat::largest_element` of kvpack.
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

    /// Prompt spans that do not cover the prompt exactly once and in order.
    #[error("prompt spans must cover tokens 0..{tokens} in order, without gaps or overlap: {reason}")]
    PromptSpans {
        /// Tokens of the prompt.
        tokens: usize,
        /// The first thing found wrong.
        reason: String,
    },

    /// Images that are not in order, overlap or lie outside the prompt.
    #[error("images of a prompt of {tokens} tokens must lie in order, disjoint and inside it: {reason}")]
    ImageSpans {
        /// Tokens of the prompt.
        tokens: usize,
        /// The first thing found wrong.
        reason: String,
    },

    /// The prompt ends with an image, so no text after it can show which parts of the image matter.
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

    /// A budget, or a parameter of a budget, is outside its range.
    #[error("{what} is {given}; it must be {allowed}")]
    Budget {
        /// The name of the budget or parameter.
        what: &'static str,
        /// The value given.
        given: String,
        /// What is allowed.
        allowed: String,
    },

    /// More of the best scores were requested than exist.
    #[error("the {k} best of {n} scores: ask for {n} or fewer")]
    TopK {
        /// The number requested.
        k: usize,
        /// The number of scores.
        n: usize,
    },

    /// A value to be compared is NaN.
    #[error("{what} hold NaN at {index}: NaN cannot be ranked")]
    NotANumber {
        /// The values to be compared.
        what: &'static str,
        /// The index of the first NaN.
        index: usize,
    },

    /// Chunks of a context that cannot be compared, ranked or reordered.
    #[error("chunks of a context: {reason}")]
    Chunks {
        /// What is wrong, and what is needed.
        reason: String,
    },

    /// A selection of tokens that contradicts itself or does not fit its prompt.
    #[error("selection of tokens: {reason}")]
    Selection {
        /// What is wrong, and what is needed.
        reason: String,
    },

    /// A request exceeds a limit of the device.
    #[error("{what} needs {needed}, but the device allows {allowed}: {hint}")]
    Limit {
        /// What is too large.
        what: String,
        /// The amount needed.
        needed: u64,
        /// The amount that the device allows.
        allowed: u64,
        /// What to do.
        hint: &'static str,
    },

    /// A cache has too little room for a call. Nothing has changed.
    #[error(
        "{needed} {what} are needed for the store of {store} and {free} are free: reserve more, allow a larger budget, or \
         truncate, clear or swap out sequences"
    )]
    NoRoom {
        /// What is short: pages, range slots, centres, or bytes of the budget.
        what: &'static str,
        /// Format of the store; the first one that lacks something where bytes are short.
        store: String,
        /// How many the call needs.
        needed: u64,
        /// How many are free.
        free: u64,
    },

    /// A call that submits commands of its own, while an engine has not submitted the steps that it encoded over the
    /// same pages: it would overtake them. Nothing has changed. Only wgpu has this error: a CUDA stream keeps the
    /// order.
    #[error(
        "{what}: {steps} encoded steps of this cache are not submitted, so its pages do not hold what the cache says. \
         Submit their command buffers, or drop them, and call again"
    )]
    NotSubmitted {
        /// What the call does.
        what: &'static str,
        /// Number of steps.
        steps: usize,
    },

    /// No adapter was found, or not the requested one.
    #[error("no usable GPU adapter: {reason}")]
    Adapter {
        /// What was searched for, what was found, and what to do.
        reason: String,
    },

    /// A buffer from the caller does not fit the plan.
    #[error("buffer for {what}: {reason}")]
    Buffer {
        /// Which buffer.
        what: &'static str,
        /// What is wrong, and what is needed.
        reason: String,
    },

    /// A call does not fit the object that it is made on: a plan with another store, set of kernels or path, or a
    /// layer, step or sequence that is not in the required state.
    #[error("{what}: {reason}")]
    Plan {
        /// What was attempted.
        what: &'static str,
        /// Why it cannot be done, and what to do.
        reason: String,
    },

    /// The device could not allocate the memory.
    #[error(
        "the device has no room for {bytes} more bytes ({what}): {message}. The cache was not changed; evict, pack to fewer bits or free sequences"
    )]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes requested.
        bytes: u64,
        /// The device's message.
        message: String,
    },

    /// The device is gone.
    #[error(
        "the GPU device was lost: {message}. Its buffers are gone: create a new device, backend and cache, and prefill \
         again"
    )]
    DeviceLost {
        /// The device's message.
        message: String,
    },

    /// The GPU stack refused a call that kvpack believed valid.
    #[error(
        "the GPU stack refused a call: {message}. Check that the buffers, tensors and streams passed in belong to the \
         device, and were not destroyed, mapped or lent elsewhere; if they are valid, this is a bug in kvpack or in \
         the driver, please report it with the output of `kvpack list`"
    )]
    Gpu {
        /// The message of wgpu or the driver.
        message: String,
    },

    /// Ranks could not exchange what they hold. The transport is lost, and the caches of the ranks are not: see
    /// `kvpack::ranks::Transport`.
    #[error(
        "{operation} on rank {rank} of {ranks}: {reason}. Abandon the open step, make new transports for the ranks that \
         are alive, and go on or clear their sequences"
    )]
    Transport {
        /// What was exchanged.
        operation: &'static str,
        /// The rank that reports it.
        rank: usize,
        /// Number of ranks.
        ranks: usize,
        /// The ranks that died, are late or disagree, as far as this one knows.
        failed: Vec<usize>,
        /// What happened, and what is missing.
        reason: String,
    },
}
