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

// import input = attend/input.wgsl#f32
// import query_rotation = attend/query_rotation.wgsl
// import query_ranges = attend/query_ranges.wgsl
// import extremes = attend/extremes.wgsl
// import query_row = attend/query_row.wgsl#int

struct PreparedQuery {
    // Row of the query in the tensor.
    row: u32,
    range_slot: u32,
}

@group(0) @binding(0) var<storage, read> prepared: array<PreparedQuery>;

const INVOCATIONS: u32 = 64u;
const HEAD_DIM: u32 = 128u;
const KV_HEADS: u32 = 8u;
const QUERY_HEADS: u32 = 32u;
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
