// Invocations numbered subgroup by subgroup, so that neighbours, counted from a multiple of their number on, share a
// subgroup that has as many lanes. Subgroups whose size divides that of the workgroup are full wherever kernels have
// run; were they not, results would be wrong, but nothing out of bounds.
//
// needs: INVOCATIONS
// gives: Numbering, number

struct Numbering {
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) lane: u32,
}

fn number(numbering: Numbering) -> u32 {
    return (numbering.subgroup * numbering.size + numbering.lane) % INVOCATIONS;
}
