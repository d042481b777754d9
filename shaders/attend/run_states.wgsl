// Slot `run_states`: whether items of the kernels that take many queries with cooperative matrices write states.
//
// Every choice has
//   const FIELDS: u32
//     vectors of four channels of a head
//   fn writes_states(item: WorkItem) -> bool
//   fn write_lse_of_state(item: WorkItem, y: u32, row: u32, lse: f32)
//   fn write_state_field(item: WorkItem, y: u32, row: u32, field: u32, output: vec4<f32>)

// -------- none --------

// No item does: each has all that its queries see. The kernel of whole prompts is faster without that branch.
//
// needs: HEAD_DIM, WorkItem
// gives: FIELDS, writes_states, write_lse_of_state, write_state_field

const FIELDS: u32 = HEAD_DIM / 4u;

fn writes_states(item: WorkItem) -> bool {
    return false;
}

fn write_lse_of_state(item: WorkItem, y: u32, row: u32, lse: f32) {}

fn write_state_field(item: WorkItem, y: u32, row: u32, field: u32, output: vec4<f32>) {}

// -------- some --------

// Items with a part of what their queries see do.
//
// needs: WorkItem
// gives: writes_states, write_lse_of_state, write_state_field

// import attend/states.wgsl#states

fn writes_states(item: WorkItem) -> bool {
    return item.states > 0u;
}

fn write_lse_of_state(item: WorkItem, y: u32, row: u32, lse: f32) {
    write_state_lse(item, y, row, lse);
}

fn write_state_field(item: WorkItem, y: u32, row: u32, field: u32, output: vec4<f32>) {
    states[state_row(item, y, row) + field] = output;
}
