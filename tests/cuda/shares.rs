//! Shares of sequences on the CUDA backend.

use kvpack::cuda::{Cuda, KernelCache};

use any_backend::shares;

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn shares_merge_to_the_whole() {
    shares::check(&Cuda::open(0, KernelCache::of_user()).expect("an NVIDIA GPU"), 1e-5);
}
