//! The CUDA files, compiled into the library.

use kvpack_device::cuda::KernelSources;

/// The files of `cuda/`, for every program.
pub(super) static SOURCES: KernelSources = KernelSources {
    library: "kvpack-weights",
    files: &[
        ("linear.cu", include_str!("../../cuda/linear.cu")),
        ("linear_strips.cu", include_str!("../../cuda/linear_strips.cu")),
        ("order_inputs.cu", include_str!("../../cuda/order_inputs.cu")),
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
