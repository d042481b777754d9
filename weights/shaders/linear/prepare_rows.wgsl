// Activations as products by matrices read them: in the order in which the codes lie, and in f16.
//
// A row is multiplied by a power of two so that its largest number lies between 2^14 and 2^15, and its outputs are
// multiplied by the inverse. So f16 and bf16 lose nothing but numbers below 2^-39 of the largest, and f32 is the sum of
// two numbers in f16 to the same precision. Padded places are 0.

// import element = linear/element.wgsl#f16
// import place = linear/place.wgsl#in_order

const INPUTS: u32 = 4096u;
// Places of a part of a row, and parts.
const PLACES: u32 = 4096u;
const PARTS: u32 = 1u;
const ALL_ROWS: u32 = 1u;
// Rows that are written; those behind the last are 0.
const WRITTEN_ROWS: u32 = 1u;

const INVOCATIONS: u32 = 256u;
// Numbers, or words, that an invocation loads before it waits for one.
const TOGETHER: u32 = 8u;

@group(0) @binding(3) var<storage, read_write> prepared: array<u32>;
@group(0) @binding(4) var<storage, read_write> units: array<f32>;

var<workgroup> exponents: array<u32, INVOCATIONS>;

fn scaled(row: u32, place: u32, factor: f32) -> f32 {
    let input = input_at(place);
    if (input >= INPUTS || row >= ALL_ROWS) {
        return 0.0;
    }
    return factor * element(row * INPUTS + input);
}

fn put(row: u32, word: u32, numbers: vec2<f32>) {
    var rest = numbers;
    // unroll
    for (var part = 0u; part < PARTS; part++) {
        prepared[(row * PARTS + part) * (PLACES / 2u) + word] = pack2x16float(rest);
        // A driver may treat a conversion and its inverse as nothing, and the rest as zero.
        rest -= quantizeToF16(rest);
    }
}

@compute @workgroup_size(256)
fn prepare_rows(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let row = min(workgroup.x, WRITTEN_ROWS - 1u);
    let read_row = min(row, ALL_ROWS - 1u);
    var largest = 0u;
    for (var first = invocation; first < INPUTS; first += TOGETHER * INVOCATIONS) {
        // unroll
        for (var i = 0u; i < TOGETHER; i++) {
            // The last number again changes no maximum.
            let input = min(first + i * INVOCATIONS, INPUTS - 1u);
            largest = max(largest, bitcast<u32>(element(read_row * INPUTS + input)) & 0x7F800000u);
        }
    }
    exponents[invocation] = largest;
    workgroupBarrier();
    for (var half = INVOCATIONS / 2u; half > 0u; half /= 2u) {
        if (invocation < half) {
            exponents[invocation] = max(exponents[invocation], exponents[invocation + half]);
        }
        workgroupBarrier();
    }
    // From 2^-100 to 2^126, so that the factor and its inverse are normal numbers.
    let exponent = clamp(exponents[0] >> 23u, 27u, 253u);
    let factor = bitcast<f32>((268u - exponent) << 23u);
    if (invocation == 0u) {
        units[row] = bitcast<f32>((exponent - 14u) << 23u);
    }
    for (var first = invocation; first < PLACES / 2u; first += TOGETHER * INVOCATIONS) {
        var pairs: array<vec2<f32>, TOGETHER>;
        // unroll
        for (var i = 0u; i < TOGETHER; i++) {
            let word = min(first + i * INVOCATIONS, PLACES / 2u - 1u);
            pairs[i] = vec2<f32>(scaled(row, 2u * word, factor), scaled(row, 2u * word + 1u, factor));
        }
        // unroll
        for (var i = 0u; i < TOGETHER; i++) {
            let word = first + i * INVOCATIONS;
            if (word < PLACES / 2u) {
                put(row, word, pairs[i]);
            }
        }
    }
}
