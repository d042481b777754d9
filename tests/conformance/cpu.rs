//! One test for each check of the conformance registry on the CPU backend. The GPU has `gpu.rs`.

use kvpack::conformance::{self, Check};
use kvpack::cpu::Cpu;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let trials = conformance::checks()
        .into_iter()
        .map(|check| Trial::test(format!("cpu::{}", check.name()), move || run(&check)));
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}

fn run(check: &Check) -> Result<(), Failed> {
    let report = pollster::block_on(check.run(&Cpu::new()))?;
    if report.passed() { Ok(()) } else { Err(report.reason().into()) }
}
