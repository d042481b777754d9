//! A language model whose attention and cache are kvpack's: the worked example of an engine integration.
//!
//! | file | holds |
//! | --- | --- |
//! | `config` | the configuration in a GGUF file |
//! | `header` | what is checked of the file before candle reads it |
//! | `weights` | its tensors, dequantised |
//! | `tokenizer` | its tokenizer |
//! | `transformer` | the forward pass, with candle's operations |
//! | `projections` | the linear layers of a block by name |
//! | `calibrate` | weights quantised layer by layer, for the inputs that a text gives them |
//! | `quantized` | folders of quantised weights |
//! | `attention` | what the forward pass asks of attention, and candle's full-precision answer |
//! | `packed` | kvpack's answer: a `ModelCache` |
//! | `bias` | how much of the keys is a bias |
//! | `recompress` | a cache that is compressed again as the text grows |
//! | `dense_prompt` | a prompt in full precision, of which a policy keeps some tokens |

mod attention;
mod bias;
mod calibrate;
mod config;
mod dense_prompt;
mod error;
mod fused;
mod header;
mod layer;
mod packed;
mod projections;
mod quantized;
mod recompress;
mod rotation;
#[cfg(test)]
pub mod tiny;
mod tokenizer;
mod transformer;
mod weights;

pub use attention::{Attention, Chunk, ExactAttention, softmax};
pub use bias::{KeyBias, KeysWatched};
pub use calibrate::{Calibration, Method, Remarks};
pub use config::{Activation, Config, LocalLayers, RopePairs};
pub use dense_prompt::DensePrompt;
pub use error::ModelError;

pub use fused::Fused;
pub use packed::PackedAttention;
pub use projections::Projection;
pub use quantized::QuantizedModel;
pub use rotation::Inputs;
pub use tokenizer::Tokenizer;
pub use transformer::Model;
pub use weights::{Linear, Product, Tensors as WeightTensors, Weights};

/// Tokens of one forward pass over a text: a tile, so that chunks end where tiles do.
pub const CHUNK_TOKENS: usize = kvpack::TILE_TOKENS;
