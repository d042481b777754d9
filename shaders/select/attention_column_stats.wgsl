// Statistics of every key over the query rows, from rows that stream past invocations or from products of matrices.

// -------- attention_column_stats --------

// attention_column_stats: the attention that every key receives, and how many keys each row needs.
//
//   column_sums[key] = Σ over rows of exp(s − lse),  s = q · k / √HEAD_DIM
//   counts[row] = visible keys of the part with s ≥ max + log_threshold
//
// Column sums are kept per query head, or combined into the sum, mean or maximum over the heads of a group
// (AGGREGATION).
//
// One workgroup owns a part: some tiles of RESIDENT keys of one KV head. An invocation owns a key, and its column sum
// is a register. The query rows of the head's group stream through, STAGED at a time. To count, an invocation writes
// one bit per row, and 16 invocations add up the bits of each row. Every sum has a fixed order. Keys are read once,
// query rows once per tile. Neither scores nor weights are written.
//
// In bounds: as in attention_row_stats; log-sum-exps and sums were checked against the call when they were bound.
//
// binds: 3 row_lse, 4 column_sums
// set by plans: AGGREGATION, ADDS

// import common/ordered.wgsl#larger
// import select/calls.wgsl#stats_call
// import counting = select/counting.wgsl

// By the strides of the call.
@group(0) @binding(3) var<storage, read> row_lse: array<f32>;
// [query_head][key], or [kv_head][key] if aggregated, every `sum_stride` elements.
@group(0) @binding(4) var<storage, read_write> column_sums: array<f32>;

// 0: per query head, 1: sum, 2: mean, 3: maximum.
const AGGREGATION: u32 = 0u;
// 1: sums are added to what is there.
const ADDS: u32 = 0u;

fn write_sum(head: u32, token: u32, sum: f32) {
    let at = head * call.sum_stride + token;
    var before = 0f;
    if (ADDS == 1u) {
        before = column_sums[at];
    }
    column_sums[at] = before + sum;
}

@compute @workgroup_size(128)
fn attention_column_stats(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let part = workgroup.x;
    let kv_head = workgroup.y;
    let first_count = (part * call.kv_heads + kv_head) * call.group * call.rows;
    clear_counts(first_count, invocation);
    for (var t = 0u; t < call.part_tiles; t++) {
        let tile = (part * call.part_tiles + t) * RESIDENT;
        if (tile >= call.tokens) {
            break;
        }
        load_tile(tile, kv_head, invocation);
        let token = tile + invocation;
        var aggregated = 0f;
        for (var g = 0u; g < call.group; g++) {
            let query_head = kv_head * call.group + g;
            var sum = 0f;
            for (var first = 0u; first < call.rows; first += STAGED) {
                // Rows before the tile see none of its keys.
                if (call.positions[min(first + STAGED, call.rows) - 1u] < tile) {
                    continue;
                }
                workgroupBarrier();
                stage_queries(first, query_head, invocation);
                workgroupBarrier();
                var staged_sum = 0f;
                var reached_rows = 0u;
                let rows = min(STAGED, call.rows - first);
                for (var r = 0u; r < rows; r++) {
                    let score = product(r);
                    if (sees(first + r, token)) {
                        let row = query_head * call.rows + first + r;
                        let lse = call.first_lse + query_head * call.lse_head_stride + (first + r) * call.lse_row_stride;
                        let exponent = score - row_lse[lse];
                        // `exp` of NaN is a number on some devices.
                        staged_sum += select(exp(exponent), exponent, is_nan(exponent));
                        reached_rows |= reaches(score, row) << r;
                    }
                }
                sum += staged_sum;
                count_rows(reached_rows, first, first_count + g * call.rows, invocation);
            }
            if (AGGREGATION == 0u) {
                if (token < call.tokens) {
                    write_sum(query_head, token, sum);
                }
            } else if (AGGREGATION == 3u) {
                // Column sums are not negative.
                aggregated = larger(aggregated, sum);
            } else {
                aggregated += sum;
            }
        }
        if (AGGREGATION != 0u && token < call.tokens) {
            write_sum(kv_head, token, aggregated / select(1f, f32(call.group), AGGREGATION == 2u));
        }
    }
}

// -------- attention_column_stats_matrix --------

// attention_column_stats_matrix: `attention_column_stats` of f16 keys with cooperative matrices.
//
//   column_sums[key] = Σ over rows of exp(s − lse),  s = q · k / √HEAD_DIM
//   counts[row] = visible keys of the part with s ≥ max + log_threshold
//
// One workgroup owns a part: some tiles of TILE keys of one KV head. Its subgroups keep a chunk of query rows
// (select/stats_matrix.wgsl) while all tiles of the part stream through. If a group has more rows than a chunk, the
// tiles stream through again, and each invocation adds to the column sums that it wrote before. A lane owns a key of
// the tile and adds the weights of the subgroup's columns, head by head. Then one subgroup adds the parts of each head,
// in order. To count, a lane owns a column and counts it over all tiles in a register. Every sum has a fixed order.
// There are two barriers per tile:
//
//   scores -> workgroup memory | next keys, sums of subgroups -> workgroup memory | column sums -> memory
//
// In bounds: as select/stats_matrix.wgsl; column sums stay within the heads and tokens of the call.
//
// gives: last_seen
// binds: 4 row_lse, 5 column_sums
// set by plans: AGGREGATION

// import common/ordered.wgsl#larger
// import select/stats_matrix.wgsl
// import counting = select/matrix_counting.wgsl

// [query_head][row].
@group(0) @binding(4) var<storage, read> row_lse: array<f32>;
// [query_head][key], or [kv_head][key] if aggregated.
@group(0) @binding(5) var<storage, read_write> column_sums: array<f32>;

// 0: per query head, 1: sum, 2: mean, 3: maximum.
const AGGREGATION: u32 = 0u;
// Maximum number of heads in a chunk.
const CHUNK_HEADS: u32 = 16u;
const PARTIAL_SUMS: u32 = (SUBGROUPS + CHUNK_HEADS) * 32u;

// For each column: the factor of its products, and its log-sum-exp, both in powers of two.
var<workgroup> columns: array<vec2<f32>, COLUMNS>;
var<workgroup> last_seen: array<u32, COLUMNS>;
// [subgroup + head][key]. A head that continues in the next subgroup has one sum in each.
var<workgroup> partial_sums: array<f32, PARTIAL_SUMS>;

fn note_column(chunk: Chunk, index: u32, kv_head: u32, column: u32) {
    let row = chunk.first_row + column % chunk.rows;
    if (column < chunk.columns) {
        let query_head = kv_head * call.group + chunk.first_head + column / chunk.rows;
        let unit = units[(kv_head * call.chunks + index) * COLUMNS + column];
        columns[column] = vec2<f32>(unit, row_lse[query_head * call.rows + row]) * LOG2_E;
        last_seen[column] = call.positions[row];
        begin_count(query_head * call.rows + row, unit);
    }
}

fn weight(column: u32, lane: u32) -> f32 {
    let of_column = columns[column];
    let exponent = scores[column * SCORE_COLUMN + lane / 4u][lane % 4u] * of_column.x - of_column.y;
    // `exp2` of NaN is a number on some devices.
    return select(exp2(exponent), exponent, is_nan(exponent));
}

// Sums, for the lane's key, of the subgroup's columns.
fn add_columns(chunk: Chunk, tile: u32, team: u32, lane: u32, all_seen: bool) {
    let end = min(team * 32u + 32u, chunk.columns);
    var column = team * 32u;
    for (var head = column / chunk.rows; head * chunk.rows < end; head++) {
        let head_end = min(end, (head + 1u) * chunk.rows);
        var sum = 0f;
        if (all_seen) {
            for (; column + 4u <= head_end; column += 4u) {
                let pair = weight(column, lane) + weight(column + 1u, lane);
                sum += pair + (weight(column + 2u, lane) + weight(column + 3u, lane));
            }
        }
        for (; column < head_end; column++) {
            sum += select(0f, weight(column, lane), tile + lane <= last_seen[column]);
        }
        partial_sums[(team + head) * 32u + lane] = sum;
    }
}

// The sum of a head for the lane's key.
fn sum_of_head(chunk: Chunk, head: u32, lane: u32) -> f32 {
    var sum = 0f;
    let last = (head * chunk.rows + chunk.rows - 1u) / 32u;
    for (var team = head * chunk.rows / 32u; team <= last; team++) {
        sum += partial_sums[(team + head) * 32u + lane];
    }
    return sum;
}

fn write_columns(chunk: Chunk, token: u32, kv_head: u32, team: u32, lane: u32) {
    if (token >= call.tokens) {
        return;
    }
    if (AGGREGATION == 0u) {
        for (var head = team; head < chunk.heads; head += SUBGROUPS) {
            let at = (kv_head * call.group + chunk.first_head + head) * call.tokens + token;
            var sum = sum_of_head(chunk, head, lane);
            if (chunk.first_row > 0u) {
                sum += column_sums[at];
            }
            column_sums[at] = sum;
        }
    } else if (team == 0u) {
        let at = kv_head * call.tokens + token;
        // Column sums are not negative.
        var aggregated = 0f;
        if (chunk.first_head + chunk.first_row > 0u) {
            aggregated = column_sums[at];
        }
        for (var head = 0u; head < chunk.heads; head++) {
            let sum = sum_of_head(chunk, head, lane);
            if (AGGREGATION == 3u) {
                aggregated = larger(aggregated, sum);
            } else {
                aggregated += sum / select(1f, f32(call.group), AGGREGATION == 2u);
            }
        }
        column_sums[at] = aggregated;
    }
}

@compute @workgroup_size(INVOCATIONS)
fn attention_column_stats_matrix(@builtin(workgroup_id) workgroup: vec3<u32>, numbering: Numbering) {
    let part = workgroup.x;
    let kv_head = workgroup.y;
    let invocation = number(numbering);
    let lane = invocation % 32u;
    let team = invocation / 32u;
    let end = end_of_part(part);
    let end_token = min(end * TILE, call.tokens);
    var rows: array<Right, ROW_MATRICES>;
    for (var index = 0u; index < call.chunks; index++) {
        let chunk = chunk_of(index);
        load_rows(&rows, index, kv_head, team);
        load_keys(part * call.part_tiles * TILE, end_token, kv_head, invocation);
        note_column(chunk, index, kv_head, invocation);
        store_keys(invocation);
        workgroupBarrier();
        // A key that the first row of the chunk sees is seen by all rows. A key that the last row does not see is seen
        // by none.
        let first_seen = call.positions[chunk.first_row];
        let most_seen = call.positions[chunk.first_row + chunk.rows - 1u];
        for (var t = part * call.part_tiles; t < end; t++) {
            let tile = t * TILE;
            load_keys(tile + TILE, end_token, kv_head, invocation);
            if (tile <= most_seen) {
                score_tile(&rows, team);
            }
            workgroupBarrier();
            store_keys(invocation);
            add_columns(chunk, tile, team, lane, tile + TILE - 1u <= first_seen);
            count_tile(tile, invocation);
            workgroupBarrier();
            write_columns(chunk, tile + lane, kv_head, team, lane);
        }
        end_count(chunk, part, kv_head, invocation);
    }
}
