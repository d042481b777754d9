// Invocations in the workgroup's own numbering.
//
// gives: Numbering, number

struct Numbering {
    @builtin(local_invocation_index) index: u32,
}

fn number(numbering: Numbering) -> u32 {
    return numbering.index;
}
