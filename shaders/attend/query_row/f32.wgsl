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
