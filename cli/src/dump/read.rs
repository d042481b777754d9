//! Reads a dump and checks everything about it.

use std::collections::BTreeSet;
use std::path::Path;

use half::{bf16, f16};
use kvpack::AttentionShape;
use safetensors::{Dtype, SafeTensors};

use crate::files;

use super::{Dump, DumpError, Layer, Mask};

/// The largest finite f16.
const LARGEST: f32 = 65504.0;

/// Bytes of the largest dump that is read: 8 GiB. As f32 it takes up to twice as much.
const MOST_BYTES: u64 = 8 << 30;

/// Reads and checks a dump.
///
/// # Errors
/// [`DumpError`] names the first thing found wrong and what to do about it.
pub fn read(path: &Path) -> Result<Dump, DumpError> {
    let bytes = files::read(path, MOST_BYTES).map_err(|reason| DumpError::Unreadable { reason })?;
    parse(&bytes)
}

/// Reads and checks the bytes of a dump.
///
/// # Errors
/// Those of [`read`].
pub fn parse(bytes: &[u8]) -> Result<Dump, DumpError> {
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|reason| DumpError::NotSafetensors { reason })?;
    let file = SafeTensors::deserialize(bytes).map_err(|reason| DumpError::NotSafetensors { reason })?;
    let indices = layer_indices(&file);
    if indices.is_empty() {
        return Err(DumpError::NoLayers { found: first_names(&file) });
    }
    let metadata = |key| header.metadata().as_ref().and_then(|all| all.get(key).cloned());
    let mask = mask(metadata("mask"))?;
    let layers = indices.into_iter().map(|index| read_layer(&file, index, mask)).collect::<Result<_, _>>()?;
    Ok(Dump { model: metadata("model"), text: metadata("text"), layers })
}

/// The mask that the metadata name; what follows a colon is a remark.
fn mask(named: Option<String>) -> Result<Mask, DumpError> {
    let Some(given) = named else { return Ok(Mask::Causal) };
    match given.split(':').next().map(str::trim) {
        Some("causal") => Ok(Mask::Causal),
        Some("none") => Ok(Mask::None),
        _ => Err(DumpError::UnknownMask { given }),
    }
}

/// The numbers of all layers that have any tensor of the format.
fn layer_indices(file: &SafeTensors<'_>) -> BTreeSet<u32> {
    let number = |name: &str| {
        let (layer, tensor) = name.strip_prefix("layer")?.split_once('.')?;
        let known = ["key", "value", "query_prompt", "query_decode"].contains(&tensor);
        known.then(|| layer.parse().ok())?
    };
    file.names().into_iter().filter_map(number).collect()
}

fn first_names(file: &SafeTensors<'_>) -> String {
    let mut names = file.names();
    names.sort_unstable();
    match names.as_slice() {
        [] => "no tensors".into(),
        some if some.len() <= 4 => some.join(", "),
        [a, b, c, ..] => format!("{a}, {b}, {c} and {} more", names.len() - 3),
        _ => names.join(", "),
    }
}

fn read_layer(file: &SafeTensors<'_>, index: u32, mask: Mask) -> Result<Layer, DumpError> {
    let tensor = |name| Tensor::read(file, index, name);
    let queries = [tensor("query_prompt")?, tensor("query_decode")?];
    let incomplete = |has, lacks, hint| DumpError::Incomplete { layer: index, has, lacks, hint };
    let (keys, values) = match (tensor("key")?, tensor("value")?) {
        (Some(keys), Some(values)) => (keys, values),
        (Some(_), None) => return Err(incomplete("keys", "values", "add layer<N>.value, shaped as the keys")),
        (None, Some(_)) => return Err(incomplete("values", "keys", "add layer<N>.key, shaped as the values")),
        (None, None) => return Err(incomplete("queries", "keys", "add layer<N>.key and layer<N>.value")),
    };
    let [kv_heads, tokens, head_dim] = keys.shape;
    if values.shape != keys.shape {
        return Err(values.shape_error(format!("{:?}, as {} has", keys.shape, keys.name)));
    }
    let Some(first) = queries.iter().flatten().next() else {
        return Err(incomplete("keys and values", "queries", "add layer<N>.query_prompt or layer<N>.query_decode"));
    };
    let query_heads = first.shape[0];
    for other in queries.iter().flatten() {
        if other.shape[0] != query_heads || other.shape[2] != head_dim {
            return Err(other.shape_error(format!(
                "[{query_heads} query heads, any number of queries, {head_dim} channels] to fit {} and {}",
                keys.name, first.name
            )));
        }
    }
    let shape = AttentionShape::new(query_heads, kv_heads, head_dim)
        .map_err(|reason| DumpError::Heads { layer: index, reason })?;
    let [prompt_queries, decode_queries] = queries.map(|tensor| tensor.map_or_else(Vec::new, |t| t.by_row()));
    if mask == Mask::Causal && prompt_queries.len() > tokens {
        let needed = format!("at most {tokens} queries, one for each of the last tokens, as the mask is causal");
        return Err(DumpError::Shape {
            tensor: format!("layer{index}.query_prompt"),
            given: vec![query_heads, prompt_queries.len(), head_dim],
            needed,
        });
    }
    let (keys, values) = (keys.data, values.data);
    Ok(Layer { index, shape, tokens, mask, keys, values, prompt_queries, decode_queries })
}

/// A tensor of three axes, its elements finite.
struct Tensor {
    name: String,
    shape: [usize; 3],
    data: Vec<f32>,
}

impl Tensor {
    /// Reads a tensor of a layer; `None` where there is none.
    fn read(file: &SafeTensors<'_>, layer: u32, name: &str) -> Result<Option<Self>, DumpError> {
        let name = format!("layer{layer}.{name}");
        let Ok(view) = file.tensor(&name) else { return Ok(None) };
        let shape: [usize; 3] = match view.shape().try_into() {
            Ok(shape) if !view.shape().contains(&0) => shape,
            _ => {
                let needed = "three axes, [heads, tokens or queries, channels], none of them 0".into();
                return Err(DumpError::Shape { tensor: name, given: view.shape().into(), needed });
            }
        };
        let half_words = || view.data().chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        let data: Vec<f32> = match view.dtype() {
            Dtype::F16 => half_words().map(|bits| f16::from_bits(bits).to_f32()).collect(),
            Dtype::BF16 => half_words().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
            Dtype::F32 => view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            other => return Err(DumpError::ElementType { tensor: name, given: other.to_string() }),
        };
        let tensor = Self { name, shape, data };
        tensor.check_finite()?;
        Ok(Some(tensor))
    }

    fn check_finite(&self) -> Result<(), DumpError> {
        let Some(at) = self.data.iter().position(|x| x.is_nan() || x.abs() > LARGEST) else { return Ok(()) };
        let [_, rows, channels] = self.shape;
        Err(DumpError::NotFinite {
            tensor: self.name.clone(),
            value: self.data[at],
            head: at / (rows * channels),
            row: at / channels % rows,
            channel: at % channels,
        })
    }

    fn shape_error(&self, needed: String) -> DumpError {
        DumpError::Shape { tensor: self.name.clone(), given: self.shape.into(), needed }
    }

    /// Splits `[heads, rows, channels]` into rows of `[heads, channels]`.
    fn by_row(&self) -> Vec<Vec<f32>> {
        let [heads, rows, channels] = self.shape;
        let part = |head: usize, row: usize| &self.data[(head * rows + row) * channels..][..channels];
        (0..rows).map(|row| (0..heads).flat_map(|head| part(head, row)).copied().collect()).collect()
    }
}
