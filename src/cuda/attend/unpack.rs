//! Where packed tiles are unpacked before `attend_run_pipelined` attends to them: when that pays off, for how many KV
//! heads at a time, and the launch of `unpack_tiles`.

use cudarc::driver::{CudaFunction, LaunchConfig};

use super::run_variant::{LEAST_PIPELINED_ROWS, RunVariant};
use crate::Result;
use crate::cuda::Cuda;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::launch::{KernelLaunch, set_shared_bytes};
use crate::cuda::device::page_format::PageFormat;
use crate::cuda::device::program::Program;
use crate::cuda::sources::SOURCES;

/// Least number of times that items read a packed tile for it to be unpacked first.
const LEAST_READS: usize = 4;

/// Most bytes of unpacked tiles at a time, unless one KV head has more.
const MOST_UNPACKED: usize = 128 << 20;

/// Warps of a block of `unpack_tiles`.
const UNPACKING_WARPS: usize = 8;

/// The kernel that unpacks tiles.
const UNPACK_TILES: &str = "unpack_tiles";

/// How often the items of a launch read its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TileReads {
    /// Tiles of all items.
    pub(super) tiles: usize,
    pub(super) pages: usize,
}

impl RunVariant {
    /// The variant over packed tiles that are unpacked first.
    pub(super) fn over_unpacked(pages: PageFormat, facts: &DeviceFacts) -> Option<Self> {
        Self::pipelined(pages, facts).filter(Self::unpacks_first)
    }

    /// The variant for blocks of `rows` rows whose items read tiles as often as `reads` says.
    pub(super) fn for_reads(pages: PageFormat, rows: usize, reads: TileReads, facts: &DeviceFacts) -> Option<Self> {
        let in_block = Self::new(pages, rows, facts);
        let unpacked = Self::over_unpacked(pages, facts).filter(|run| {
            let of_head = reads.pages * run.unpacked_bytes();
            let pays = reads.tiles >= LEAST_READS * reads.pages && of_head <= MOST_UNPACKED;
            in_block.is_none() || rows >= LEAST_PIPELINED_ROWS && pays
        });
        unpacked.or(in_block)
    }

    /// Whether runs of up to `longest` queries may be taken over tiles that are unpacked first, in items of as many.
    pub(super) const fn unpacks_for(longest: usize, of_item: usize) -> bool {
        longest.div_ceil(of_item) >= LEAST_READS
    }

    /// Whether another launch unpacks its tiles first.
    pub(super) const fn unpacks_first(&self) -> bool {
        self.takes_works() && self.pages().packed()
    }

    /// Bytes of an unpacked tile of one KV head, of keys and values.
    pub(super) const fn unpacked_bytes(&self) -> usize {
        PageFormat::f16(self.pages().head_dim).head_bytes()
    }

    /// The KV heads whose tiles of as many pages are unpacked together: sections of about the same size.
    pub(super) const fn section_heads(&self, pages: usize, kv_heads: usize) -> usize {
        let sections = (pages * kv_heads * self.unpacked_bytes()).div_ceil(MOST_UNPACKED);
        match kv_heads.div_ceil(if sections == 0 { 1 } else { sections }) {
            0 => 1,
            heads => heads,
        }
    }

    /// The launch that unpacks `tiles` tiles of one KV head each.
    pub(super) fn unpack_launch(&self, backend: &Cuda, tiles: usize) -> Result<KernelLaunch> {
        let config = LaunchConfig {
            grid_dim: (tiles as u32, 1, 1),
            block_dim: (UNPACKING_WARPS as u32 * 32, 1, 1),
            shared_mem_bytes: self.pages().head_bytes() as u32,
        };
        let function = self.unpack_function(backend)?;
        Ok(KernelLaunch { name: UNPACK_TILES, function, config, cluster: 1, overlaps: self.overlaps() })
    }

    pub(super) fn unpack_function(&self, backend: &Cuda) -> Result<CudaFunction> {
        let function = backend.kernels().function(&self.unpack_program(), UNPACK_TILES)?;
        set_shared_bytes(&function, UNPACK_TILES, self.pages().head_bytes())?;
        Ok(function)
    }

    pub(super) fn unpack_program(&self) -> Program {
        let mut defines = self.pages().defines();
        defines.extend(self.tile_defines());
        defines.extend([("STAGES", 1), ("WARPS", UNPACKING_WARPS), ("WARPGROUPS", 0), ("TOKEN_PARTS", 1)]);
        Program { sources: &SOURCES, files: &["unpack_tiles.cu"], defines }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AttentionShape, Bits, SegmentFormat};

    /// Packed tiles that items read several times are unpacked first, for some KV heads at a time.
    #[test]
    fn tiles_that_are_read_several_times_are_unpacked_first() -> Result<()> {
        let h200 = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };
        let a100 = DeviceFacts { capability: (8, 0), multiprocessors: 108, shared_bytes: 166_912 };
        let saw_int4 = |head_dim| PageFormat::new(&AttentionShape::new(32, 8, head_dim)?, &SegmentFormat::saw_int4());
        let unpacks = |head_dim, rows, tiles, pages, facts: &DeviceFacts| -> Result<Option<bool>> {
            let run = RunVariant::for_reads(saw_int4(head_dim)?, rows, TileReads { tiles, pages }, facts);
            Ok(run.as_ref().map(RunVariant::unpacks_first))
        };
        assert_eq!(unpacks(128, 128, 400, 100, &h200)?, Some(true));
        assert_eq!(unpacks(128, 128, 399, 100, &h200)?, Some(false));
        assert_eq!(unpacks(128, 64, 400, 100, &h200)?, Some(false));
        assert_eq!(unpacks(128, 128, 400, 100, &a100)?, Some(false));
        // One head of 1M tokens would take 512 MiB. No other kernel takes 256 channels.
        assert_eq!(unpacks(128, 128, 40 * 8192, 8192, &h200)?, Some(false));
        assert_eq!(unpacks(256, 128, 100, 100, &h200)?, Some(true));
        assert_eq!(unpacks(256, 128, 100, 100, &a100)?, None);
        let run = RunVariant::over_unpacked(saw_int4(128)?, &h200).unwrap();
        assert_eq!(run.unpacked_bytes(), 1 << 16);
        // 16k tokens of all heads are 64 MiB, 34k tokens 136.
        let sections = [(128, 8), (256, 8), (257, 4), (272, 4), (1024, 2), (2048, 1), (8192, 1)];
        for (pages, heads) in sections {
            assert_eq!(run.section_heads(pages, 8), heads, "{pages} pages");
        }
        assert_eq!(run.section_heads(272, 1), 1);
        let sketches =
            PageFormat::new(&AttentionShape::new(32, 8, 128)?, &SegmentFormat::turboquant_prod(Bits::Four, 128))?;
        assert_eq!(RunVariant::over_unpacked(sketches, &h200), None);
        Ok(())
    }
}
