//! Layers in strips of 16 outputs: their order, and how their product is launched.

use cudarc::driver::LaunchConfig;
use kvpack_device::cuda::launch::set_shared_bytes;
use kvpack_device::cuda::{DeviceFacts, KernelLaunch, Kernels, Program};

use crate::error::Result;
use crate::shape::{Bits, LinearShape};
use crate::stored::{CHUNK, STEP, Scales, Stored};

/// Outputs of a strip.
const OUTPUTS: usize = 16;
/// Most warps of a block.
const MOST_WARPS: usize = 16;
/// Shared memory that every launch fits into.
const SHARED_BYTES: usize = 220 << 10;
/// Shared memory for the weights of all warps.
const WEIGHT_BYTES: usize = 144 << 10;
/// Most strips of a warp, whose sums are in registers.
const MOST_OWN: usize = 8;
/// Most strips of a cluster, which bounds the sums in its shared memory.
const MOST_STRIPS: usize = 32;
/// Rows whose sums fit into the registers of 16 warps.
const TILE_ROWS: usize = 8;
/// Steps of strips of a block from which products take so long that their beginning and end hardly matter.
const MANY_STEPS: usize = 512;

/// Whether the layer is stored in strips: where `linear_strips` is the faster kernel, and has been measured.
pub(super) fn has_kernel(facts: &DeviceFacts, stored: &Stored, shape: LinearShape) -> bool {
    let fits = facts.is_9_0_or_newer() && facts.shared_bytes >= SHARED_BYTES;
    let whole = shape.outputs().is_multiple_of(OUTPUTS) && stored.chunks >= STEP * MOST_WARPS;
    fits && whole && stored.group_chunks == STEP
}

/// Puts the chunks and scales of a layer, `[n][chunk][b]` and `[n][group]`, in the order `[strip][step][n][chunk][b]`
/// and `[strip][group][n]`.
pub(super) fn reorder(stored: &mut Stored, bits: Bits) {
    let (chunks, steps) = (stored.chunks, stored.chunks / STEP);
    stored.codes = strips_of(&stored.codes, steps, STEP * bits.count() as usize);
    let groups = chunks / stored.group_chunks;
    match &mut stored.scales {
        Scales::Half(words) => *words = strips_of(words, groups, 1),
        Scales::Single(pairs) => *pairs = strips_of(pairs, groups, 1),
    }
}

/// `[n][step][width]` as `[strip][step][n][width]`.
fn strips_of<T: Copy>(from: &[T], steps: usize, width: usize) -> Vec<T> {
    let row = steps * width;
    let mut to = Vec::with_capacity(from.len());
    for strip in from.chunks_exact(OUTPUTS * row) {
        for step in 0..steps {
            strip.chunks_exact(row).for_each(|output| to.extend_from_slice(&output[step * width..][..width]));
        }
    }
    to
}

/// What the launch of a product depends on.
pub(super) struct StripLaunch {
    pub rows: usize,
    pub outputs: usize,
    pub chunks: usize,
    pub bits: Bits,
    pub scale_bytes: usize,
    pub multiprocessors: usize,
}

impl StripLaunch {
    fn strips(&self) -> usize {
        self.outputs / OUTPUTS
    }

    fn steps(&self) -> usize {
        self.chunks / STEP
    }

    /// Blocks of a cluster, which share the steps: two where all of their warps have one. One, where the strips of two
    /// are more than a warp keeps and those of one are not: warps that share activations wait for each other.
    fn cluster(&self) -> usize {
        let most_strips = |cluster| self.strips().div_ceil(self.clusters_of(cluster));
        let alone = most_strips(1) <= MOST_OWN && most_strips(2) > MOST_OWN;
        if self.steps() >= 2 * MOST_WARPS && !alone { 2 } else { 1 }
    }

    /// Clusters.
    fn grid(&self) -> usize {
        self.clusters_of(self.cluster())
    }

    fn clusters_of(&self, blocks: usize) -> usize {
        (self.multiprocessors / blocks).max(self.strips().div_ceil(MOST_STRIPS)).min(self.strips())
    }

    /// Most strips of a cluster.
    fn most_strips(&self) -> usize {
        self.strips().div_ceil(self.grid())
    }

    /// Warps of a block. Eight have registers for the sums of 16 rows, and with fewer rows two blocks fit into a
    /// multiprocessor, so that the next product begins before this one ends. Where that takes long, 16 are faster.
    fn warps(&self) -> usize {
        let takes_long = self.steps().div_ceil(self.cluster()) * self.most_strips() >= MANY_STEPS;
        if self.rows <= TILE_ROWS && takes_long { MOST_WARPS } else { MOST_WARPS / 2 }
    }

    /// Warps that share activations, each with strips of its own: as few as their registers and memory allow.
    fn team(&self) -> usize {
        let fits = |&team: &usize| {
            let own = self.most_strips().div_ceil(team);
            own <= MOST_OWN && self.warps() * own * self.slot_bytes() <= WEIGHT_BYTES
        };
        (0..self.warps().ilog2()).map(|log| 1 << log).find(fits).unwrap_or(self.warps())
    }

    /// Bytes of a step of a strip in shared memory.
    fn slot_bytes(&self) -> usize {
        256 * self.bits.count() as usize + OUTPUTS * self.scale_bytes
    }

    /// Weights and activations, which partial sums replace. Then the sums of the other block of a cluster, and a
    /// barrier.
    fn shared_bytes(&self) -> usize {
        let (most, shares) = (self.most_strips(), self.warps() / self.team());
        let weights = self.warps() * most.div_ceil(self.team()) * self.slot_bytes();
        let inputs = shares * 2 * self.rows * STEP * CHUNK * size_of::<u16>();
        // Rows of 16 outputs lie 20 words apart.
        let partial = most * shares * self.rows * 20 * size_of::<f32>();
        let others = most.div_ceil(2) * OUTPUTS * self.rows * size_of::<f32>() + size_of::<u64>();
        (weights + inputs).max(partial) + others
    }

    /// The macros of `linear_strips`.
    pub fn defines(&self) -> [(&'static str, usize); 4] {
        [("WARPS", self.warps()), ("CLUSTER", self.cluster()), ("GRID", self.grid()), ("TEAM", self.team())]
    }

    /// The launch of a program with these macros.
    pub fn on(&self, kernels: &Kernels, program: &Program) -> Result<KernelLaunch> {
        let name = "linear_strips";
        let function = kernels.function(program, name)?;
        set_shared_bytes(&function, name, self.shared_bytes())?;
        let config = LaunchConfig {
            grid_dim: ((self.grid() * self.cluster()) as u32, 1, 1),
            block_dim: (32 * self.warps() as u32, 1, 1),
            shared_mem_bytes: self.shared_bytes() as u32,
        };
        Ok(KernelLaunch { name, function, config, cluster: self.cluster() as u32, overlaps: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `chunk_at` and `scale_at` of codes.cuh find them.
    #[test]
    fn outputs_of_a_strip_lie_together() {
        let (outputs, chunks, bits) = (32, 8, 3);
        let codes: Vec<u32> = (0..outputs * chunks * bits).map(|at| at as u32).collect();
        let scales: Vec<u32> = (0..outputs * chunks / STEP).map(|at| at as u32).collect();
        let (scales, order) = (Scales::Half(scales), None);
        let mut stored = Stored { chunks, group_chunks: STEP, codes: codes.clone(), scales, order };
        reorder(&mut stored, Bits::Three);
        let Scales::Half(scales) = stored.scales else { panic!("scales in f16") };
        for output in 0..outputs {
            for chunk in 0..chunks {
                let step = output / 16 * (chunks / 4) + chunk / 4;
                let at = 64 * step + output % 16 * 4 + chunk % 4;
                assert_eq!(stored.codes[bits * at..][..bits], codes[(output * chunks + chunk) * bits..][..bits]);
            }
            for group in 0..chunks / STEP {
                let at = 16 * (output / 16 * (chunks / STEP) + group) + output % 16;
                assert_eq!(scales[at] as usize, output * (chunks / STEP) + group);
            }
        }
    }

    /// Those that measured best on an H200.
    #[test]
    fn launches_of_models() {
        let of = |rows, outputs, inputs, bits| {
            let chunks = inputs / CHUNK;
            let launch = StripLaunch { rows, outputs, chunks, bits, scale_bytes: 4, multiprocessors: 132 };
            (launch.cluster(), launch.warps(), launch.team())
        };
        for rows in [1, 8, 16] {
            for [outputs, inputs, cluster] in [[4096, 4096, 2], [8192, 8192, 2], [14336, 4096, 1], [5120, 13824, 2]] {
                assert_eq!(of(rows, outputs, inputs, Bits::Four), (cluster, 8, 1));
            }
            assert_eq!(of(rows, 8192, 8192, Bits::Eight), (2, 8, 1));
        }
        assert_eq!(of(8, 8192, 28672, Bits::Four), (2, 16, 1));
        assert_eq!(of(8, 8192, 28672, Bits::Eight), (2, 16, 2));
        assert_eq!(of(16, 8192, 28672, Bits::Eight), (2, 8, 1));
    }

    #[test]
    fn every_launch_fits_shared_memory() {
        for bits in Bits::ALL {
            for rows in 1..=16 {
                for chunks in [64, 68, 128, 132, 256, 896, 65536] {
                    for outputs in [16, 4096, 14336, 16 * 65536] {
                        for (multiprocessors, scale_bytes) in [(66, 4), (132, 4), (132, 8)] {
                            let launch = StripLaunch { rows, outputs, chunks, bits, scale_bytes, multiprocessors };
                            let bytes = launch.shared_bytes();
                            assert!(bytes <= SHARED_BYTES, "{rows} rows, {outputs} x {chunks}: {bytes}");
                        }
                    }
                }
            }
        }
    }
}
