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

/// Threads of a block: one warpgroup that copies and dequantises, and two that multiply.
const THREADS: u32 = 384;
/// Inputs of a step.
const STEP_INPUTS: usize = 128;
/// Slots of the rings of activations and weights, as linear_tiles.cu has them.
const SLOTS: [usize; 2] = [3, 2];
/// Shared memory of the barriers.
const BARRIER_BYTES: usize = 128;
/// Whether the device has what the kernel needs.
pub(super) fn has_tiles(facts: &DeviceFacts) -> bool {
    facts.has_warpgroups() && facts.shared_bytes >= Tiles::LARGEST.shared_bytes()
}

/// How a product is cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tiles {
    rows: usize,
    outputs: usize,
    /// Blocks of a cluster with the same tile, which share the steps.
    split: usize,
}

/// Nanoseconds that a step of a tile takes, for tiles of 128 and of 256 outputs and up to 64 or more rows, and what
/// begins and ends a tile takes for each block that shares it. Measured on an H200.
const STEP_NS: [[usize; 2]; 2] = [[1300, 1310], [1830, 2040]];
const EDGE_NS: usize = 3000;

/// Most blocks of a cluster that share the steps of a tile.
const MOST_SPLIT: usize = 4;

impl Tiles {
    const LARGEST: Self = Self { rows: 128, outputs: 256, split: 1 };

    /// The tiles of a product that take the shortest time. `steps` are those of a row of activations, with all of its
    /// parts.
    fn of(rows: usize, outputs: usize, steps: usize, multiprocessors: usize) -> Self {
        let is_high = rows > 64;
        let shapes = [128, 256].into_iter().flat_map(|outputs| (1..=MOST_SPLIT).map(move |split| (outputs, split)));
        let tiles = shapes.map(|(outputs, split)| Self { rows: if is_high { 128 } else { 64 }, outputs, split });
        // Blocks that share steps have one tile each.
        let fits =
            |tiles: &Self| tiles.split == 1 || tiles.split <= steps && tiles.turns(rows, outputs, multiprocessors) == 1;
        let time = |tiles: &Self| {
            let step = STEP_NS[usize::from(tiles.outputs == 256)][usize::from(is_high)];
            tiles.turns(rows, outputs, multiprocessors) * (steps.div_ceil(tiles.split) * step + EDGE_NS * tiles.split)
        };
        tiles.filter(fits).min_by_key(time).unwrap_or(Self::LARGEST)
    }

    /// Tiles of a product.
    fn count(&self, rows: usize, outputs: usize) -> usize {
        rows.div_ceil(self.rows) * outputs.div_ceil(self.outputs)
    }

    /// How often the device is filled with blocks.
    fn turns(&self, rows: usize, outputs: usize, multiprocessors: usize) -> usize {
        self.count(rows, outputs).div_ceil(clusters(multiprocessors, self.split))
    }

    const fn shared_bytes(&self) -> usize {
        2 * STEP_INPUTS * (SLOTS[0] * self.rows + SLOTS[1] * self.outputs) + BARRIER_BYTES
    }

    /// Blocks of the grid.
    fn blocks(&self, rows: usize, outputs: usize, multiprocessors: usize) -> usize {
        let tiles = self.count(rows, outputs);
        if self.split > 1 { tiles * self.split } else { tiles.min(multiprocessors) }
    }
}

/// Clusters that run at the same time. On an H200 there are 30 of four blocks, and fewer than 40 of three: not all
/// multiprocessors are in whole threes or fours of one part of the chip.
fn clusters(multiprocessors: usize, blocks: usize) -> usize {
    match blocks {
        1 | 2 => multiprocessors / blocks,
        3 => multiprocessors / 4,
        _ => multiprocessors * 10 / 11 / blocks,
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
    rows: u32,
    padding: [u32; 7],
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
        let is_wide = (outputs * bytes).is_multiple_of(16) && y.0.is_multiple_of(16);
        let mut defines = self.defines();
        defines.extend([
            ("WARPGROUPS", 1),
            ("ROW_TILE", tiles.rows),
            ("OUTPUT_TILE", tiles.outputs),
            // Sharing activations took longer.
            ("SHARE", 1),
            ("SPLIT", tiles.split),
            ("PARTS", prepared.parts),
            ("UNITS", usize::from(prepared.launch.is_some())),
            ("OUTPUT", type_code(y.1)),
            ("WIDE", usize::from(is_wide)),
        ]);
        let program = Program { sources: &SOURCES, files: &["linear_tiles.cu"], defines };
        let name = "linear_tiles";
        let function = kernels.function(&program, name)?;
        set_shared_bytes(&function, name, tiles.shared_bytes())?;
        let config = LaunchConfig {
            grid_dim: (tiles.blocks(rows, outputs, facts.multiprocessors) as u32, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: tiles.shared_bytes() as u32,
        };
        let cluster = tiles.split as u32;
        let call = TilesCall {
            map: TensorMap::new(prepared.address, rows, prepared.columns, tiles.rows)?,
            codes: self.codes.address(),
            scales: self.scales.address(),
            units: prepared.units,
            outputs: y.0,
            rows: rows as u32,
            padding: [0; 7],
        };
        let launch = KernelLaunch { name, function, config, cluster, overlaps: true };
        Ok(BoundTiles { prepare: prepared.launch, product: (launch, call), _memory: prepared.memory })
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
        let tiles = |rows, outputs, split| Tiles { rows, outputs, split };
        for [outputs, inputs] in [[4096, 4096], [8192, 8192], [14336, 4096], [8192, 28672], [5120, 13824]] {
            assert_eq!(of(4096, outputs, inputs), tiles(128, 256, 1));
        }
        assert_eq!(of(256, 4096, 4096), tiles(128, 128, 2));
        assert_eq!(of(256, 8192, 8192), tiles(128, 256, 2));
        assert_eq!(of(256, 14336, 4096), tiles(128, 256, 1));
        assert_eq!(of(256, 8192, 28672), tiles(128, 256, 2));
        assert_eq!(of(256, 5120, 13824), tiles(128, 256, 2));
        assert_eq!(of(64, 4096, 4096), tiles(64, 128, 3));
        assert_eq!(of(64, 14336, 4096), tiles(64, 256, 2));
        assert_eq!(of(64, 5120, 13824), tiles(64, 256, 4));
    }

    #[test]
    fn grids_hold_whole_clusters_that_run_at_once() {
        for rows in [17, 64, 65, 256, 300, 4096] {
            for outputs in [1, 7, 256, 300, 4096, 5120, 8192, 14336, 151936] {
                for steps in [1, 2, 3, 32, 64, 224] {
                    let tiles = Tiles::of(rows, outputs, steps, 132);
                    let blocks = tiles.blocks(rows, outputs, 132);
                    assert!(tiles.split <= steps && blocks.is_multiple_of(tiles.split));
                    assert!(blocks > 0 && blocks <= 132, "{rows} {outputs} {steps}: {tiles:?}");
                    assert!(tiles.shared_bytes() <= 227 << 10);
                }
            }
        }
    }
}
