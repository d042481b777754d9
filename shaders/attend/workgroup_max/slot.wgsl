// Slot `workgroup_max`: largest values over the workgroup, by atomic maxima. It decides which invocations contribute
// which values. By default every invocation contributes its own.
//
// gives: prepare_workgroup_max, largest_to_enter, enters

// Called once, before the first step.
fn prepare_workgroup_max() {}

// The largest value among the invocations for which this one contributes. Called by all invocations.
fn largest_to_enter(value: u32) -> u32 {
    return value;
}

// Whether the invocation contributes.
fn enters() -> bool {
    return true;
}
