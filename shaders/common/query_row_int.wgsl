// A prepared query as integers: QUERY_PLANES byte planes of field-group words, low byte first, both signed, then
// (scale, bias, Σ q, 0). Integers span ±QUERY_LARGEST: 127 in one plane, 32639 in two, so that both bytes stay signed.

@group(0) @binding(3) var<storage, read_write> rows: array<u32>;

const QUERY_PLANES: u32 = 2u;
const QUERY_LARGEST: f32 = 32639f;
// What a dot product of integers and bytes of keys must be multiplied with, beside the query's own scale: 2^(bits-8) for
// affine codes, which are shifted to the top of their bytes, and the unit of a codebook's levels.
const CODE_UNIT: f32 = 0.0625f;
// Words of a vector of keys, and bit planes of a word.
const KEY_VECTOR: u32 = 4u;
const KEY_PLANES: u32 = 2u;
const ROW: u32 = QUERY_PLANES * ROW_FIELDS + 4u;

fn write_row(row: u32, field: u32, scaled: vec4<f32>, totals: vec4<f32>) {
    let scale = totals.x / QUERY_LARGEST;
    if (field < ROW_FIELDS) {
        var integers = vec4<i32>(0i);
        if (totals.x > 0f) {
            integers = vec4<i32>(round(scaled * (QUERY_LARGEST / totals.x)));
        }
        let at = row * ROW + place(field);
        rows[at] = bytes(integers);
        // unroll
        for (var plane = 0u; plane < QUERY_PLANES - 1u; plane++) {
            rows[at + ROW_FIELDS] = bytes((integers + vec4<i32>(128i)) >> vec4<u32>(8u));
        }
    }
    if (field == 0u) {
        let constants = row * ROW + QUERY_PLANES * ROW_FIELDS;
        rows[constants] = bitcast<u32>(scale * CODE_UNIT);
        rows[constants + 1u] = bitcast<u32>(totals.y);
        rows[constants + 2u] = bitcast<u32>(totals.z);
        rows[constants + 3u] = 0u;
    }
}

// Field groups in the order in which `scores` and `attend` use them: within a vector of words, bit plane by bit
// plane from the top.
fn place(field: u32) -> u32 {
    let in_vector = field % (KEY_VECTOR * KEY_PLANES);
    return field - in_vector + (KEY_PLANES - 1u - in_vector % KEY_PLANES) * KEY_VECTOR + in_vector / KEY_PLANES;
}

fn bytes(x: vec4<i32>) -> u32 {
    let b = vec4<u32>(x) & vec4<u32>(255u);
    return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}
