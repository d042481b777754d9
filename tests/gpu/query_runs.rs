//! Runs of queries through wgpu.

use kvpack::backend::{AttendOptions, QueryPrecision};

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
