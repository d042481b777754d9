//! What can be wrong with a dump.

/// Why a dump of keys, values and queries cannot be evaluated.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// The file cannot be read.
    #[error("cannot read the dump: {reason}")]
    Unreadable {
        /// The operating system's reason.
        reason: std::io::Error,
    },

    /// The file is no whole safetensors file.
    #[error(
        "the dump is not a whole safetensors file: {reason}. If it was copied or downloaded, do so again; otherwise write \
         it again with a safetensors library"
    )]
    NotSafetensors {
        /// The parser's reason.
        reason: safetensors::SafeTensorError,
    },

    /// No tensor has a name that the format knows.
    #[error(
        "the dump holds no tensor named layer<N>.key (it holds {found}). Name the tensors layer<N>.key, layer<N>.value, \
         layer<N>.query_prompt and layer<N>.query_decode; `kvpack eval --help` describes their shapes"
    )]
    NoLayers {
        /// The names found, shortened.
        found: String,
    },

    /// The metadata name a mask that does not exist.
    #[error("metadata 'mask' is '{given}'; it must be 'causal' or 'none', or be left out (causal)")]
    UnknownMask {
        /// The mask given.
        given: String,
    },

    /// A layer lacks a tensor.
    #[error("layer {layer} has {has} but no {lacks}; {hint}")]
    Incomplete {
        /// The layer.
        layer: u32,
        /// A tensor that it has.
        has: &'static str,
        /// The one that it lacks.
        lacks: &'static str,
        /// What to do.
        hint: &'static str,
    },

    /// A tensor has an element type that is not read.
    #[error("{tensor} holds {given} elements; F16, BF16 and F32 are read. Convert it before writing the dump")]
    ElementType {
        /// The tensor.
        tensor: String,
        /// Its element type.
        given: String,
    },

    /// A tensor has the wrong shape.
    #[error("{tensor} has shape {given:?}, needed is {needed}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape.
        given: Vec<usize>,
        /// What is needed, in words.
        needed: String,
    },

    /// An element that no cache can hold.
    #[error(
        "{tensor} holds {value} at [{head}, {row}, {channel}]: elements must be finite and within ±65504, the range of \
         f16. Look for an overflow in what made the dump"
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// The element.
        value: f32,
        /// Head.
        head: usize,
        /// Token or query.
        row: usize,
        /// Channel.
        channel: usize,
    },

    /// Head counts or head dimension that kvpack does not serve.
    #[error("layer {layer}: {reason}")]
    Heads {
        /// The layer.
        layer: u32,
        /// The library's reason.
        reason: kvpack::Error,
    },
}
