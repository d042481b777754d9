//! Runs of queries on the CPU.

use kvpack::SegmentFormat;
use kvpack::backend::AttendOptions;
use kvpack::cpu::Cpu;

use any_backend::query_runs;

#[test]
fn every_query_sees_what_it_should() {
    for case in query_runs::cases(300) {
        case.check(&Cpu::new(), AttendOptions::default(), 1e-9);
    }
}

#[test]
fn outliers_and_sinks_take_no_bits_of_weights() {
    for format in [SegmentFormat::F16, SegmentFormat::saw_int4()] {
        query_runs::outliers(format, 4, 16_500).check(&Cpu::new(), AttendOptions::default(), 1e-9);
        query_runs::empty_sink(format, 4).check(&Cpu::new(), AttendOptions::default(), 1e-9);
    }
}
