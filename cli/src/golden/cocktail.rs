//! The chunk search of Cocktail.

use anyhow::Result;
use kvpack::policy::{ChunkPrecision, ChunkSearch, chunk_search};

use super::file::GoldenFile;
use super::kernels::Device;
use super::{Computed, Outputs, doubles};

/// `cocktail.search`: eq. 1-3 and the assignment of algorithm 1.
pub fn search(file: &GoldenFile, device: Device<'_>) -> Result<Computed> {
    let similarities = device.chunk_similarity(&file.input("query")?.f32()?, &file.input("chunks")?.f32()?)?;
    let search = ChunkSearch { alpha: file.number("alpha")?, beta: file.number("beta")? };
    let (thresholds, precision) = chunk_search(&similarities, search)?;
    let code = |precision| match precision {
        ChunkPrecision::Int2 => 0.0,
        ChunkPrecision::Int4 => 1.0,
        ChunkPrecision::F16 => 2.0,
    };
    let outputs = Outputs::from([
        ("scores", doubles(&similarities)),
        ("t_low", vec![thresholds.low]),
        ("t_high", vec![thresholds.high]),
        ("precision", precision.into_iter().map(code).collect()),
    ]);
    Ok(vec![(device.named(["chunk_similarity, chunk_search", "chunk_similarity, chunk_search (wgpu)"]), outputs)])
}
