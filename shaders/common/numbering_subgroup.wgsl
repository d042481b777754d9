// Invocations numbered subgroup by subgroup, so that 2^n neighbours from a multiple of 2^n on are in one subgroup of as many lanes
// or more. The subgroups of a workgroup whose size theirs divides are full.

struct Numbering {
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) lane: u32,
}

fn number(numbering: Numbering) -> u32 {
    return numbering.subgroup * numbering.size + numbering.lane;
}
