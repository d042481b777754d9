//! Checkpoints: folders of safetensors files with a configuration.

mod config;
mod files;
mod write;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

pub use config::{AwqVersion, Scheme};
pub use files::Dense;
pub use write::{NewCheckpoint, WrittenFormat};

use crate::error::{Error, Result};
use crate::format::awq_gemm::AwqTensors;
use crate::format::awq_gemv_fast::AwqFastTensors;
use crate::format::compressed_tensors::CompressedTensors;
use crate::format::gptq::{AllOnes, GptqLayout, GptqTensors, StoredZeros};
use crate::format::{awq_gemm, awq_gemv, awq_gemv_fast, compressed_tensors, gptq};
use crate::linear::QuantizedLinear;
use crate::shape::GroupSize;
use files::TensorFile;

/// The most tensor files of a checkpoint.
const MOST_FILES: usize = 10_000;

/// A checkpoint on disk or in memory. Opening one reads headers and the configuration; tensors are read when they are
/// asked for.
pub struct Checkpoint {
    scheme: Scheme,
    all_ones: AllOnes,
    files: Vec<TensorFile>,
    /// The file of each tensor.
    tensors: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// Opens a folder: its `*.safetensors`, or those that `model.safetensors.index.json` names, and the configuration
    /// in `config.json` (`quantization_config`), `quantize_config.json` (AutoGPTQ) or `quant_config.json` (AutoAWQ).
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Safetensors`], [`Error::Config`] and [`Error::Tensor`] for files that cannot be read,
    /// are cut off, or contradict each other.
    pub fn open(folder: &Path) -> Result<Self> {
        let scheme = config::of_folder(folder)?;
        let names = files::names(folder, MOST_FILES)?;
        let opened = names.files.iter().map(|name| TensorFile::open(&folder.join(name))).collect::<Result<Vec<_>>>()?;
        let checkpoint = Self::new(scheme, opened)?;
        for (tensor, file) in &names.index {
            let found = checkpoint.tensors.get(tensor).map(|&at| names.files[at].as_str());
            if found != Some(file) {
                let reason = match found {
                    None => format!("the index names it in {file}, which does not hold it; fetch the file again"),
                    Some(found) => format!("the index names it in {file}, but it is in {found}; fetch both again"),
                };
                return Err(Error::Tensor { name: tensor.clone(), reason });
            }
        }
        Ok(checkpoint)
    }

    /// A checkpoint of tensor files in memory, and its configuration: what `quantize_config.json` holds, or the value
    /// of `quantization_config`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_bytes(files: Vec<Vec<u8>>, configuration: &Value) -> Result<Self> {
        let scheme = Scheme::parse(configuration)?;
        let files = files.into_iter().enumerate();
        let files = files.map(|(index, bytes)| TensorFile::from_bytes(format!("file {index}"), bytes));
        Self::new(scheme, files.collect::<Result<_>>()?)
    }

    fn new(scheme: Scheme, files: Vec<TensorFile>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (at, file) in files.iter().enumerate() {
            for name in file.tensor_names() {
                if let Some(other) = tensors.insert(name.clone(), at) {
                    let both = (files[other].name(), file.name());
                    let reason = format!("it is in {} and in {}; remove one of the files", both.0, both.1);
                    return Err(Error::Tensor { name, reason });
                }
            }
        }
        Ok(Self { scheme, all_ones: AllOnes::default(), files, tensors })
    }

    /// Sets what a zero of all ones means in GPTQ checkpoints of version 1. Without it such a layer is refused.
    pub fn with_all_ones(self, all_ones: AllOnes) -> Self {
        Self { all_ones, ..self }
    }

    /// The scheme in the configuration.
    pub fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// The names of all tensors, in order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The names of all quantised layers, in order: `model.layers.0.mlp.up_proj`.
    pub fn layer_names(&self) -> impl Iterator<Item = &str> {
        let codes = match self.scheme {
            Scheme::Gptq { .. } | Scheme::Awq { .. } => ".qweight",
            Scheme::CompressedTensors { .. } => ".weight_packed",
        };
        self.tensor_names().filter_map(move |name| name.strip_suffix(codes))
    }

    /// Reads a quantised layer. Its bias, where it has one, is the dense tensor `NAME.bias`.
    ///
    /// # Errors
    /// [`Error::Tensor`], [`Error::Layer`] and [`Error::Io`] for tensors that are missing, do not fit each other or
    /// hold what no layer holds.
    pub fn layer(&self, name: &str) -> Result<QuantizedLinear> {
        let tensor = |part: &str| format!("{name}.{part}");
        let read = match &self.scheme {
            Scheme::Gptq { .. } => return self.gptq_layer(name).map(|(linear, _)| linear),
            &Scheme::Awq { group, version } => match version {
                AwqVersion::Gemm | AwqVersion::Gemv => {
                    let tensors = AwqTensors {
                        qweight: self.words(&tensor("qweight"))?,
                        qzeros: self.words(&tensor("qzeros"))?,
                        scales: self.table(&tensor("scales"))?,
                    };
                    match version {
                        AwqVersion::Gemm => awq_gemm::unpack(&tensors, group),
                        _ => awq_gemv::unpack(&tensors, group),
                    }
                }
                AwqVersion::GemvFast => {
                    let qweight = tensor("qweight");
                    // AutoAWQ keeps the name of the other versions, llm-awq has one of its own.
                    let scaled_zeros = Some(tensor("scaled_zeros")).filter(|name| self.tensors.contains_key(name));
                    let scaled_zeros = scaled_zeros.unwrap_or_else(|| tensor("qzeros"));
                    let tensors = AwqFastTensors {
                        qweight: self.file(&qweight)?.shorts(&qweight)?,
                        scales: self.table(&tensor("scales"))?,
                        scaled_zeros: self.table(&scaled_zeros)?,
                    };
                    awq_gemv_fast::unpack(&tensors, group)
                }
            },
            &Scheme::CompressedTensors { bits, group, symmetric, act_order } => {
                let (shape, index) = (tensor("weight_shape"), tensor("weight_g_idx"));
                let tensors = CompressedTensors {
                    weight_packed: self.words(&tensor("weight_packed"))?,
                    weight_scale: self.table(&tensor("weight_scale"))?,
                    weight_zero_point: match symmetric {
                        true => None,
                        false => Some(self.words(&tensor("weight_zero_point"))?),
                    },
                    weight_shape: self.file(&shape)?.pair(&shape)?,
                    weight_g_idx: self.group_index(&index, group, act_order)?,
                };
                compressed_tensors::unpack(&tensors, bits, group)
            }
        };
        read.map_err(|reason| Error::Layer { name: name.into(), reason: Box::new(reason) })
    }

    /// Reads a quantised layer of a GPTQ checkpoint, and how its zeros are stored.
    ///
    /// The configuration says which version that is, except in symmetric layers, whose zeros show it:
    /// [`gptq::stored_zeros_of_symmetric`].
    ///
    /// # Errors
    /// As [`layer`](Self::layer), and [`Error::Config`] for a checkpoint in another format.
    pub fn gptq_layer(&self, name: &str) -> Result<(QuantizedLinear, StoredZeros)> {
        let &Scheme::Gptq { bits, group, zeros, symmetric, act_order } = &self.scheme else {
            let reason = format!("{:?} has no GPTQ layers", self.scheme);
            return Err(Error::Config { what: name.into(), reason });
        };
        let tensor = |part: &str| format!("{name}.{part}");
        let g_idx = self.group_index(&tensor("g_idx"), group, act_order)?;
        let tensors = GptqTensors {
            qweight: self.words(&tensor("qweight"))?,
            qzeros: self.words(&tensor("qzeros"))?,
            scales: self.table(&tensor("scales"))?,
            // Some programs write zeros where there is no index. exllama reads them so.
            g_idx: g_idx.filter(|index| act_order || index.iter().any(|&group| group != 0)),
        };
        let shown = if symmetric { gptq::stored_zeros_of_symmetric(&tensors.qzeros, bits) } else { None };
        let zeros = shown.unwrap_or(zeros);
        let layout = GptqLayout { bits, group, zeros, all_ones: self.all_ones };
        let linear = gptq::unpack(&tensors, &layout);
        let linear = linear.map_err(|reason| Error::Layer { name: name.into(), reason: Box::new(reason) })?;
        Ok((linear, zeros))
    }

    /// Reads a tensor of f16, bf16 or f32, such as a norm or a bias.
    ///
    /// # Errors
    /// [`Error::Tensor`] for one that is missing or of another type, and [`Error::Io`].
    pub fn dense(&self, name: &str) -> Result<Dense> {
        self.file(name)?.dense(name)
    }

    fn file(&self, name: &str) -> Result<&TensorFile> {
        let missing = || Error::Tensor { name: name.into(), reason: "no file of the checkpoint holds it".into() };
        self.tensors.get(name).map(|&at| &self.files[at]).ok_or_else(missing)
    }

    fn words(&self, name: &str) -> Result<crate::format::Table<u32>> {
        self.file(name)?.words(name)
    }

    fn table(&self, name: &str) -> Result<crate::format::Table<f32>> {
        self.file(name)?.table(name)
    }

    /// The group of each input. It may be missing where groups are in order.
    fn group_index(&self, name: &str, group: GroupSize, act_order: bool) -> Result<Option<Vec<i32>>> {
        if self.tensors.contains_key(name) {
            return self.file(name)?.indices(name).map(Some);
        }
        if act_order && group != GroupSize::Row {
            let reason = "the configuration sets act-order, so the group of each input is needed, but no file of the \
                          checkpoint holds it; fetch the checkpoint again";
            return Err(Error::Tensor { name: name.into(), reason: reason.into() });
        }
        Ok(None)
    }
}
