//! Kernels `prepare_stats_queries`, `attention_row_stats_matrix` and `attention_column_stats_matrix`: attention
//! statistics of f16 keys with cooperative matrices.

use super::{aggregation_constant, queries_file};
use crate::Result;
use crate::format::AttentionShape;
use crate::plan::{ElementType, RowLayout};
use crate::policy::HeadAggregation;
use crate::wgpu::device::{Capabilities, ElementBinding, Tensor, Variant};
use crate::wgpu::sources::SHADERS;

/// Keys of a tile, `TILE` of `select/calls.wgsl#matrix_call`.
const TILE_KEYS: usize = 32;
/// Query rows that a subgroup keeps.
const SUBGROUP_ROWS: usize = 32;
/// Maximum number of subgroups in a workgroup: the scores of seven fit into 48 KiB of workgroup memory.
const MOST_SUBGROUPS: usize = 7;
/// Maximum number of heads in a chunk: `CHUNK_HEADS` of `attention_column_stats.wgsl#attention_column_stats_matrix`.
const CHUNK_HEADS: usize = 16;
/// The largest head dimension whose rows a subgroup keeps in registers, even as two summands.
const MOST_CHANNELS: usize = 128;
/// Workgroups of a launch: several times as many as a large device runs at once.
const WORKGROUPS: usize = 1024;
/// Maximum size of the prepared rows in bytes.
const PREPARED_BYTES: usize = 64 << 20;
/// Elements of the vectors in which keys are read.
const VECTOR: usize = 4;

/// How the matrix kernels cut query rows into chunks and keys into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MatrixCut {
    pub head_dim: usize,
    pub kv_heads: usize,
    pub subgroups: usize,
    pub chunk_heads: usize,
    pub chunk_rows: usize,
    pub row_chunks: usize,
    pub chunks: usize,
    pub part_tiles: usize,
    pub parts: usize,
}

/// `MatrixCall` of `select/calls.wgsl#matrix_call`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct MatrixCall {
    pub first_key: u32,
    pub key_token_stride: u32,
    pub key_head_stride: u32,
    pub first_query: u32,
    pub query_token_stride: u32,
    pub query_head_stride: u32,
    pub tokens: u32,
    pub rows: u32,
    pub kv_heads: u32,
    pub group: u32,
    pub chunk_heads: u32,
    pub chunk_rows: u32,
    pub row_chunks: u32,
    pub chunks: u32,
    pub part_tiles: u32,
    pub scale: f32,
    pub log_threshold: f32,
}

impl MatrixCut {
    /// Cuts `rows` query rows of each head and `tokens` keys. Returns `None` if `capabilities` lack the matrices or the
    /// memory, or there are no kernels for the shape. Partial results exist for no more than `most_parts` parts.
    pub fn new(
        shape: &AttentionShape,
        [rows, tokens]: [usize; 2],
        aggregation: HeadAggregation,
        most_parts: usize,
        capabilities: &Capabilities,
    ) -> Option<Self> {
        let (head_dim, group, kv_heads) = (shape.head_dim(), shape.group(), shape.kv_heads());
        let columns = MOST_SUBGROUPS * SUBGROUP_ROWS;
        let row_chunks = rows.div_ceil(columns);
        let chunk_rows = rows.div_ceil(row_chunks);
        let most_heads = (columns / chunk_rows).clamp(1, CHUNK_HEADS);
        let chunk_heads = if row_chunks > 1 { 1 } else { group.div_ceil(group.div_ceil(most_heads)) };
        let subgroups = (chunk_heads * chunk_rows).div_ceil(SUBGROUP_ROWS);
        let chunks = group.div_ceil(chunk_heads) * row_chunks;
        let tiles = tokens.div_ceil(TILE_KEYS);
        let parts = (WORKGROUPS / kv_heads).clamp(1, most_parts.max(1));
        let part_tiles = tiles.div_ceil(parts);
        let parts = tiles.div_ceil(part_tiles);
        let cut =
            Self { head_dim, kv_heads, subgroups, chunk_heads, chunk_rows, row_chunks, chunks, part_tiles, parts };
        // The maximum over heads is taken of whole sums.
        let whole = row_chunks == 1 || aggregation != HeadAggregation::Max;
        let limits = &capabilities.limits;
        let fits = cut.workgroup_bytes() <= limits.workgroup_memory as usize
            && cut.invocations() <= limits.invocations as usize
            && cut.prepared_elements(2) * 2 <= PREPARED_BYTES
            && chunks.max(kv_heads) <= limits.workgroups as usize;
        (capabilities.matrices && head_dim.is_multiple_of(16) && head_dim <= MOST_CHANNELS && whole && fits)
            .then_some(cut)
    }

    /// Columns of a chunk, which is also the number of invocations of a workgroup.
    pub const fn invocations(&self) -> usize {
        self.subgroups * SUBGROUP_ROWS
    }

    /// Columns of all chunks of all KV heads.
    pub const fn columns(&self) -> usize {
        self.kv_heads * self.chunks * self.invocations()
    }

    /// Number of halves in the prepared rows.
    pub const fn prepared_elements(&self, query_parts: usize) -> usize {
        self.columns() * query_parts * self.head_dim
    }

    /// The largest workgroup memory of these kernels, as the shader declares it.
    pub const fn workgroup_bytes(&self) -> usize {
        let keys = TILE_KEYS * (self.head_dim + 8) * 2;
        let scores = self.invocations() * (TILE_KEYS + 4) * 4;
        let columns = self.invocations() * 12;
        let sums = (self.subgroups + CHUNK_HEADS) * TILE_KEYS * 4;
        keys + scores + columns + sums
    }

    /// The grid of the measuring kernels.
    pub const fn grid(&self) -> [u32; 3] {
        [self.parts as u32, self.kv_heads as u32, 1]
    }

    /// The grid of the preparing kernel.
    pub const fn prepare_grid(&self) -> [u32; 3] {
        [self.invocations() as u32, self.chunks as u32, self.kv_heads as u32]
    }

    /// Memory for the prepared rows and their units.
    pub fn prepared(&self, device: &wgpu::Device, queries: ElementType) -> Result<(Tensor, Tensor)> {
        let rows = Tensor::zeroed(device, self.prepared_elements(query_parts(queries)), ElementType::F16)?;
        Ok((rows, Tensor::zeroed(device, self.columns(), ElementType::F32)?))
    }

    /// The kernel that prepares rows of `queries` elements.
    pub fn prepare_variant(&self, queries: ElementType) -> Variant {
        self.variant("prepare_stats_queries", queries).import("queries", queries_file(queries))
    }

    /// The kernel that measures rows.
    pub fn row_variant(&self, queries: ElementType) -> Variant {
        self.variant("attention_row_stats_matrix", queries).with_matrices()
    }

    /// The kernel that measures columns.
    pub fn column_variant(&self, queries: ElementType, aggregation: HeadAggregation) -> Variant {
        let variant = self.variant("attention_column_stats_matrix", queries).with_matrices();
        variant.constant("AGGREGATION", aggregation_constant(aggregation))
    }

    /// The kernel that also counts the keys at or above the threshold of each row.
    pub fn counting_column_variant(&self, queries: ElementType, aggregation: HeadAggregation) -> Variant {
        self.column_variant(queries, aggregation).import("counting", "select/matrix_counting.wgsl#rows")
    }

    fn variant(&self, kernel: &'static str, queries: ElementType) -> Variant {
        let variant = Variant::new(&SHADERS, kernel).with_f16().constant("HEAD_DIM", self.head_dim);
        variant.constant("QUERY_PARTS", query_parts(queries)).constant("SUBGROUPS", self.subgroups)
    }
}

/// f16 summands per element of a row. One suffices for 16-bit elements, which it holds exactly (bf16 down to 2^-28 of
/// the largest element).
pub(super) const fn query_parts(queries: ElementType) -> usize {
    match queries {
        ElementType::F16 | ElementType::Bf16 => 1,
        ElementType::F32 => 2,
    }
}

/// Whether the kernels can read such keys: f16, in rows that begin at whole vectors.
pub(super) fn reads_keys(keys: ElementType, layout: &RowLayout) -> bool {
    keys == ElementType::F16 && layout.token_stride.is_multiple_of(VECTOR) && layout.head_stride.is_multiple_of(VECTOR)
}

/// Whether a tensor of such keys also begins at a whole vector.
pub(super) fn begins_at_vector(keys: &ElementBinding<'_>) -> bool {
    (keys.first_element as usize).is_multiple_of(VECTOR) && keys.buffer.offset.is_multiple_of(2 * VECTOR as u64)
}

/// An index or a stride in vectors.
pub(super) const fn in_vectors(elements: u32) -> u32 {
    elements / VECTOR as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wgpu::device::{KernelLimits, SubgroupSizes, Timestamps};

    fn capabilities(workgroup_memory: u32) -> Capabilities {
        let limits = KernelLimits {
            binding_bytes: 128 << 20,
            binding_alignment: 256,
            storage_buffers: 10,
            workgroup_memory,
            invocations: 1024,
            workgroups: 65535,
        };
        let subgroups = Some(SubgroupSizes { min: 32, max: 32 });
        Capabilities { f16: true, subgroups, coherent: true, matrices: true, timestamps: Timestamps::None, limits }
    }

    fn cut(
        [query_heads, kv_heads, head_dim]: [usize; 3],
        size: [usize; 2],
        aggregation: HeadAggregation,
        capabilities: &Capabilities,
    ) -> Option<MatrixCut> {
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim).unwrap();
        MatrixCut::new(&shape, size, aggregation, 1 << 20, capabilities)
    }

    /// The declarations of the shaders are valid and take no more memory than planned: a driver that was asked for more
    /// than it has hung.
    #[test]
    fn workgroup_memory_is_counted() {
        let capabilities = capabilities(48 << 10);
        for (heads, head_dim, rows) in [(8, 128, 50), (1, 64, 1), (4, 96, 300), (32, 80, 7)] {
            let cut = cut([heads, 1, head_dim], [rows, 1000], HeadAggregation::Each, &capabilities).unwrap();
            let declared = ElementType::ALL.map(|queries| {
                let columns = cut.counting_column_variant(queries, HeadAggregation::Each);
                [cut.row_variant(queries), columns].map(|variant| {
                    let module = naga::front::wgsl::parse_str(&variant.source().unwrap().wgsl).unwrap();
                    let mut layouter = naga::proc::Layouter::default();
                    layouter.update(module.to_ctx()).unwrap();
                    let globals = module.global_variables.iter();
                    globals
                        .filter(|(_, variable)| variable.space == naga::AddressSpace::WorkGroup)
                        .map(|(_, variable)| layouter[variable.ty].size as usize)
                        .sum::<usize>()
                })
            });
            assert_eq!(declared.as_flattened().iter().max(), Some(&cut.workgroup_bytes()), "{cut:?}");
        }
    }

    #[test]
    fn only_what_has_kernels_takes_matrices() {
        let large = capabilities(48 << 10);
        let each = HeadAggregation::Each;
        let some = |heads, size, aggregation, capabilities: &Capabilities| {
            cut(heads, size, aggregation, capabilities).is_some()
        };
        let usual = [32, 8, 128];
        assert!(some(usual, [50, 32768], each, &large));
        assert!(!some(usual, [50, 32768], each, &capabilities(32 << 10)));
        assert!(!some(usual, [50, 32768], each, &Capabilities { matrices: false, ..large }));
        assert!(!some([32, 8, 256], [50, 32768], each, &large));
        // A head whose rows span several chunks has no whole sum, and very many chunks need too much memory.
        assert!(some(usual, [300, 32768], each, &large) && !some(usual, [300, 32768], HeadAggregation::Max, &large));
        assert!(!some(usual, [32768, 32768], each, &large));

        let layout = RowLayout::token_major(9, &AttentionShape::new(1, 1, 64).unwrap());
        assert!(reads_keys(ElementType::F16, &layout) && !reads_keys(ElementType::Bf16, &layout));
        assert!(!reads_keys(ElementType::F16, &RowLayout { token_stride: 66, ..layout }));
    }

    /// Every row of a group is in one chunk, and every key in one part.
    #[test]
    fn rows_and_keys_are_cut_without_rest() {
        let large = capabilities(48 << 10);
        for (group, rows, tokens) in [(4, 50, 32768), (1, 1, 1), (7, 224, 33), (3, 225, 1000), (40, 3, 100_000)] {
            let cut = cut([group * 2, 2, 64], [rows, tokens], HeadAggregation::Sum, &large).unwrap();
            let heads = cut.chunks / cut.row_chunks;
            assert!((heads - 1) * cut.chunk_heads < group && group <= heads * cut.chunk_heads, "{cut:?}");
            let of_head = cut.row_chunks;
            assert!((of_head - 1) * cut.chunk_rows < rows && rows <= of_head * cut.chunk_rows, "{cut:?}");
            assert!(cut.chunk_heads * cut.chunk_rows <= cut.invocations() && cut.chunk_heads <= CHUNK_HEADS);
            assert!(cut.row_chunks == 1 || cut.chunk_heads == 1, "{cut:?}");
            let part = cut.part_tiles * TILE_KEYS;
            assert!((cut.parts - 1) * part < tokens && tokens <= cut.parts * part, "{cut:?}");
        }
    }
}
