//! Folders of quantised weights: the GGUF file that they belong to, and a checkpoint whose layers have the names of
//! that file.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use kvpack_weights::checkpoint::{NewCheckpoint, WrittenFormat};
use kvpack_weights::{Checkpoint, GroupSize, QuantizedLinear};
use serde_json::json;

use super::projections::{Input, Projection};
use super::{Model, ModelError};

/// The model's own file in such a folder: shape, tokenizer, and everything that is not quantised.
pub const GGUF: &str = "model.gguf";

/// A folder that is being put together.
pub struct QuantizedModel {
    checkpoint: NewCheckpoint,
    bits: u64,
    weights: u64,
}

impl QuantizedModel {
    /// One without layers.
    pub fn new(format: WrittenFormat, group: GroupSize) -> Self {
        Self { checkpoint: NewCheckpoint::new(format, group), bits: 0, weights: 0 }
    }

    /// Adds a projection.
    ///
    /// # Errors
    /// What the format cannot store.
    pub fn add(&mut self, layer: usize, projection: Projection, linear: &QuantizedLinear) -> Result<()> {
        let name = projection.name(layer);
        self.checkpoint.add_layer(&name, linear).with_context(|| format!("cannot store {name}"))?;
        let (weights, per_group) = (linear.shape().weights() as u64, u64::from(linear.bits().count()) + 16);
        self.weights += weights;
        self.bits += weights * u64::from(linear.bits().count()) + linear.scales().len() as u64 * per_group;
        Ok(())
    }

    /// Adds the weights of a norm that have changed.
    ///
    /// # Errors
    /// Values beyond f16.
    pub fn add_norm(&mut self, name: &str, weights: &[f32]) -> Result<()> {
        Ok(self.checkpoint.add_dense(name, &[weights.len()], weights)?)
    }

    /// Bits per quantised weight, with scales and zeros.
    pub fn bits_per_weight(&self) -> f64 {
        self.bits as f64 / self.weights.max(1) as f64
    }

    /// Writes into a folder, which must be there, for the model of a GGUF file.
    ///
    /// # Errors
    /// The operating system's.
    pub fn write(&self, folder: &Path, gguf: &Path) -> Result<()> {
        self.checkpoint.write(folder, &json!({"kvpack": {"names": "gguf", "model": GGUF}}))?;
        let copy = folder.join(GGUF);
        fs::copy(gguf, &copy).with_context(|| format!("cannot copy {} to {}", gguf.display(), copy.display()))?;
        Ok(())
    }
}

/// Sets the weights of a model to those of a folder, dequantised.
pub fn replace_weights(model: &mut Model, folder: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(folder)?;
    let dense: Vec<&str> = checkpoint.tensor_names().filter(|name| name.ends_with("_norm.weight")).collect();
    for index in 0..model.config.layers {
        let layer = model.layer_mut(index);
        for projection in Projection::ALL {
            let name = projection.name(index);
            let linear = checkpoint.layer(&name)?;
            let shape = [linear.shape().outputs(), linear.shape().inputs()];
            let weight = layer.projection(projection);
            let needed = weight.weight()?.dims();
            if needed != shape {
                let reason = format!("its shape is {shape:?}, {needed:?} is needed");
                return Err(ModelError::Tensor { name, reason }.into());
            }
            weight.set_codes(linear)?;
        }
        for input in Input::ALL {
            let name = input.norm_name(index).filter(|name| dense.contains(&name.as_str()));
            let (Some(name), Some(norm)) = (name, layer.norm_before(input)) else { continue };
            let values = checkpoint.dense(&name)?.values;
            ensure!(
                values.len() == norm.elem_count(),
                "{name} has {} elements, {} are needed",
                values.len(),
                norm.elem_count()
            );
            *norm = Tensor::new(values, &Device::Cpu)?;
        }
    }
    Ok(())
}
