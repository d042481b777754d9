//! Runs of queries on the CPU.

use kvpack::backend::AttendOptions;
use kvpack::cpu::Cpu;

use any_backend::query_runs;

#[test]
fn every_query_sees_what_it_should() {
    for case in query_runs::cases(300) {
        case.check(&Cpu::new(), AttendOptions::default(), 1e-9);
    }
}
