//! The tensors of a GGUF file, dequantised to f32.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Tensor};

use super::ModelError;
use super::config::Metadata;

/// An open GGUF file.
pub struct Weights {
    content: Content,
    reader: BufReader<File>,
}

/// A dense layer: `x · weightᵀ + bias`.
pub struct Linear {
    /// `[outputs, inputs]`.
    weight: Tensor,
    /// `[outputs]`.
    bias: Option<Tensor>,
}

impl Weights {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// [`ModelError::Unreadable`], [`ModelError::NotGguf`] and [`ModelError::Truncated`].
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let unreadable = |reason| ModelError::Unreadable { path: path.into(), reason };
        let file = File::open(path).map_err(unreadable)?;
        let given = file.metadata().map_err(unreadable)?.len();
        let mut reader = BufReader::new(file);
        let content = Content::read(&mut reader).map_err(|reason| ModelError::NotGguf { path: path.into(), reason })?;
        let end = |info: &candle_core::quantized::gguf_file::TensorInfo| {
            let blocks = info.shape.elem_count().div_ceil(info.ggml_dtype.block_size());
            content.tensor_data_offset + info.offset + (blocks * info.ggml_dtype.type_size()) as u64
        };
        let needed = content.tensor_infos.values().map(end).max().unwrap_or(0);
        if needed > given {
            return Err(ModelError::Truncated { path: path.into(), needed, given });
        }
        Ok(Self { content, reader })
    }

    /// The metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.content.metadata
    }

    /// True if there is such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// A tensor, which must have this shape.
    ///
    /// # Errors
    /// [`ModelError::Tensor`].
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let wrong = |reason: String| ModelError::Tensor { name: name.into(), reason };
        let Some(info) = self.content.tensor_infos.get(name) else {
            return Err(wrong("the file does not hold it".into()));
        };
        if info.shape.dims() != shape {
            return Err(wrong(format!("its shape is {:?}, {shape:?} is needed", info.shape.dims())));
        }
        let quantized = self.content.tensor(&mut self.reader, name, &Device::Cpu);
        quantized.and_then(|tensor| tensor.dequantize(&Device::Cpu)).map_err(|reason| wrong(reason.to_string()))
    }

    /// A dense layer; its bias is read where the file has one.
    ///
    /// # Errors
    /// [`ModelError::Tensor`].
    pub fn linear(&mut self, name: &str, inputs: usize, outputs: usize) -> Result<Linear, ModelError> {
        let weight = self.tensor(&format!("{name}.weight"), &[outputs, inputs])?;
        let bias_name = format!("{name}.bias");
        let bias = if self.has(&bias_name) { Some(self.tensor(&bias_name, &[outputs])?) } else { None };
        Ok(Linear { weight, bias })
    }
}

impl Linear {
    /// A layer without a bias.
    pub fn new(weight: Tensor) -> Self {
        Self { weight, bias: None }
    }

    /// `[rows, inputs]` to `[rows, outputs]`.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let product = x.matmul(&self.weight.t()?)?;
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }
}
