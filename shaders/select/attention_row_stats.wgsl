// Statistics of every query row over the keys, from rows that stream past invocations or from products of matrices.

// -------- attention_row_stats --------

// attention_row_stats: the largest score of every query row, and the sum of the exponentials of its scores, over the
// keys of one part.
//
//   s = q · k / √HEAD_DIM,  max = max s,  sum = Σ exp(s − max)  over visible keys of the part
//
// One workgroup owns a part: some tiles of RESIDENT keys of one KV head. An invocation owns a key, and the query rows
// of the head's group stream through, STAGED at a time. The scores are collected in workgroup memory, where 16
// invocations reduce each row in a fixed order. `partials` holds the statistics of a row over the part so far, and one
// invocation owns them. Keys are read once, query rows once per tile. No scores are written.
//
// In bounds: part and head are below the grid's, which the plan made; rows, tokens and positions are checked where they
// are read, and tensors and partials were checked against the call when they were bound. Loops are bounded by the call.
//
// binds: 3 partials

// import select/calls.wgsl#stats_call

// (max, sum) as [part][query_head][row].
@group(0) @binding(3) var<storage, read_write> partials: array<vec2<f32>>;

const LANES: u32 = RESIDENT / STAGED;
const SCORES: u32 = STAGED * RESIDENT;

var<workgroup> scores: array<f32, SCORES>;
var<workgroup> lane_stats: array<vec2<f32>, RESIDENT>;

@compute @workgroup_size(128)
fn attention_row_stats(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let part = workgroup.x;
    let kv_head = workgroup.y;
    let own_row = invocation / LANES;
    let lane = invocation % LANES;
    let first_partial = (part * call.kv_heads + kv_head) * call.group * call.rows;
    // The invocation that adds to a row also clears it: barriers of a workgroup do not order storage.
    for (var g = 0u; g < call.group && lane == 0u; g++) {
        for (var row = own_row; row < call.rows; row += STAGED) {
            partials[first_partial + g * call.rows + row] = vec2<f32>(LOWEST, 0f);
        }
    }
    for (var t = 0u; t < call.part_tiles; t++) {
        let tile = (part * call.part_tiles + t) * RESIDENT;
        if (tile >= call.tokens) {
            break;
        }
        load_tile(tile, kv_head, invocation);
        for (var g = 0u; g < call.group; g++) {
            for (var first = 0u; first < call.rows; first += STAGED) {
                // Rows before the tile see none of its keys.
                if (call.positions[min(first + STAGED, call.rows) - 1u] < tile) {
                    continue;
                }
                workgroupBarrier();
                stage_queries(first, kv_head * call.group + g, invocation);
                workgroupBarrier();
                let rows = min(STAGED, call.rows - first);
                for (var r = 0u; r < rows; r++) {
                    scores[r * RESIDENT + invocation] = select(LOWEST, product(r), sees(first + r, tile + invocation));
                }
                workgroupBarrier();
                lane_stats[invocation] = stats_of_lane(own_row, lane);
                workgroupBarrier();
                let row = first + own_row;
                if (lane == 0u && row < call.rows) {
                    let at = first_partial + g * call.rows + row;
                    partials[at] = joined(partials[at], own_row);
                }
            }
        }
    }
}

// Maximum and sum of a lane's share of a row: every LANES-th key.
fn stats_of_lane(row: u32, lane: u32) -> vec2<f32> {
    var largest = LOWEST;
    for (var i = lane; i < RESIDENT; i += LANES) {
        largest = max(largest, scores[row * RESIDENT + i]);
    }
    var sum = 0f;
    if (largest > LOWEST) {
        for (var i = lane; i < RESIDENT; i += LANES) {
            sum += exp(scores[row * RESIDENT + i] - largest);
        }
    }
    return vec2<f32>(largest, sum);
}

// The statistics so far, combined in order with those of the row's lanes.
fn joined(before: vec2<f32>, row: u32) -> vec2<f32> {
    var largest = before.x;
    for (var i = 0u; i < LANES; i++) {
        largest = max(largest, lane_stats[row * LANES + i].x);
    }
    var sum = before.y * exp(before.x - largest);
    for (var i = 0u; i < LANES; i++) {
        let stats = lane_stats[row * LANES + i];
        sum += stats.y * exp(stats.x - largest);
    }
    return vec2<f32>(largest, sum);
}

// -------- attention_row_stats_matrix --------

// attention_row_stats_matrix: `attention_row_stats` of f16 keys with cooperative matrices.
//
//   s = q · k / √HEAD_DIM,  max = max s,  sum = Σ exp(s − max)  over visible keys of the part
//
// One workgroup owns a part: some tiles of TILE keys of one KV head. Its subgroups keep a chunk of query rows
// (select/stats_matrix.wgsl) while all tiles of the part stream through. An invocation owns a column, keeps its maximum
// and sum in registers, and reads its scores of a tile from workgroup memory. There are two barriers per tile.
//
// In bounds: as select/stats_matrix.wgsl; the plan made `partials` for the grid's parts and the call's rows.
//
// binds: 4 partials

// import select/stats_matrix.wgsl

// (max, sum) as [part][query_head][row].
@group(0) @binding(4) var<storage, read_write> partials: array<vec2<f32>>;

// The largest product, and the sum of exponentials relative to it.
var<private> largest: f32;
var<private> sum: f32;

// Adds the column's scores of a tile. `unit` is in powers of two.
fn take_tile(tile: u32, column: u32, unit: f32, last_seen: u32) {
    var s: array<vec4<f32>, TILE / 4u>;
    var high = vec4<f32>(largest);
    // unroll
    for (var i = 0u; i < TILE / 4u; i++) {
        let token = vec4<u32>(tile + i * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
        let sees = token <= vec4<u32>(last_seen);
        s[i] = select(vec4<f32>(LOWEST), scores[column * SCORE_COLUMN + i], sees);
        high = max(high, s[i]);
    }
    let new_largest = max(max(high.x, high.y), max(high.z, high.w));
    // A row has no sum before the first key that it sees.
    if (new_largest > LOWEST) {
        var sums = vec4<f32>();
        // unroll
        for (var i = 0u; i < TILE / 4u; i++) {
            sums += exp2((s[i] - vec4<f32>(new_largest)) * unit);
        }
        sum = sum * exp2((largest - new_largest) * unit) + ((sums.x + sums.y) + (sums.z + sums.w));
        largest = new_largest;
    }
}

@compute @workgroup_size(INVOCATIONS)
fn attention_row_stats_matrix(@builtin(workgroup_id) workgroup: vec3<u32>, numbering: Numbering) {
    let part = workgroup.x;
    let kv_head = workgroup.y;
    let invocation = number(numbering);
    let team = invocation / 32u;
    let end = end_of_part(part);
    let end_token = min(end * TILE, call.tokens);
    var rows: array<Right, ROW_MATRICES>;
    for (var index = 0u; index < call.chunks; index++) {
        let chunk = chunk_of(index);
        load_rows(&rows, index, kv_head, team);
        load_keys(part * call.part_tiles * TILE, end_token, kv_head, invocation);
        // Columns that do not exist hold zeros.
        let unit = units[(kv_head * call.chunks + index) * COLUMNS + invocation];
        let row = chunk.first_row + invocation % chunk.rows;
        let last_seen = call.positions[row];
        // A key that the last row does not see is seen by no row.
        let most_seen = call.positions[chunk.first_row + chunk.rows - 1u];
        largest = LOWEST;
        sum = 0f;
        store_keys(invocation);
        workgroupBarrier();
        for (var t = part * call.part_tiles; t < end; t++) {
            let tile = t * TILE;
            load_keys(tile + TILE, end_token, kv_head, invocation);
            if (tile <= most_seen) {
                score_tile(&rows, team);
            }
            workgroupBarrier();
            store_keys(invocation);
            take_tile(tile, invocation, unit * LOG2_E, last_seen);
            workgroupBarrier();
        }
        if (invocation < chunk.columns) {
            let query_head = kv_head * call.group + chunk.first_head + invocation / chunk.rows;
            let of_row = (part * call.kv_heads * call.group + query_head) * call.rows + row;
            partials[of_row] = vec2<f32>(select(LOWEST, largest * unit, largest > LOWEST), sum);
        }
    }
}
