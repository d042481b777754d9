//! Kernel `attend_matrix`: `attend` with cooperative matrices, where that is faster.

use super::recipe::{AttendRecipe, HeadSplit};
use super::specialisation::{MAX_TILES, Specialisation};
use crate::backend::QueryBytes;
use crate::format::SegmentFormat;
use crate::plan::ElementType;

/// Query heads of a workgroup: two columns each of a product's right operand.
const HEADS: usize = 8;
/// The only head dimension that was checked and timed.
const HEAD_DIM: usize = 128;

impl Specialisation<'_> {
    /// Whether cooperative matrices take the segment: f16 at eight query heads per KV head. On an H200 they took 306 µs
    /// where `attend` took 364 (`g8-b8-32k`), but at four heads 322 and 272, and codes of 2 bits 203 and 126 at eight:
    /// see lab/wgpu.md.
    pub fn uses_matrices(&self) -> bool {
        self.may_use_matrices
            && self.scoring.is_plain()
            && self.capabilities.matrices
            && *self.format == SegmentFormat::F16
            && (self.shape.group(), self.shape.head_dim()) == (HEADS, HEAD_DIM)
            && self.matrix_workgroup_bytes(ElementType::F32) <= self.capabilities.limits.workgroup_memory as usize
    }

    /// All heads of a KV head in one workgroup.
    pub(super) fn matrix_head_split(&self) -> HeadSplit {
        HeadSplit { heads: HEADS, chunks: 1 }
    }

    /// The kernel, for queries of `input` elements.
    pub(super) fn attend_matrix(&self, input: ElementType) -> AttendRecipe {
        AttendRecipe::Matrix {
            work: self.work(self.matrix_head_split()),
            query_parts: self.query_halves(input),
            query: self.given_query(input),
        }
    }

    /// f16 summands per element of the query: one for 16-bit queries, which it holds exactly (bf16 down to 2^-28 of the
    /// largest element), and one if 8 bits suffice.
    fn query_halves(&self, input: ElementType) -> usize {
        match (input, self.query) {
            (ElementType::F16 | ElementType::Bf16, _) | (_, QueryBytes::One) => 1,
            (ElementType::F32, QueryBytes::Two) => 2,
        }
    }

    /// Workgroup memory of the kernel, as the shader declares it.
    fn matrix_workgroup_bytes(&self, input: ElementType) -> usize {
        /// A vector of right operands: two columns of eight halves for every head, followed by eight zeros.
        const COLUMNS: usize = (2 * HEADS + 1) * 16;
        /// A block of sums, padded.
        const BLOCK: usize = 16 * 20 * 4;
        let query = self.query_halves(input) * self.shape.head_dim() / 8 * COLUMNS;
        // Weights of two tiles.
        let weights = 2 * 16 * COLUMNS;
        let scores_and_sums = 2 * (4 + self.shape.head_dim() / 32) * BLOCK;
        MAX_TILES * 4 + query + weights + scores_and_sums
    }
}

#[cfg(test)]
mod tests {
    use super::super::specialisation::ItemScoring;
    use super::*;
    use crate::format::{AttentionShape, Bits};
    use crate::wgpu::device::{Capabilities, KernelLimits, SubgroupSizes, Timestamps};

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

    /// The shader's declarations are valid and equal the planned size.
    #[test]
    fn workgroup_memory_is_counted() {
        let (shape, format) = (AttentionShape::new(16, 2, HEAD_DIM).unwrap(), SegmentFormat::F16);
        let capabilities = capabilities(48 << 10);
        for query in [QueryBytes::Two, QueryBytes::One] {
            let special = Specialisation {
                shape: &shape,
                format: &format,
                query,
                capabilities: &capabilities,
                may_use_matrices: true,
                scoring: ItemScoring::plain(&shape),
                queries: 1,
            };
            for input in ElementType::ALL {
                let source = special.attend_matrix(input).variant().source().unwrap();
                let module = naga::front::wgsl::parse_str(&source.wgsl).unwrap();
                let (flags, all) = (naga::valid::ValidationFlags::all(), naga::valid::Capabilities::all());
                naga::valid::Validator::new(flags, all).validate(&module).unwrap();
                let mut layouter = naga::proc::Layouter::default();
                layouter.update(module.to_ctx()).unwrap();
                let globals = module.global_variables.iter();
                let declared: u32 = globals
                    .filter(|(_, variable)| variable.space == naga::AddressSpace::WorkGroup)
                    .map(|(_, variable)| layouter[variable.ty].size)
                    .sum();
                assert_eq!(declared as usize, special.matrix_workgroup_bytes(input), "{query:?} {input:?}");
            }
        }
    }

    /// A driver that was asked for more workgroup memory than it has hung.
    #[test]
    fn only_what_was_timed_takes_matrices() {
        let uses = |capabilities: &Capabilities, heads: usize, head_dim: usize, format: SegmentFormat| {
            let shape = AttentionShape::new(heads, 1, head_dim).unwrap();
            let query = QueryBytes::Two;
            let special = Specialisation {
                shape: &shape,
                format: &format,
                query,
                capabilities,
                may_use_matrices: true,
                scoring: ItemScoring::plain(&shape),
                queries: 1,
            };
            special.uses_matrices()
        };
        let large = capabilities(48 << 10);
        assert!(uses(&large, 8, 128, SegmentFormat::F16));
        assert!(!uses(&capabilities(32 << 10), 8, 128, SegmentFormat::F16));
        assert!(!uses(&Capabilities { matrices: false, ..large }, 8, 128, SegmentFormat::F16));
        assert!(!uses(&large, 4, 128, SegmentFormat::F16));
        assert!(!uses(&large, 8, 64, SegmentFormat::F16));
        assert!(!uses(&large, 8, 128, SegmentFormat::per_channel(Bits::Two)));
    }
}
