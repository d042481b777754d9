//! A decode step over the keys and values of a dump.

use std::path::Path;

use half::f16;
use kvpack::conformance::{DecodeShape, SequenceData};
use kvpack::cpu::CpuTensor;
use kvpack::plan::RowLayout;

use crate::dump::{Layer, NamedDump};

/// Sequences of the batch; all store what the dump has.
const SEQUENCES: usize = 16;

/// The middle layer of a dump, with its last query.
pub fn data(NamedDump { name, dump }: NamedDump) -> (DecodeShape, SequenceData) {
    let mut layers = dump.layers;
    let layer = layers.swap_remove(layers.len() / 2);
    let name = Path::new(&name).file_stem().unwrap_or_default().to_string_lossy();
    let decode = DecodeShape::even(format!("{name} layer {}", layer.index), layer.shape, SEQUENCES, layer.tokens);
    (decode, sequence(layer))
}

fn sequence(layer: Layer) -> SequenceData {
    let halves = |elements: Vec<f32>| CpuTensor::F16(elements.into_iter().map(f16::from_f32).collect());
    let queries = layer.decode_queries.last().or(layer.prompt_queries.last());
    SequenceData {
        rows: RowLayout::head_major(layer.tokens, &layer.shape),
        queries: queries.cloned().unwrap_or_default(),
        keys: halves(layer.keys),
        values: halves(layer.values),
    }
}
