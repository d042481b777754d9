//! Checkpoints that other programs read: GPTQ v2 and AWQ gemm.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::f16;
use safetensors::{Dtype, View, serialize_to_file};
use serde_json::{Value, json};

use super::files;
use crate::error::{Error, Result, check_elements, check_finite};
use crate::format::gptq::StoredZeros;
use crate::format::{Table, awq_gemm, gptq};
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, GroupSize};

/// The file with the tensors.
const TENSORS: &str = "model.safetensors";

/// The configuration that GPTQ has next to that of the model.
const CONFIG: &str = "config.json";
const GPTQ_CONFIG: &str = "quantize_config.json";

/// The formats that are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrittenFormat {
    /// GPTQ, `checkpoint_format` "gptq_v2".
    GptqV2,
    /// AutoAWQ, `version` "gemm"; 4 bits.
    AwqGemm,
}

/// A checkpoint that is being put together in memory.
pub struct NewCheckpoint {
    format: WrittenFormat,
    group: GroupSize,
    tensors: BTreeMap<String, Stored>,
    bits: Option<Bits>,
    symmetric: bool,
    act_order: bool,
}

/// A tensor to be written.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for &Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

impl NewCheckpoint {
    /// A checkpoint without tensors, whose layers have groups of `group` inputs.
    pub fn new(format: WrittenFormat, group: GroupSize) -> Self {
        Self { format, group, tensors: BTreeMap::new(), bits: None, symmetric: true, act_order: false }
    }

    /// Adds a quantised layer. Its scales are written in f16.
    ///
    /// # Errors
    /// [`Error::Format`] for what the format cannot store, and for a layer whose bits or groups are not those of the
    /// others; [`Error::Tensor`] for a name that is taken.
    pub fn add_layer(&mut self, name: &str, linear: &QuantizedLinear) -> Result<()> {
        let format = match self.format {
            WrittenFormat::GptqV2 => "a GPTQ checkpoint",
            WrittenFormat::AwqGemm => "an AWQ checkpoint",
        };
        if self.bits.is_some_and(|bits| bits != linear.bits()) {
            let hint = "all layers of a checkpoint have the same bits";
            return Err(Error::Format { format, what: format!("{} in '{name}'", linear.bits()), hint });
        }
        if linear.groups().size() != self.group.inputs(linear.shape().inputs()) {
            let what = format!("groups of {} in '{name}'", linear.groups().size());
            return Err(Error::Format { format, what, hint: "all layers have the group size of the checkpoint" });
        }
        let part = |part: &str| format!("{name}.{part}");
        let mut tensors = match self.format {
            WrittenFormat::GptqV2 => {
                let tensors = gptq::pack(linear, StoredZeros::Plain)?;
                let index = tensors.g_idx.unwrap_or_default();
                vec![
                    (part("qweight"), words(&tensors.qweight)),
                    (part("qzeros"), words(&tensors.qzeros)),
                    (part("scales"), scales(name, &tensors.scales)?),
                    (
                        part("g_idx"),
                        Stored::new(Dtype::I32, vec![index.len()], index.iter().flat_map(|group| group.to_le_bytes())),
                    ),
                ]
            }
            WrittenFormat::AwqGemm => {
                let tensors = awq_gemm::pack(linear)?;
                vec![
                    (part("qweight"), words(&tensors.qweight)),
                    (part("qzeros"), words(&tensors.qzeros)),
                    (part("scales"), scales(name, &tensors.scales)?),
                ]
            }
        };
        if let Some((taken, _)) = tensors.iter().find(|(name, _)| self.tensors.contains_key(name)) {
            return Err(self.taken(taken));
        }
        self.tensors.extend(tensors.drain(..));
        self.bits = Some(linear.bits());
        self.symmetric &= linear.is_symmetric();
        self.act_order |= linear.groups().index().is_some();
        Ok(())
    }

    /// Adds a tensor that is not quantised, in f16.
    ///
    /// # Errors
    /// [`Error::Elements`] for values that do not fill the shape, [`Error::Value`] for values beyond f16,
    /// [`Error::Tensor`] for a name that is taken.
    pub fn add_dense(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Result<()> {
        if self.tensors.contains_key(name) {
            return Err(self.taken(name));
        }
        let stored = halves(name, shape, values)?;
        self.tensors.insert(name.into(), stored);
        Ok(())
    }

    /// Writes `model.safetensors`, `config.json` (`model`, which must be an object or null, with `quantization_config`)
    /// and, for GPTQ, `quantize_config.json` into a folder that exists. Files of these names are overwritten.
    ///
    /// The folder must hold no `model.safetensors.index.json` and no other `*.safetensors`: readers would take the
    /// tensors of those files with this configuration. AWQ needs one without `quantize_config.json`, which readers may
    /// take for the configuration.
    ///
    /// # Errors
    /// [`Error::Config`] without a quantised layer, for a `model` that is no object and for a folder with such files:
    /// then nothing is written. [`Error::Io`]: an earlier checkpoint in the folder is as it was, or, where its files could
    /// be written and not replaced, has no `config.json` any more.
    pub fn write(&self, folder: &Path, model: &Value) -> Result<()> {
        let configuration = self.configuration()?;
        check_folder(folder, self.format)?;
        let mut model = match model {
            Value::Null => json!({}),
            Value::Object(_) => model.clone(),
            _ => {
                let reason = "it must be an object: what config.json of the model holds".into();
                return Err(Error::Config { what: "the configuration of the model".into(), reason });
            }
        };
        model["quantization_config"] = configuration.clone();
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        // All files are complete before one takes the place of an earlier one.
        let mut files = vec![Partial::new(folder, TENSORS)];
        serialize_to_file(self.tensors.iter(), Some(metadata), &files[0].written)
            .map_err(|reason| Error::Io { path: files[0].file.clone(), reason: std::io::Error::other(reason) })?;
        if self.format == WrittenFormat::GptqV2 {
            files.push(Partial::new(folder, GPTQ_CONFIG));
            write_json(&files[1].written, &configuration)?;
        }
        files.push(Partial::new(folder, CONFIG));
        write_json(&files[files.len() - 1].written, &model)?;
        put_in_place(files)
    }

    /// `quantization_config`.
    fn configuration(&self) -> Result<Value> {
        let Some(bits) = self.bits else {
            let reason = "it has no quantised layer; add one".into();
            return Err(Error::Config { what: "the checkpoint".into(), reason });
        };
        GroupSize::new(self.group.written())?; // what no reader takes
        Ok(match self.format {
            WrittenFormat::GptqV2 => json!({
                "quant_method": "gptq",
                "checkpoint_format": "gptq_v2",
                "bits": bits.count(),
                "group_size": self.group.written(),
                "desc_act": self.act_order,
                "sym": self.symmetric,
                "lm_head": false,
            }),
            WrittenFormat::AwqGemm => json!({
                "quant_method": "awq",
                "version": "gemm",
                "bits": bits.count(),
                "group_size": self.group.written(),
                "zero_point": true,
                "modules_to_not_convert": null,
            }),
        })
    }

    fn taken(&self, name: &str) -> Error {
        Error::Tensor { name: name.into(), reason: "the checkpoint has it already; give each another name".into() }
    }
}

impl Stored {
    fn new(dtype: Dtype, shape: Vec<usize>, bytes: impl Iterator<Item = u8>) -> Self {
        Self { dtype, shape, bytes: bytes.collect() }
    }
}

fn words(table: &Table<u32>) -> Stored {
    let bytes = table.values().iter().flat_map(|word| word.to_le_bytes());
    Stored::new(Dtype::I32, vec![table.rows(), table.columns()], bytes)
}

/// Scales in f16. They may be rounded, but must not vanish.
fn scales(name: &str, table: &Table<f32>) -> Result<Stored> {
    let values = table.values();
    match values.iter().position(|&value| value != 0.0 && f16::from_f32(value) == f16::ZERO) {
        None => halves(name, &[table.rows(), table.columns()], values),
        Some(index) => Err(not_a_half(name, values, index)),
    }
}

/// Values in f16, rounded.
fn halves(name: &str, shape: &[usize], values: &[f32]) -> Result<Stored> {
    let needed = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size)).unwrap_or(usize::MAX);
    check_elements("the list of values", values.len(), needed, || format!("'{name}' with the shape {shape:?}"))?;
    check_finite("value", values)?;
    if let Some(index) = values.iter().position(|&value| f16::from_f32(value).is_infinite()) {
        return Err(not_a_half(name, values, index));
    }
    let bytes = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes());
    Ok(Stored::new(Dtype::F16, shape.to_vec(), bytes))
}

fn not_a_half(name: &str, values: &[f32], index: usize) -> Error {
    let given = format!("{:e} in '{name}'", values[index]);
    Error::Value { what: "value", index, given, allowed: "what f16 can hold: up to 65504, scales from 6e-8 on".into() }
}

/// Refuses a folder with files that readers would take in place of what is written, or with it.
fn check_folder(folder: &Path, format: WrittenFormat) -> Result<()> {
    let mut others = files::in_folder(folder)?;
    others.retain(|name| name != TENSORS);
    others.sort();
    let unwritten = match format {
        WrittenFormat::GptqV2 => vec![files::INDEX],
        WrittenFormat::AwqGemm => vec![files::INDEX, GPTQ_CONFIG],
    };
    others.extend(unwritten.into_iter().filter(|name| folder.join(name).exists()).map(str::to_owned));
    let Some(other) = others.first() else { return Ok(()) };
    let reason = format!(
        "it holds {other} of another checkpoint, and readers would mix the two; name another folder, or remove the \
         other checkpoint"
    );
    Err(Error::Config { what: folder.display().to_string(), reason })
}

/// A file that is written under another name first. What is left of it goes.
struct Partial {
    file: PathBuf,
    written: PathBuf,
}

impl Partial {
    fn new(folder: &Path, name: &str) -> Self {
        Self { file: folder.join(name), written: folder.join(format!(".{name}.partial")) }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // It is there where something failed.
        _ = std::fs::remove_file(&self.written);
    }
}

/// Gives files their names, that of the model's configuration last: a folder without it is no checkpoint, so that none
/// has the tensors of one and the configuration of another, whenever it ends.
fn put_in_place(files: Vec<Partial>) -> Result<()> {
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |reason| Error::Io { path, reason }
    };
    let Some(last) = files.last() else { return Ok(()) };
    if last.file.exists() {
        std::fs::remove_file(&last.file).map_err(io(&last.file))?;
    }
    files.iter().try_for_each(|of| std::fs::rename(&of.written, &of.file).map_err(io(&of.file)))
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = format!("{value:#}\n");
    std::fs::write(path, text).map_err(|reason| Error::Io { path: path.into(), reason })
}
