//! Tensors of f32 in a safetensors file, and embeddings that others wrote there.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use super::RankingError;
use crate::files;

/// Bytes of the largest file that is read: 1 GiB.
const MOST_BYTES: u64 = 1 << 30;

/// Embeddings of queries, `[width]`, and of chunks, `[chunks, width]`, by name.
pub struct Embeddings {
    tensors: BTreeMap<String, Tensor>,
}

/// The elements of a tensor, and its axes.
pub struct Tensor {
    pub shape: Vec<usize>,
    pub elements: Vec<f32>,
}

impl Embeddings {
    /// Reads a file.
    ///
    /// # Errors
    /// [`RankingError`].
    pub fn read(path: &Path) -> Result<Self, RankingError> {
        let bytes = read_file(path)?;
        let file = parse(&bytes)?;
        let named = |name: &str| Ok((name.to_owned(), tensor(&file, name)?));
        Ok(Self { tensors: file.names().into_iter().map(named).collect::<Result<_, _>>()? })
    }

    /// The elements of a tensor with this many axes.
    ///
    /// # Errors
    /// [`RankingError::Tensor`].
    pub fn rows(&self, name: &str, axes: usize) -> Result<&[f32], RankingError> {
        let wrong = |reason| RankingError::Tensor { name: name.into(), reason };
        let Some(tensor) = self.tensors.get(name) else {
            let known: Vec<&str> = self.tensors.keys().take(4).map(String::as_str).collect();
            return Err(wrong(format!("the file does not hold it; its first are {}", known.join(", "))));
        };
        if tensor.shape.len() != axes {
            let needed = if axes == 1 { "[width]" } else { "[chunks, width]" };
            return Err(wrong(format!("its shape is {:?}, {needed} is needed", tensor.shape)));
        }
        Ok(&tensor.elements)
    }
}

/// The bytes of a file.
pub fn read_file(path: &Path) -> Result<Vec<u8>, RankingError> {
    let file = || path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    files::read(path, MOST_BYTES).map_err(|reason| RankingError::Unreadable { file: file(), reason })
}

/// The header of a safetensors file.
pub fn parse(bytes: &[u8]) -> Result<SafeTensors<'_>, RankingError> {
    SafeTensors::deserialize(bytes).map_err(|reason| RankingError::NotSafetensors { reason })
}

/// A tensor of f32.
pub fn tensor(file: &SafeTensors<'_>, name: &str) -> Result<Tensor, RankingError> {
    let wrong = |reason| RankingError::Tensor { name: name.into(), reason };
    let Ok(view) = file.tensor(name) else { return Err(wrong("the file does not hold it".into())) };
    if view.dtype() != Dtype::F32 {
        return Err(wrong(format!("it holds {:?} elements, F32 is read", view.dtype())));
    }
    let (words, _) = view.data().as_chunks::<4>();
    let elements = words.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    Ok(Tensor { shape: view.shape().to_vec(), elements })
}
