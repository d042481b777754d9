//! Parts of prompts on the CPU.

use kvpack::cpu::Cpu;

use crate::any_backend::prompt_parts;

/// Queries see their part in f16, the step packs it, and an abandoned step leaves nothing.
#[test]
fn parts_are_seen_in_f16_and_packed_by_their_step() {
    prompt_parts::RECIPES.into_iter().for_each(|recipe| prompt_parts::check(&Cpu::new(), recipe, 1e-6));
}
