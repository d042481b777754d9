//! What can be wrong with what chunks are ranked by.

/// Why chunks cannot be ranked.
#[derive(Debug, thiserror::Error)]
pub enum RankingError {
    /// A name that stands for nothing.
    #[error(
        "chunks are ranked by bm25, minilm, minilm:FOLDER, or embeddings in a FILE.safetensors; '{given}' is none of \
         these"
    )]
    Unknown {
        /// What was given.
        given: String,
    },

    /// A file cannot be read.
    #[error("{file} cannot be read: {reason}. scripts/fetch-encoder.sh fetches MiniLM")]
    Unreadable {
        /// The file.
        file: String,
        /// The operating system's reason.
        reason: std::io::Error,
    },

    /// The description of an encoder is not usable.
    #[error("config.json: {reason}")]
    Config {
        /// What is wrong with it.
        reason: String,
    },

    /// The word pieces of an encoder are not usable.
    #[error("vocab.txt: {reason}")]
    Vocabulary {
        /// What is wrong with it.
        reason: String,
    },

    /// The file is no whole safetensors file.
    #[error("it is not a whole safetensors file: {reason}")]
    NotSafetensors {
        /// The parser's reason.
        reason: safetensors::SafeTensorError,
    },

    /// A tensor that is needed is not there, or is another one.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
}
