//! Products of many rows by warpgroups: `linear_tiles`.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, LaunchConfig};
use kvpack_device::ElementType;
use kvpack_device::cuda::launch::set_shared_bytes;
use kvpack_device::cuda::memory::bytes_of;
use kvpack_device::cuda::{DeviceFacts, KernelLaunch, Kernels, Memory, Program, TensorMap};

use super::linear::{Linear, launch_of, type_code};
use super::sources::SOURCES;
use crate::error::Result;
use crate::stored::STEP;

/// Threads of a block: two warpgroups that dequantise and multiply, and one that copies.
const THREADS: u32 = 384;
/// Inputs of a step, outputs of a tile, and outputs whose codes lie together in a slot.
const STEP_INPUTS: usize = 128;
const TILE_OUTPUTS: usize = 128;
const STRIP_OUTPUTS: usize = 16;
/// Shared memory of the slots, and of the barriers and what blocks of a tile agree on.
const SLOTS_BYTES: usize = 222 << 10;
const BARRIER_BYTES: usize = 256;
/// Most slots. More of them do not copy earlier.
const MOST_SLOTS: usize = 8;

/// Whether the device has what the kernel needs.
pub(super) fn has_tiles(facts: &DeviceFacts) -> bool {
    facts.has_warpgroups() && facts.shared_bytes >= SLOTS_BYTES + BARRIER_BYTES
}

/// How a product is cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tiles {
    rows: usize,
    /// Blocks with the same tile, which share the steps.
    split: usize,
}

/// Rows of a tile, nanoseconds of a step, and nanoseconds that begin and end a tile with one block, two, or more.
/// Measured on an H200.
const SHAPES: [(usize, usize, [usize; 3]); 3] =
    [(64, 800, [1000, 4500, 5500]), (128, 940, [1000, 4500, 5500]), (256, 1400, [1000, 4500, 8500])];
/// Most blocks that share the steps of a tile.
const MOST_SPLIT: usize = 8;

impl Tiles {
    /// The tiles of a product that take the shortest time. `steps` are those of a row of activations, with all of its
    /// parts.
    fn of(rows: usize, outputs: usize, steps: usize, multiprocessors: usize) -> Self {
        let time = |tiles: &Self, step: usize, edges: [usize; 3]| {
            let turns = (tiles.count(rows, outputs) * tiles.split).div_ceil(multiprocessors);
            // Blocks that share steps have one tile each.
            let fits = tiles.split == 1 || tiles.split <= steps && turns == 1;
            fits.then(|| turns * (steps.div_ceil(tiles.split) * step + edges[tiles.split.min(3) - 1]))
        };
        let timed = SHAPES.into_iter().flat_map(|(rows, step, edges)| {
            let tiles = (1..=MOST_SPLIT).map(move |split| Self { rows, split });
            tiles.filter_map(move |tiles| Some((time(&tiles, step, edges)?, tiles)))
        });
        let shortest = timed.min_by_key(|&(time, _)| time);
        shortest.map_or(Self { rows: SHAPES[0].0, split: 1 }, |(_, tiles)| tiles)
    }

    /// Tiles of a product.
    fn count(&self, rows: usize, outputs: usize) -> usize {
        rows.div_ceil(self.rows) * outputs.div_ceil(TILE_OUTPUTS)
    }

    /// Blocks of the grid.
    fn blocks(&self, rows: usize, outputs: usize, multiprocessors: usize) -> usize {
        (self.count(rows, outputs) * self.split).min(multiprocessors)
    }

    /// Blocks of a cluster. More than two blocks of a tile meet in memory, as fewer clusters of them fit on the device.
    fn cluster(&self) -> usize {
        if self.split == 2 { 2 } else { 1 }
    }

    /// Memory for the sums of blocks that meet there, and for how many of them have come to each part of a tile.
    fn partial_bytes(&self, rows: usize, outputs: usize) -> Option<[usize; 2]> {
        let blocks = self.count(rows, outputs) * self.split;
        (self.split > 2).then(|| [blocks * self.rows * TILE_OUTPUTS, blocks].map(|words| words * size_of::<u32>()))
    }
}

/// The ring of a block.
#[derive(Clone, Copy, Debug)]
struct Ring {
    slots: usize,
    bytes: usize,
}

impl Ring {
    /// As many slots as fit. `strip_bytes` are the bytes of codes and scales of 16 outputs in a step.
    fn new(tile_rows: usize, strip_bytes: usize) -> Self {
        let step = 2 * STEP_INPUTS * tile_rows + TILE_OUTPUTS / STRIP_OUTPUTS * strip_bytes;
        let slot = step.next_multiple_of(1024);
        let slots = (SLOTS_BYTES / slot).min(MOST_SLOTS);
        Self { slots, bytes: slots * slot + BARRIER_BYTES }
    }
}

/// A product in tiles that is joined with its tensors.
#[derive(Debug)]
pub(super) struct BoundTiles {
    prepare: Option<(KernelLaunch, PrepareCall)>,
    product: (KernelLaunch, TilesCall),
    /// What the arguments point at.
    _memory: Vec<Arc<Memory>>,
}

/// The argument of `prepare_rows`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PrepareCall {
    order: u64,
    inputs: u64,
    prepared: u64,
    units: u64,
}

/// The argument of `linear_tiles`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct TilesCall {
    map: TensorMap,
    codes: u64,
    scales: u64,
    units: u64,
    outputs: u64,
    partial: u64,
    came: u64,
    rows: u32,
    padding: [u32; 3],
}

// SAFETY: Plain integers in the order of the kernels' struct.
unsafe impl DeviceRepr for PrepareCall {}
// SAFETY: As above.
unsafe impl DeviceRepr for TilesCall {}

/// Activations as `linear_tiles` reads them.
struct Prepared {
    launch: Option<(KernelLaunch, PrepareCall)>,
    address: u64,
    columns: usize,
    parts: usize,
    units: u64,
    memory: Vec<Arc<Memory>>,
}

impl Linear {
    /// Joins the product with activations `[rows, K]`, which are in order if they are f16, and with outputs.
    pub(super) fn tiles(
        &self,
        kernels: &Kernels,
        x: (u64, ElementType),
        rows: usize,
        y: (u64, ElementType),
    ) -> Result<BoundTiles> {
        let prepared = self.prepare(kernels, x, rows)?;
        let (outputs, facts) = (self.shape.outputs(), kernels.facts());
        let steps = self.chunks.div_ceil(STEP) * prepared.parts;
        let tiles = Tiles::of(rows, outputs, steps, facts.multiprocessors);
        let bytes = y.1.bytes();
        let ring = Ring::new(tiles.rows, self.strip_bytes());
        let is_wide = (outputs * bytes).is_multiple_of(16) && y.0.is_multiple_of(16);
        let mut defines = self.defines();
        defines.extend([
            ("WARPGROUPS", 1),
            ("ROW_TILE", tiles.rows),
            ("SLOTS", ring.slots),
            ("SPLIT", tiles.split),
            ("PARTS", prepared.parts),
            ("UNITS", usize::from(prepared.launch.is_some())),
            ("OUTPUT", type_code(y.1)),
            ("WIDE", usize::from(is_wide)),
        ]);
        let program = Program { sources: &SOURCES, files: &["linear_tiles.cu"], defines };
        let name = "linear_tiles";
        let function = kernels.function(&program, name)?;
        set_shared_bytes(&function, name, ring.bytes)?;
        let config = LaunchConfig {
            grid_dim: (tiles.blocks(rows, outputs, facts.multiprocessors) as u32, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: ring.bytes as u32,
        };
        let mut memory = prepared.memory;
        let [mut partial, mut came] = [0; 2];
        if let Some([sums, counts]) = tiles.partial_bytes(rows, outputs) {
            let of = |what, bytes| Memory::zeroed(&self.stream, what, bytes);
            let both = [of("sums of blocks", sums)?, of("counts of blocks", counts)?];
            [partial, came] = [both[0].address(), both[1].address()];
            memory.extend(both);
        }
        let call = TilesCall {
            map: TensorMap::new(prepared.address, rows, prepared.columns, tiles.rows)?,
            codes: self.codes.address(),
            scales: self.scales.address(),
            units: prepared.units,
            outputs: y.0,
            partial,
            came,
            rows: rows as u32,
            padding: [0; 3],
        };
        let launch = KernelLaunch { name, function, config, cluster: tiles.cluster() as u32, overlaps: true };
        Ok(BoundTiles { prepare: prepared.launch, product: (launch, call), _memory: memory })
    }

    /// Bytes of the codes and scales of 16 outputs in a slot. Layers in strips have one group a step.
    fn strip_bytes(&self) -> usize {
        let scales = if self.in_strips { STRIP_OUTPUTS } else { STRIP_OUTPUTS * STEP };
        let scale_bytes = if self.has_single_scales { 8 } else { 4 };
        STRIP_OUTPUTS * STEP * 4 * self.bits.count() as usize + scales * scale_bytes
    }

    /// f16 activations are read where they lie. Others become f16 with a power of two for each row.
    fn prepare(&self, kernels: &Kernels, (address, of): (u64, ElementType), rows: usize) -> Result<Prepared> {
        let parts = if of == ElementType::F32 { 2 } else { 1 };
        if of == ElementType::F16 {
            let columns = self.places();
            return Ok(Prepared { launch: None, address, columns, parts, units: 0, memory: Vec::new() });
        }
        let places = self.chunks.div_ceil(STEP) * STEP_INPUTS;
        let what = "activations in f16";
        let bytes = bytes_of(what, rows * parts * places, ElementType::F16.bytes())?;
        let prepared = Memory::zeroed(&self.stream, what, bytes)?;
        let units = Memory::zeroed(&self.stream, "units of activations", rows * size_of::<f32>())?;
        let defines = vec![
            ("INPUTS", self.shape.inputs()),
            ("PLACES", places),
            ("PARTS", parts),
            ("INPUT", type_code(of)),
            ("ORDERED", usize::from(self.order.is_some())),
            ("ORDER_PLACES", self.places()),
        ];
        let program = Program { sources: &SOURCES, files: &["prepare_rows.cu"], defines };
        let launch = launch_of(kernels, &program, "prepare_rows", (rows as u32, 1, 1), 256)?;
        let call = PrepareCall {
            order: self.order.as_ref().map_or(0, |order| order.inputs.address()),
            inputs: address,
            prepared: prepared.address(),
            units: units.address(),
        };
        Ok(Prepared {
            launch: Some((launch, call)),
            address: prepared.address(),
            columns: parts * places,
            parts,
            units: units.address(),
            memory: vec![prepared, units],
        })
    }
}

impl BoundTiles {
    pub(super) fn launch(&self, stream: &Arc<CudaStream>) -> Result<()> {
        if let Some((launch, call)) = &self.prepare {
            // SAFETY: docs/weights.md, "Why the kernels stay in bounds". The product holds the memory.
            unsafe { launch.run(stream, call) }?;
        }
        let (launch, call) = &self.product;
        // SAFETY: As above.
        Ok(unsafe { launch.run(stream, call) }?)
    }

    /// Whether activations become f16 first.
    pub(super) fn prepares(&self) -> bool {
        self.prepare.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those that measured best on an H200.
    #[test]
    fn tiles_of_models() {
        let of = |rows, outputs, inputs| Tiles::of(rows, outputs, inputs / STEP_INPUTS, 132);
        let tiles = |rows, split| Tiles { rows, split };
        for [outputs, inputs] in [[4096, 4096], [8192, 8192], [14336, 4096], [8192, 28672], [5120, 13824]] {
            assert_eq!(of(4096, outputs, inputs), tiles(256, 1));
        }
        assert_eq!(of(256, 4096, 4096), tiles(128, 2));
        assert_eq!(of(256, 8192, 8192), tiles(256, 2));
        assert_eq!(of(256, 14336, 4096), tiles(256, 1));
        assert_eq!(of(256, 8192, 28672), tiles(256, 2));
        assert_eq!(of(256, 5120, 13824), tiles(256, 3));
        assert_eq!(of(64, 5120, 13824), tiles(64, 3));
        assert_eq!(of(64, 8192, 8192), tiles(64, 2));
    }

    #[test]
    fn blocks_that_share_a_tile_run_at_once() {
        for rows in [17, 64, 65, 256, 300, 4096] {
            for outputs in [1, 7, 256, 300, 4096, 5120, 8192, 14336, 151936] {
                for steps in [1, 2, 3, 32, 64, 224] {
                    let tiles = Tiles::of(rows, outputs, steps, 132);
                    let blocks = tiles.blocks(rows, outputs, 132);
                    assert!(tiles.split <= steps && blocks.is_multiple_of(tiles.split));
                    assert!(blocks > 0 && blocks <= 132, "{rows} {outputs} {steps}: {tiles:?}");
                }
            }
        }
    }

    /// The copies of a step run while another is multiplied, and half of the sums fit into the ring.
    #[test]
    fn every_ring_has_two_slots_and_fits() {
        for (rows, ..) in SHAPES {
            for bits in [2, 3, 4, 8] {
                for scales in [64, 128, 256, 512] {
                    let ring = Ring::new(rows, 256 * bits + scales);
                    assert!(ring.slots >= 2 && ring.bytes <= 227 << 10, "{rows} rows, {bits} bits: {ring:?}");
                    assert!(ring.bytes >= rows / 2 * TILE_OUTPUTS * size_of::<f32>());
                }
            }
        }
    }
}
