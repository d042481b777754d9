// Slot `workgroup_max`: largest values over the workgroup, by atomic maxima: who enters what. By default every
// invocation enters its own.
//
// gives: prepare_workgroup_max, largest_to_enter, enters

// Called once, before the first step.
fn prepare_workgroup_max() {}

// The largest of the values of those that the invocation enters for; called by all invocations.
fn largest_to_enter(value: u32) -> u32 {
    return value;
}

// Whether the invocation enters.
fn enters() -> bool {
    return true;
}
