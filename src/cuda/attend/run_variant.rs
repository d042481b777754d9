//! How `attend_run`, `attend_run_pipelined` and `attend_drafts`, the kernels for several queries of a run, are compiled
//! for a format on a device.

use crate::cuda::sources::SOURCES;
use cudarc::driver::CudaFunction;

use super::logits::Logits;
use super::split::{DRAFT_TOKEN_RATE, PIPELINED_TOKEN_RATE, RUN_TOKEN_RATE};
use super::variant::{LINE_BYTES, ScorePass};
use crate::Result;
use crate::cuda::Cuda;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::launch::set_shared_bytes;
use crate::cuda::device::page_format::{PageFormat, TensorPages};
use crate::cuda::device::program::Program;
use crate::format::TILE_TOKENS;

/// Rows of queries and query heads of a warp: `WARP_ROWS` in `cuda/common/run_queries.cuh` and `run_rows.cuh`.
const WARP_ROWS: usize = 16;

/// Maximum number of warps in a block.
const MOST_WARPS: usize = 16;

/// Rows that one block takes, of up to 128 channels.
pub(super) const BLOCK_ROWS: usize = MOST_WARPS * WARP_ROWS;

/// Fewest rows for which `attend_run` pays off in f16, and `attend_drafts` over ranges of groups, and over those of tokens
/// at 4 bits. `attend` takes fewer.
const LEAST_DRAFT_ROWS: usize = 9;

/// The same where `attend_run` unpacks tiles for all its warps, and where scores are calibrated.
pub(super) const LEAST_PACKED_ROWS: usize = 33;

/// The same for `attend_drafts` over other ranges of tokens, and over those of the span.
const LEAST_CODE_ROWS: usize = 17;

/// Warps of a block of few rows, which share the tokens of a tile.
const FEW_WARPS: usize = MOST_WARPS / 2;

/// Most warps that have the same rows, each for its part of the tokens.
const MOST_PARTS: usize = 4;

/// Most rows of a block whose tokens as many warps share.
pub(super) const DRAFT_ROWS: usize = FEW_WARPS * WARP_ROWS / MOST_PARTS;

/// Smallest number of rows for `attend_run_pipelined`, and the heads whose outputs it has products for.
pub(super) const LEAST_PIPELINED_ROWS: usize = 65;
const PIPELINED_CHANNELS: [usize; 4] = [64, 96, 128, 256];

/// Rows of `attend_drafts`: its registers have room for as many of up to 128 channels, and for half of them of 256.
const LEAST_REGISTER_ROWS: usize = 16;
const MOST_REGISTER_ROWS: usize = 64;
const REGISTER_CHANNELS: [usize; 3] = [64, 128, 256];

/// Warpgroups of a block of `attend_drafts`, and stages of each, the best first. Three leave registers for 32 rows, but
/// not for the two loads that 3-bit codes come from.
const DRAFT_GROUPS: [(usize, usize); 6] = [(3, 4), (3, 3), (3, 2), (2, 4), (2, 3), (2, 2)];

/// Threads of `attend_run_pipelined` that copy.
const COPYING_THREADS: usize = 128;

/// Rows of an item of 64 channels: those of three warpgroups, for which there are registers enough.
const PIPELINED_ROWS_OF_64: usize = 192;

/// Channels whose queries and sums fit the registers of a warp of 16, and of 8 in f16: halves of packed tiles would not
/// fit the shared memory.
const MOST_CHANNELS: usize = 128;
const MOST_DENSE_CHANNELS: usize = 256;

/// Rows of an item of as many channels. `attend_run_pipelined` takes items of more rows than it has warps for in parts.
pub(super) fn item_rows(head_dim: usize, facts: &DeviceFacts) -> usize {
    match (facts.has_warpgroups(), head_dim) {
        (true, 64) => PIPELINED_ROWS_OF_64,
        _ if head_dim <= MOST_CHANNELS => BLOCK_ROWS,
        _ => BLOCK_ROWS / 2,
    }
}

/// Bytes of shared memory in addition to tiles and outputs: what is known of every row, and barriers.
const FIXED_BYTES: usize = BLOCK_ROWS * 5 * size_of::<f32>() + 64;

/// Bytes of shared memory that every block costs in addition to its own.
const RESERVED_BYTES: usize = 1 << 10;

/// Bytes of a counter of works and of one of the blocks that have ended.
pub(super) const WORK_COUNTER_BYTES: usize = 8;

/// How `attend_run`, `attend_run_pipelined` or `attend_drafts` is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RunVariant {
    pages: PageFormat,
    /// Warps of a block.
    warps: usize,
    multiplies: Multiplies,
    /// Stages of the ring. Each holds a piece of a tile.
    stages: usize,
    bulk_copies: bool,
    logits: Logits,
    /// Rows that an item may have, where blocks take them in parts.
    item_rows: usize,
}

/// How warps multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Multiplies {
    /// Every warp 16 rows, and a part of the tokens of a tile where several warps have the same rows.
    Warps { parts: usize },
    /// Four warps together multiply 64 rows by 64 tokens. If `halves` is 2, they do so for two halves of a tile at the
    /// same time.
    Warpgroups { halves: usize },
    /// `attend_run_pipelined`: as many groups of four warps have 64 rows each, and other warps copy. Packed tiles are
    /// unpacked by `unpack_tiles` first.
    Pipelined { groups: usize },
    /// `attend_drafts`: as many groups of four warps have the same rows and take tiles in turn. Every code is unpacked once,
    /// into the registers of the warp that multiplies it.
    Registers { groups: usize, rows: usize },
}

impl RunVariant {
    /// The variant for blocks of `rows` rows. `None` for sketches, more than 128 channels of packed tensors, and devices
    /// with little shared memory.
    pub(super) fn new(pages: PageFormat, rows: usize, facts: &DeviceFacts) -> Option<Self> {
        if let Some(drafts) = Self::drafts(pages, rows, facts) {
            return Some(drafts);
        }
        let most = if pages.packed() { MOST_CHANNELS } else { MOST_DENSE_CHANNELS };
        if pages.head_dim > most || pages.key.sketched() {
            return None;
        }
        let bulk_copies = facts.is_9_0_or_newer();
        let half_warps = if rows <= BLOCK_ROWS / 2 { MOST_WARPS / 2 } else { MOST_WARPS };
        let parts =
            [MOST_PARTS, MOST_PARTS / 2].into_iter().find(|parts| rows * parts <= FEW_WARPS * WARP_ROWS).unwrap_or(1);
        let mut ways = vec![(Multiplies::Warps { parts }, half_warps, 1..=3)];
        if facts.has_warpgroups() && pages.packed() && [64, 128].contains(&pages.head_dim) {
            ways.insert(0, (Multiplies::Warpgroups { halves: 1 }, half_warps, 1..=3));
            if rows <= BLOCK_ROWS / 2 {
                ways.insert(0, (Multiplies::Warpgroups { halves: 2 }, MOST_WARPS, 2..=3));
            }
        }
        // Few rows take less time where warps multiply separately.
        if !pages.packed()
            && rows >= LEAST_PIPELINED_ROWS
            && let Some(run) = Self::pipelined(pages, facts)
        {
            return Some(run);
        }
        let variants = ways.into_iter().flat_map(|(multiplies, warps, stages)| {
            let logits = Logits::default();
            let item_rows = BLOCK_ROWS;
            stages.rev().map(move |stages| Self { pages, warps, multiplies, stages, bulk_copies, logits, item_rows })
        });
        variants.into_iter().find(|variant| variant.fits(facts))
    }

    /// `attend_run_pipelined`, on devices with warpgroups.
    pub(super) fn pipelined(pages: PageFormat, facts: &DeviceFacts) -> Option<Self> {
        let groups = if pages.head_dim == 64 { 3 } else { 2 };
        let run = Self {
            pages,
            warps: 4 * groups,
            multiplies: Multiplies::Pipelined { groups },
            stages: 2,
            bulk_copies: true,
            logits: Logits::default(),
            item_rows: BLOCK_ROWS,
        };
        let runs = facts.has_warpgroups() && PIPELINED_CHANNELS.contains(&pages.head_dim) && !pages.key.sketched();
        (runs && run.fits(facts)).then_some(run)
    }

    /// `attend_drafts`, for packed pages on devices with warpgroups.
    fn drafts(pages: PageFormat, rows: usize, facts: &DeviceFacts) -> Option<Self> {
        let rows = rows.next_power_of_two().max(LEAST_REGISTER_ROWS);
        let most = if pages.head_dim > MOST_CHANNELS { MOST_REGISTER_ROWS / 2 } else { MOST_REGISTER_ROWS };
        let serves = facts.has_warpgroups() && pages.packed() && !pages.key.sketched();
        if !serves || rows > most || !REGISTER_CHANNELS.contains(&pages.head_dim) {
            return None;
        }
        let three_bits = pages.key.bits == 3 || pages.value.bits == 3;
        let many_registers = rows > MOST_REGISTER_ROWS / 2 || pages.head_dim > MOST_CHANNELS || three_bits;
        let sizes = DRAFT_GROUPS.into_iter().filter(|&(groups, _)| groups == 2 || !many_registers);
        let variants = sizes.map(|(groups, stages)| Self {
            pages,
            warps: 4 * groups,
            multiplies: Multiplies::Registers { groups, rows },
            stages,
            bulk_copies: true,
            logits: Logits::default(),
            item_rows: rows,
        });
        variants.into_iter().find(|variant| variant.fits(facts))
    }

    /// Whether a block finds room.
    const fn fits(&self, facts: &DeviceFacts) -> bool {
        self.shared_bytes() + FIXED_BYTES + RESERVED_BYTES <= facts.shared_bytes
    }

    /// Smallest number of rows over these pages for which `attend` is slower.
    pub(super) fn least_rows(pages: PageFormat, facts: &DeviceFacts) -> usize {
        if pages.packed() && Self::drafts(pages, LEAST_DRAFT_ROWS, facts).is_none() {
            return LEAST_PACKED_ROWS;
        }
        let in_tokens = |tensor: &TensorPages| tensor.bits == 4 && tensor.has_token_ranges();
        let pays_off = pages.is_grouped() || (in_tokens(&pages.key) && in_tokens(&pages.value));
        if pages.packed() && !pays_off { LEAST_CODE_ROWS } else { LEAST_DRAFT_ROWS }
    }

    /// The same for launches whose scores become such logits.
    pub(super) const fn with_logits(self, logits: Logits) -> Self {
        Self { logits, ..self }
    }

    /// The same for items of up to as many rows.
    pub(super) const fn with_item_rows(self, item_rows: usize) -> Self {
        Self { item_rows, ..self }
    }

    /// Every variant for blocks of up to `rows` rows.
    pub(super) fn all(pages: PageFormat, rows: usize, facts: &DeviceFacts) -> Vec<Self> {
        let least = [1, LEAST_REGISTER_ROWS + 1, LEAST_PACKED_ROWS, LEAST_PIPELINED_ROWS, BLOCK_ROWS / 2 + 1];
        let least = least.into_iter().filter(|&least| least <= rows);
        let mut all: Vec<Self> = least.filter_map(|rows| Self::new(pages, rows, facts)).collect();
        all.dedup();
        all
    }

    /// Rows that a block has at the same time.
    pub(super) const fn rows(&self) -> usize {
        match self.multiplies {
            Multiplies::Registers { rows, .. } => rows,
            _ => self.warps * WARP_ROWS / self.token_parts(),
        }
    }

    /// Whether blocks stay on their multiprocessor and take works from a counter, [`WORK_COUNTER_BYTES`] of memory that
    /// is zero between steps.
    pub(super) const fn takes_works(&self) -> bool {
        matches!(self.multiplies, Multiplies::Pipelined { .. })
    }

    /// Rows that an item may have.
    pub(super) const fn item_rows(&self) -> usize {
        if self.takes_works() { self.item_rows } else { self.rows() }
    }

    /// Parts that blocks take the rows of an item in, each whole queries.
    pub(super) const fn row_parts(&self, group: usize) -> usize {
        match self.rows() / group {
            0 => 1,
            queries => (self.item_rows() / group).div_ceil(queries),
        }
    }

    /// Tokens that a block attends to in a microsecond.
    pub(super) const fn token_rate(&self) -> f64 {
        match self.multiplies {
            Multiplies::Pipelined { .. } => PIPELINED_TOKEN_RATE * 128.0 / self.pages.head_dim as f64,
            Multiplies::Registers { .. } => DRAFT_TOKEN_RATE * 128.0 / self.pages.head_dim as f64,
            _ => RUN_TOKEN_RATE * (BLOCK_ROWS / self.rows()) as f64,
        }
    }

    pub(super) const fn pages(&self) -> &PageFormat {
        &self.pages
    }

    /// Number of warps that have the same rows.
    const fn token_parts(&self) -> usize {
        match self.multiplies {
            Multiplies::Warps { parts } => parts,
            Multiplies::Warpgroups { halves } => halves,
            Multiplies::Pipelined { .. } => 1,
            Multiplies::Registers { groups, .. } => groups,
        }
    }

    /// Threads of a block.
    pub(super) const fn threads(&self) -> usize {
        self.warps * 32 + if self.takes_works() { COPYING_THREADS } else { 0 }
    }

    /// Threads of a block of `merge_run`.
    pub(super) const fn merging_threads(&self) -> usize {
        self.warps * 32
    }

    /// The name of its kernel.
    pub(super) const fn name(&self) -> &'static str {
        match self.multiplies {
            Multiplies::Pipelined { .. } => "attend_run_pipelined",
            Multiplies::Registers { .. } => "attend_drafts",
            Multiplies::Warps { .. } | Multiplies::Warpgroups { .. } => "attend_run",
        }
    }

    /// Whether launches may overlap.
    pub(super) const fn overlaps(&self) -> bool {
        self.bulk_copies
    }

    /// Compiles its kernels for these passes over the scores, unless they were compiled before.
    pub(super) fn prepare(&self, backend: &Cuda, passes: &[ScorePass]) -> Result<()> {
        if self.unpacks_first() {
            self.unpack_function(backend)?;
        }
        for &pass in passes {
            self.function(backend, pass)?;
        }
        passes.last().map_or(Ok(()), |&pass| self.merge_function(backend, pass).map(drop))
    }

    /// The attending function, compiled unless it was compiled before.
    pub(super) fn function(&self, backend: &Cuda, pass: ScorePass) -> Result<CudaFunction> {
        let function = backend.kernels().function(&self.program(pass), self.name())?;
        set_shared_bytes(&function, self.name(), self.shared_bytes())?;
        Ok(function)
    }

    /// The function that merges the states of a pass.
    pub(super) fn merge_function(&self, backend: &Cuda, pass: ScorePass) -> Result<CudaFunction> {
        backend.kernels().function(&self.program(pass), "merge_run")
    }

    pub(super) fn program(&self, pass: ScorePass) -> Program {
        let mut defines = self.pages.defines();
        defines.extend(self.tile_defines());
        defines.extend([
            ("STAGES", self.stages),
            ("WARPS", self.warps),
            ("WARPGROUPS", (!matches!(self.multiplies, Multiplies::Warps { .. })).into()),
            ("TOKEN_PARTS", self.token_parts()),
            ("DRAFT_ROWS", if let Multiplies::Registers { rows, .. } = self.multiplies { rows } else { 0 }),
            ("SCORE_PASS", pass as usize),
        ]);
        defines.extend(self.logits.defines());
        let files: &[&str] = match self.multiplies {
            Multiplies::Pipelined { .. } => &["attend_run_pipelined.cu", "merge_run.cu"],
            Multiplies::Registers { .. } => &["attend_drafts.cu", "merge_run.cu"],
            Multiplies::Warps { .. } | Multiplies::Warpgroups { .. } => &["attend_run.cu", "merge_run.cu"],
        };
        Program { sources: &SOURCES, files, defines }
    }

    /// What every kernel over whole tiles is compiled with.
    pub(super) fn tile_defines(&self) -> [(&'static str, usize); 8] {
        [
            ("WIDE", 0),
            ("STEP_TOKENS", TILE_TOKENS),
            ("PASS_TOKENS", TILE_TOKENS),
            ("BLOCKS_PER_SM", 1),
            ("BULK_COPIES", self.bulk_copies.into()),
            ("QUERIES", 2),
            ("MOVING", 1),
            ("ROW_WARPS", 1),
        ]
    }

    /// Shared memory of tiles, which outputs occupy afterwards, except those of `attend_run_pipelined`.
    pub(super) const fn shared_bytes(&self) -> usize {
        let tile = PageFormat::f16(self.pages.head_dim).head_bytes();
        let queries = self.rows() * self.pages.head_dim * size_of::<u16>();
        if self.takes_works() {
            // A pass is a tile of up to 128 channels, or half of one.
            let pass = if self.pages.head_dim > MOST_CHANNELS { tile / 2 } else { tile };
            // The queries of the next work have room, too, except those of 256 channels.
            let works = if self.pages.head_dim > MOST_CHANNELS { 1 } else { 2 };
            return self.stages * pass + works * queries;
        }
        let stage = self.pages.head_bytes().next_multiple_of(LINE_BYTES);
        if let Multiplies::Registers { groups, rows } = self.multiplies {
            let weights = rows * TILE_TOKENS * size_of::<u16>();
            let tiles = groups * (self.stages * stage + weights) + queries;
            let outputs = groups * rows * (self.pages.head_dim + 8) * size_of::<f32>();
            return if tiles > outputs { tiles } else { outputs };
        }
        let halves = match self.multiplies {
            Multiplies::Warpgroups { halves } => halves * tile + queries,
            Multiplies::Warps { .. } if self.pages.packed() => 2 * tile,
            _ => 0,
        };
        let tiles = halves + self.stages * stage;
        let outputs = self.warps * WARP_ROWS * (self.pages.head_dim + 8) * size_of::<f32>();
        if tiles > outputs { tiles } else { outputs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Bits, Grouping, SegmentFormat, TensorFormat};
    use crate::{AttentionShape, Error};

    fn variant(format: &SegmentFormat, head_dim: usize, facts: &DeviceFacts) -> Result<Option<RunVariant>> {
        let shape = AttentionShape::new(8, 2, head_dim)?;
        Ok(RunVariant::new(PageFormat::new(&shape, format)?, BLOCK_ROWS, facts))
    }

    #[test]
    fn all_variants_are_those_of_any_rows() -> std::result::Result<(), Error> {
        let h200 = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };
        let a100 = DeviceFacts { capability: (8, 0), multiprocessors: 108, shared_bytes: 166_912 };
        let int8 = TensorFormat::Affine(AffineFormat::new(Bits::Eight, Grouping::Token));
        let shape = AttentionShape::new(8, 2, 128)?;
        for facts in [h200, a100] {
            for format in [SegmentFormat::F16, SegmentFormat::saw_int4(), SegmentFormat { key: int8, value: int8 }] {
                let pages = PageFormat::new(&shape, &format)?;
                for longest in [1, 32, 33, 64, 65, 128, 200, BLOCK_ROWS] {
                    let all = RunVariant::all(pages, longest, &facts);
                    let one_by_one: Vec<_> =
                        (1..=longest).filter_map(|rows| RunVariant::new(pages, rows, &facts)).collect();
                    assert!(one_by_one.iter().all(|variant| all.contains(variant)), "{format}, {longest} rows");
                    assert!(all.iter().all(|variant| one_by_one.contains(variant)), "{format}, {longest} rows");
                }
            }
        }
        Ok(())
    }

    /// f16 pages have a kernel whose blocks take works, where there are warpgroups and rows for them. It takes the rows of
    /// an item in parts of whole queries.
    #[test]
    fn many_rows_of_f16_are_works() -> std::result::Result<(), Error> {
        let h200 = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };
        let a100 = DeviceFacts { capability: (8, 0), multiprocessors: 108, shared_bytes: 166_912 };
        for (head_dim, rows) in [(64, 192), (80, 128), (96, 128), (128, 128), (256, 128)] {
            let pages = PageFormat::new(&AttentionShape::new(32, 8, head_dim)?, &SegmentFormat::F16)?;
            let run = |rows, facts: &DeviceFacts| RunVariant::new(pages, rows, facts).filter(RunVariant::takes_works);
            let pipelined = run(LEAST_PIPELINED_ROWS, &h200).unwrap();
            assert_eq!((pipelined.rows(), pipelined.name()), (rows, "attend_run_pipelined"), "{head_dim}");
            assert_eq!(run(LEAST_PIPELINED_ROWS - 1, &h200), None);
            assert_eq!(run(LEAST_PIPELINED_ROWS, &a100), None);
            // 64 queries of four heads; 85 of three, of which a part has 42 (64 of three warpgroups).
            assert_eq!(pipelined.row_parts(4), 2, "{head_dim}");
            assert_eq!(pipelined.row_parts(3), if head_dim == 64 { 2 } else { 3 }, "{head_dim}");
            assert_eq!(pipelined.with_item_rows(rows).row_parts(4), 1);
        }
        assert_eq!(item_rows(64, &h200), 192);
        assert_eq!(item_rows(64, &a100), BLOCK_ROWS);
        Ok(())
    }

    /// Few rows over packed pages are unpacked in registers, where there are warpgroups and no sketches.
    #[test]
    fn few_rows_of_packed_pages_are_drafts() -> std::result::Result<(), Error> {
        let h200 = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };
        let a100 = DeviceFacts { capability: (8, 0), multiprocessors: 108, shared_bytes: 166_912 };
        let rows = |head_dim, format: &SegmentFormat, rows, facts: &DeviceFacts| -> Result<Option<usize>> {
            let run = RunVariant::new(PageFormat::new(&AttentionShape::new(32, 8, head_dim)?, format)?, rows, facts);
            Ok(run.filter(|run| run.name() == "attend_drafts").map(|run| run.rows()))
        };
        let saw_int4 = SegmentFormat::saw_int4();
        for (given, taken) in [(9, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64)] {
            assert_eq!(rows(128, &saw_int4, given, &h200)?, Some(taken), "{given}");
            assert_eq!(rows(256, &saw_int4, given, &h200)?, (taken <= 32).then_some(taken), "{given}");
        }
        assert_eq!(rows(128, &saw_int4, 65, &h200)?, None);
        assert_eq!(rows(128, &SegmentFormat::F16, 32, &h200)?, None);
        assert_eq!(rows(96, &saw_int4, 32, &h200)?, None);
        assert_eq!(rows(128, &saw_int4, 32, &a100)?, None);
        assert_eq!(rows(128, &SegmentFormat::turboquant_prod(Bits::Four, 128), 32, &h200)?, None);
        Ok(())
    }

    #[test]
    fn formats_without_sketches_of_up_to_128_channels_have_a_variant() -> std::result::Result<(), Error> {
        let h200 = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };
        let small = DeviceFacts { shared_bytes: 101_376, ..h200 };
        let affine = |bits, grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
        let groupings = [Grouping::Channel, Grouping::Token, Grouping::ChannelTokens(32), Grouping::TokenChannels(32)];
        for head_dim in [64, 80, 96, 128] {
            for bits in Bits::ALL {
                for grouping in groupings {
                    let tensor = affine(bits, grouping);
                    let format = SegmentFormat { key: tensor, value: tensor };
                    let Ok(found) = variant(&format, head_dim, &h200) else { continue };
                    assert!(found.is_some(), "{format} at {head_dim}");
                }
            }
            assert!(variant(&SegmentFormat::F16, head_dim, &h200)?.is_some());
            assert!(variant(&SegmentFormat::turboquant(Bits::Four, head_dim), head_dim, &h200)?.is_some());
        }
        let shape = AttentionShape::new(8, 2, 256)?;
        let rows = item_rows(256, &h200);
        assert!(RunVariant::new(PageFormat::new(&shape, &SegmentFormat::F16)?, rows, &h200).is_some());
        assert_eq!(variant(&SegmentFormat::saw_int4(), 256, &h200)?, None);
        assert_eq!(variant(&SegmentFormat::F16, 128, &small)?, None);
        assert_eq!(variant(&SegmentFormat::turboquant_prod(Bits::Four, 128), 128, &h200)?, None);
        Ok(())
    }
}
