// Activations in the order in which the codes lie, in f32: padded places are 0.

// import element = linear/element.wgsl#f16

const INPUTS: u32 = 4096u;
const PLACES: u32 = 4096u;
const ALL_ROWS: u32 = 1u;

// The input at each place; 0xFFFFFFFF where there is none.
@group(0) @binding(0) var<storage, read> order: array<u32>;
@group(0) @binding(3) var<storage, read_write> ordered: array<f32>;

@compute @workgroup_size(64)
fn order_inputs(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let place = 64u * workgroup.x + invocation;
    let row = workgroup.y;
    if (place >= PLACES || row >= ALL_ROWS) {
        return;
    }
    let input = order[place];
    var x = 0.0;
    if (input < INPUTS) {
        x = element(row * INPUTS + input);
    }
    ordered[row * PLACES + place] = x;
}
