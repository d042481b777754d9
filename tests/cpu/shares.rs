//! Shares of sequences on the CPU.

use kvpack::cpu::Cpu;

use any_backend::shares;

#[test]
fn shares_merge_to_the_whole() {
    shares::check(&Cpu::new(), 1e-11);
}
