//! Timing. Nothing is said about how long anything takes.

use kvpack::wgpu::measure::{Encode, Repeats, read_bandwidth, time};
use pollster::block_on;

use crate::gpu_device::shared;

#[test]
fn bandwidth_is_measured_and_checked() {
    let backend = shared();
    let repeats = Repeats { warm_up: 1, timed: 3, together: 2 };
    let measured = block_on(read_bandwidth(&backend, 3 << 20, repeats)).unwrap();
    assert_eq!(measured.bytes, 3 << 20);
    assert_eq!(measured.timing.sorted.len(), 3);
    assert!(measured.gigabytes_per_second() > 0.0);
}

#[test]
fn measurements_need_work_and_repeats() {
    let backend = shared();
    assert!(block_on(time(&backend, &[], Repeats::default())).is_err());
    let nothing: Encode<'_> = &|_| {};
    let timed = |timed, together| block_on(time(&backend, &[nothing], Repeats { warm_up: 0, timed, together }));
    assert!(timed(0, 1).is_err() && timed(2049, 1).is_err() && timed(2, 0).is_err());
    assert_eq!(timed(2, 3).unwrap().sorted.len(), 2);
}
