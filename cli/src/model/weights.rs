//! The tensors of a GGUF file, dequantised to f32.

use std::io::{self, Read, Seek, SeekFrom};

use candle_core::quantized::gguf_file::{Content, TensorInfo};
use candle_core::{DType, Device, Tensor};
use kvpack_weights::QuantizedLinear;

use super::config::Metadata;
use super::{ModelError, header};

/// An open GGUF file.
pub struct Weights<R> {
    content: Content,
    reader: R,
}

/// A layer: `x · weightᵀ + bias`.
pub struct Linear {
    weight: Weight,
    /// `[outputs]`.
    bias: Option<Tensor>,
}

/// What a layer multiplies with.
enum Weight {
    /// `[outputs, inputs]`, and the codes that it was dequantised from.
    Dense { weight: Tensor, codes: Option<Box<QuantizedLinear>> },
    /// In a form of its device.
    Stored(Box<dyn Product>),
    /// Rows of another layer, which multiplies for this one as well.
    Joined,
}

/// A weight in a form of its device, for example in codes.
pub trait Product: Send + Sync {
    /// `x · weightᵀ`: `[rows, inputs]` to `[rows, outputs]`, in the type of `x`.
    ///
    /// # Errors
    /// Those of the device.
    fn product(&self, x: &Tensor) -> candle_core::Result<Tensor>;
}

/// Tensors by the names that they have in GGUF files.
pub trait Tensors {
    /// True if there is such a tensor.
    fn has(&self, name: &str) -> bool;

    /// A tensor, which must have this shape.
    ///
    /// # Errors
    /// [`ModelError::Tensor`].
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError>;

    /// A dense layer; its bias is read where there is one.
    ///
    /// # Errors
    /// [`ModelError::Tensor`].
    fn linear(&mut self, name: &str, inputs: usize, outputs: usize) -> Result<Linear, ModelError> {
        let weight = self.tensor(&format!("{name}.weight"), &[outputs, inputs])?;
        let bias_name = format!("{name}.bias");
        let bias = if self.has(&bias_name) { Some(self.tensor(&bias_name, &[outputs])?) } else { None };
        Ok(Linear::new(weight, bias))
    }
}

/// Normal numbers, for measurements of shapes whose weights cannot be had. Norms multiply with 1.
pub struct RandomTensors {
    /// Where they lie.
    pub device: Device,
    /// The type of weights; that of norms is f32.
    pub dtype: DType,
}

impl Tensors for RandomTensors {
    fn has(&self, _: &str) -> bool {
        false
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let tensor = if name.ends_with("norm.weight") {
            Tensor::ones(shape, DType::F32, &self.device)
        } else {
            Tensor::randn(0f32, 0.02, shape, &self.device).and_then(|tensor| tensor.to_dtype(self.dtype))
        };
        tensor.map_err(|reason| ModelError::Tensor { name: name.into(), reason: reason.to_string() })
    }
}

impl<R: Read + Seek> Weights<R> {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// [`ModelError::NotGguf`] and [`ModelError::Truncated`].
    pub fn open(mut reader: R) -> Result<Self, ModelError> {
        header::check(&mut reader).map_err(|reason| ModelError::NotGguf { reason: reason.to_string() })?;
        let content =
            Content::read(&mut reader).map_err(|reason| ModelError::NotGguf { reason: reason.to_string() })?;
        let given = length(&mut reader).map_err(|reason| ModelError::Unreadable { reason })?;
        let mut all = 0u64;
        for (name, info) in &content.tensor_infos {
            let beyond = || ModelError::Tensor {
                name: name.clone(),
                reason: format!("no file holds its shape {:?} at {}", info.shape.dims(), info.offset),
            };
            let bytes = bytes(info).ok_or_else(beyond)?;
            let start = content.tensor_data_offset.checked_add(info.offset);
            let needed = start.and_then(|start| start.checked_add(bytes)).ok_or_else(beyond)?;
            if needed > given {
                return Err(ModelError::Truncated { needed, given });
            }
            all = all.saturating_add(bytes);
        }
        // Tensors that lie in one place would take memory each.
        if all > given {
            let reason = format!("its tensors have {all} bytes, the file {given}; they must not overlap");
            return Err(ModelError::NotGguf { reason });
        }
        Ok(Self { content, reader })
    }

    /// The metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.content.metadata
    }
}

impl<R: Read + Seek> Tensors for Weights<R> {
    fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
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
}

/// Bytes of a tensor in the file; `None` where they are beyond all numbers.
fn bytes(info: &TensorInfo) -> Option<u64> {
    let elements = info.shape.dims().iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
    let blocks = elements.div_ceil(info.ggml_dtype.block_size());
    blocks.checked_mul(info.ggml_dtype.type_size()).map(|bytes| bytes as u64)
}

fn length(reader: &mut impl Seek) -> io::Result<u64> {
    reader.seek(SeekFrom::End(0))
}

impl Linear {
    /// A layer with a weight `[outputs, inputs]` and a bias `[outputs]`, or without one.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight: Weight::Dense { weight, codes: None }, bias }
    }

    /// `[outputs, inputs]`.
    ///
    /// # Errors
    /// That the weight is in a form of its device.
    pub fn weight(&self) -> candle_core::Result<&Tensor> {
        match &self.weight {
            Weight::Dense { weight, .. } => Ok(weight),
            Weight::Stored(_) => candle_core::bail!("the weight is in a form of its device; read the model again"),
            Weight::Joined => candle_core::bail!("the weight is part of a joined projection; read the model again"),
        }
    }

    /// The codes that the weight was dequantised from, if the model's folder holds any.
    pub fn codes(&self) -> Option<&QuantizedLinear> {
        match &self.weight {
            Weight::Dense { codes, .. } => codes.as_deref(),
            Weight::Stored(_) | Weight::Joined => None,
        }
    }

    /// Layers with the same inputs as one, whose outputs follow each other. They give up their weights. `None`, and
    /// nothing is changed, unless all are dense, without codes, and all or none have a bias.
    ///
    /// # Errors
    /// Those of the device.
    pub fn joined(parts: &mut [&mut Self]) -> candle_core::Result<Option<Self>> {
        let dense = |part: &&mut Self| match &part.weight {
            Weight::Dense { weight, codes: None } => Some(weight.clone()),
            _ => None,
        };
        let weights: Option<Vec<Tensor>> = parts.iter().map(dense).collect();
        let biases: Vec<Tensor> = parts.iter().filter_map(|part| part.bias.clone()).collect();
        let Some(weights) = weights.filter(|_| biases.is_empty() || biases.len() == parts.len()) else {
            return Ok(None);
        };
        let bias = if biases.is_empty() { None } else { Some(Tensor::cat(&biases, 0)?) };
        let joined = Self::new(Tensor::cat(&weights, 0)?, bias);
        for part in parts {
            (part.weight, part.bias) = (Weight::Joined, None);
        }
        Ok(Some(joined))
    }

    /// True if another layer multiplies for this one.
    pub fn is_joined(&self) -> bool {
        matches!(self.weight, Weight::Joined)
    }

    /// True if a bias is added.
    pub fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// Sets another weight of the same shape.
    pub fn set_weight(&mut self, weight: Tensor) {
        self.weight = Weight::Dense { weight, codes: None };
    }

    /// Sets a weight in codes of the same shape.
    ///
    /// # Errors
    /// Those of the device.
    pub fn set_codes(&mut self, codes: QuantizedLinear) -> candle_core::Result<()> {
        let shape = (codes.shape().outputs(), codes.shape().inputs());
        let weight = Tensor::from_vec(codes.dequantize::<f32>(), shape, &Device::Cpu)?;
        self.weight = Weight::Dense { weight, codes: Some(Box::new(codes)) };
        Ok(())
    }

    /// Multiplies with another form of the same weight from now on.
    pub fn set_product(&mut self, product: Box<dyn Product>) {
        self.weight = Weight::Stored(product);
    }

    /// The same on another device and in another type. A weight in a form of its device stays there.
    pub fn moved(self, device: &Device, dtype: DType) -> candle_core::Result<Self> {
        let moved = |tensor: &Tensor| tensor.to_device(device)?.to_dtype(dtype);
        let weight = match self.weight {
            Weight::Dense { weight, codes } => Weight::Dense { weight: moved(&weight)?, codes },
            stays => stays,
        };
        Ok(Self { weight, bias: self.bias.as_ref().map(moved).transpose()? })
    }

    /// `[rows, inputs]` to `[rows, outputs]`.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let product = match &self.weight {
            Weight::Dense { weight, .. } => x.matmul(&weight.t()?)?,
            Weight::Stored(stored) => stored.product(x)?,
            Weight::Joined => candle_core::bail!("another layer multiplies for this one"),
        };
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }
}
