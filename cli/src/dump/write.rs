//! Writes a dump.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use safetensors::tensor::TensorView;
use serde_json::Value;

/// The header of a safetensors file: what every name stands for, field by field.
type Header = BTreeMap<String, BTreeMap<String, Value>>;

/// The bytes of a dump: the same for the same tensors and metadata.
///
/// # Errors
/// When the tensors make no safetensors file.
pub fn write<const N: usize>(tensors: Vec<(String, TensorView<'_>)>, metadata: [(&str, &str); N]) -> Result<Vec<u8>> {
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let mut bytes = safetensors::serialize(tensors, Some(metadata))?;
    sort_header(&mut bytes)?;
    Ok(bytes)
}

/// Sorts the header by name. safetensors writes metadata in the order of a hash map, which differs from process to
/// process.
fn sort_header(bytes: &mut [u8]) -> Result<()> {
    let (length, rest) = bytes.split_first_chunk_mut().context("a file without a header")?;
    let length = usize::try_from(u64::from_le_bytes(*length))?;
    let header = rest.get_mut(..length).context("a header that is cut off")?;
    let sorted = serde_json::to_vec(&serde_json::from_slice::<Header>(header)?)?;
    let text = header.get_mut(..sorted.len()).context("a header that grew when it was sorted")?;
    text.copy_from_slice(&sorted);
    // Spaces fill the header up to its length, as in the format.
    header[sorted.len()..].fill(b' ');
    Ok(())
}

#[cfg(test)]
mod tests {
    use safetensors::{Dtype, SafeTensors};

    use super::*;

    #[test]
    fn the_same_dump_is_the_same_bytes() {
        let (a, b) = ([1, 0, 2, 0], [3, 0, 4, 0]);
        let view = |bytes| TensorView::new(Dtype::F16, vec![2], bytes).unwrap();
        let metadata = [("model", "m \"quoted\""), ("text", "t"), ("mask", "causal"), ("d", ""), ("e", "")];
        // Every hash map has an order of its own.
        let written = || write(vec![("b".into(), view(&b)), ("a".into(), view(&a))], metadata).unwrap();
        let first = written();
        assert!((0..20).all(|_| written() == first));
        let file = SafeTensors::deserialize(&first).unwrap();
        assert_eq!((file.tensor("a").unwrap().data(), file.tensor("b").unwrap().data()), (&a[..], &b[..]));
        let (_, header) = SafeTensors::read_metadata(&first).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["model"], "m \"quoted\"");
    }
}
