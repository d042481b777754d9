// States that `merge_states` joins.

@group(0) @binding(7) var<storage, read_write> states: array<vec4<f32>>;

fn merge_item(item: WorkItem, y: u32, invocation: u32) {}
