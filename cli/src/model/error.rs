//! What can be wrong with a model file, or with what is asked of it.

/// Why a model cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file cannot be opened or read.
    #[error("it cannot be read: {reason}. scripts/fetch-model.sh fetches the default model, or name another GGUF file")]
    Unreadable {
        /// The operating system's reason.
        reason: std::io::Error,
    },

    /// The file is no GGUF file.
    #[error("it is not a readable GGUF file: {reason}")]
    NotGguf {
        /// The parser's reason.
        reason: String,
    },

    /// The file ends before its tensors do.
    #[error("it is truncated: its tensors end at byte {needed}, the file at {given}. Fetch it again")]
    Truncated {
        /// Bytes that its header speaks of.
        needed: u64,
        /// Bytes that there are.
        given: u64,
    },

    /// An architecture that the forward pass does not implement.
    #[error("the model's architecture is '{given}'; llama, qwen2 and gemma3 are implemented")]
    Architecture {
        /// The architecture.
        given: String,
    },

    /// A variant of an architecture that the forward pass does not implement.
    #[error("the model uses {what}, which is not implemented")]
    Variant {
        /// What it uses.
        what: String,
    },

    /// A metadata entry that is needed is not there or of the wrong type.
    #[error("the model's metadata have no usable '{key}': {reason}")]
    Metadata {
        /// The key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A tensor that is needed is not there, or has the wrong shape.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A tokenizer that is not implemented, or inconsistent.
    #[error("the model's tokenizer: {reason}")]
    Tokenizer {
        /// What is wrong with it.
        reason: String,
    },

    /// More tokens than the model was trained for.
    #[error("{given} tokens do not fit the model's context of {context}; shorten the text or generate less")]
    Context {
        /// Tokens asked for.
        given: usize,
        /// Tokens of the context.
        context: usize,
    },

    /// A recipe names a layer that the model does not have.
    #[error("recipe '{recipe}' names layer {layer}; the model has layers 0..{layers}")]
    Layer {
        /// The recipe.
        recipe: String,
        /// The layer.
        layer: usize,
        /// Layers of the model.
        layers: usize,
    },
}
