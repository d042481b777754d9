// The product of one row of activations with packed 4-bit weights: y = x · Wᵀ.
//
// A workgroup has TOGETHER outputs. Its invocations take the chunks of 32 inputs in turn, each for all outputs. An
// invocation turns the inputs of a chunk into integers, relative to the largest of them. Bytes of integers are
// multiplied with four codes at a time:
//
//     Σ x · code = unit · Σ integer · code = unit · (256 · Σ high · code + Σ low · code)
//
// and a group adds scale · (Σ x · code - zero · Σ x) to its output. Sums of integers are exact. Others are f32 and run in
// a fixed order.

// import codes = linear/codes.wgsl#four
// import scales = linear/scales.wgsl#half
// import input = linear/input.wgsl#f16
// import output = linear/output.wgsl#f32
// import linear/integers.wgsl

// Chunks of an output, and of a group.
const CHUNKS: u32 = 128u;
const GROUP_CHUNKS: u32 = 4u;
const GROUPS: u32 = CHUNKS / GROUP_CHUNKS;
const OUTPUTS: u32 = 4096u;

// Outputs of a workgroup, and those whose codes are loaded together. Both are multiples of 4.
const TOGETHER: u32 = 8u;
const BATCH: u32 = 4u;
const BATCHES: u32 = TOGETHER / BATCH;
const QUADS: u32 = TOGETHER / 4u;

const INVOCATIONS: u32 = 128u;
// Invocations that add eight sums of four outputs each.
const EIGHTH: u32 = INVOCATIONS / 8u;

// 1.5 · 2^23: a number below 2^22 is an integer in the low bits of the sum.
const ROUND: f32 = 12582912f;

// Sums of four outputs over the chunks of an invocation.
var<workgroup> partial: array<vec4<f32>, QUADS * INVOCATIONS>;

// The codes of a chunk for a batch of outputs, with their scales and zeros.
struct Batch {
    codes: array<Codes, BATCH>,
    ranges: array<vec2<f32>, BATCH>,
}

// The inputs of a chunk as integers.
struct Integers {
    octets: array<Bytes, 4>,
    unit: f32,
    // Of the inputs themselves.
    sum: f32,
}

fn load_batch(first: u32, chunk: u32) -> Batch {
    var batch: Batch;
    // unroll
    for (var o = 0u; o < BATCH; o++) {
        let output = min(first + o, OUTPUTS - 1u);
        batch.codes[o] = load_codes(output * CHUNKS + chunk);
        batch.ranges[o] = load_scale(output * GROUPS + chunk / GROUP_CHUNKS);
    }
    return batch;
}

fn load_integers(chunk: u32) -> Integers {
    let x = array<Octet, 4>(
        load_inputs(4u * chunk),
        load_inputs(4u * chunk + 1u),
        load_inputs(4u * chunk + 2u),
        load_inputs(4u * chunk + 3u),
    );
    var largest: vec4<f32>;
    var sum: vec4<f32>;
    // unroll
    for (var q = 0u; q < 4u; q++) {
        largest = max(largest, max(abs(x[q].low), abs(x[q].high)));
        sum += x[q].low + x[q].high;
    }
    let exponent = bitcast<u32>(max(max(largest.x, largest.y), max(largest.z, largest.w))) >> 23u;
    // From 2^-100 on, so that the factor and its inverse are normal numbers. Sums of infinite inputs and of NaNs are not
    // finite, whatever their integers are.
    let clamped = clamp(exponent, 27u, 254u);
    let factor = vec4<f32>(bitcast<f32>((253u + MAGNITUDE - clamped) << 23u));
    var found: Integers;
    found.unit = bitcast<f32>((clamped + 1u - MAGNITUDE) << 23u);
    found.sum = (sum.x + sum.y) + (sum.z + sum.w);
    // unroll
    for (var q = 0u; q < 4u; q++) {
        let a = bitcast<vec4<u32>>(fma(x[q].low, factor, vec4<f32>(ROUND)));
        let b = bitcast<vec4<u32>>(fma(x[q].high, factor, vec4<f32>(ROUND)));
        found.octets[q] = cut(a, b);
    }
    return found;
}

// The part of an output that comes from a chunk.
fn product(x: Integers, chunk: Codes, range: vec2<f32>) -> f32 {
    var sums: Sums;
    // unroll
    for (var q = 0u; q < 4u; q++) {
        // The inputs 0, 4, 1 and 5 of an octet, and 2, 6, 3 and 7.
        add_products(&sums, x.octets[q], chunk[q] & 0x0F0F0F0Fu, (chunk[q] >> 4u) & 0x0F0F0F0Fu);
    }
    return range.x * (f32(whole(sums)) * x.unit - range.y * x.sum);
}

@compute @workgroup_size(INVOCATIONS)
fn linear_row(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    // The last workgroups of a folded grid, and of a row of outputs, take the last output again and write nothing.
    let first = TOGETHER * (workgroup.x + workgroups.x * workgroup.y);
    var sums: array<f32, TOGETHER>;
    var batch = load_batch(first, min(invocation, CHUNKS - 1u));
    for (var chunk = invocation; chunk < CHUNKS; chunk += INVOCATIONS) {
        let x = load_integers(chunk);
        // unroll
        for (var b = 0u; b < BATCHES; b++) {
            // The next codes are on their way while some are multiplied. Behind the last chunk it is the last again.
            let next = load_batch(
                first + (b + 1u) % BATCHES * BATCH,
                min(chunk + (b + 1u) / BATCHES * INVOCATIONS, CHUNKS - 1u),
            );
            // unroll
            for (var o = 0u; o < BATCH; o++) {
                sums[b * BATCH + o] += product(x, batch.codes[o], batch.ranges[o]);
            }
            batch = next;
        }
    }
    // unroll
    for (var quad = 0u; quad < QUADS; quad++) {
        partial[quad * INVOCATIONS + invocation] =
            vec4<f32>(sums[4u * quad], sums[4u * quad + 1u], sums[4u * quad + 2u], sums[4u * quad + 3u]);
    }
    workgroupBarrier();
    if (invocation < EIGHTH * QUADS) {
        let at = invocation / EIGHTH * INVOCATIONS + invocation % EIGHTH;
        var sum = partial[at];
        // unroll
        for (var i = 0u; i < 7u; i++) {
            sum += partial[at + EIGHTH * (i + 1u)];
        }
        partial[at] = sum;
    }
    workgroupBarrier();
    if (invocation < QUADS) {
        let at = invocation * INVOCATIONS;
        var sum = partial[at];
        // unroll
        for (var i = 0u; i < EIGHTH - 1u; i++) {
            sum += partial[at + i + 1u];
        }
        store(0u, first + 4u * invocation, sum);
    }
}
