//! Layers in strips of 16 outputs: their order, and how their product is launched.

use cudarc::driver::LaunchConfig;
use kvpack_device::cuda::launch::set_shared_bytes;
use kvpack_device::cuda::{DeviceFacts, KernelLaunch, Kernels, Program};

use crate::error::Result;
use crate::shape::{Bits, LinearShape};
use crate::stored::{STEP, Scales, Stored};

/// Outputs of a strip.
const OUTPUTS: usize = 16;
/// Warps of a block.
const WARPS: usize = 16;
/// Shared memory that every launch fits into.
const SHARED_BYTES: usize = 220 << 10;
/// Shared memory of the rings of blocks in clusters.
const RINGS_BYTES: usize = 70 << 10;
/// Most strips of a cluster, which bounds the sums in its shared memory.
const MOST_STRIPS: usize = 16;

/// Whether the layer is stored in strips: where `linear_strips` is the faster kernel, and has been measured.
pub(super) fn has_kernel(facts: &DeviceFacts, bits: Bits, stored: &Stored, shape: LinearShape) -> bool {
    let fits = facts.is_9_0_or_newer() && facts.shared_bytes >= SHARED_BYTES;
    let whole = shape.outputs().is_multiple_of(OUTPUTS) && stored.chunks >= STEP * WARPS;
    fits && whole && bits != Bits::Eight && stored.group_chunks == STEP
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

    /// Blocks of a cluster, which share the steps: two where all of their warps have one.
    fn cluster(&self) -> usize {
        if self.chunks / STEP >= 2 * WARPS { 2 } else { 1 }
    }

    /// Clusters.
    fn grid(&self) -> usize {
        (self.multiprocessors / self.cluster()).max(self.strips().div_ceil(MOST_STRIPS)).min(self.strips())
    }

    /// Most strips of a cluster.
    fn most_strips(&self) -> usize {
        self.strips().div_ceil(self.grid())
    }

    /// Most steps of a warp.
    fn steps(&self) -> usize {
        (self.chunks / STEP).div_ceil(WARPS * self.cluster())
    }

    /// Steps whose activations fit into 64 registers.
    fn together(&self) -> usize {
        self.steps().min(if self.rows > 8 { 2 } else { 4 })
    }

    /// Strips of a ring. The values are those that measured best.
    fn ahead(&self) -> usize {
        if self.cluster() == 2 {
            let ring = WARPS * self.together() * self.slot_bytes();
            return (RINGS_BYTES / ring).clamp(1, self.most_strips());
        }
        match (self.rows, self.together()) {
            (..=4, ..=2) => 3,
            (5..=8, 3..) => 1,
            _ => 2,
        }
    }

    /// Bytes of the partial sums of a strip: rows of 16 outputs lie 20 words apart.
    fn partial_bytes(&self) -> usize {
        WARPS * self.rows * 20 * size_of::<f32>()
    }

    /// Strips whose partial sums fit into 40 KB, or 36 KB beside the largest rings, and the number of such buffers.
    fn window(&self) -> (usize, usize) {
        let most = self.most_strips();
        let bytes = if self.rows > 4 { 40 << 10 } else { 36 << 10 };
        let window = (bytes / self.partial_bytes()).clamp(1, most);
        (window, if most > window { 2 } else { 1 })
    }

    /// Bytes of a step of a strip in a ring.
    fn slot_bytes(&self) -> usize {
        256 * self.bits.count() as usize + OUTPUTS * self.scale_bytes
    }

    fn shared_bytes(&self) -> usize {
        let ring = self.ahead() * self.together() * self.slot_bytes();
        let (window, buffers) = self.window();
        // Those of the block, and those that the other block of the cluster adds.
        let sums = self.cluster() * self.most_strips() * OUTPUTS * self.rows * size_of::<f32>();
        WARPS * ring + buffers * window * self.partial_bytes() + sums
    }

    /// The macros of `linear_strips`.
    pub fn defines(&self) -> [(&'static str, usize); 7] {
        let (window, buffers) = self.window();
        [
            ("WARPS", WARPS),
            ("CLUSTER", self.cluster()),
            ("GRID", self.grid()),
            ("TOGETHER", self.together()),
            ("AHEAD", self.ahead()),
            ("WINDOW", window),
            ("BUFFERS", buffers),
        ]
    }

    /// The launch of a program with these macros.
    pub fn on(&self, kernels: &Kernels, program: &Program) -> Result<KernelLaunch> {
        let name = "linear_strips";
        let function = kernels.function(program, name)?;
        set_shared_bytes(&function, name, self.shared_bytes())?;
        let config = LaunchConfig {
            grid_dim: ((self.grid() * self.cluster()) as u32, 1, 1),
            block_dim: (32 * WARPS as u32, 1, 1),
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

    #[test]
    fn every_launch_fits_shared_memory() {
        for bits in [Bits::Two, Bits::Three, Bits::Four] {
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
