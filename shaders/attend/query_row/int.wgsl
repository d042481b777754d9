// A prepared query as integers (attend/query_fields.wgsl), then (scale, bias, Σ q, 0).
//
// needs: ROW_FIELDS
// gives: write_row
// binds: 3 rows
// set by plans: QUERY_PLANES

@group(0) @binding(3) var<storage, read_write> rows: array<u32>;

const QUERY_PLANES: u32 = 2u;

// import attend/query_fields.wgsl

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
