//! `chunk_similarity` and `reorder_chunks`.

use super::{exact_numbers, far};
use crate::backend::TensorRows;
use crate::conformance::data::Random;
use crate::conformance::pack::difference;
use crate::conformance::report::{Failure, Report};
use crate::cpu::{self, CpuTensor, DenseRows};
use crate::format::AttentionShape;
use crate::plan::{ElementType, RowLayout};
use crate::{Backend, Error, Result};

/// A case of chunks: compared with a query, and reordered.
#[derive(Clone, Debug, PartialEq)]
pub struct ChunksCase {
    /// Unique name: lower case letters, digits and dashes.
    pub name: String,
    /// Elements of an embedding.
    pub width: usize,
    /// Embeddings, the first of which is zeros.
    pub embeddings: usize,
    /// Element types of the query's embedding, and of the chunks' embeddings and the rows.
    pub elements: [ElementType; 2],
    /// Heads of the rows that are reordered.
    pub shape: AttentionShape,
    /// Tokens of them.
    pub tokens: usize,
    /// Tokens of a chunk. Remaining tokens stay in place.
    pub chunk_tokens: usize,
    /// Seed of the data.
    pub seed: u64,
    /// Whether the case belongs to the set that tests run on software drivers.
    pub quick: bool,
}

/// All cases: one element, widths that do not fill a warp, tokens that do not fill a chunk, and fewer than a chunk.
pub fn chunks_cases() -> Vec<ChunksCase> {
    use ElementType::{Bf16, F16, F32};
    let sizes = [
        ("one-element", (1, 1), [F32, F32], 64, (1, 16)),
        ("of-16", (96, 89), [F16, F16], 128, (300, 16)),
        ("of-40", (384, 15), [F32, Bf16], 80, (257, 40)),
        ("wide", (770, 3), [Bf16, F32], 256, (128, 128)),
    ];
    let case =
        |(i, (name, (width, embeddings), elements, head_dim, (tokens, chunk_tokens))): (usize, (&str, _, _, _, _))| {
            ChunksCase {
                name: format!("chunks-{name}"),
                width,
                embeddings,
                elements,
                shape: AttentionShape::new(2, 2, head_dim).expect("the registry's shapes have kernels"),
                tokens,
                chunk_tokens,
                seed: 6000 + i as u64,
                quick: name == "of-16",
            }
        };
    sizes.into_iter().enumerate().map(case).collect()
}

/// Compares similarities and reordered rows. The rows must have the same bits.
pub(in crate::conformance) async fn run<B: Backend>(backend: &B, case: &ChunksCase) -> Result<Report> {
    let (query, mut chunks) =
        (exact_numbers(case.width, case.seed), exact_numbers(case.width * case.embeddings, case.seed + 100));
    chunks[..case.width].fill(0.0);
    let [query_type, chunk_type] = case.elements;
    let query_on_device = backend.upload(CpuTensor::from_f32(query.clone(), query_type).elements()).await?;
    let chunks_on_device = backend.upload(CpuTensor::from_f32(chunks.clone(), chunk_type).elements()).await?;
    let similarities = backend.chunk_similarity(&query_on_device, &chunks_on_device)?;
    let mut failures = Vec::new();
    let want = cpu::chunk_similarity(&query, &chunks)?;
    failures.extend(far("similarities of chunks", &backend.download(&similarities).await?, &want, 1e-5));

    let layout = RowLayout::token_major(case.tokens, &case.shape);
    let rows = CpuTensor::from_f32(exact_numbers(layout.elements_needed(&case.shape), case.seed + 200), chunk_type);
    let mut order: Vec<u32> = (0..(case.tokens / case.chunk_tokens) as u32).collect();
    Random::new(case.seed).shuffle(&mut order);
    let on_device = backend.upload(rows.elements()).await?;
    let tensor = TensorRows { tensor: &on_device, layout };
    let reordered = backend.reorder_chunks(&case.shape, tensor, case.chunk_tokens, &order)?;
    let dense = DenseRows { elements: rows.elements(), layout };
    let want = cpu::reorder_chunks(&case.shape, dense, case.chunk_tokens, &order)?.to_f32();
    failures.extend(difference("reordered rows", &backend.download(&reordered).await?, &want));

    order.push(0);
    let refused = backend.reorder_chunks(&case.shape, tensor, case.chunk_tokens, &order);
    if !matches!(refused, Err(Error::Chunks { .. })) {
        failures.push(Failure::Refusal { message: "an order with a chunk too many was not refused for that".into() });
    }
    Ok(Report { check: case.name.clone(), accuracy: None, failures })
}
