//! Runs of queries on the CUDA backend.

use kvpack::backend::AttendOptions;
use kvpack::cuda::{Cuda, KernelCache};
use kvpack::format::{AffineFormat, Grouping, TensorFormat};
use kvpack::{Bits, SegmentFormat};

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

/// `attend`, `attend_drafts` and the kernels of prompts round weights to halves: here of tokens next to an outlier without
/// weight, and next to a sink without a value.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn outliers_and_sinks_take_no_bits_of_weights() {
    let backend = Cuda::open(0, KernelCache::of_user()).expect("an NVIDIA GPU");
    let turboquant = SegmentFormat::turboquant(Bits::Four, 128);
    let of_tokens = TensorFormat::Affine(AffineFormat::new(Bits::Eight, Grouping::Token));
    let int8 = SegmentFormat { key: of_tokens, value: of_tokens };
    let formats = [SegmentFormat::F16, int8, SegmentFormat::saw_int4(), turboquant];
    for format in formats.into_iter().chain([Bits::Four, Bits::Two].map(SegmentFormat::kivi)) {
        for queries in [1, 4, 8, 16, 64] {
            query_runs::outliers(format, queries, 16_500).check(&backend, AttendOptions::default(), 1e-4);
            query_runs::empty_sink(format, queries).check(&backend, AttendOptions::default(), 1e-4);
        }
    }
}
