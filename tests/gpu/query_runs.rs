//! Runs of queries through wgpu.

use kvpack::backend::{AttendOptions, QueryPrecision};
use kvpack::{Bits, SegmentFormat};

use crate::gpu_device;
use any_backend::query_runs;

#[test]
fn every_query_sees_what_it_should() {
    let backend = gpu_device::shared();
    let options = AttendOptions { query: QueryPrecision::Int16, ..AttendOptions::default() };
    for case in query_runs::cases(20) {
        case.check(&backend, options, 1e-6);
    }
}

/// Runs of 32 and more queries, whose items hold many queries where no matrices take them: with and without several
/// queries to a workgroup, keys with ranges of spans, calibrated, and under a window.
#[test]
fn queries_of_long_runs_are_spread_over_workgroups() {
    let backend = gpu_device::shared();
    let options = AttendOptions { query: QueryPrecision::Int16, ..AttendOptions::default() };
    let cases = query_runs::cases(140);
    let calibrated = cases.iter().position(|case| case.stores.iter().any(|store| store.1.is_some()));
    let windows = [cases.len() - 2, cases.len() - 1];
    for case in [0, 3, 5, calibrated.unwrap()].into_iter().chain(windows).map(|index| &cases[index]) {
        case.check(&backend, options, 1e-6);
    }
}

#[test]
fn bytes_of_queries_serve_blocks_too() {
    let backend = gpu_device::shared();
    let options = AttendOptions { query: QueryPrecision::Int8, ..AttendOptions::default() };
    for case in query_runs::cases(20).into_iter().take(2) {
        case.check(&backend, options, 1e-3);
    }
}

/// Weights are halves, or integers: here of tokens next to an outlier without weight, and next to a sink without a value.
#[test]
fn outliers_and_sinks_take_no_bits_of_weights() {
    let backend = gpu_device::shared();
    let options = |query| AttendOptions { query, ..AttendOptions::default() };
    for format in [SegmentFormat::F16, SegmentFormat::saw_int4(), SegmentFormat::kivi(Bits::Four)] {
        for queries in [1, 8] {
            query_runs::outliers(format, queries, 600).check(&backend, options(QueryPrecision::Int16), 1e-4);
            query_runs::empty_sink(format, queries).check(&backend, options(QueryPrecision::Int16), 1e-5);
        }
    }
    // Weights of a byte.
    query_runs::outliers(SegmentFormat::kivi(Bits::Four), 1, 600).check(&backend, options(QueryPrecision::Int8), 1e-3);
}
