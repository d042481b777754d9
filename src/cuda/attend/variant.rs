//! How `attend` is compiled for a format on a device.

use cudarc::driver::CudaFunction;

use super::logits::Logits;
use super::split::{BIT_TOKEN_RATE, MOST_CLUSTER, TOKEN_RATE};
use super::variant_sizes::whole_loads;
use crate::Result;
use crate::cuda::Cuda;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::launch::set_shared_bytes;
use crate::cuda::device::page_format::PageFormat;
use crate::cuda::device::program::Program;
use crate::cuda::sources::SOURCES;
use crate::format::{KeyOrValue, TILE_TOKENS};

/// Bytes of shared memory that `attend` needs in addition to its rings and to [`AttendVariant::fixed_bytes`].
const SPARE_SHARED_BYTES: usize = 1 << 10;

/// Bytes of shared memory that every block costs in addition to its own.
const RESERVED_SHARED_BYTES: usize = 1 << 10;

/// Outputs that go to a block of a cluster at a time; `CLUSTER_RUN` in `cuda/merge_states.cu`.
const CLUSTER_RUN: usize = 32;

/// Lines of the L2 cache, to which stages are aligned: `LINE_BYTES` in `cuda/common/attend_call.cuh`.
pub(super) const LINE_BYTES: usize = 128;

/// How a launch of `attend` uses scores: `SCORE_PASS` in `cuda/common/calibration.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScorePass {
    /// Weighs values with them.
    Plain = 0,
    /// Only finds their extremes over each span.
    Extremes = 1,
    /// Maps them by those extremes and weighs values.
    Mapped = 2,
}

impl ScorePass {
    /// Those of a segment: two where its scores are calibrated.
    pub(super) const fn of(calibrated: bool) -> &'static [Self] {
        if calibrated { &[Self::Extremes, Self::Mapped] } else { &[Self::Plain] }
    }
}

/// How `attend` is compiled for a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttendVariant {
    pub(super) pages: PageFormat,
    /// Up to 8 query heads to a block instead of 4.
    pub(super) wide: bool,
    /// Tokens that are copied at once.
    pub(super) step_tokens: usize,
    /// Tokens whose scores a warp holds at once.
    pub(super) pass_tokens: usize,
    pub(super) stages: usize,
    pub(super) warps: usize,
    /// Blocks that share a multiprocessor.
    pub(super) blocks: usize,
    /// Copies by the copy engine, which compute capability 9.0 has.
    pub(super) bulk_copies: bool,
    /// Maximum number of queries of an item. Several queries share a block with all their heads.
    pub(super) queries: usize,
    /// Whether each query of an item may see one more token than the one before it. Otherwise they see the same.
    pub(super) moving: bool,
    /// Warps that attend to the same tokens, each for its own of a block's heads.
    pub(super) row_warps: usize,
    pub(super) logits: Logits,
    /// Whether blocks also store the tokens of the step: `STORES` in `cuda/attend.cu`.
    pub(super) stores: bool,
    /// Whether a block has one query head: 1-bit keys of whole tiles are then multiplied as bits.
    pub(super) lone_head: bool,
}

/// Most warps that attend to the same tokens.
pub(super) const MOST_ROW_WARPS: usize = 4;

/// Query heads of a warp: columns of an MMA.
pub(super) const WARP_HEADS: usize = 8;

impl AttendVariant {
    pub(super) const fn has_room(&self, facts: &DeviceFacts) -> bool {
        let room = facts.shared_bytes - (self.blocks - 1) * RESERVED_SHARED_BYTES;
        (self.shared_bytes() + self.fixed_bytes()) * self.blocks <= room
    }

    /// The variant whose blocks also store the tokens of the step, where each attends to one query with all the query
    /// heads of a KV head, of which there are `group`. It needs the copy engine.
    pub(super) fn storing(self, group: usize, facts: &DeviceFacts) -> Option<Self> {
        let storing = Self { stores: true, ..self.in_half_steps().unwrap_or(self) };
        let alone = self.queries == 1 && self.row_warps == 1 && group <= self.block_heads() && self.warps > 2;
        (self.bulk_copies && alone && storing.has_room(facts)).then_some(storing)
    }

    /// Of a variant of many warps with one stage each, that with two stages of half as many tokens. Its rings are filled
    /// before the step begins, so that it begins sooner, and its last turn leaves fewer warps idle.
    pub(super) fn in_half_steps(self) -> Option<Self> {
        let tokens = self.step_tokens / 2;
        let halves = self.warps == 16 && self.stages == 1 && whole_loads(&self.pages, tokens);
        halves.then_some(Self { step_tokens: tokens, pass_tokens: tokens, stages: 2, ..self })
    }

    /// The function of a pass, compiled unless it was compiled before, with its shared memory.
    pub(super) fn function(&self, backend: &Cuda, pass: ScorePass) -> Result<CudaFunction> {
        let function = backend.kernels().function(&self.program(pass), "attend")?;
        set_shared_bytes(&function, "attend", self.shared_bytes())?;
        Ok(function)
    }

    /// Whether the warps, which take the steps of an item in turn, are idle for more than a quarter of its time if it
    /// has `tiles` tiles.
    pub(super) const fn wastes_turns(&self, tiles: usize) -> bool {
        let steps = tiles * TILE_TOKENS / self.step_tokens;
        let idle = steps.next_multiple_of(self.warps) - steps;
        4 * idle > steps
    }

    /// Shared memory in addition to the rings: the query's fragments, the exchange between warps, and the data that the
    /// blocks of a cluster send.
    pub(super) const fn fixed_bytes(&self) -> usize {
        let heads = self.block_heads();
        let key = &self.pages.key;
        let query_bytes = if key.bits == 16 || key.is_grouped(self.pages.head_dim) { 2 } else { 1 };
        let group_sums = heads * key.row_groups(self.pages.head_dim) * size_of::<f32>();
        let queries = if key.sketched() && key.bits > 1 { 2 } else { 1 };
        let rows = queries * 2 * heads * (self.pages.head_dim * query_bytes + 16);
        let joined =
            self.warps * self.warp_heads() * 3 * size_of::<f32>() + self.pages.head_dim * size_of::<[f32; 2]>();
        let outputs = heads * self.pages.head_dim + MOST_CLUSTER * (CLUSTER_RUN + heads);
        let stored = if self.stores { 2 * self.pages.head_dim * (size_of::<f32>() + size_of::<u16>()) } else { 0 };
        rows + group_sums + joined + outputs * size_of::<f32>() + stored + SPARE_SHARED_BYTES
    }

    /// Heads of a warp.
    const fn warp_heads(&self) -> usize {
        if self.wide { WARP_HEADS } else { WARP_HEADS / 2 }
    }

    /// Heads of a block.
    pub(super) const fn block_heads(&self) -> usize {
        self.row_warps * self.warp_heads()
    }

    pub(super) fn program(&self, pass: ScorePass) -> Program {
        let mut defines = self.pages.defines();
        defines.extend([
            ("WIDE", self.wide.into()),
            ("STEP_TOKENS", self.step_tokens),
            ("PASS_TOKENS", self.pass_tokens),
            ("STAGES", self.stages),
            ("WARPS", self.warps),
            ("BLOCKS_PER_SM", self.blocks),
            ("BULK_COPIES", self.bulk_copies.into()),
            ("QUERIES", self.queries),
            ("MOVING", self.moving.into()),
            ("ROW_WARPS", self.row_warps),
            ("SCORE_PASS", pass as usize),
        ]);
        defines.extend(self.logits.defines());
        defines.extend(self.stores.then_some(("STORES", 1)));
        defines.extend((pass == ScorePass::Plain && self.multiplies_bits()).then_some(("LONE_HEAD", 1)));
        Program { sources: &SOURCES, files: &["attend.cu"], defines }
    }

    /// Tokens of one head that a multiprocessor attends to in a microsecond.
    pub(super) fn token_rate(&self) -> f64 {
        let rate = if self.multiplies_bits() { BIT_TOKEN_RATE } else { TOKEN_RATE };
        rate / self.row_warps as f64
    }

    /// Whether keys stay bits where scores are not calibrated: `LONE_HEAD` in `cuda/common/attend_call.cuh`.
    pub(super) fn multiplies_bits(&self) -> bool {
        let (key, value) = (&self.pages.key, &self.pages.value);
        let keys = key.bits == 1 && key.has_span_ranges() && value.has_span_ranges();
        let alone = self.lone_head && self.queries == 1 && self.row_warps == 1;
        alone && keys && self.pages.head_dim == 128 && self.pass_tokens == TILE_TOKENS
    }

    /// Bytes of keys and values that a block has under way.
    pub(super) const fn ring_bytes(&self) -> usize {
        self.warps / self.row_warps * self.stages * stage_bytes(&self.pages, self.step_tokens)
    }

    /// Shared memory of the rings, where the warps' sums are merged afterwards: those of minimums next to those of
    /// channels.
    pub(super) const fn shared_bytes(&self) -> usize {
        let rings = self.ring_bytes();
        let minimums = match self.pages.value.row_groups(self.pages.head_dim) {
            1 => 0,
            groups => groups.next_multiple_of(32),
        };
        let joined = self.warps * self.warp_heads() * (self.pages.head_dim + 8 + minimums) * size_of::<f32>();
        if rings > joined { rings } else { joined }
    }
}

/// Bytes of a stage, whole lines of the L2 cache: `STAGE_BYTES` in `cuda/common/attend_call.cuh`.
pub(super) const fn stage_bytes(pages: &PageFormat, step_tokens: usize) -> usize {
    let tiles = (pages.tile_bytes(KeyOrValue::Key) + pages.tile_bytes(KeyOrValue::Value)) * step_tokens / TILE_TOKENS;
    let ranges = pages.key.step_range_bytes(pages.head_dim, step_tokens)
        + pages.value.step_range_bytes(pages.head_dim, step_tokens);
    (tiles + ranges).next_multiple_of(LINE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::super::logits::TokenMask;
    use super::super::run_variant::{BLOCK_ROWS, RunVariant};
    use super::*;
    use crate::format::{AffineFormat, Grouping, SegmentFormat, TensorFormat};
    use crate::{AttentionShape, Bits};

    const H200: DeviceFacts = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };

    fn affine(bits: Bits, grouping: Grouping) -> TensorFormat {
        TensorFormat::Affine(AffineFormat::new(bits, grouping))
    }

    /// What stores has the rings of what does not, in smaller parts where there was one.
    #[test]
    fn storing_halves_the_steps_of_many_warps() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        for (format, sizes) in [
            (SegmentFormat::saw_int4(), [32, 32, 2, 16]),
            (SegmentFormat::turboquant(Bits::Three, 128), [32, 32, 2, 16]),
            (SegmentFormat::F16, [16, 16, 2, 8]),
        ] {
            let pages = PageFormat::new(&shape, &format).unwrap();
            let whole = AttendVariant::candidates(pages, 4, 90, &H200).unwrap()[0];
            let storing = whole.storing(4, &H200).unwrap();
            let of = |variant: AttendVariant| [variant.step_tokens, variant.pass_tokens, variant.stages, variant.warps];
            assert_eq!(of(storing), sizes, "{format}");
            assert_eq!(storing.ring_bytes(), whole.ring_bytes(), "{format}");
        }
    }

    /// The sources of a format of every kind compile, with every way from scores to logits. This needs no device.
    #[test]
    #[ignore = "needs NVRTC"]
    fn kernels_compile() {
        let shape = AttentionShape::new(8, 2, 128).unwrap();
        let both = |tensor| SegmentFormat { key: tensor, value: tensor };
        let kivi = SegmentFormat {
            key: affine(Bits::Two, Grouping::ChannelTokens(32)),
            value: affine(Bits::Two, Grouping::TokenChannels(32)),
        };
        let formats = [
            SegmentFormat::F16,
            both(affine(Bits::Four, Grouping::Token)),
            both(affine(Bits::Three, Grouping::Channel)),
            kivi,
            SegmentFormat::turboquant_prod(Bits::Three, 128),
        ];
        for format in formats {
            let pages = PageFormat::new(&shape, &format).unwrap();
            for program in programs(pages, &shape) {
                let architecture = program.architecture(&H200);
                program.compile(&architecture).unwrap_or_else(|error| panic!("{format}: {error}"));
            }
        }
        let alone = AttentionShape::new(2, 2, 128).unwrap();
        let pages = PageFormat::new(&alone, &SegmentFormat::per_channel(Bits::One)).unwrap();
        for program in programs(pages, &alone) {
            program.compile(&program.architecture(&H200)).unwrap();
        }
        let wide = PageFormat::new(&AttentionShape::new(8, 2, 256).unwrap(), &SegmentFormat::F16).unwrap();
        let program = RunVariant::new(wide, BLOCK_ROWS / 2, &H200).unwrap().program(ScorePass::Plain);
        program.compile(&program.architecture(&H200)).unwrap();
    }

    /// Cards before and after 9.0 have no warpgroups, and those before it no barriers of the copy engine.
    #[test]
    #[ignore = "needs NVRTC"]
    fn kernels_of_other_cards_compile() {
        let a100 = DeviceFacts { capability: (8, 0), multiprocessors: 108, shared_bytes: 166_912 };
        let ada = DeviceFacts { capability: (8, 9), multiprocessors: 128, shared_bytes: 101_376 };
        let blackwell = DeviceFacts { capability: (12, 0), multiprocessors: 170, shared_bytes: 101_376 };
        for (facts, head_dim) in [a100, ada, blackwell].into_iter().flat_map(|facts| [(facts, 64), (facts, 128)]) {
            let shape = AttentionShape::new(8, 2, head_dim).unwrap();
            for format in [SegmentFormat::F16, SegmentFormat::saw_int4(), SegmentFormat::kivi(Bits::Four)] {
                let pages = PageFormat::new(&shape, &format).unwrap();
                let attend = AttendVariant::candidates(pages, shape.group(), 9, &facts).unwrap()[0];
                let runs = [BLOCK_ROWS, BLOCK_ROWS / 2, 64, 32, 16].map(|rows| RunVariant::new(pages, rows, &facts));
                let programs = runs.into_iter().flatten().map(|run| run.program(ScorePass::Plain));
                for program in programs.chain([attend.program(ScorePass::Plain), pages.rows_program()]) {
                    let of = format!("{format} at {head_dim} on {:?}", facts.capability);
                    program.compile(&program.architecture(&facts)).unwrap_or_else(|error| panic!("{of}: {error}"));
                }
            }
        }
    }

    /// Products of warpgroups do not wait for each other, and the sums of prompts stay in registers.
    #[test]
    #[ignore = "needs NVRTC"]
    fn prompts_neither_wait_nor_spill() {
        for head_dim in [64, 96, 128, 256] {
            let shape = AttentionShape::new(32, 8, head_dim).unwrap();
            let formats = [
                SegmentFormat::F16,
                SegmentFormat::saw_int4(),
                SegmentFormat::per_channel(Bits::Four),
                SegmentFormat::turboquant(Bits::Four, head_dim),
            ];
            for format in formats {
                let pages = PageFormat::new(&shape, &format).unwrap();
                let in_block = [16, 32, 64, BLOCK_ROWS / 2].map(|rows| RunVariant::new(pages, rows, &H200));
                let unpacked = RunVariant::over_unpacked(pages, &H200);
                let windowed = Logits { capped: true, sinks: true, mask: TokenMask::Window };
                let runs =
                    in_block.into_iter().flatten().chain(unpacked).flat_map(|run| [run, run.with_logits(windowed)]);
                for program in runs.map(|run| run.program(ScorePass::Plain)) {
                    let remarks = program.compiler_remarks(&program.architecture(&H200)).unwrap();
                    assert!(!remarks.contains("serialized"), "{format} at {head_dim}: {remarks}");
                    let numbers = remarks.split(" bytes spill stores").map(|before| before.rsplit(' ').next());
                    let stores: Vec<usize> = numbers.flatten().filter_map(|number| number.parse().ok()).collect();
                    // Places of rows and the like, once for each work: no sum.
                    assert!(stores.iter().all(|&bytes| bytes <= 64), "{format} at {head_dim}: {remarks}");
                    assert!(!stores.is_empty(), "{remarks}");
                }
            }
        }
    }

    /// What is compiled for steps over these pages.
    fn programs(pages: PageFormat, shape: &AttentionShape) -> Vec<Program> {
        let attend = AttendVariant::candidates(pages, shape.group(), 9, &H200).unwrap()[0];
        let calibrated = [ScorePass::Extremes, ScorePass::Mapped].map(|pass| attend.program(pass));
        let of_logits = |logits: Logits| AttendVariant { logits, ..attend }.program(ScorePass::Plain);
        let wide = AttendVariant { queries: 2, ..AttendVariant::candidates(pages, 8, 9, &H200).unwrap()[0] };
        let masks = [TokenMask::None, TokenMask::Window, TokenMask::Tree];
        let logits = masks.into_iter().flat_map(|mask| {
            [(false, false), (false, true), (true, false)].map(|(capped, sinks)| Logits { capped, sinks, mask })
        });
        let unpacked = RunVariant::over_unpacked(pages, &H200);
        let runs =
            [BLOCK_ROWS, BLOCK_ROWS / 2, 64, 32, 1].into_iter().filter_map(|rows| RunVariant::new(pages, rows, &H200));
        let runs = runs.chain(unpacked);
        let runs = runs.flat_map(|run| {
            let windowed = Logits { capped: true, sinks: true, mask: TokenMask::Window };
            [run, run.with_logits(windowed)].map(|run| run.program(ScorePass::Plain))
        });
        let many = RunVariant::pipelined(pages, &H200).into_iter();
        let many = many.flat_map(|run| [ScorePass::Extremes, ScorePass::Mapped].map(|pass| run.program(pass)));
        let rows = pages.rows_program();
        let wide = wide.program(ScorePass::Plain);
        let storing = attend.storing(shape.group(), &H200).map(|variant| variant.program(ScorePass::Plain));
        let moving = [2, 4, 8].map(|queries| AttendVariant::moving(pages, shape.group(), queries, &H200));
        let windowed = Logits { mask: TokenMask::Window, ..Logits::default() };
        let moving = moving.into_iter().flatten().flat_map(|variant| {
            [variant, AttendVariant { logits: windowed, ..variant }].map(|variant| variant.program(ScorePass::Plain))
        });
        let unpacks = unpacked.map(|run| run.unpack_program());
        calibrated
            .into_iter()
            .chain(logits.map(of_logits))
            .chain(runs)
            .chain(many)
            .chain(moving)
            .chain(storing)
            .chain(unpacks)
            .chain([wide, rows])
            .collect()
    }
}
