//! Kernels `kept_norms`, `nearest_kept`, `merge_members` and `merge_tokens`.

use super::check_indices;
use super::key_tile::{GroupWarps, KeyTile, aligned};
use super::launch::{Kernel, Launch, Launches};
use super::words::Words;
use crate::cuda::Cuda;
use crate::cuda::device::indices::Indices;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::sources::SOURCES;
use crate::format::AttentionShape;
use crate::plan::{ElementType, RowLayout};
use crate::policy::Merging;
use crate::{Error, Result};

/// Kept tokens of a block of `merge_tokens`, one per warp: `WARPS` in its source.
const MERGE_WARPS: usize = 8;

/// Kept tokens of a block of `merge_members`, `MEMBER_TILE` in its source.
const MEMBER_TILE: usize = 256;

/// Threads of such a block: 32 for each of its `MEMBER_WARPS`.
const MEMBER_THREADS: u32 = 1024;

/// Bytes of a `MergeMember`: a token and a similarity.
const MEMBER_BYTES: usize = 8;

/// Threads of a block of `kept_norms`, one warp per row.
const NORM_THREADS: u32 = 256;

const NEAREST_PROGRAM: &[&str] = &["select/nearest_kept.cu"];

const MEMBERS_PROGRAM: &[&str] = &["select/merge_members.cu"];

/// Merges evicted tokens into their nearest kept ones. The plan decides everything except the memory.
///
/// [`MergePlan::bind`] makes five launches: they find the nearest kept key of every evicted token, list the tokens that
/// merge into each kept token, and merge keys and values by these lists. The order of the sums depends on the lists
/// alone, so two runs give the same bits.
#[derive(Clone, Debug)]
pub struct MergePlan {
    shape: AttentionShape,
    rows: RowLayout,
    kept: usize,
    evicted: usize,
    merging: Merging,
}

/// A merge bound to its tensors.
#[derive(Clone, Debug)]
pub struct BoundMerge {
    /// The launches to run.
    pub launches: Launches,
    /// `[kv_heads, evicted]`: index of the nearest key among the kept tokens of the head.
    pub nearest: Words,
    /// `[kv_heads, evicted]`: cosine similarity of the keys.
    pub similarities: Tensor,
    /// `[kv_heads, kept, head_dim]`.
    pub keys: Tensor,
    /// `[kv_heads, kept, head_dim]`.
    pub values: Tensor,
}

/// `MergeCall` of `select/merge_call.cuh`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct MergeCall {
    rows: u64,
    token_stride: u64,
    head_stride: u64,
    kept_tokens: u64,
    evicted_tokens: u64,
    inverse_norms: u64,
    nearest: u64,
    similarities: u64,
    ends: u64,
    members: u64,
    merged: u64,
    tokens: u32,
    kv_heads: u32,
    kept: u32,
    evicted: u32,
}

impl MergePlan {
    /// Plans the merge of `evicted` tokens of every KV head into `kept` tokens. The device reads which tokens they are.
    /// An index beyond the tokens is clamped to the last token.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when none are kept or evicted.
    pub fn new(shape: &AttentionShape, rows: RowLayout, [kept, evicted]: [usize; 2], merging: Merging) -> Result<Self> {
        if kept == 0 || evicted == 0 || rows.tokens == 0 {
            return Err(Error::NoTokens { what: "merge_tokens", hint: "pass at least one kept and one evicted token" });
        }
        Ok(Self { shape: *shape, rows, kept, evicted, merging })
    }

    /// Binds keys and values of one layout, and the positions of the kept tokens, `[kv_heads, kept]`, and of the
    /// evicted tokens, `[kv_heads, evicted]`. Creates the results.
    ///
    /// # Errors
    /// [`Error::Elements`] when a tensor does not fit the plan; [`Error::OutOfMemory`] or another error of the driver.
    pub fn bind(
        &self,
        backend: &Cuda,
        [keys, values]: [&Tensor; 2],
        kept: &Indices,
        evicted: &Indices,
    ) -> Result<BoundMerge> {
        let (stream, heads, head_dim) = (backend.stream(), self.shape.kv_heads(), self.shape.head_dim());
        check_indices("positions of kept tokens", kept, heads, self.kept)?;
        check_indices("positions of evicted tokens", evicted, heads, self.evicted)?;
        for (what, rows) in [("keys", keys), ("values", values)] {
            self.rows.check(what, rows.elements(), &self.shape)?;
        }
        let f32s = |elements| Tensor::zeroed(stream, elements, ElementType::F32);
        let inverse_norms = f32s(heads * self.kept)?;
        let similarities = f32s(heads * self.evicted)?;
        let nearest = Words::zeroed(stream, "nearest kept tokens", heads * self.evicted)?;
        let ends = Memory::unwritten(stream, "ends of members", heads * self.kept * size_of::<u32>())?;
        let members = Memory::unwritten(stream, "members of kept tokens", heads * self.evicted * MEMBER_BYTES)?;
        let merged = [f32s(heads * self.kept * head_dim)?, f32s(heads * self.kept * head_dim)?];
        let call = |rows: &Tensor, merged: &Tensor| MergeCall {
            rows: rows.address(),
            token_stride: self.rows.token_stride as u64,
            head_stride: self.rows.head_stride as u64,
            kept_tokens: kept.address(),
            evicted_tokens: evicted.address(),
            inverse_norms: inverse_norms.address(),
            nearest: nearest.memory().address(),
            similarities: similarities.address(),
            ends: ends.address(),
            members: members.address(),
            merged: merged.address(),
            tokens: self.rows.tokens as u32,
            kv_heads: heads as u32,
            kept: self.kept as u32,
            evicted: self.evicted as u32,
        };
        let shared = [
            kept.memory(),
            evicted.memory(),
            inverse_norms.memory(),
            nearest.memory(),
            similarities.memory(),
            &ends,
            &members,
        ];
        let facts = backend.kernels().facts();
        let tile = KeyTile::new(facts, head_dim, [keys.element_type(); 2], GroupWarps::Wide);
        let program =
            Program { sources: &SOURCES, files: NEAREST_PROGRAM, defines: tile.defines([(keys, &self.rows); 2]) };
        let of_keys = [shared.as_slice(), &[keys.memory()]].concat();
        let grid = [(heads * self.kept * 32).div_ceil(NORM_THREADS as usize), 1];
        let norms = Kernel { program: &program, name: "kept_norms", grid, block: NORM_THREADS, shared: 0 };
        let grid = [self.evicted.div_ceil(tile.block_rows()), heads];
        let search = Kernel { program: &program, name: "nearest_kept", grid, block: tile.threads(), shared: 0 };
        let of_members = Program { sources: &SOURCES, files: MEMBERS_PROGRAM, defines: Vec::new() };
        let grid = [self.kept.div_ceil(MEMBER_TILE), heads];
        let list = Kernel { program: &of_members, name: "merge_members", grid, block: MEMBER_THREADS, shared: 0 };
        let mut launches = vec![
            Launch::new(backend, norms, &call(keys, &merged[0]), &of_keys)?,
            Launch::new(backend, search, &call(keys, &merged[0]), &of_keys)?,
            Launch::new(backend, list, &call(keys, &merged[0]), &of_keys)?,
        ];
        for (rows, merged) in [keys, values].into_iter().zip(&merged) {
            let program = self.merge_program(rows);
            let (grid, block) = ([self.kept.div_ceil(MERGE_WARPS), heads], MERGE_WARPS as u32 * 32);
            let kernel = Kernel { program: &program, name: "merge_tokens", grid, block, shared: 0 };
            let memory = [shared.as_slice(), &[rows.memory(), merged.memory()]].concat();
            launches.push(Launch::new(backend, kernel, &call(rows, merged), &memory)?);
        }
        let [keys, values] = merged;
        Ok(BoundMerge { launches: Launches::new(launches), nearest, similarities, keys, values })
    }

    fn merge_program(&self, rows: &Tensor) -> Program {
        let merging = match self.merging {
            Merging::Averaged => 0,
            Merging::Pivotal => 1,
            Merging::Weighted => 2,
        };
        let defines = vec![
            ("HEAD_DIM", self.shape.head_dim()),
            ("KEY_TYPE", rows.type_code() as usize),
            ("ROWS_ALIGNED", usize::from(aligned(rows, &self.rows))),
            ("MERGING", merging),
        ];
        Program { sources: &SOURCES, files: &["select/merge_tokens.cu"], defines }
    }
}
