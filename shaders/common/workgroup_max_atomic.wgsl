// Largest value over the workgroup without subgroups: every invocation enters its own by an atomic maximum.

fn prepare_workgroup_max() {}

fn largest_to_enter(value: u32) -> u32 {
    return value;
}

fn enters() -> bool {
    return true;
}
