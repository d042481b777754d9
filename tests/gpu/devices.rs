//! Devices that are opened and dropped, one after the other: nothing of them stays.

use kvpack::backend::Device;
use kvpack::wgpu::Wgpu;
use pollster::block_on;

use crate::gpu_device;

/// Opens a device, computes on it, and drops it.
fn open_and_drop(number: usize) {
    gpu_device::adapter().unwrap();
    let backend = block_on(Wgpu::open(None, wgpu::ExperimentalFeatures::disabled())).unwrap_or_else(|error| panic!("device {number}: {error}"));
    let tensor = block_on(backend.upload((&[0.5f32; 64][..]).into())).unwrap();
    assert_eq!(block_on(backend.download(&tensor)).unwrap(), [0.5; 64]);
}

/// Files that the process has open.
#[cfg(target_os = "linux")]
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The driver stays loaded: one that is loaded anew for every device leaks on some systems until none is found. And
/// no file stays open.
#[test]
#[cfg(target_os = "linux")]
fn a_hundred_devices_load_one_driver() {
    let loaded = || std::fs::read_to_string("/proc/self/maps").unwrap();
    let is_driver =
        |line: &&str| ["lvp", "swiftshader", "nvidia", "radeon", "intel"].iter().any(|name| line.contains(name));
    open_and_drop(0);
    let driver = |maps: &str| maps.lines().filter(is_driver).map(str::to_owned).collect::<Vec<String>>();
    let first = driver(&loaded());
    assert!(!first.is_empty(), "the driver was unloaded with its first device");
    let files = open_files();
    let devices = if gpu_device::is_brief() { 10 } else { 100 };
    for number in 1..devices {
        open_and_drop(number);
    }
    // Other tests of this process open files of their own.
    assert!(open_files() < files + 40, "{} files, {files} after the first device", open_files());
    let last = driver(&loaded());
    assert!(first.iter().any(|line| last.contains(line)), "the driver was loaded anew");
}

/// For a card: `cargo test --test gpu -- --ignored devices_of_a_card`.
#[test]
#[ignore = "it takes minutes on a card"]
fn devices_of_a_card_come_and_go() {
    (0..200).for_each(open_and_drop);
}
