//! Kernel `attend_run`: many queries of a run together, with cooperative matrices.

use super::recipe::{AttendRecipe, RunArrivals, RunCodes, RunRows};
use super::specialisation::{MAX_TILES, Specialisation};
use crate::format::{AffineFormat, Bits, Grouping, TensorFormat, TileLayout};
use crate::plan::ElementType;
use crate::wgpu::device::Variant;

/// Tokens of a step: those of a product of 16 × 16 × 16.
const STEP_TOKENS: usize = 16;
/// Rows of a subgroup, two blocks of such products.
const SUBGROUP_ROWS: usize = 32;
/// Invocations of a subgroup.
const SUBGROUP: usize = 32;
/// Maximum number of rows of queries and query heads in a workgroup, and of rows behind the prepared ones: `RUN_ROWS`
/// of the shaders.
pub(super) const RUN_ROWS: usize = 256;
/// Number of rows of a run from which on the kernel takes it: in f16, and with codes, which `attend` multiplies as
/// integers. At four query heads over 32k tokens on an H200, up to 128 rows took 188 µs; `attend` took that long for 32
/// rows in f16 and for 100.
const LEAST_ROWS: usize = 48;
const LEAST_CODE_ROWS: usize = 112;
/// The largest head dimension whose queries and sums a subgroup keeps in registers.
const MOST_CHANNELS: usize = 128;
/// Number of buffers that the kernel binds.
const BUFFERS: u32 = 9;

impl Specialisation<'_> {
    /// The parts that read the segment's tensors, if the kernel supports its format and shape on this device.
    fn run_codes(&self) -> Option<[RunCodes; 2]> {
        let head_dim = self.shape.head_dim();
        let limits = &self.capabilities.limits;
        let codes = [run_codes(&self.format.key)?, run_codes(&self.format.value)?];
        let arrivals = RunArrivals::of(codes);
        let fits = self.capabilities.matrices
            && self.scoring.is_plain()
            && head_dim.is_multiple_of(SUBGROUP)
            && head_dim <= MOST_CHANNELS
            && self.shape.group() <= RUN_ROWS / 2
            && limits.storage_buffers >= BUFFERS
            && run_rows(RUN_ROWS).workgroup_bytes(head_dim, arrivals) <= limits.workgroup_memory as usize
            && run_rows(RUN_ROWS).invocations() <= limits.invocations as usize;
        (fits && self.format.value.rotation().is_none()).then_some(codes)
    }

    /// Maximum number of queries in a block, and minimum number in a run that is cut into such blocks, if there is a
    /// kernel.
    pub(super) fn run_block_queries(&self) -> Option<[usize; 2]> {
        let group = self.shape.group();
        let codes = self.run_codes()?;
        let least = if codes == [RunCodes::F16; 2] { LEAST_ROWS } else { LEAST_CODE_ROWS };
        Some([RUN_ROWS / group, least.div_ceil(group).max(2)])
    }

    /// The rows of a workgroup, if the items have more queries than `attend` takes.
    pub(super) fn run_rows(&self) -> Option<RunRows> {
        (self.queries > self.most_queries()).then(|| run_rows(self.queries * self.shape.group()))
    }

    /// Number of queries that the rows belong to.
    pub(super) fn run_queries(&self, rows: RunRows) -> usize {
        rows.rows() / self.shape.group()
    }

    /// The kernel, if the items have more queries than `attend` takes.
    pub(super) fn attend_run(&self) -> Option<AttendRecipe> {
        let (rows, codes) = (self.run_rows()?, self.run_codes()?);
        let ([keys, values], arrivals) = (codes, RunArrivals::of(codes));
        let mut work = self.work(self.head_split());
        work.queries = self.run_queries(rows);
        let key_vector = TileLayout::of(&self.format.key, self.shape.head_dim()).key_vector();
        Some(AttendRecipe::Run { work, rows, keys, key_vector, values, arrivals })
    }

    /// The kernel that prepares its queries of `input` elements.
    pub(super) fn prepare_run_query(&self, input: ElementType) -> Variant {
        let variant = self.prepare_rotated_query(input).import("query_row", "attend/query_row/f16.wgsl");
        match self.query_fields().span_middle {
            Some(middle) => variant.import("query_ranges", "attend/query_ranges/span.wgsl").float("KEY_MIDDLE", middle),
            None => variant,
        }
    }

    /// Bytes of `queries` prepared queries, and of their constants.
    pub(super) fn run_query_bytes(&self, queries: usize) -> [u64; 2] {
        let rows = (queries * self.shape.query_heads() + RUN_ROWS) as u64;
        [rows * self.shape.head_dim() as u64 * 2, rows * 8]
    }
}

/// Numbers of queries in runs that fill a workgroup of either size. Together they use every kernel of a segment.
pub(in crate::wgpu) const fn full_runs(group: usize) -> [usize; 2] {
    [RUN_ROWS / 2 / group, RUN_ROWS / group]
}

/// How a tensor is read, if the kernel supports it.
fn run_codes(format: &TensorFormat) -> Option<RunCodes> {
    match format {
        TensorFormat::F16 => Some(RunCodes::F16),
        TensorFormat::Affine(AffineFormat { bits: Bits::Three, .. }) => None,
        TensorFormat::Affine(AffineFormat { bits, grouping: Grouping::Channel, .. }) => Some(RunCodes::Channel(*bits)),
        TensorFormat::Affine(AffineFormat { bits, grouping: Grouping::Token, .. }) => Some(RunCodes::Token(*bits)),
        _ => None,
    }
}

/// A workgroup of at least `rows` rows, in one of two sizes.
const fn run_rows(rows: usize) -> RunRows {
    let rows = if rows <= RUN_ROWS / 2 { RUN_ROWS / 2 } else { RUN_ROWS };
    RunRows { subgroups: rows / SUBGROUP_ROWS }
}

impl RunRows {
    /// Rows of a workgroup.
    pub(super) const fn rows(self) -> usize {
        self.subgroups * SUBGROUP_ROWS
    }

    pub(super) const fn invocations(self) -> usize {
        self.subgroups * SUBGROUP
    }

    /// Workgroup memory of the kernel, as the shader declares it.
    const fn workgroup_bytes(self, head_dim: usize, arrivals: RunArrivals) -> usize {
        let keys = arrivals.key_steps() * STEP_TOKENS * (head_dim / 4 + 2) * 8;
        let values = head_dim * 6 * 8;
        // A row of scores, one of weights, and a factor.
        let rows = self.rows() * (5 * 16 + 6 * 8 + 4);
        MAX_TILES * 4 + keys + values + rows + 64
    }
}

impl RunArrivals {
    /// The decision depends on the loads of a lane: one word or four of keys and of values.
    fn of(codes: [RunCodes; 2]) -> Self {
        if codes == [RunCodes::F16; 2] { Self::ByTurns } else { Self::Ahead }
    }

    /// Number of steps that keys have room for: `KEY_STEPS` of the shaders.
    const fn key_steps(self) -> usize {
        match self {
            Self::ByTurns => 1,
            Self::Ahead => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::specialisation::ItemScoring;
    use super::*;
    use crate::backend::QueryBytes;
    use crate::format::{AttentionShape, SegmentFormat};
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

    fn formats() -> [SegmentFormat; 7] {
        let token = |bits| TensorFormat::Affine(AffineFormat::new(bits, Grouping::Token));
        let channel = SegmentFormat::per_channel;
        [
            SegmentFormat::F16,
            channel(Bits::Four),
            SegmentFormat::saw_int4(),
            SegmentFormat { key: TensorFormat::F16, value: token(Bits::Four) },
            SegmentFormat { key: token(Bits::Eight), value: channel(Bits::Two).value },
            SegmentFormat { key: channel(Bits::Two).key, value: token(Bits::Eight) },
            channel(Bits::One),
        ]
    }

    /// The shader's declarations are valid and equal the planned size.
    #[test]
    fn workgroup_memory_is_counted() {
        let capabilities = capabilities(48 << 10);
        for (group, head_dim) in [(4, 128), (3, 96), (1, 64)] {
            let shape = AttentionShape::new(2 * group, 2, head_dim).unwrap();
            for (format, queries) in formats().iter().flat_map(|format| [(format, 100 / group), (format, 250 / group)])
            {
                let special = Specialisation {
                    shape: &shape,
                    format,
                    query: QueryBytes::Two,
                    capabilities: &capabilities,
                    may_use_matrices: true,
                    scoring: ItemScoring::plain(&shape),
                    queries,
                };
                let rows = special.run_rows().unwrap();
                assert!(rows.rows() >= queries * group && rows.rows() <= RUN_ROWS);
                let source = special.attend_run().unwrap().variant().source().unwrap();
                let module = naga::front::wgsl::parse_str(&source.wgsl)
                    .unwrap_or_else(|error| panic!("{}", error.emit_to_string(&source.wgsl)));
                let (flags, all) = (naga::valid::ValidationFlags::all(), naga::valid::Capabilities::all());
                naga::valid::Validator::new(flags, all)
                    .validate(&module)
                    .unwrap_or_else(|error| panic!("{}", error.emit_to_string(&source.wgsl)));
                let mut layouter = naga::proc::Layouter::default();
                layouter.update(module.to_ctx()).unwrap();
                let globals = module.global_variables.iter();
                let declared: u32 = globals
                    .filter(|(_, variable)| variable.space == naga::AddressSpace::WorkGroup)
                    .map(|(_, variable)| layouter[variable.ty].size)
                    .sum();
                let arrivals = RunArrivals::of(special.run_codes().unwrap());
                assert_eq!(declared as usize, rows.workgroup_bytes(head_dim, arrivals), "{format} {queries}");
                let prepare = special.prepare_run_query(ElementType::F16).source().unwrap();
                naga::front::wgsl::parse_str(&prepare.wgsl)
                    .unwrap_or_else(|error| panic!("{}", error.emit_to_string(&prepare.wgsl)));
            }
        }
    }
}
