//! The shape of a decoder, as the command reads it from GGUF files, and its tensors by name, for hosts without candle.

use kvpack_cli::ModelFile;
pub use kvpack_cli::{Activation, Config, LocalLayers, RopePairs};

/// Tensors by the names that they have in GGUF files.
pub trait Tensors {
    /// Whether there is such a tensor.
    fn has(&self, name: &str) -> bool;

    /// The elements of a tensor, which must have this shape, in row-major order.
    ///
    /// # Errors
    /// That there is none, or that it has another shape.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String>;
}

impl Tensors for ModelFile {
    fn has(&self, name: &str) -> bool {
        Self::has(self, name)
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        Self::tensor(self, name, shape).map_err(|error| format!("{error:#}"))
    }
}

/// Random numbers, for measurements of shapes whose weights cannot be had. Norms multiply with 1.
#[derive(Clone, Debug, Default)]
pub struct RandomTensors {
    seed: u64,
}

impl Tensors for RandomTensors {
    fn has(&self, _: &str) -> bool {
        false
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        let count = shape.iter().product();
        // Uniform numbers of the deviation that candle's random models have.
        let scale = 0.02 * 3f32.sqrt();
        Ok(if name.ends_with("norm.weight") {
            vec![1.0; count]
        } else {
            crate::tiny::random(&mut self.seed, count, scale)
        })
    }
}
