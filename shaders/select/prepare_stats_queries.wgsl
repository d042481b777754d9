// prepare_stats_queries: query rows as the right operands of cooperative matrices.
//
//   row = Σ over parts of halves · unit,  so that products of the halves with a key, times units[column], are its scores
//
// The unit is the power of two that brings the largest element of the row between 2^14 and 2^15. Elements that f16
// holds exactly stay exact, and two summands keep 22 bits of f32 elements.
//
// A workgroup owns a column of a chunk (select/calls.wgsl#matrix_call); an invocation owns four of its channels.
// Columns that do not exist are zeros.
//
// In bounds: the grid is one workgroup for each column of each chunk of each KV head, for which the plan made
// `prepared` and `units`; rows and heads of a column that exists are below the call's, and the queries were
// checked against it.
//
// binds: 1 prepared, 3 units

// import select/calls.wgsl#matrix_call
// import queries = select/queries.wgsl#f32

@group(0) @binding(1) var<storage, read_write> prepared: array<Half4>;
@group(0) @binding(3) var<storage, read_write> units: array<f32>;

// The largest element in f16 is at least this, and less than twice as much.
const LARGEST: f32 = 16384f;
const LANES: u32 = 32u;

var<workgroup> magnitudes: array<f32, LANES>;

@compute @workgroup_size(32)
fn prepare_stats_queries(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let column = workgroup.x;
    let kv_head = workgroup.z;
    let chunk = chunk_of(workgroup.y);
    var q = vec4<f32>();
    if (lane < VECTORS && column < chunk.columns) {
        let row = chunk.first_row + column % chunk.rows;
        let query_head = kv_head * call.group + chunk.first_head + column / chunk.rows;
        let at = call.first_query + row * call.query_token_stride + query_head * call.query_head_stride + lane * 4u;
        q = vec4<f32>(query_element(at), query_element(at + 1u), query_element(at + 2u), query_element(at + 3u));
    }
    let magnitude = abs(q);
    magnitudes[lane] = max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w));
    workgroupBarrier();
    var largest = 0f;
    for (var i = 0u; i < LANES; i++) {
        largest = max(largest, magnitudes[i]);
    }
    // The power of two below the largest magnitude.
    let unit = bitcast<f32>(clamp(bitcast<u32>(largest) & 0x7f800000u, 0x10000000u, 0x70000000u));
    let at = (kv_head * call.chunks + workgroup.y) * COLUMNS + column;
    if (lane == 0u) {
        units[at] = unit * (call.scale / LARGEST);
    }
    if (lane < VECTORS) {
        var rest = q / unit * LARGEST;
        // unroll
        for (var part = 0u; part < QUERY_PARTS; part++) {
            // A driver may treat a conversion and its inverse as nothing, and the rest as zero.
            let rounded = quantizeToF16(rest);
            prepared[at * COLUMN_VECTORS + part * VECTORS + lane] = Half4(rounded);
            rest -= rounded;
        }
    }
}
