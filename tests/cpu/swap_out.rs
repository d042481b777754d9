//! Sequences that leave a cache in two calls, on the CPU.

use kvpack::cpu::Cpu;

use any_backend::swap_out;

#[test]
fn a_sequence_leaves_while_others_go_on() {
    swap_out::check(&Cpu::new());
}

#[test]
fn a_sequence_that_changes_stays() {
    swap_out::check_misuse(&Cpu::new());
}
