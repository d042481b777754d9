// Slot `merge`: chooses what merges the states of a sequence: `merge_states`, or the workgroup that writes the last of
// them.
//
// Every choice has
//   var states
//     attention states, as in attend/states.wgsl#states
//
// needs: WorkItem
// gives: merge_item

// Called once the states of an item are written.
fn merge_item(item: WorkItem, y: u32, invocation: u32) {}

// -------- last --------

// The workgroup that writes the last state of a query head merges all of them, as `merge_states` would.
//
// Every workgroup increments a counter once its states are written. The one that finds all others counted is the last.
// Items have one query each. The next step finds the counter at 0 again. The states of others are visible for three
// reasons: the memory is coherent, a storage barrier stands between the states and the count, and another between the
// count and the reads. In WGSL a storage barrier orders memory for one workgroup only. The SPIR-V of naga orders it for
// the device, so this part is for Vulkan (`Capabilities::coherent`).
//
// A team of 32 lanes merges a head; a lane owns every 32nd field group of four channels.
//
// needs: FIELDS, HEADS, INVOCATIONS, QUERY_HEADS, WorkItem, head_exists, input_row, query_head
// gives: states, merge_item
// binds: 7 states, 9 arrived

// import output = attend/output.wgsl#f32
// import attend/states.wgsl#join_states

@group(0) @binding(7) @coherent var<storage, read_write> states: array<vec4<f32>>;
// Number of workgroups that have written their state of a query head: [row][query head].
@group(0) @binding(9) var<storage, read_write> arrived: array<atomic<u32>>;

var<workgroup> is_last: array<u32, HEADS>;

fn merge_item(item: WorkItem, y: u32, invocation: u32) {
    storageBarrier();
    if (invocation < HEADS) {
        is_last[invocation] = 0u;
        if (head_exists(item, y, invocation)) {
            let counter = min(input_row(item, y, invocation), arrayLength(&arrived) - 1u);
            if (atomicAdd(&arrived[counter], 1u) + 1u == item.states) {
                atomicStore(&arrived[counter], 0u);
                is_last[invocation] = 1u;
            }
        }
    }
    workgroupBarrier();
    storageBarrier();
    for (var head = invocation / 32u; head < HEADS; head += INVOCATIONS / 32u) {
        if (is_last[head] == 1u) {
            merge_head(item, query_head(y, head), invocation % 32u);
        }
    }
}

fn merge_head(item: WorkItem, query_head: u32, lane: u32) {
    for (var field = lane; field < FIELDS; field += 32u) {
        let joined = join_states(item.first_state, item.first_state + item.states, 1u, query_head, field);
        write_output((item.row * QUERY_HEADS + query_head) * FIELDS + field, joined.sum / joined.weight_sum);
    }
}

// -------- later --------

// States that `merge_states` joins.
//
// gives: states
// binds: 7 states

@group(0) @binding(7) var<storage, read_write> states: array<vec4<f32>>;
