//! Runs plain loops compiled for the widest vectors of the machine.
//!
//! The loops are ordinary safe Rust that the compiler vectorises. This module only chooses, once per call, between a
//! version compiled for the target's baseline and one compiled with AVX2 and FMA.

/// A loop over slices that the compiler vectorises. `run` and everything that it calls must be `#[inline(always)]`, so
/// that they are compiled with the features of the caller.
pub(super) trait Kernel {
    /// Runs the loop. `FMA` tells whether [`multiply_add`] is a single instruction.
    fn run<const FMA: bool>(self);
}

/// Runs `kernel` in the best version for this machine.
pub(super) fn dispatch<K: Kernel>(kernel: K) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        #[target_feature(enable = "avx2,fma")]
        fn with_avx2<K: Kernel>(kernel: K) {
            kernel.run::<true>();
        }
        // SAFETY: The function is safe except that it needs AVX2 and FMA, which were just detected on this machine.
        return unsafe { with_avx2(kernel) };
    }
    kernel.run::<{ cfg!(target_arch = "aarch64") }>();
}

/// `a · b + c`, fused where that is one instruction.
#[inline(always)]
pub(super) fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}
