// Slot `numbering`: the number of an invocation within its workgroup, chosen so that invocations that exchange values
// by shuffles can share a subgroup.
//
// Every choice has
//   struct Numbering
//     the builtins that the entry point takes
//   fn number(numbering: Numbering) -> u32
//     each of 0 .. INVOCATIONS once

// -------- local --------

// Invocations in the workgroup's own numbering.
//
// gives: Numbering, number

struct Numbering {
    @builtin(local_invocation_index) index: u32,
}

fn number(numbering: Numbering) -> u32 {
    return numbering.index;
}

// -------- subgroup --------

// Invocations numbered subgroup by subgroup. An aligned group of neighbours shares a subgroup that has at least as many
// lanes. Subgroups whose size divides that of the workgroup have been full wherever kernels have run. If they were not,
// results would be wrong, but nothing would be out of bounds.
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
