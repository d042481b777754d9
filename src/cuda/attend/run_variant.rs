//! How `attend_run`, the kernel for many queries of a run, is compiled for a format on a device.

use crate::cuda::sources::SOURCES;
use cudarc::driver::CudaFunction;

use super::logits::Logits;
use super::variant::LINE_BYTES;
use crate::Result;
use crate::cuda::Cuda;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::launch::set_shared_bytes;
use crate::cuda::device::page_format::PageFormat;
use crate::cuda::device::program::Program;
use crate::format::TILE_TOKENS;

/// Rows of queries and query heads of a warp: `WARP_ROWS` in `cuda/attend_run.cu`.
const WARP_ROWS: usize = 16;

/// Maximum number of warps in a block.
const MOST_WARPS: usize = 16;

/// Rows that one block takes, of up to 128 channels.
pub(super) const BLOCK_ROWS: usize = MOST_WARPS * WARP_ROWS;

/// Smallest number of rows for which it pays off: in f16, and where something is unpacked. `attend` takes fewer rows. Its
/// blocks have up to 8 query heads, so that more read the tokens twice, but from codes: on an H200 drafts of 8 queries of
/// four heads over 8 × 32k tokens took 462 µs in f16 by `attend` and 262 by this kernel, and 207 and 252 at 4 bits.
const LEAST_DRAFT_ROWS: usize = 9;
const LEAST_PACKED_ROWS: usize = 33;

/// Warps of a block of few rows, which share the tokens of a tile.
const FEW_WARPS: usize = MOST_WARPS / 2;

/// Most warps that have the same rows, each for its part of the tokens.
const MOST_PARTS: usize = 4;

/// Most rows of a block whose tokens as many warps share.
pub(super) const DRAFT_ROWS: usize = FEW_WARPS * WARP_ROWS / MOST_PARTS;

/// Smallest number of f16 rows for which four warps multiply together.
const LEAST_DENSE_ROWS: usize = 65;

/// Channels whose queries and sums fit the registers of a warp of 16, and of 8 in f16: halves of packed tiles would not
/// fit the shared memory.
const MOST_CHANNELS: usize = 128;
const MOST_DENSE_CHANNELS: usize = 256;

/// Rows that one block takes of as many channels.
pub(super) const fn block_rows(head_dim: usize) -> usize {
    if head_dim <= MOST_CHANNELS { BLOCK_ROWS } else { BLOCK_ROWS / 2 }
}

/// Bytes of shared memory in addition to tiles and outputs: the state of every row, and barriers.
const FIXED_BYTES: usize = BLOCK_ROWS * 5 * size_of::<f32>() + 64;

/// Bytes of shared memory that every block costs in addition to its own.
const RESERVED_BYTES: usize = 1 << 10;

/// How `attend_run` is compiled.
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
}

/// How warps multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Multiplies {
    /// Every warp 16 rows, and a part of the tokens of a tile where several warps have the same rows.
    Warps { parts: usize },
    /// Four warps together multiply 64 rows by 64 tokens. If `halves` is 2, they do so for two halves of a tile at the
    /// same time.
    Warpgroups { halves: usize },
}

impl RunVariant {
    /// The variant for blocks of `rows` rows. `None` for sketches, more than 128 channels of packed tensors, and devices
    /// with little shared memory.
    pub(super) fn new(pages: PageFormat, rows: usize, facts: &DeviceFacts) -> Option<Self> {
        let most = if pages.packed() { MOST_CHANNELS } else { MOST_DENSE_CHANNELS };
        if pages.head_dim > most || pages.key.sketched() {
            return None;
        }
        let bulk_copies = facts.is_9_0_or_newer();
        let half_warps = if rows <= BLOCK_ROWS / 2 { MOST_WARPS / 2 } else { MOST_WARPS };
        let parts =
            [MOST_PARTS, MOST_PARTS / 2].into_iter().find(|parts| rows * parts <= FEW_WARPS * WARP_ROWS).unwrap_or(1);
        let mut ways = vec![(Multiplies::Warps { parts }, half_warps, 1..=3)];
        // Few rows of f16 take less time without warpgroups, and so do drafts.
        let pays = pages.packed() || rows >= LEAST_DENSE_ROWS;
        if facts.has_warpgroups() && [64, 128].contains(&pages.head_dim) && pays {
            ways.insert(0, (Multiplies::Warpgroups { halves: 1 }, half_warps, 1..=3));
            if rows <= BLOCK_ROWS / 2 {
                ways.insert(0, (Multiplies::Warpgroups { halves: 2 }, MOST_WARPS, 2..=3));
            }
        }
        let variants = ways.into_iter().flat_map(|(multiplies, warps, stages)| {
            let logits = Logits::default();
            stages.rev().map(move |stages| Self { pages, warps, multiplies, stages, bulk_copies, logits })
        });
        variants.into_iter().find(|variant| variant.shared_bytes() + FIXED_BYTES + RESERVED_BYTES <= facts.shared_bytes)
    }

    /// Smallest number of rows for which `attend` is slower.
    pub(super) const fn least_rows(&self) -> usize {
        if self.pages.packed() { LEAST_PACKED_ROWS } else { LEAST_DRAFT_ROWS }
    }

    /// The same for launches whose scores become such logits.
    pub(super) const fn with_logits(self, logits: Logits) -> Self {
        Self { logits, ..self }
    }

    /// Every variant for blocks of up to `rows` rows.
    pub(super) fn all(pages: PageFormat, rows: usize, facts: &DeviceFacts) -> Vec<Self> {
        let least =
            [1, LEAST_PACKED_ROWS, LEAST_DENSE_ROWS, BLOCK_ROWS / 2 + 1].into_iter().filter(|&least| least <= rows);
        let mut all: Vec<Self> = least.filter_map(|rows| Self::new(pages, rows, facts)).collect();
        all.dedup();
        all
    }

    /// Rows of a block.
    pub(super) const fn rows(&self) -> usize {
        self.warps * WARP_ROWS / self.token_parts()
    }

    /// Number of warps that have the same rows.
    const fn token_parts(&self) -> usize {
        match self.multiplies {
            Multiplies::Warps { parts } => parts,
            Multiplies::Warpgroups { halves } => halves,
        }
    }

    /// Pieces of a tile, of which a stage holds one: halves of f16 tiles, if halves are multiplied.
    const fn tile_pieces(&self) -> usize {
        match self.multiplies {
            Multiplies::Warpgroups { halves: 1 } if !self.pages.packed() => 2,
            _ => 1,
        }
    }

    pub(super) const fn threads(&self) -> usize {
        self.warps * 32
    }

    /// Whether launches may overlap.
    pub(super) const fn overlaps(&self) -> bool {
        self.bulk_copies
    }

    /// Compiles its kernels, unless they were compiled before.
    pub(super) fn prepare(&self, backend: &Cuda) -> Result<()> {
        self.function(backend)?;
        self.merge_function(backend).map(drop)
    }

    /// The attending function, compiled unless it was compiled before.
    pub(super) fn function(&self, backend: &Cuda) -> Result<CudaFunction> {
        let function = backend.kernels().function(&self.program(), "attend_run")?;
        set_shared_bytes(&function, "attend_run", self.shared_bytes())?;
        Ok(function)
    }

    /// The function that merges its states.
    pub(super) fn merge_function(&self, backend: &Cuda) -> Result<CudaFunction> {
        backend.kernels().function(&self.program(), "merge_run")
    }

    pub(super) fn program(&self) -> Program {
        let mut defines = self.pages.defines();
        defines.extend([
            ("WIDE", 0),
            ("STEP_TOKENS", TILE_TOKENS),
            ("PASS_TOKENS", TILE_TOKENS),
            ("STAGES", self.stages),
            ("WARPS", self.warps),
            ("BLOCKS_PER_SM", 1),
            ("BULK_COPIES", self.bulk_copies.into()),
            ("WARPGROUPS", matches!(self.multiplies, Multiplies::Warpgroups { .. }).into()),
            ("TOKEN_PARTS", self.token_parts()),
            ("TILE_PIECES", self.tile_pieces()),
            ("QUERIES", 2),
        ]);
        defines.extend(self.logits.defines());
        Program { sources: &SOURCES, files: &["attend_run.cu", "merge_run.cu"], defines }
    }

    /// Shared memory of tiles, which outputs occupy afterwards.
    pub(super) const fn shared_bytes(&self) -> usize {
        let tile = PageFormat::f16(self.pages.head_dim).head_bytes();
        let halves = match self.multiplies {
            Multiplies::Warpgroups { halves } => halves * tile + self.rows() * self.pages.head_dim * size_of::<u16>(),
            Multiplies::Warps { .. } if self.pages.packed() => 2 * tile,
            Multiplies::Warps { .. } => 0,
        };
        let stage = self.pages.head_bytes().next_multiple_of(LINE_BYTES) / self.tile_pieces();
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
        let rows = block_rows(256);
        assert!(RunVariant::new(PageFormat::new(&shape, &SegmentFormat::F16)?, rows, &h200).is_some());
        assert_eq!(variant(&SegmentFormat::saw_int4(), 256, &h200)?, None);
        assert_eq!(variant(&SegmentFormat::F16, 128, &small)?, None);
        assert_eq!(variant(&SegmentFormat::turboquant_prod(Bits::Four, 128), 128, &h200)?, None);
        Ok(())
    }
}
