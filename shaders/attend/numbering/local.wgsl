// Invocations as the workgroup numbers them.
//
// gives: Numbering, number

struct Numbering {
    @builtin(local_invocation_index) index: u32,
}

fn number(numbering: Numbering) -> u32 {
    return numbering.index;
}
