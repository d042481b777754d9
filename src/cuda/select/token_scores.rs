//! Kernel `token_scores`.

use super::check_output;
use super::launch::{Kernel, Launch, Launches};
use super::words::Words;
use crate::cuda::Cuda;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::sources::SOURCES;
use crate::plan::ElementType;
use crate::policy::{ScoreRequest, ScoreTables};
use crate::{Error, Result};

/// Threads of a block, `THREADS` in its source.
const THREADS: u32 = 256;

/// Tokens of a block, `TILE` in its source.
const TILE: usize = 8 * THREADS as usize;

/// Scores tokens by their column sums. One launch. The plan decides everything except the memory.
#[derive(Clone, Debug)]
pub struct TokenScoresPlan {
    kv_heads: usize,
    sums: usize,
    tables: ScoreTables,
}

/// `TokenScoresCall` of `select/token_scores.cu`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct TokenScoresCall {
    sums: u64,
    scores: u64,
    rows: u64,
    boundaries: u64,
    not_numbers: u64,
    tokens: u32,
    row_count: u32,
    boundary_count: u32,
    recent_from: u32,
    half_width: u32,
    unused: u32,
}

impl TokenScoresPlan {
    /// Plans the scores of every token of `kv_heads` heads.
    ///
    /// # Errors
    /// As [`ScoreRequest::check`].
    pub fn new(kv_heads: usize, request: &ScoreRequest<'_>) -> Result<Self> {
        let sums = request.sums(kv_heads);
        request.check(sums, kv_heads)?;
        Ok(Self { kv_heads, sums, tables: request.tables() })
    }

    /// Binds the f32 column sums to read, `[kv_heads · group, tokens]`, the f32 scores to write, `[kv_heads, tokens]`,
    /// and a zeroed word for every head. The kernel sets the word to the number of tokens from the first NaN sum to the
    /// end.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when a tensor or the words do not fit the plan; [`Error::Plan`] when
    /// one belongs to another stream; errors of the driver.
    pub fn bind(&self, backend: &Cuda, sums: &Tensor, scores: &Tensor, not_numbers: &Words) -> Result<Launches> {
        let tables = &self.tables;
        let elements = self.kv_heads * tables.tokens;
        check_output("column sums", sums, self.sums, ElementType::F32)?;
        check_output("scores of tokens", scores, elements, ElementType::F32)?;
        if not_numbers.len() != self.kv_heads {
            let (given, expected) = (not_numbers.len(), self.kv_heads);
            return Err(Error::Elements { what: "words of heads", given, expected, shape: "[kv_heads]".into() });
        }
        let upload = |what, words: &[u32]| Memory::upload(backend.stream(), what, bytemuck::cast_slice(words));
        let rows = upload("positions of query rows", &tables.rows)?;
        let boundaries = upload("boundaries of images", &tables.boundaries)?;
        let call = TokenScoresCall {
            sums: sums.address(),
            scores: scores.address(),
            rows: rows.address(),
            boundaries: boundaries.address(),
            not_numbers: not_numbers.memory().address(),
            tokens: tables.tokens as u32,
            row_count: tables.rows.len() as u32,
            boundary_count: tables.boundaries.len() as u32,
            recent_from: tables.recent_from as u32,
            half_width: tables.half_width as u32,
            unused: 0,
        };
        let program =
            Program { sources: &SOURCES, files: &["select/token_scores.cu"], defines: tables.constants.to_vec() };
        let grid = [tables.tokens.div_ceil(TILE), self.kv_heads];
        let kernel = Kernel { program: &program, name: "token_scores", grid, block: THREADS, shared: 0 };
        let memory = [sums.memory(), scores.memory(), &rows, &boundaries, not_numbers.memory()];
        Ok(Launches::new(vec![Launch::new(backend, kernel, &call, &memory)?]))
    }
}
