// The product of up to 4 rows of activations with the packed weights of four outputs: y = x · Wᵀ.
//
// A workgroup has four outputs and ROWS rows. Its invocations take the chunks of 32 inputs in turn. Codes come as f16
// numbers 1024 + f · code, with a power of two f that depends on where they lie in a word. Inputs are divided by f, so
//
//     Σ x · code = Σ x / f · (1024 + f · code) - 1024 · Σ x / f
//
// and a group adds scale · (Σ x · code - zero · Σ x) to its output. Sums are f32 and run in a fixed order.

// import codes = linear/codes.wgsl#four
// import scales = linear/scales.wgsl#half
// import input = linear/input.wgsl#f16
// import output = linear/output.wgsl#f32

// Chunks of an output, and of a group.
const CHUNKS: u32 = 128u;
const GROUP_CHUNKS: u32 = 4u;
const GROUPS: u32 = CHUNKS / GROUP_CHUNKS;
const OUTPUTS: u32 = 4096u;
// Rows of a workgroup, and of the call.
const ROWS: u32 = 1u;
const ALL_ROWS: u32 = 1u;

const INVOCATIONS: u32 = 64u;

var<workgroup> partial: array<vec4<f32>, 64u * ROWS>;

// The sums of four outputs over the chunks of an invocation, for every row.
struct Sums {
    rows: array<vec4<f32>, ROWS>,
}

// A chunk of each of four outputs.
struct Chunks {
    c0: Codes,
    c1: Codes,
    c2: Codes,
    c3: Codes,
}

fn load_chunks(outputs: vec4<u32>, chunk: u32) -> Chunks {
    let at = outputs * CHUNKS + vec4<u32>(chunk);
    return Chunks(load_codes(at.x), load_codes(at.y), load_codes(at.z), load_codes(at.w));
}

fn add_chunk(sums: ptr<function, Sums>, chunks: Chunks, outputs: vec4<u32>, first_row: u32, chunk: u32) {
    let group = chunk / GROUP_CHUNKS;
    let s0 = load_scale(outputs.x * GROUPS + group);
    let s1 = load_scale(outputs.y * GROUPS + group);
    let s2 = load_scale(outputs.z * GROUPS + group);
    let s3 = load_scale(outputs.w * GROUPS + group);
    let scale = vec4<f32>(s0.x, s1.x, s2.x, s3.x);
    let zero = vec4<f32>(s0.y, s1.y, s2.y, s3.y);
    var dots: array<vec4<f32>, ROWS>;
    var plain: array<vec4<f32>, ROWS>;
    var divided: array<vec4<f32>, ROWS>;
    // unroll
    for (var q = 0u; q < 4u; q++) {
        let f0 = fields(chunks.c0, q);
        let f1 = fields(chunks.c1, q);
        let f2 = fields(chunks.c2, q);
        let f3 = fields(chunks.c3, q);
        let by = divisors(q);
        // unroll
        for (var m = 0u; m < ROWS; m++) {
            let x = load_inputs(min(first_row + m, ALL_ROWS - 1u) * (4u * CHUNKS) + 4u * chunk + q);
            let low = x.low * by.low;
            let high = x.high * by.high;
            plain[m] += x.low + x.high;
            divided[m] += low + high;
            dots[m] += vec4<f32>(
                dot(f0.low, low) + dot(f0.high, high),
                dot(f1.low, low) + dot(f1.high, high),
                dot(f2.low, low) + dot(f2.high, high),
                dot(f3.low, low) + dot(f3.high, high),
            );
        }
    }
    // unroll
    for (var m = 0u; m < ROWS; m++) {
        let offset = 1024.0 * dot(divided[m], vec4<f32>(1.0)) + zero * dot(plain[m], vec4<f32>(1.0));
        (*sums).rows[m] += scale * (dots[m] - offset);
    }
}

@compute @workgroup_size(64)
fn linear(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    // The last workgroups of a folded grid, and of a row of four outputs, take the last output again and write nothing.
    let first = 4u * (workgroup.x + workgroups.x * workgroup.y);
    let outputs = min(vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(OUTPUTS - 1u));
    let first_row = ROWS * workgroup.z;
    var sums: Sums;
    // The next codes are on their way while some are multiplied. Behind the last chunk it is the last again.
    var chunks = load_chunks(outputs, min(invocation, CHUNKS - 1u));
    for (var chunk = invocation; chunk < CHUNKS; chunk += INVOCATIONS) {
        let next = load_chunks(outputs, min(chunk + INVOCATIONS, CHUNKS - 1u));
        add_chunk(&sums, chunks, outputs, first_row, chunk);
        chunks = next;
    }
    // unroll
    for (var m = 0u; m < ROWS; m++) {
        partial[m * INVOCATIONS + invocation] = sums.rows[m];
    }
    workgroupBarrier();
    // Eight invocations a row add eight sums each, then one adds these.
    if (invocation < 8u * ROWS) {
        let at = invocation / 8u * INVOCATIONS + invocation % 8u;
        var sum = partial[at];
        for (var i = 1u; i < 8u; i++) {
            sum += partial[at + 8u * i];
        }
        partial[at] = sum;
    }
    workgroupBarrier();
    if (invocation < ROWS && first_row + invocation < ALL_ROWS) {
        let at = invocation * INVOCATIONS;
        var sum = partial[at];
        for (var i = 1u; i < 8u; i++) {
            sum += partial[at + i];
        }
        store(first_row + invocation, first, sum);
    }
}
