// Slot `counting`: counts the keys at or above each row's threshold. The default counts nothing.
//
// needs: Chunk
// gives: begin_count, count_tile, end_count

// Begins row `row` of all query heads. `unit` is the factor of its products.
fn begin_count(row: u32, unit: f32) {}

// Counts the tile's keys for column `column`.
fn count_tile(tile: u32, column: u32) {}

// Writes the counts of the part.
fn end_count(chunk: Chunk, part: u32, kv_head: u32, column: u32) {}

// -------- rows --------

// Counts the keys at or above each row's threshold. An invocation owns a column.
//
// needs: Chunk, SCORE_COLUMN, TILE, call, last_seen, scores
// gives: begin_count, count_tile, end_count
// binds: 6 row_max, 7 count_partials

// [query_head][row].
@group(0) @binding(6) var<storage, read> row_max: array<f32>;
// [part][query_head][row].
@group(0) @binding(7) var<storage, read_write> count_partials: array<u32>;

var<private> count: u32;
// The factor of the column's products, and the least score that counts.
var<private> count_unit: f32;
var<private> least: f32;

fn begin_count(row: u32, unit: f32) {
    count = 0u;
    count_unit = unit;
    least = row_max[row] + call.log_threshold;
}

fn count_tile(tile: u32, column: u32) {
    for (var i = 0u; i < TILE / 4u; i++) {
        let score = scores[column * SCORE_COLUMN + i] * count_unit;
        let token = vec4<u32>(tile + i * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
        let counts = (score >= vec4<f32>(least)) & (token <= vec4<u32>(last_seen[column]));
        let ones = select(vec4<u32>(), vec4<u32>(1u), counts);
        count += (ones.x + ones.y) + (ones.z + ones.w);
    }
}

fn end_count(chunk: Chunk, part: u32, kv_head: u32, column: u32) {
    if (column < chunk.columns) {
        let query_head = kv_head * call.group + chunk.first_head + column / chunk.rows;
        let row = chunk.first_row + column % chunk.rows;
        count_partials[(part * call.kv_heads * call.group + query_head) * call.rows + row] = count;
    }
}
