//! The CUDA files, compiled into the library.

use kvpack_device::cuda::KernelSources;

/// The files of `cuda/`, for every program.
pub(super) static SOURCES: KernelSources = KernelSources {
    library: "kvpack-weights",
    files: &[
        ("codes.cuh", include_str!("../../cuda/codes.cuh")),
        ("dequantize_weights.cu", include_str!("../../cuda/dequantize_weights.cu")),
        ("linear.cu", include_str!("../../cuda/linear.cu")),
        ("linear_strips.cu", include_str!("../../cuda/linear_strips.cu")),
        ("linear_tiles.cu", include_str!("../../cuda/linear_tiles.cu")),
        ("order_inputs.cu", include_str!("../../cuda/order_inputs.cu")),
        ("prepare_rows.cu", include_str!("../../cuda/prepare_rows.cu")),
        ("shared_memory.cuh", include_str!("../../cuda/shared_memory.cuh")),
        ("tile.cuh", include_str!("../../cuda/tile.cuh")),
        ("tile_sums.cuh", include_str!("../../cuda/tile_sums.cuh")),
    ],
};

#[cfg(test)]
mod tests {
    use super::SOURCES;

    #[test]
    fn files_are_what_nvrtc_reads() {
        assert_eq!(SOURCES.check(), Ok(()));
    }
}
