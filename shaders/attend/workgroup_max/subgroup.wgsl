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
