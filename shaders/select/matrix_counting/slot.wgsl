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
