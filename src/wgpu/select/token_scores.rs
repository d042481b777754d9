//! Kernel `token_scores`.

use super::{Words, check_index, check_output};
use crate::plan::ElementType;
use crate::policy::{ScoreRequest, ScoreTables};
use crate::wgpu::device::launch::Launches;
use crate::wgpu::device::{Kernels, Tensor, Variant};
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Tokens of a workgroup, `TILE` in its source.
const TILE: usize = 2048;

/// Scores tokens by their column sums. One dispatch. The plan decides everything except the buffers.
#[derive(Clone, Debug)]
pub struct TokenScoresPlan {
    kv_heads: usize,
    sums: usize,
    tables: ScoreTables,
}

/// `TokenScoresCall` of `select/token_scores.wgsl`, without the places that follow it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct TokenScoresCall {
    tokens: u32,
    recent_from: u32,
    half_width: u32,
    row_count: u32,
    boundary_count: u32,
    first_sum: u32,
}

impl TokenScoresPlan {
    /// Plans the scores of every token of `kv_heads` heads.
    ///
    /// # Errors
    /// As [`ScoreRequest::check`]; [`Error::Limit`] when there are more scores than a 32-bit index can count.
    pub fn new(kv_heads: usize, request: &ScoreRequest<'_>) -> Result<Self> {
        let sums = request.sums(kv_heads);
        request.check(sums, kv_heads)?;
        check_index("the sums of all heads", sums as u64)?;
        Ok(Self { kv_heads, sums, tables: request.tables() })
    }

    /// The kernel variants, for [`Kernels::prepare`].
    pub fn variants(&self) -> Vec<Variant> {
        vec![variant_of(&self.tables.constants)]
    }

    /// Binds the f32 column sums to read, `[kv_heads · group, tokens]`, the f32 scores to write, `[kv_heads, tokens]`,
    /// and a zeroed word for every head. The kernel sets the word to the number of tokens from the first NaN sum to the
    /// end.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when a buffer does not fit the plan, [`Error::Plan`] when the output
    /// shares a buffer with an input, [`Error::Limit`] when a buffer is too large or the device cannot dispatch enough
    /// workgroups.
    pub fn bind(&self, kernels: &Kernels, sums: &Tensor, scores: &Tensor, not_numbers: &Words) -> Result<Launches> {
        let (tables, limits) = (&self.tables, kernels.device().limits());
        let elements = self.kv_heads * tables.tokens;
        if sums.elements() != self.sums {
            let (given, expected, shape) = (sums.elements(), self.sums, format!("[heads, {}]", tables.tokens));
            return Err(Error::Elements { what: "column sums", given, expected, shape });
        }
        if sums.element_type() != ElementType::F32 {
            return Err(Error::Buffer { what: "column sums", reason: "they must be f32".into() });
        }
        check_output("scores of tokens", scores, elements, ElementType::F32, &limits)?;
        if not_numbers.len() != self.kv_heads {
            let (given, expected) = (not_numbers.len(), self.kv_heads);
            return Err(Error::Elements { what: "words of heads", given, expected, shape: "[kv_heads]".into() });
        }
        let read = sums.element_binding(&limits)?;
        let call = TokenScoresCall {
            tokens: tables.tokens as u32,
            recent_from: tables.recent_from as u32,
            half_width: tables.half_width as u32,
            row_count: tables.rows.len() as u32,
            boundary_count: tables.boundaries.len() as u32,
            first_sum: read.first_element,
        };
        // An array in a binding has at least one element.
        let places = [tables.rows.as_slice(), &tables.boundaries, &[0]].concat();
        let call = super::upload_call(kernels.device(), &call, &places)?;
        let buffers = [
            ("call", call.as_entire_buffer_binding()),
            ("sums", read.buffer),
            ("scores", scores.binding()),
            ("not_numbers", not_numbers.binding()),
        ];
        let grid = [tables.tokens.div_ceil(TILE) as u32, self.kv_heads as u32, 1];
        Ok([planned(kernels, &variant_of(&self.tables.constants), &buffers, grid)?].into_iter().collect())
    }
}

fn variant_of(constants: &[(&'static str, usize)]) -> Variant {
    constants
        .iter()
        .fold(Variant::new(&SHADERS, "token_scores"), |variant, &(name, value)| variant.constant(name, value))
}

/// Every variant that a plan uses. Those that differ only in numbers appear once.
pub(super) fn variants() -> Vec<Variant> {
    let of = |[weighing, pool, text, group]: [usize; 4]| {
        variant_of(&[("WEIGHING", weighing), ("POOL", pool), ("TEXT", text), ("GROUP", group)])
    };
    [[0, 0, 0, 1], [1, 1, 1, 4], [0, 2, 2, 1]].map(of).to_vec()
}
