//! One test for each case of the conformance registry on the CPU backend. The GPU has `gpu_conformance.rs`.

use kvpack::conformance::{self, Case};
use kvpack::cpu::Cpu;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let trials = conformance::cases().into_iter().map(|case| Trial::test(format!("cpu::{}", case.name), || run(case)));
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}

fn run(case: Case) -> Result<(), Failed> {
    let report = pollster::block_on(conformance::run_case(&Cpu::new(), &case))?;
    if report.passed() { Ok(()) } else { Err(report.reason().into()) }
}
