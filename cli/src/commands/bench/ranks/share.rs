//! The tokens of a sequence that a rank holds, in several copies.

use anyhow::Result;
use half::f16;
use kvpack::backend::AttentionStates;
use kvpack::cache::{KvCache, PromptSpan, Recipe, StoreId};
use kvpack::cuda::{AttendStep, AttendTensors, BoundAttendStep, Cuda, Tensor};
use kvpack::plan::{ElementType, Elements, QueryRun, RowLayout, TokenRange};
use kvpack::{AttentionShape, SegmentFormat};

use super::super::timed::random_rows;

/// Parts of a sequence, each of which goes to one rank: up to eight ranks share a sequence.
pub const PARTS: usize = 8;

/// Parts whose values have another mean, so that leaving one out or counting it twice shows.
const MEANS: [f32; 4] = [0.5, -0.5, 0.25, 1.0];

/// The maximum number of tokens that are stored at once.
const CHUNK: usize = 1 << 16;

/// Random tokens, from which chunks are made.
const BASE: usize = 1 << 13;

/// Most copies of a sequence.
const MOST_COPIES: usize = 64;

/// Bytes of stores that steps go round, at least.
const FOOTPRINT: u64 = 1 << 30;

/// Keys and values that sequences are filled with.
pub struct Contents {
    keys: Tensor,
    values: Vec<Tensor>,
}

impl Contents {
    /// The same on every rank.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(backend: &Cuda, shape: &AttentionShape) -> Result<Self> {
        let row = shape.kv_heads() * shape.head_dim();
        let upload = |rows: &[f16]| -> Result<Tensor> {
            // Chunks repeat the base, each time from another token on.
            let mut all = Vec::with_capacity(CHUNK * row);
            for part in 0..CHUNK / BASE {
                let (head, tail) = rows.split_at(part * 977 % BASE * row);
                all.extend_from_slice(tail);
                all.extend_from_slice(head);
            }
            Ok(Tensor::upload(backend.stream(), Elements::F16(&all))?)
        };
        let keys = upload(&random_rows(BASE * row, shape.head_dim(), 4))?;
        // No channel stands out: it would hide what is wrong in the others.
        let values = random_rows(BASE * row, usize::MAX, 5);
        let moved = |mean: f32| values.iter().map(|value| f16::from_f32(value.to_f32() + mean)).collect::<Vec<_>>();
        let values = MEANS.iter().map(|&mean| upload(&moved(mean))).collect::<Result<_>>()?;
        Ok(Self { keys, values })
    }
}

/// A rank's part of a sequence, in as many copies as steps go round.
pub struct Share {
    cache: KvCache<Cuda>,
    /// What the attention of every copy writes.
    pub states: AttentionStates<Tensor>,
    /// The attention of every copy.
    pub steps: Vec<BoundAttendStep>,
}

/// What a sequence is, and who holds how much of it.
#[derive(Clone, Copy)]
pub struct Sequence {
    /// Heads.
    pub shape: AttentionShape,
    /// Its tokens on all ranks, a multiple of [`PARTS`] tiles.
    pub tokens: usize,
    /// How they are stored.
    pub format: SegmentFormat,
    /// Copies, such as layers of a model; none for as many as steps have to go round.
    pub layers: Option<usize>,
}

impl Share {
    /// Fills the part of `rank` of `ranks`, and binds the attention of one query.
    ///
    /// # Errors
    /// Errors of the device, of which memory that runs out is one.
    pub async fn fill(
        backend: &Cuda,
        contents: &Contents,
        sequence: Sequence,
        (rank, ranks): (usize, usize),
        queries: &Tensor,
    ) -> Result<Self> {
        let Sequence { shape, tokens, format, .. } = sequence;
        let copies = copies(sequence, ranks);
        let recipe = if format == SegmentFormat::F16 { Recipe::f16() } else { Recipe::pack_all(format) };
        let mut cache = KvCache::new(backend.clone(), shape, copies, recipe)?;
        let store = if cache.recipe().packs() { StoreId::PACKED } else { StoreId::F16 };
        cache.reserve(store, copies * (tokens / ranks)).await?;
        let part = tokens / PARTS;
        let row = shape.kv_heads() * shape.head_dim();
        let chunk = part.min(CHUNK);
        let layout = RowLayout::token_major(chunk, &shape);
        let spans = [PromptSpan::run(TokenRange::new(0, chunk)?, store)];
        let keys = contents.keys.slice(0, chunk * row)?;
        for copy in 0..copies {
            for part_of in rank * PARTS / ranks..(rank + 1) * PARTS / ranks {
                let values = contents.values[part_of * MEANS.len() / PARTS].slice(0, chunk * row)?;
                for _ in 0..part / chunk {
                    cache.prefill(copy, layout, &keys, &values, &spans).await?;
                }
            }
        }
        let zeroed = |elements| Tensor::zeroed(backend.stream(), elements, ElementType::F32);
        let (heads, outputs) = (shape.query_heads(), shape.query_heads() * shape.head_dim());
        let both = zeroed(outputs + heads)?;
        let states = AttentionStates { outputs: both.slice(0, outputs)?, lse: both.slice(outputs, heads)? };
        let mut steps = Vec::with_capacity(copies);
        for copy in 0..copies {
            let step = AttendStep::new(backend, &cache.plan(&[QueryRun::decode(copy)])?)?;
            let tensors = AttendTensors { queries, output: &states.outputs, lse: Some(&states.lse) };
            steps.push(step.bind(backend, &cache.stores(), tensors)?);
        }
        Ok(Self { cache, states, steps })
    }

    /// Bytes of codes and ranges that a step reads.
    pub fn bytes(&self) -> u64 {
        self.cache.memory().in_use_bytes() / self.steps.len().max(1) as u64
    }
}

/// Copies of the share of a sequence.
fn copies(Sequence { shape, tokens, format, layers }: Sequence, ranks: usize) -> usize {
    if let Some(layers) = layers {
        return layers;
    }
    let pages = (tokens / ranks / kvpack::TILE_TOKENS) as u64;
    let bytes = pages * format.page_bytes(&shape) as u64;
    FOOTPRINT.div_ceil(bytes.max(1)).clamp(1, MOST_COPIES as u64) as usize
}
