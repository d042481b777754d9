//! Kernel `attend_run`: many queries of a run together, with cooperative matrices.

use super::recipe::{AttendRecipe, RunArrivals, RunCodes, RunItems, RunRows, ValueRangesOfRun, WrittenOutputs};
use super::specialisation::{MAX_RUN_TILES, Specialisation};
use crate::TILE_TOKENS;
use crate::format::codebook::level_unit;
use crate::format::{AffineFormat, AttentionShape, Bits, Direction, Grouping, SegmentFormat, TensorFormat, TileLayout};
use crate::plan::ElementType;
use crate::wgpu::device::Variant;
use crate::wgpu::pack::hadamard::{DirectedRotation, with_turn};

/// Tokens of a step: those of a product of 16 × 16 × 16.
const STEP_TOKENS: usize = 16;
/// Rows of a block of such products.
const BLOCK_ROWS: usize = 16;
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
/// The largest head dimension at which a subgroup keeps the queries and sums of two blocks in registers, and of one.
const MOST_CHANNELS_OF_TWO: usize = 128;
const MOST_CHANNELS: usize = 256;
/// The largest head dimension at which two workgroups of four subgroups, whose subgroups do not wait for each other, share
/// a multiprocessor and are faster than one of eight. On an H200 a prompt of 16k tokens took 6.5 ms at 4 bits and not
/// 6.7, and 7.9 with `kivi:4` and not 9.0. `int8` took 7.3 and not 7.0, since only eight subgroups stage its ranges.
const MOST_SHARED_CHANNELS: usize = 64;
/// Query heads that an invocation of `prepare_run_query` prepares a part of, and invocations of a workgroup.
const PREPARED_HEADS: usize = 4;
const PREPARING_INVOCATIONS: usize = 64;
/// The storage of its prepared queries.
const QUERY_ROW: &str = "attend/query_row.wgsl#f16";
/// Subgroups of the largest workgroup.
const MOST_SUBGROUPS: usize = 8;
/// Words of an item that wait in workgroup memory: `kept` of the shaders.
const KEPT_WORDS: usize = 8;
/// Steps of levels in the half 1: see `attend/codes.wgsl#level_halves`.
const LEVEL_STEPS: f32 = 128.0;
/// Most buffers that the kernel binds: those of keys and values, their ranges, four of work, the states, and three for
/// outputs, log-sum-exps and sinks.
const BUFFERS: u32 = 12;

impl Specialisation<'_> {
    /// The parts that read the segment's tensors, if the kernel supports its format and shape on this device.
    fn run_codes(&self) -> Option<[RunCodes; 2]> {
        let head_dim = self.shape.head_dim();
        let limits = &self.capabilities.limits;
        let codes = [run_codes(&self.format.key, head_dim)?, run_codes(&self.format.value, head_dim)?];
        let rows = RunRows::most(head_dim);
        let bytes = rows.workgroup_bytes(head_dim, RunArrivals::together(codes), ValueRangesOfRun::of(codes));
        // A lane that rotates a row knows the places of its channels in advance.
        let turns = self.format.value.rotation().is_none_or(|rotation| rotation.dealt_blocks(head_dim) == 1);
        let fits = self.capabilities.matrices
            && self.scoring.is_plain()
            && head_dim.is_multiple_of(SUBGROUP)
            && head_dim <= MOST_CHANNELS
            && self.shape.group() <= rows.rows() / 2
            && turns
            && limits.storage_buffers >= BUFFERS
            && bytes <= limits.workgroup_memory as usize
            && rows.invocations() <= limits.invocations as usize;
        fits.then_some(codes)
    }

    /// The largest workgroup for these codes, and when it stores what it loads.
    fn run_workgroup(&self, codes: [RunCodes; 2]) -> (RunRows, RunArrivals) {
        let (head_dim, most) = (self.shape.head_dim(), RunRows::most(self.shape.head_dim()));
        let ranges = ValueRangesOfRun::of(codes);
        let fits = |rows: RunRows, buffers: usize| {
            let bytes = rows.workgroup_bytes(head_dim, RunArrivals::Apart(buffers), ranges);
            bytes <= self.capabilities.limits.workgroup_memory as usize
        };
        let half = RunRows { subgroups: most.subgroups / 2, ..most };
        let shared = head_dim <= MOST_SHARED_CHANNELS && ranges == ValueRangesOfRun::WithCodes;
        if shared && self.shape.group() <= half.rows() / 2 && fits(half, 2) {
            return (half, RunArrivals::Apart(2));
        }
        // Both formats were measured. Others hold more of a step in registers.
        let few_words = codes == [RunCodes::F16; 2] || codes == [RunCodes::Channel(Bits::Four); 2];
        match [2, 1].into_iter().find(|buffers| fits(most, *buffers)) {
            Some(buffers) if most.blocks == 1 && few_words => (most, RunArrivals::Apart(buffers)),
            _ => (most, RunArrivals::together(codes)),
        }
    }

    /// Maximum number of queries in a block, and minimum number in a run that is cut into such blocks, if there is a
    /// kernel.
    pub(super) fn run_block_queries(&self) -> Option<[usize; 2]> {
        let group = self.shape.group();
        let codes = self.run_codes()?;
        let least = if codes == [RunCodes::F16; 2] { LEAST_ROWS } else { LEAST_CODE_ROWS };
        let (most, _) = self.run_workgroup(codes);
        Some([most.rows() / group, least.div_ceil(group).max(2)])
    }

    /// The rows of a workgroup, if the items have more queries than `attend` takes.
    pub(super) fn run_rows(&self) -> Option<RunRows> {
        let rows = self.queries * self.shape.group();
        let codes = (self.queries > self.most_queries()).then(|| self.run_codes()).flatten()?;
        Some(self.run_workgroup(codes).0.of(rows))
    }

    /// Number of queries that the rows belong to.
    pub(super) fn run_queries(&self, rows: RunRows) -> usize {
        rows.rows() / self.shape.group()
    }

    /// The kernel, if the items have more queries than `attend` takes.
    pub(super) fn attend_run(&self, items: RunItems, outputs: WrittenOutputs) -> Option<AttendRecipe> {
        let (rows, codes) = (self.run_rows()?, self.run_codes()?);
        let ([keys, values], (_, arrivals)) = (codes, self.run_workgroup(codes));
        let arrivals = if items == RunItems::Parts { arrivals } else { RunArrivals::First };
        let mut work = self.work(self.head_split());
        work.queries = self.run_queries(rows);
        let key_vector = TileLayout::of(&self.format.key, self.shape.head_dim()).key_vector();
        let rotation = self.format.value.rotation();
        Some(AttendRecipe::Run { work, rows, keys, key_vector, values, rotation, arrivals, items, outputs })
    }

    /// Whether there is a text for items with all that their f16 queries see: f16 at 128 and at 256 channels, in the
    /// largest workgroup. On an H200 sixteen prompts of 1k tokens take 1026 µs so, and 1173 with prepared queries and
    /// states. Packed formats have ranges or rotations that queries must be multiplied with, and 64 channels are no faster.
    pub(super) fn takes_whole_runs(&self) -> bool {
        let most = RunRows::most(self.shape.head_dim());
        *self.format == SegmentFormat::F16
            && matches!(self.shape.head_dim(), MOST_CHANNELS_OF_TWO | MOST_CHANNELS)
            && self.run_rows() == Some(most)
    }

    /// The kernel that prepares its queries of `input` elements.
    pub(super) fn prepare_run_query(&self, input: ElementType) -> Variant {
        if self.prepares_apart() {
            return self.put_query_ranges(self.prepare_rotated_query(input).import("query_row", QUERY_ROW));
        }
        let head_dim = self.shape.head_dim();
        let variant =
            self.put_rows("prepare_run_query", input).constant("ROW_INVOCATIONS", self.prepared_row_invocations());
        let variant = match self.format.key.rotation() {
            None => variant,
            Some(rotation) => {
                let turn = DirectedRotation { rotation, direction: Direction::Forward };
                with_turn(variant.import("rotated_rows", "attend/rotated_rows.wgsl#hadamard"), turn, head_dim)
            }
        };
        self.put_query_ranges(variant)
    }

    /// Whether `prepare_query` prepares its queries, one by one: where channels change their places.
    fn prepares_apart(&self) -> bool {
        self.format.key.rotation().is_some_and(|rotation| rotation.dealt_blocks(self.shape.head_dim()) > 1)
    }

    fn put_query_ranges(&self, variant: Variant) -> Variant {
        match self.query_fields().span_middle {
            Some(middle) => variant.import("query_ranges", "attend/query_ranges.wgsl#span").float("KEY_MIDDLE", middle),
            None => variant,
        }
    }

    /// Invocations that prepare a row of queries together.
    const fn prepared_row_invocations(&self) -> usize {
        if self.shape.head_dim() <= 4 * SUBGROUP { SUBGROUP } else { 2 * SUBGROUP }
    }

    /// Workgroups that prepare a query.
    pub(super) fn prepared_workgroups(&self) -> usize {
        let heads = PREPARED_HEADS * (PREPARING_INVOCATIONS / self.prepared_row_invocations());
        if self.prepares_apart() { self.shape.query_heads() } else { self.shape.query_heads().div_ceil(heads) }
    }

    /// Bytes of `queries` prepared queries, and of their constants.
    pub(super) fn run_query_bytes(&self, queries: usize) -> [u64; 2] {
        let rows = (queries * self.shape.query_heads() + RUN_ROWS) as u64;
        [rows * self.shape.head_dim() as u64 * 2, rows * 8]
    }
}

/// Numbers of queries in runs that fill a workgroup of either size. Together they use every kernel of a segment.
pub(in crate::wgpu) const fn full_runs(shape: &AttentionShape) -> [usize; 2] {
    let rows = RunRows::most(shape.head_dim()).rows();
    [rows / 2 / shape.group(), rows / shape.group()]
}

/// How a tensor is read, if the kernel supports it.
fn run_codes(format: &TensorFormat, head_dim: usize) -> Option<RunCodes> {
    if format.code_bits() == Some(Bits::Three) || format.sketched().is_some() {
        return None;
    }
    match format {
        TensorFormat::F16 => Some(RunCodes::F16),
        TensorFormat::Affine(AffineFormat { bits, grouping, .. }) => match grouping {
            Grouping::Channel => Some(RunCodes::Channel(*bits)),
            Grouping::Token => Some(RunCodes::Token(*bits, 1)),
            Grouping::ChannelTokens(tokens) => Some(RunCodes::ChannelTokens(*bits, TILE_TOKENS / tokens)),
            // Eight neighbouring channels of a key have one range.
            Grouping::TokenChannels(channels) => {
                channels.is_multiple_of(8).then(|| RunCodes::Token(*bits, head_dim / channels))
            }
        },
        TensorFormat::Codebook(codebook) => {
            level_unit(codebook.bits, head_dim).map(|unit| RunCodes::Levels(codebook.bits, LEVEL_STEPS * unit))
        }
    }
}

impl RunRows {
    /// A workgroup of at least `rows` rows, or the largest one, which this is. None has less than half of
    /// `MOST_SUBGROUPS`.
    const fn of(self, rows: usize) -> Self {
        let halves = rows <= self.rows() / 2 && self.subgroups == MOST_SUBGROUPS;
        if halves { Self { subgroups: self.subgroups / 2, ..self } } else { self }
    }

    /// The largest workgroup.
    const fn most(head_dim: usize) -> Self {
        let blocks = if head_dim <= MOST_CHANNELS_OF_TWO { 2 } else { 1 };
        Self { subgroups: MOST_SUBGROUPS, blocks }
    }

    /// Rows of a workgroup.
    pub(super) const fn rows(self) -> usize {
        self.subgroups * self.blocks * BLOCK_ROWS
    }

    pub(super) const fn invocations(self) -> usize {
        self.subgroups * SUBGROUP
    }

    /// Vectors of four that a row of scores has room for in workgroup memory. Scores are four of them. With six, products
    /// are stored without conflicts of banks. On an H200 a prompt of 16k tokens in f16 then takes 9.4 ms and not 9.8 at 128
    /// channels, but 25.6 and not 25.0 at 256. Keys that arrive ahead leave no room at 128 channels, and `int8` with 64
    /// takes 7.3 and not 7.1.
    pub(super) const fn score_row(self, arrivals: RunArrivals) -> usize {
        match arrivals {
            RunArrivals::Apart(_) => 6,
            RunArrivals::ByTurns | RunArrivals::First if self.blocks == 2 => 6,
            RunArrivals::ByTurns | RunArrivals::First | RunArrivals::Ahead => 5,
        }
    }

    /// Workgroup memory of the kernel, as the shader declares it.
    const fn workgroup_bytes(self, head_dim: usize, arrivals: RunArrivals, ranges: ValueRangesOfRun) -> usize {
        let keys = STEP_TOKENS * (head_dim / 4 + 2) * 8;
        let values = head_dim * 6 * 8;
        let score_row = self.score_row(arrivals);
        let (scores, weights) = (score_row * 16, 6 * 8);
        // Together, it is known which subgroups moved their references. No padding follows the last rows of four arrays.
        // There is a factor for every row, unless that lies in the padding of scores, which then follows their last row,
        // and ranges of 16 tokens have room.
        let together = self.rows() * (scores + weights) + self.subgroups * 4 - (3 + score_row - 4) * 16;
        let together = match ranges {
            ValueRangesOfRun::WithCodes => together + self.rows() * 4,
            ValueRangesOfRun::Staged => together + (score_row - 4) * 16 + STEP_TOKENS * 4,
        };
        let rest = match arrivals {
            RunArrivals::ByTurns | RunArrivals::First => keys + values + together,
            RunArrivals::Ahead => 2 * keys + values + together,
            RunArrivals::Apart(buffers) => {
                buffers * (keys + values) + self.subgroups * BLOCK_ROWS * scores + self.rows() * weights
            }
        };
        MAX_RUN_TILES * 4 + KEPT_WORDS * 4 + rest
    }
}

impl RunArrivals {
    /// Where subgroups wait for each other. The decision depends on the loads of a lane: one word or four of keys and
    /// of values.
    fn together(codes: [RunCodes; 2]) -> Self {
        if codes == [RunCodes::F16; 2] { Self::ByTurns } else { Self::Ahead }
    }
}

#[cfg(test)]
mod tests {
    use super::super::recipe::{LseOutput, Sinks};
    use super::super::specialisation::ItemScoring;
    use super::*;
    use crate::backend::QueryBytes;
    use crate::format::Rotation;
    use crate::wgpu::device::{Capabilities, KernelLimits, SubgroupSizes, Timestamps};

    fn capabilities(workgroup_memory: u32) -> Capabilities {
        let limits = KernelLimits {
            binding_bytes: 128 << 20,
            binding_alignment: 256,
            storage_buffers: 12,
            workgroup_memory,
            invocations: 1024,
            workgroups: 65535,
        };
        let subgroups = Some(SubgroupSizes { min: 32, max: 32 });
        Capabilities { f16: true, subgroups, coherent: true, matrices: true, timestamps: Timestamps::None, limits }
    }

    fn formats(head_dim: usize) -> Vec<SegmentFormat> {
        let affine = |bits, grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
        let token = |bits| affine(bits, Grouping::Token);
        let channel = SegmentFormat::per_channel;
        let turned = AffineFormat::new(Bits::Eight, Grouping::Channel).rotated(Rotation::randomized(32, 1));
        vec![
            SegmentFormat::turboquant(Bits::Four, head_dim),
            SegmentFormat::turboquant(Bits::One, head_dim),
            SegmentFormat {
                key: SegmentFormat::turboquant(Bits::Two, head_dim).key,
                value: TensorFormat::Affine(turned),
            },
            SegmentFormat {
                key: affine(Bits::Two, Grouping::ChannelTokens(32)),
                value: affine(Bits::Two, Grouping::TokenChannels(32)),
            },
            SegmentFormat {
                key: affine(Bits::Eight, Grouping::TokenChannels(16)),
                value: affine(Bits::Four, Grouping::ChannelTokens(128)),
            },
            SegmentFormat::F16,
            channel(Bits::Four),
            SegmentFormat::saw_int4(),
            SegmentFormat { key: TensorFormat::F16, value: token(Bits::Four) },
            SegmentFormat { key: token(Bits::Eight), value: channel(Bits::Two).value },
            SegmentFormat { key: token(Bits::Eight), value: token(Bits::Eight) },
            SegmentFormat { key: TensorFormat::F16, value: token(Bits::Eight) },
            SegmentFormat { key: channel(Bits::Two).key, value: token(Bits::Eight) },
            channel(Bits::One),
        ]
    }

    /// The shader's declarations are valid and equal the planned size.
    #[test]
    fn workgroup_memory_is_counted() {
        let capabilities = capabilities(48 << 10);
        for (group, head_dim) in [(4, 128), (3, 96), (1, 64), (4, 256)] {
            let shape = AttentionShape::new(2 * group, 2, head_dim).unwrap();
            let most = RunRows::most(head_dim).rows();
            let counts = [most / 2 - 5, most - 5].map(|rows| rows / group);
            for (format, queries) in formats(head_dim).iter().flat_map(|format| counts.map(|count| (format, count))) {
                let mut special = Specialisation {
                    shape: &shape,
                    format,
                    query: QueryBytes::Two,
                    capabilities: &capabilities,
                    may_use_matrices: true,
                    scoring: ItemScoring::plain(&shape),
                    queries,
                };
                let (most, arrivals) = special.run_workgroup(special.run_codes().unwrap());
                special.queries = queries.min(most.rows() / group);
                let rows = special.run_rows().unwrap();
                let ranges = ValueRangesOfRun::of(special.run_codes().unwrap());
                assert!(ranges == ValueRangesOfRun::WithCodes || arrivals == RunArrivals::Ahead, "{format} {queries}");
                assert!(rows.rows() >= special.queries * group && rows.rows() <= RUN_ROWS);
                let outputs = WrittenOutputs {
                    element_type: ElementType::Bf16,
                    lse: if group == 3 { LseOutput::None } else { LseOutput::F32 },
                    sinks: if group == 1 { Sinks::None } else { Sinks::Logits },
                };
                let items = match special.takes_whole_runs() {
                    true => RunItems::Whole(special.given_query(ElementType::F16)),
                    false => RunItems::Parts,
                };
                let recipe = special.attend_run(items, outputs).unwrap();
                let AttendRecipe::Run { arrivals, .. } = recipe else { panic!("{format}: {recipe:?}") };
                let source = recipe.variant().source().unwrap();
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
                assert_eq!(declared as usize, rows.workgroup_bytes(head_dim, arrivals, ranges), "{format} {queries}");
                let prepare = special.prepare_run_query(ElementType::F16).source().unwrap();
                naga::front::wgsl::parse_str(&prepare.wgsl)
                    .unwrap_or_else(|error| panic!("{}", error.emit_to_string(&prepare.wgsl)));
            }
        }
    }
}
