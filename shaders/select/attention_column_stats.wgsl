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
                        staged_sum += exp(score - row_lse[lse]);
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
                aggregated = max(aggregated, sum);
            } else {
                aggregated += sum;
            }
        }
        if (AGGREGATION != 0u && token < call.tokens) {
            write_sum(kv_head, token, aggregated / select(1f, f32(call.group), AGGREGATION == 2u));
        }
    }
}
