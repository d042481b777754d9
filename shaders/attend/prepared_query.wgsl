// Where the fields of a prepared query are, and how they are written.

// -------- query_fields --------

// A query as integers: QUERY_PLANES byte planes of field-group words, low byte first, both signed. Integers span
// ±QUERY_LARGEST: 127 in one plane, 32639 in two, so that both bytes stay signed.
//
// gives: QUERY_LARGEST, CODE_UNIT, place, integers, bytes, high_bytes
// set by plans: QUERY_LARGEST, CODE_UNIT, PLACE_WORDS, PLACE_PLANES

const QUERY_LARGEST: f32 = 32639f;
// Factor of a dot product of integers and key bytes, in addition to the query's own scale: 2^(bits-8) for affine codes,
// which are shifted to the top of their bytes, and the unit of a codebook's levels.
const CODE_UNIT: f32 = 0.0625f;
// Words of a vector of keys, and bit planes of a word; a vector of 3-bit codes counts as one word of eight planes.
const PLACE_WORDS: u32 = 4u;
const PLACE_PLANES: u32 = 2u;

// Field groups in the order in which `scores` and `attend` use them: within a vector of words, bit plane by bit plane
// from the top.
fn place(field: u32) -> u32 {
    let in_vector = field % (PLACE_WORDS * PLACE_PLANES);
    return field - in_vector + (PLACE_PLANES - 1u - in_vector % PLACE_PLANES) * PLACE_WORDS + in_vector / PLACE_PLANES;
}

fn integers(scaled: vec4<f32>, largest: f32) -> vec4<i32> {
    if (largest > 0f) {
        return vec4<i32>(round(scaled * (QUERY_LARGEST / largest)));
    }
    return vec4<i32>(0i);
}

fn bytes(x: vec4<i32>) -> u32 {
    let b = vec4<u32>(x) & vec4<u32>(255u);
    return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}

// The byte plane above that of `bytes`.
fn high_bytes(x: vec4<i32>) -> u32 {
    return bytes((x + vec4<i32>(128i)) >> vec4<u32>(8u));
}

// -------- query_in_row --------

// A query in workgroup memory, four channels per invocation, to be rotated.
//
// needs: HEAD_DIM
// gives: put_query, rotated_query

// import common/rotation.wgsl#rotate_row

fn put_query(q: vec4<f32>, field: u32) {
    if (field < HEAD_DIM / 4u) {
        // unroll
        for (var i = 0u; i < 4u; i++) {
            let place = input_place(field * 4u + i);
            rotated[place] = rotation_input(q[i], place);
        }
    }
}

fn rotated_query(field: u32) -> vec4<f32> {
    if (field >= HEAD_DIM / 4u) {
        return vec4<f32>(0f);
    }
    return vec4<f32>(rotated[field * 4u], rotated[field * 4u + 1u], rotated[field * 4u + 2u], rotated[field * 4u + 3u]);
}
