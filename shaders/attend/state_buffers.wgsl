// Slot `state_buffers`: the buffers that states lie in. By default all lie in one.
//
// Every choice has
//   fn find_buffers(at: u32)
//     called first, with the place of the query's row in the table of states
//   fn read_state(state: u32, index: u32) -> vec4<f32>
//
// needs: states
// gives: find_buffers, read_state

fn find_buffers(at: u32) {}

fn read_state(state: u32, index: u32) -> vec4<f32> {
    return states[index];
}

// -------- four --------

// Every launch writes to a buffer of its own, so that it need not wait for the others. A state has the place there that
// it would have in a single buffer. The states of a query are numbered in the order of the buffers, and its row in the
// table says where those of each buffer end.
//
// In bounds: all four buffers are bound with as many bytes, so that what lies within `states` lies within each.
//
// needs: state_rows, states
// gives: find_buffers, read_state
// binds: 10 second_states, 12 third_states, 13 fourth_states

@group(0) @binding(10) var<storage, read> second_states: array<vec4<f32>>;
@group(0) @binding(12) var<storage, read> third_states: array<vec4<f32>>;
@group(0) @binding(13) var<storage, read> fourth_states: array<vec4<f32>>;

// Where the states of the first three buffers end.
var<private> buffer_ends: vec3<u32>;

fn find_buffers(at: u32) {
    buffer_ends = vec3<u32>(state_rows[at + 1u], state_rows[at + 2u], state_rows[at + 3u]);
}

fn read_state(state: u32, index: u32) -> vec4<f32> {
    if (state < buffer_ends.x) {
        return states[index];
    }
    if (state < buffer_ends.y) {
        return second_states[index];
    }
    if (state < buffer_ends.z) {
        return third_states[index];
    }
    return fourth_states[index];
}
