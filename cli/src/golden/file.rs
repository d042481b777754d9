//! A golden file in memory.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use half::f16;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::compare::Mode;
use crate::files;

/// Bytes of the largest file that is read: 64 MiB.
const MOST_BYTES: u64 = 64 << 20;

/// One case: inputs, wanted outputs and how to compare.
pub struct GoldenFile {
    /// The op.
    pub op: String,
    /// How each output is compared.
    pub compare: BTreeMap<String, Mode>,
    /// How those of kernels that round weights to halves are, where the file says so.
    pub compare_f16: BTreeMap<String, Mode>,
    params: Value,
    tensors: BTreeMap<String, Tensor>,
}

/// A tensor of a golden file.
pub struct Tensor {
    /// Its shape, outermost first.
    pub shape: Vec<usize>,
    /// Its elements in row-major order.
    pub elements: Elements,
}

/// Elements of a tensor.
pub enum Elements {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 16-bit floats.
    F16(Vec<f16>),
    /// Codes and bits.
    U8(Vec<u8>),
    /// Indices and packed words.
    I32(Vec<i32>),
    /// Masks.
    Bool(Vec<bool>),
}

impl GoldenFile {
    /// Reads and parses a file.
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(&files::read(path, MOST_BYTES)?)
    }

    /// Parses the bytes of a file.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let (_, header) = SafeTensors::read_metadata(bytes).context("not a whole safetensors file")?;
        let file = SafeTensors::deserialize(bytes).context("not a whole safetensors file")?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let text = |key: &str| metadata.get(key).with_context(|| format!("no '{key}' in the metadata"));
        let json = |key| serde_json::from_str::<Value>(text(key)?).with_context(|| format!("'{key}' is no JSON"));
        let tensors = file.tensors().into_iter().map(|(name, view)| Ok((name, Tensor::new(&view)?)));
        let mut golden = Self {
            op: text("op")?.clone(),
            compare: BTreeMap::new(),
            compare_f16: BTreeMap::new(),
            params: json("params")?,
            tensors: tensors.collect::<Result<_>>()?,
        };
        golden.compare = golden.modes(&json("compare")?)?;
        if golden.has_param("compare_f16") {
            golden.compare_f16 = golden.modes(&golden.params["compare_f16"])?;
        }
        ensure!(!golden.compare.is_empty(), "nothing to compare");
        Ok(golden)
    }

    /// How outputs are compared.
    fn modes(&self, modes: &Value) -> Result<BTreeMap<String, Mode>> {
        let modes = modes.as_object().context("what says how outputs are compared is no object")?;
        let mode = |(output, mode): (&String, &Value)| {
            let row = self.tensor(&format!("out.{output}"))?.shape.last().copied().unwrap_or(1);
            Ok((output.clone(), Mode::parse(mode, row)?))
        };
        modes.iter().map(mode).collect()
    }

    /// An input.
    pub fn input(&self, name: &str) -> Result<&Tensor> {
        self.tensor(&format!("in.{name}"))
    }

    /// True if there is such an input.
    pub fn has_input(&self, name: &str) -> bool {
        self.tensors.contains_key(&format!("in.{name}"))
    }

    /// A wanted output.
    pub fn output(&self, name: &str) -> Result<Vec<f64>> {
        Ok(self.tensor(&format!("out.{name}"))?.elements.to_f64())
    }

    /// Refuses parameters that ask for more elements of an output than the file has, before they are computed; `None`
    /// stands for a count that overflowed.
    pub fn check_asked(&self, output: &str, asked: Option<usize>) -> Result<()> {
        let there = self.tensor(&format!("out.{output}"))?.shape.iter().product::<usize>();
        match asked {
            Some(asked) if asked <= there => Ok(()),
            Some(asked) => bail!("the parameters ask for {asked} elements of '{output}'; the file has {there}"),
            None => bail!("the parameters ask for more elements of '{output}' than can be counted"),
        }
    }

    /// A numeric parameter.
    pub fn number(&self, name: &str) -> Result<f64> {
        self.params[name].as_f64().with_context(|| format!("no number '{name}' among the parameters"))
    }

    /// A parameter that counts something: at most `u32::MAX`, as positions are.
    pub fn count(&self, name: &str) -> Result<usize> {
        let count = self.params[name].as_u64().with_context(|| format!("no count '{name}' among the parameters"))?;
        ensure!(count <= u64::from(u32::MAX), "'{name}' is {count}; the largest count is {}", u32::MAX);
        Ok(usize::try_from(count)?)
    }

    /// A count that may be missing, or null.
    pub fn optional_count(&self, name: &str) -> Result<Option<usize>> {
        if self.params[name].is_null() { Ok(None) } else { self.count(name).map(Some) }
    }

    /// A parameter that something is divided by.
    pub fn divisor(&self, name: &str) -> Result<usize> {
        let count = self.count(name)?;
        ensure!(count > 0, "'{name}' is 0; give at least 1");
        Ok(count)
    }

    /// A parameter that is a list of counts, empty if it is not there.
    pub fn counts(&self, name: &str) -> Result<Vec<u32>> {
        let items = self.params[name].as_array().map(Vec::as_slice).unwrap_or_default();
        let count = |item: &Value| item.as_u64().and_then(|count| u32::try_from(count).ok());
        items.iter().map(|item| count(item).with_context(|| format!("'{name}' holds {item}"))).collect()
    }

    /// A textual parameter.
    pub fn text(&self, name: &str) -> Result<&str> {
        self.params[name].as_str().with_context(|| format!("no text '{name}' among the parameters"))
    }

    /// A boolean parameter, false if it is not there.
    pub fn flag(&self, name: &str) -> bool {
        self.params[name].as_bool().unwrap_or(false)
    }

    /// True if there is such a parameter, whatever its value.
    pub fn has_param(&self, name: &str) -> bool {
        self.params.get(name).is_some()
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).with_context(|| format!("no tensor '{name}'"))
    }
}

impl Tensor {
    fn new(view: &safetensors::tensor::TensorView<'_>) -> Result<Self> {
        let data = view.data();
        let words = || data.as_chunks::<4>().0.iter();
        let elements = match view.dtype() {
            Dtype::F32 => Elements::F32(words().map(|&bytes| f32::from_le_bytes(bytes)).collect()),
            Dtype::I32 => Elements::I32(words().map(|&bytes| i32::from_le_bytes(bytes)).collect()),
            Dtype::F16 => {
                Elements::F16(data.as_chunks::<2>().0.iter().map(|&bytes| f16::from_le_bytes(bytes)).collect())
            }
            Dtype::U8 => Elements::U8(data.to_vec()),
            Dtype::BOOL => Elements::Bool(data.iter().map(|&byte| byte != 0).collect()),
            other => bail!("tensors of {other:?} are not read"),
        };
        Ok(Self { shape: view.shape().to_vec(), elements })
    }

    /// The shape, which must have `N` axes, none of them empty.
    pub fn axes<const N: usize>(&self) -> Result<[usize; N]> {
        let axes = self.shape.as_slice().try_into();
        let axes: [usize; N] =
            axes.with_context(|| format!("a tensor of shape {:?} where {N} axes are needed", self.shape))?;
        self.last_axes::<N>()?;
        Ok(axes)
    }

    /// The last `N` axes of a tensor that has elements.
    pub fn last_axes<const N: usize>(&self) -> Result<[usize; N]> {
        ensure!(!self.shape.contains(&0), "an empty tensor of shape {:?}", self.shape);
        let axes = self.shape.last_chunk::<N>();
        axes.copied().with_context(|| format!("a tensor of shape {:?} where at least {N} axes are needed", self.shape))
    }

    /// The elements as f32.
    pub fn f32(&self) -> Result<Vec<f32>> {
        match &self.elements {
            Elements::F32(x) => Ok(x.clone()),
            Elements::F16(x) => Ok(x.iter().map(|x| x.to_f32()).collect()),
            _ => bail!("integers where floats are needed"),
        }
    }

    /// The elements as indices.
    pub fn indices(&self) -> Result<Vec<u32>> {
        match &self.elements {
            Elements::I32(x) => Ok(x.iter().map(|&x| u32::try_from(x)).collect::<Result<_, _>>()?),
            _ => bail!("other elements where indices are needed"),
        }
    }

    /// The elements as a mask.
    pub fn mask(&self) -> Result<&[bool]> {
        match &self.elements {
            Elements::Bool(x) => Ok(x),
            _ => bail!("other elements where a mask is needed"),
        }
    }

    /// The elements as bytes.
    pub fn u8(&self) -> Result<&[u8]> {
        match &self.elements {
            Elements::U8(x) => Ok(x),
            _ => bail!("other elements where bytes are needed"),
        }
    }
}

impl Elements {
    fn to_f64(&self) -> Vec<f64> {
        match self {
            Self::F32(x) => x.iter().map(|&x| x.into()).collect(),
            Self::F16(x) => x.iter().map(|&x| x.into()).collect(),
            Self::U8(x) => x.iter().map(|&x| x.into()).collect(),
            Self::I32(x) => x.iter().map(|&x| x.into()).collect(),
            Self::Bool(x) => x.iter().map(|&x| f64::from(u8::from(x))).collect(),
        }
    }
}

/// Part `index` of `elements`, counted in parts of `length`.
pub fn part<T>(elements: &[T], index: usize, length: usize) -> Result<&[T]> {
    let part = index.checked_mul(length).and_then(|first| elements.get(first..)?.get(..length));
    part.with_context(|| format!("{} elements hold no part {index} of {length}; the shapes disagree", elements.len()))
}
