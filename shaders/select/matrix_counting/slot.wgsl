// Slot `counting`: the counts of keys at or above each row's threshold. By default nothing is counted.
//
// needs: Chunk
// gives: begin_count, count_tile, end_count

// Begins with row `row` of all query heads, whose products are multiplied with `unit`.
fn begin_count(row: u32, unit: f32) {}

// Counts the tile's keys for column `column`.
fn count_tile(tile: u32, column: u32) {}

// Writes what was counted of the part.
fn end_count(chunk: Chunk, part: u32, kv_head: u32, column: u32) {}
