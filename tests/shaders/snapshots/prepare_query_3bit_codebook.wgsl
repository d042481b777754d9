// ----------------------------------------------------------------------------------------------------
// shaders/attend/prepare_query.wgsl
// ----------------------------------------------------------------------------------------------------

// prepare_query: one row per prepared query and query head, for the kernels that score keys. A query is prepared once,
// or once for every span where keys have span ranges.
//
// With per-channel ranges k = s ⊙ u + m and u = c + 2^(bits-1) folded in: q·k / √D · log2 e = Σ (q ⊙ s) c + Σ q (m +
// 2^(bits-1) s), with q already multiplied by log2 e / √D. If keys are rotated, q is rotated first. The row holds q ⊙ s
// as integers in byte planes and (scale, bias, Σ q, 0), or as f32 (see attend/query_row.wgsl).
//
// Workgroup (x, y) prepares part y % PARTS of query head y / PARTS of prepared query x: keys with sketches need one row
// for their signs and one for their levels. An invocation owns four neighbouring channels. It reads D elements and as
// many ranges, and writes one row.
//
// In bounds: rows are sized for the plan, and what the table of prepared queries holds is clamped to what is bound;
// channels past HEAD_DIM are not read.
//
// gives: INVOCATIONS, HEAD_DIM, KV_HEADS, QUERY_HEADS, ROW_FIELDS
// binds: 0 prepared
// set by plans: HEAD_DIM, KV_HEADS, QUERY_HEADS, ROW_FIELDS, PARTS, SCORE_SCALE

struct PreparedQuery {
    // Row of the query in the tensor.
    row: u32,
    range_slot: u32,
}

@group(0) @binding(0) var<storage, read> prepared: array<PreparedQuery>;

const INVOCATIONS: u32 = 64u;
const HEAD_DIM: u32 = 128u;
const KV_HEADS: u32 = 2u;
const QUERY_HEADS: u32 = 8u;
// Field groups of a row of keys, padding included.
const ROW_FIELDS: u32 = 32u;
// Rows of a query head.
const PARTS: u32 = 1u;
// log2(e) / √D.
const SCORE_SCALE: f32 = 0.12751743f;

var<workgroup> parts: array<vec4<f32>, INVOCATIONS>;

@compute @workgroup_size(64)
fn prepare_query(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) field: u32) {
    let query = prepared[group.x];
    let head = group.y / PARTS;
    let row = (group.x * QUERY_HEADS + head) * PARTS + group.y % PARTS;
    var q = vec4<f32>(0f);
    var scaled = vec4<f32>(0f);
    var bias = 0f;
    if (field < HEAD_DIM / 4u) {
        q = input4((query.row * QUERY_HEADS + head) * (HEAD_DIM / 4u) + field) * SCORE_SCALE;
    }
    q = rotate_query(q, field, group.y % PARTS);
    if (field < HEAD_DIM / 4u) {
        let kv_head = head / (QUERY_HEADS / KV_HEADS);
        let base = (existing_slot(query.range_slot) * KV_HEADS + kv_head) * HEAD_DIM + field * 4u;
        scaled = scale_query(q, base);
        bias = query_bias(q, base);
    }
    let magnitude = abs(scaled);
    let largest = max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w));
    parts[field] = vec4<f32>(largest, bias, q.x + q.y + q.z + q.w, 0f);
    for (var half = INVOCATIONS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (field < half) {
            let other = parts[field + half];
            parts[field] = vec4<f32>(max(parts[field].x, other.x), parts[field].yzw + other.yzw);
        }
    }
    workgroupBarrier();
    write_row(row, field, scaled, parts[0]);
    reset_extremes(group.x * QUERY_HEADS + head, field);
}

// Of attend/query_ranges.wgsl, by default:

// The range slot, clamped to the last one.
fn existing_slot(range_slot: u32) -> u32 {
    return range_slot;
}

// Four channels of a query times the scales that begin at `base`.
fn scale_query(q: vec4<f32>, base: u32) -> vec4<f32> {
    return q;
}

// The contribution of the middles of these ranges to every score.
fn query_bias(q: vec4<f32>, base: u32) -> f32 {
    return 0f;
}

// Of attend/extremes.wgsl, by default:

fn reset_extremes(row: u32, field: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/input.wgsl#f16
// ----------------------------------------------------------------------------------------------------

// A dense f16 tensor, read four elements at a time.
//
// gives: input4
// binds: 2 inputs

@group(0) @binding(2) var<storage, read> inputs: array<vec2<u32>>;

fn input4(index: u32) -> vec4<f32> {
    let words = inputs[min(input_at(index), arrayLength(&inputs) - 1u)];
    return without_infinities(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)));
}

// Of attend/input_rows.wgsl, by default:

fn input_at(index: u32) -> u32 {
    return index;
}

// ----------------------------------------------------------------------------------------------------
// shaders/common/ordered.wgsl#infinities
// ----------------------------------------------------------------------------------------------------

// NaN in place of infinities. All scores of an infinite query may be minus infinity, as if it saw no token.
//
// gives: without_infinities

fn without_infinities(x: vec4<f32>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(x);
    let exponent = vec4<u32>(0x7f800000u);
    return bitcast<vec4<f32>>(select(bits, bits | vec4<u32>(0x00400000u), (bits & exponent) == exponent));
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/query_rotation.wgsl#hadamard
// ----------------------------------------------------------------------------------------------------

// Rotates the query for rotated keys. The products stay the same.
//
// gives: rotate_query

fn rotate_query(q: vec4<f32>, field: u32, part: u32) -> vec4<f32> {
    put_query(q, field);
    rotate_row(field);
    return rotated_query(field);
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/prepared_query.wgsl#query_in_row #query_fields
// ----------------------------------------------------------------------------------------------------

// A query in workgroup memory, four channels per invocation, to be rotated.
//
// needs: HEAD_DIM
// gives: put_query, rotated_query

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

// A query as integers: QUERY_PLANES byte planes of field-group words, low byte first, both signed. Integers span
// ±QUERY_LARGEST: 127 in one plane, 32639 in two, so that both bytes stay signed.
//
// gives: QUERY_LARGEST, CODE_UNIT, place, integers, bytes, high_bytes
// set by plans: QUERY_LARGEST, CODE_UNIT, PLACE_WORDS, PLACE_PLANES

const QUERY_LARGEST: f32 = 32639.0f;
// Factor of a dot product of integers and key bytes, in addition to the query's own scale: 2^(bits-8) for affine codes,
// which are shifted to the top of their bytes, and the unit of a codebook's levels.
const CODE_UNIT: f32 = 0.0017032468f;
// Words of a vector of keys, and bit planes of a word; a vector of 3-bit codes counts as one word of eight planes.
const PLACE_WORDS: u32 = 1u;
const PLACE_PLANES: u32 = 8u;

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

// ----------------------------------------------------------------------------------------------------
// shaders/common/rotation.wgsl#rotate_row #rotation
// ----------------------------------------------------------------------------------------------------

// Rotates a row of HEAD_DIM channels in workgroup memory, in place: `format::Rotation`. Blocks of ORDER channels are
// multiplied with the Walsh-Hadamard matrix over √ORDER.
//
// Channels may first be dealt out to the blocks in turns: channel c then lies at `dealt(c)`. Code that writes a channel
// does so at `input_place` and applies `rotation_input`. Code that reads a channel does so at `output_place` and
// applies `unflipped`. An invocation owns pairs of channels. There is one barrier per butterfly stage, and every
// invocation of the workgroup must call.
//
// needs: HEAD_DIM, INVOCATIONS
// gives: rotated, rotate_row

var<workgroup> rotated: array<f32, HEAD_DIM>;

fn rotate_row(invocation: u32) {
    for (var stage = 0u; (1u << stage) < ROTATION_ORDER; stage++) {
        let half = 1u << stage;
        workgroupBarrier();
        for (var pair = invocation; pair < HEAD_DIM / 2u; pair += INVOCATIONS) {
            // pair / half · 2 half + pair % half. Compilers do not know the divisor and would divide.
            let low = ((pair >> stage) << (stage + 1u)) + (pair & (half - 1u));
            let a = rotated[low];
            let b = rotated[low + half];
            rotated[low] = a + b;
            rotated[low + half] = a - b;
        }
    }
    workgroupBarrier();
}

// `format::Rotation` of a row of channels: its numbers, and what becomes of a channel before and after the butterflies.
//
// gives: ROTATION_ORDER, dealt, input_place, output_place, rotation_input, scaled_input, unflipped, flipped
// set by plans: ROTATION_ORDER, ROTATION_SCALE, ROTATION_SIGNED, ROTATION_SEED, ROTATION_BACK, ROTATION_BLOCKS

const ROTATION_ORDER: u32 = 128u;
// 1 / √ORDER.
const ROTATION_SCALE: f32 = 0.088388346f;
// Whether signs are flipped, and the seed of the signs.
const ROTATION_SIGNED: u32 = 1u;
const ROTATION_SEED: u32 = 1953854050u;
// 1 for the inverse rotation: signs are flipped after the butterflies.
const ROTATION_BACK: u32 = 0u;

// Number of blocks that channels are dealt out to.
const ROTATION_BLOCKS: u32 = 1u;

fn dealt(channel: u32, blocks: u32) -> u32 {
    return channel % blocks * ROTATION_ORDER + channel / blocks;
}

fn input_place(channel: u32) -> u32 {
    return select(dealt(channel, ROTATION_BLOCKS), channel, ROTATION_BACK == 1u);
}

fn output_place(channel: u32) -> u32 {
    return select(channel, dealt(channel, ROTATION_BLOCKS), ROTATION_BACK == 1u);
}

fn rotation_input(x: f32, place: u32) -> f32 {
    return scaled_input(flipped(x, place, ROTATION_SEED, ROTATION_SIGNED & (1u - ROTATION_BACK)));
}

fn scaled_input(x: f32) -> f32 {
    // Bits of 2^-50: smaller elements count as 0.
    return select(x * ROTATION_SCALE, 0f, (bitcast<u32>(x) & 0x7fffffffu) < 0x26800000u);
}

fn unflipped(x: f32, place: u32) -> f32 {
    return flipped(x, place, ROTATION_SEED, ROTATION_SIGNED & ROTATION_BACK);
}

fn flipped(x: f32, place: u32, seed: u32, apply: u32) -> f32 {
    var word = seed + 0x9e3779b9u * (place + 1u);
    word = (word ^ (word >> 16u)) * 0x7feb352du;
    word = (word ^ (word >> 15u)) * 0x846ca68bu;
    let flip = (word ^ (word >> 16u)) & apply;
    return bitcast<f32>(bitcast<u32>(x) ^ (flip << 31u));
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/query_row.wgsl#int
// ----------------------------------------------------------------------------------------------------

// A prepared query as integers (attend/prepared_query.wgsl#query_fields), then (scale, bias, Σ q, 0).
//
// needs: ROW_FIELDS
// gives: write_row
// binds: 3 rows
// set by plans: QUERY_PLANES

@group(0) @binding(3) var<storage, read_write> rows: array<u32>;

const QUERY_PLANES: u32 = 2u;

const ROW: u32 = QUERY_PLANES * ROW_FIELDS + 4u;

fn write_row(row: u32, field: u32, scaled: vec4<f32>, totals: vec4<f32>) {
    if (field < ROW_FIELDS) {
        let whole = integers(scaled, totals.x);
        let at = row * ROW + place(field);
        rows[at] = bytes(whole);
        // unroll
        for (var plane = 0u; plane < QUERY_PLANES - 1u; plane++) {
            rows[at + ROW_FIELDS] = high_bytes(whole);
        }
    }
    if (field == 0u) {
        let constants = row * ROW + QUERY_PLANES * ROW_FIELDS;
        rows[constants] = bitcast<u32>(totals.x / QUERY_LARGEST * CODE_UNIT);
        rows[constants + 1u] = bitcast<u32>(totals.y);
        rows[constants + 2u] = bitcast<u32>(totals.z);
        rows[constants + 3u] = 0u;
    }
}
