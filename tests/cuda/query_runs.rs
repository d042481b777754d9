//! Runs of queries on the CUDA backend.

use kvpack::backend::AttendOptions;
use kvpack::cuda::{Cuda, KernelCache};

use any_backend::query_runs;

/// Long runs take tiles of queries, short ones single queries; both see what they should.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_query_sees_what_it_should() {
    let backend = Cuda::open(0, KernelCache::of_user()).expect("an NVIDIA GPU");
    for longest in [20, 300] {
        for case in query_runs::cases(longest) {
            case.check(&backend, AttendOptions::default(), 1e-6);
        }
    }
}
