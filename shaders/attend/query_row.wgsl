// Slot `query_row`: the storage of a prepared query.
//
// Every choice has
//   fn write_row(row: u32, field: u32, scaled: vec4<f32>, totals: vec4<f32>)
//     four channels of a row; `totals` are the largest magnitude, the bias and Σ q of the row

// -------- f16 --------

// A prepared query in f16 for `attend_run`, divided by a power of two so that its largest element is at least LARGEST
// and less than twice as much. Elements that are exact in f16 stay exact. Its constants are the factor that turns its
// products into scores, and the bias of the score. Rows lie as [KV head][prepared query][head of the group]. Behind
// them are RUN_ROWS unused rows, so that whole blocks of rows can be read at the end.
//
// In bounds: the plan made both sections for the prepared queries and RUN_ROWS more.
//
// needs: KV_HEADS, QUERY_HEADS, ROW_FIELDS
// gives: write_row
// binds: 3 rows, 5 row_constants

@group(0) @binding(3) var<storage, read_write> rows: array<vec2<u32>>;
@group(0) @binding(5) var<storage, read_write> row_constants: array<vec2<f32>>;

const LARGEST: f32 = 16384f;
// Maximum number of rows of an item.
const RUN_ROWS: u32 = 256u;

fn write_row(row: u32, field: u32, scaled: vec4<f32>, totals: vec4<f32>) {
    let group = QUERY_HEADS / KV_HEADS;
    let sections = min(arrayLength(&row_constants), arrayLength(&rows) / ROW_FIELDS);
    let prepared_queries = (sections - RUN_ROWS) / QUERY_HEADS;
    let head = row % QUERY_HEADS;
    let at = (head / group * prepared_queries + row / QUERY_HEADS) * group + head % group;
    let unit = bitcast<f32>(clamp(bitcast<u32>(totals.x) & 0x7f800000u, 0x10000000u, 0x70000000u));
    if (field < ROW_FIELDS) {
        let halves = scaled / unit * LARGEST;
        rows[at * ROW_FIELDS + field] = vec2<u32>(pack2x16float(halves.xy), pack2x16float(halves.zw));
    }
    if (field == 0u) {
        row_constants[at] = vec2<f32>(unit / LARGEST, totals.y);
    }
}

// -------- f32 --------

// A prepared query as f32, followed by four unused constants.
//
// needs: ROW_FIELDS
// gives: write_row
// binds: 3 rows

@group(0) @binding(3) var<storage, read_write> rows: array<vec4<f32>>;

const ROW: u32 = ROW_FIELDS + 1u;

fn write_row(row: u32, field: u32, scaled: vec4<f32>, totals: vec4<f32>) {
    if (field < ROW_FIELDS) {
        rows[row * ROW + field] = scaled;
    }
}

// -------- int --------

// A prepared query as integers (attend/prepared_query.wgsl#query_fields), then (scale, bias, Σ q, 0).
//
// needs: ROW_FIELDS
// gives: write_row
// binds: 3 rows
// set by plans: QUERY_PLANES

// import attend/prepared_query.wgsl#query_fields

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
