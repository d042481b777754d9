//! Rows that stay in registers while others stream through: the settings that `select/key_tile.cuh` is compiled with,
//! and the sizes that follow from them.

use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::tensor::{Tensor, type_code};
use crate::plan::{ElementType, RowLayout};

/// Resident rows, which a warp holds as MMA operands, and passing rows, which stream through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyTile {
    head_dim: usize,
    passing: ElementType,
    /// Whether four warps multiply together, with instructions of compute capability 9.0.
    warpgroups: bool,
    warps: usize,
    /// Tiles of 16 resident rows of a warp.
    m_tiles: usize,
}

/// Resident rows of a warp in a warpgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupWarps {
    /// 16 rows and more warps: each warp's work on its products needs few registers and mostly waits.
    Many,
    /// 32 rows and fewer warps: the products of one passing row are combined over the rows.
    Wide,
}

impl KeyTile {
    /// The best tile for the device, the head dimension and the element types of resident and passing rows.
    pub(super) fn new(
        facts: &DeviceFacts,
        head_dim: usize,
        [resident, passing]: [ElementType; 2],
        groups: GroupWarps,
    ) -> Self {
        let halves = resident != ElementType::F32 && passing != ElementType::F32;
        // Wider heads need so many registers that too few warps remain.
        if facts.has_warpgroups() && halves && head_dim <= 128 {
            let (warps, m_tiles) = match groups {
                GroupWarps::Many => (16, 1),
                GroupWarps::Wide => (12, 2),
            };
            return Self { head_dim, passing, warpgroups: true, warps, m_tiles };
        }
        let registers = 8 * head_dim.div_ceil(32) * halves_of(resident);
        let (warps, m_tiles) = match registers {
            0..=32 => (16, 2),
            33..=64 => (16, 1),
            _ => (8, 1),
        };
        Self { head_dim, passing, warpgroups: false, warps, m_tiles }
    }

    /// Warps of a block.
    pub(super) const fn warps(&self) -> usize {
        self.warps
    }

    /// Threads of a block.
    pub(super) const fn threads(&self) -> u32 {
        32 * self.warps as u32
    }

    /// Resident rows of a warp, `WARP_ROWS`.
    pub(super) const fn warp_rows(&self) -> usize {
        16 * self.m_tiles
    }

    /// Resident rows of a block.
    pub(super) const fn block_rows(&self) -> usize {
        self.warps * self.warp_rows()
    }

    /// Warps that multiply together, `GROUP_WARPS`.
    pub(super) const fn group_warps(&self) -> usize {
        if self.warpgroups { 4 } else { 1 }
    }

    /// Groups of eight passing rows that are multiplied at once, `AT_ONCE`.
    pub(super) const fn at_once(&self) -> usize {
        if self.warpgroups { 7 } else { 2 }
    }

    /// Bytes of shared memory of eight passing rows, 16 `EIGHT_LOADS`.
    pub(super) const fn eight_bytes(&self) -> usize {
        512 * self.pairs() * halves_of(self.passing)
    }

    /// The macros, given the tensors of the passing and of the resident rows.
    pub(super) fn defines(&self, tensors: [(&Tensor, &RowLayout); 2]) -> Vec<(&'static str, usize)> {
        self.macros(tensors.map(|(tensor, rows)| (tensor.element_type(), usize::from(aligned(tensor, rows)))))
    }

    /// The same, given the types of the passing and of the resident rows, and 1 where those begin at 16 bytes.
    fn macros(&self, [passing, resident]: [(ElementType, usize); 2]) -> Vec<(&'static str, usize)> {
        vec![
            ("HEAD_DIM", self.head_dim),
            ("QUERY_TYPE", type_code(passing.0) as usize),
            ("KEY_TYPE", type_code(resident.0) as usize),
            ("QUERIES_ALIGNED", passing.1),
            ("KEYS_ALIGNED", resident.1),
            ("WARPGROUPS", usize::from(self.warpgroups)),
            ("WARPS", self.warps),
            ("M_TILES", self.m_tiles),
        ]
    }

    /// Pairs of steps of 16 channels.
    const fn pairs(&self) -> usize {
        self.head_dim.div_ceil(32)
    }
}

/// Number of halves that an element is multiplied as.
const fn halves_of(element_type: ElementType) -> usize {
    match element_type {
        ElementType::F32 => 2,
        ElementType::F16 | ElementType::Bf16 => 1,
    }
}

/// Whether every row of a tensor begins at a multiple of 16 bytes. A tensor may be part of another, or begin anywhere
/// in an engine's memory.
pub(super) fn aligned(tensor: &Tensor, rows: &RowLayout) -> bool {
    let bytes = tensor.element_type().bytes();
    let strides = [rows.token_stride, rows.head_stride];
    tensor.address().is_multiple_of(16) && strides.iter().all(|stride| (stride * bytes).is_multiple_of(16))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::device::program::Program;
    use crate::cuda::sources::SOURCES;

    const H200: DeviceFacts = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };
    const A100: DeviceFacts = DeviceFacts { capability: (8, 0), ..H200 };

    /// The sources of all kernels of this room compile. This needs no device.
    #[test]
    #[ignore = "needs NVRTC"]
    fn kernels_compile() {
        let compiles = |files: &'static [&'static str], defines: Vec<(&'static str, usize)>| {
            let program = Program { sources: &SOURCES, files, defines };
            let compiled = program.compile(&program.architecture(&H200));
            compiled.unwrap_or_else(|error| panic!("{files:?} with {:?}: {error}", program.defines));
        };
        for (types, aligned) in [([ElementType::F16; 2], 1), ([ElementType::F32, ElementType::Bf16], 0)] {
            let tile = KeyTile::new(&H200, 128, types, GroupWarps::Wide).macros(types.map(|of| (of, aligned)));
            compiles(&["select/attention_row_stats.cu"], tile.clone());
            compiles(&["select/nearest_kept.cu"], tile.clone());
            for (aggregation, of_columns) in (0..4).map(|aggregation| (aggregation, aggregation % 2)) {
                let columns = [("AGGREGATION", aggregation), ("COUNTING", of_columns), ("ADDS", 1 - of_columns)];
                compiles(&["select/attention_column_stats.cu"], [tile.clone(), columns.to_vec()].concat());
            }
        }
        compiles(&["select/sum_partials.cu"], Vec::new());
        compiles(&["select/chunk_similarity.cu"], Vec::new());
        compiles(&["select/evicted.cu"], Vec::new());
        compiles(&["select/top_k.cu"], Vec::new());
        compiles(&["select/merge_members.cu"], Vec::new());
        let scores = [("WEIGHING", 1), ("POOL", 2), ("TEXT", 1), ("GROUP", 4)];
        compiles(&["select/token_scores.cu"], scores.to_vec());
    }

    /// Resident rows take at most 64 registers of a thread.
    #[test]
    fn sizes_are_those_of_the_kernels() {
        let of = |head_dim, element_type| KeyTile::new(&A100, head_dim, [element_type; 2], GroupWarps::Wide);
        let half = of(128, ElementType::F16);
        assert_eq!((half.warp_rows(), half.eight_bytes(), half.block_rows()), (32, 2048, 512));
        let wide = of(256, ElementType::Bf16);
        assert_eq!((wide.warp_rows(), wide.eight_bytes()), (16, 4096));
        let full = of(80, ElementType::F32);
        assert_eq!((full.warp_rows(), full.eight_bytes()), (16, 3072));
        assert_eq!(of(64, ElementType::F32).warp_rows(), 32);
    }

    #[test]
    fn groups_multiply_halves_on_capability_9_0_alone() {
        let f16 = ElementType::F16;
        let of = |facts, head_dim, passing| KeyTile::new(facts, head_dim, [f16, passing], GroupWarps::Wide);
        let tile = of(&H200, 128, ElementType::Bf16);
        assert_eq!((tile.warps(), tile.group_warps(), tile.at_once()), (12, 4, 7));
        for (facts, head_dim, passing) in [(&A100, 128, f16), (&H200, 256, f16), (&H200, 64, ElementType::F32)] {
            assert_eq!(of(facts, head_dim, passing).group_warps(), 1);
        }
    }
}
