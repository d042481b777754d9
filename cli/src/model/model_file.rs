//! GGUF files for decoders on other tensor libraries.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result};

use super::weights::{Tensors as _, Weights};
use super::{Config, ModelError, Tokenizer};
use crate::files;

/// An open GGUF file: the shape of its model, its tokenizer, and its tensors by name.
pub struct ModelFile {
    /// The shape of the model.
    pub config: Config,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    weights: Weights<BufReader<File>>,
}

impl ModelFile {
    /// Opens a file.
    ///
    /// # Errors
    /// [`ModelError`] says what is wrong with the file and what to do.
    pub fn open(path: &Path) -> Result<Self> {
        let open = || -> Result<Self> {
            let file = files::open(path).map_err(|reason| ModelError::Unreadable { reason })?;
            let weights = Weights::open(BufReader::new(file))?;
            let (config, tokenizer) = (Config::read(weights.metadata())?, Tokenizer::read(weights.metadata())?);
            Ok(Self { config, tokenizer, weights })
        };
        open().with_context(|| format!("cannot open the model {}", path.display()))
    }

    /// Whether there is such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.weights.has(name)
    }

    /// The elements of a tensor, which must have this shape, dequantised, in row-major order.
    ///
    /// # Errors
    /// [`ModelError::Tensor`].
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        Ok(self.weights.tensor(name, shape)?.flatten_all()?.to_vec1()?)
    }
}
