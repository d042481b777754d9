// prepare_run_query: `prepare_query` for the kernel of many queries. A workgroup prepares several query heads of a query,
// since prompts have many.
//
// Workgroup (x, y): prepared query x, query heads y · PREPARED_HEADS onwards. ROW_INVOCATIONS of its invocations own the
// channels of a head, four neighbouring ones each, of LANE_HEADS heads. It reads D elements of each, and as many ranges,
// and writes as many rows.
//
// In bounds: as `prepare_query`. Heads that do not exist read the last one and write nothing.
//
// gives: INVOCATIONS, HEAD_DIM, KV_HEADS, QUERY_HEADS, ROW_FIELDS, LANE_HEADS
// binds: 0 prepared
// set by plans: HEAD_DIM, KV_HEADS, QUERY_HEADS, ROW_FIELDS, ROW_INVOCATIONS, SCORE_SCALE

// import input = attend/input.wgsl#f32
// import rotated_rows = attend/rotated_rows.wgsl
// import query_ranges = attend/query_ranges.wgsl
// import query_row = attend/query_row.wgsl#f16

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
// Field groups of a row.
const ROW_FIELDS: u32 = 32u;
// Invocations of a head, a power of two; heads of an invocation, and of a workgroup.
const ROW_INVOCATIONS: u32 = 32u;
const LANE_HEADS: u32 = 4u;
const PREPARED_HEADS: u32 = LANE_HEADS * (INVOCATIONS / ROW_INVOCATIONS);
// log2(e) / √D.
const SCORE_SCALE: f32 = 0.12751743f;

// The largest magnitude, and the bias: [head of an invocation][invocation].
var<workgroup> parts: array<vec2<f32>, LANE_HEADS * INVOCATIONS>;

@compute @workgroup_size(64)
fn prepare_run_query(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let query = prepared[group.x];
    let field = invocation % ROW_INVOCATIONS;
    let first = group.y * PREPARED_HEADS + invocation / ROW_INVOCATIONS * LANE_HEADS;
    let channels = min(field, HEAD_DIM / 4u - 1u);
    let exists = select(0f, SCORE_SCALE, field < HEAD_DIM / 4u);
    var rows: array<vec4<f32>, LANE_HEADS>;
    // unroll
    for (var i = 0u; i < LANE_HEADS; i++) {
        let head = min(first + i, QUERY_HEADS - 1u);
        rows[i] = input4((query.row * QUERY_HEADS + head) * (HEAD_DIM / 4u) + channels) * exists;
    }
    rotate_rows(&rows, invocation, field);
    // unroll
    for (var i = 0u; i < LANE_HEADS; i++) {
        let kv_head = min(first + i, QUERY_HEADS - 1u) / (QUERY_HEADS / KV_HEADS);
        let base = (existing_slot(query.range_slot) * KV_HEADS + kv_head) * HEAD_DIM + channels * 4u;
        let bias = query_bias(rows[i], base);
        rows[i] = scale_query(rows[i], base);
        let magnitude = abs(rows[i]);
        let largest = max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w));
        parts[i * INVOCATIONS + invocation] = vec2<f32>(largest, bias);
    }
    for (var half = ROW_INVOCATIONS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (field < half) {
            // unroll
            for (var i = 0u; i < LANE_HEADS; i++) {
                let own = parts[i * INVOCATIONS + invocation];
                let other = parts[i * INVOCATIONS + invocation + half];
                parts[i * INVOCATIONS + invocation] = vec2<f32>(max(own.x, other.x), own.y + other.y);
            }
        }
    }
    workgroupBarrier();
    // unroll
    for (var i = 0u; i < LANE_HEADS; i++) {
        if (first + i < QUERY_HEADS) {
            let totals = parts[i * INVOCATIONS + invocation / ROW_INVOCATIONS * ROW_INVOCATIONS];
            write_row(group.x * QUERY_HEADS + first + i, field, rows[i], vec4<f32>(totals, 0f, 0f));
        }
    }
}
