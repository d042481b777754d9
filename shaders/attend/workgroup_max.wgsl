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

// -------- subgroup --------

// Largest value over the workgroup. The first invocation of every subgroup contributes the subgroup's maximum to an
// atomic maximum.
//
// gives: prepare_workgroup_max, largest_to_enter, enters

var<private> first_of_subgroup: bool;

fn prepare_workgroup_max() {
    first_of_subgroup = subgroupExclusiveAdd(1u) == 0u;
}

fn largest_to_enter(value: u32) -> u32 {
    return subgroupMax(value);
}

fn enters() -> bool {
    return first_of_subgroup;
}
