// Slot `run_queries`: the rows of the kernels that take many queries with cooperative matrices.
//
// Every choice has
//   fn first_row(item: WorkItem, kv_head: u32) -> u32
//     where the item's rows for a KV head begin, by the choice's own count
//   fn load_rows(rows: ptr<function, array<Left, ROW_BLOCKS * STEPS>>, item: WorkItem, first: u32, team: u32, lane: u32)
//     the subgroup's rows; by all subgroups, before anything is in the memory of weights
//   fn constants_of(row: u32) -> vec2<f32>
//     the factor that turns a row's products into scores, and the bias of its scores

// -------- given --------

// The queries as the caller gave them, in f16. Keys in f16 have no ranges to multiply with, so that products of given
// queries are exact. Rows pass through the memory of weights, 16 channels at a time. Reading them does not wait for a
// launch that prepares them, and nothing is written and read once more.
//
// needs: HEAD_DIM, Half4, Left, OWN_ROWS, ROW_BLOCKS, STEPS, WEIGHT_ROW, WorkItem, input_row, row_weights
// gives: first_row, load_rows, constants_of

// import input = attend/input.wgsl#f32

// log2(e) / √D.
const SCORE_SCALE: f32 = 0.12751743f;
// Vectors of 16 channels of the subgroup's rows that a lane moves.
const LANE_VECTORS: u32 = OWN_ROWS / 8u;

// Rows are counted within the item: their KV head says where they are.
fn first_row(item: WorkItem, kv_head: u32) -> u32 {
    return kv_head;
}

fn load_rows(rows: ptr<function, array<Left, ROW_BLOCKS * STEPS>>, item: WorkItem, first: u32, team: u32, lane: u32) {
    var halves: array<Half4, STEPS * LANE_VECTORS>;
    // unroll
    for (var i = 0u; i < LANE_VECTORS; i++) {
        let row = input_row(item, first, team * OWN_ROWS + i * 8u + lane / 4u) * (HEAD_DIM / 4u);
        // unroll
        for (var step = 0u; step < STEPS; step++) {
            halves[step * LANE_VECTORS + i] = Half4(input4(row + step * 4u + lane % 4u));
        }
    }
    // unroll
    for (var step = 0u; step < STEPS; step++) {
        // unroll
        for (var i = 0u; i < LANE_VECTORS; i++) {
            let to = (team * OWN_ROWS + i * 8u + lane / 4u) * WEIGHT_ROW + lane % 4u;
            row_weights[to] = halves[step * LANE_VECTORS + i];
        }
        workgroupBarrier();
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            let at = (team * OWN_ROWS + block * 16u) * WEIGHT_ROW;
            (*rows)[block * STEPS + step] = coopLoadT<Left>(&row_weights[at], WEIGHT_ROW);
        }
        workgroupBarrier();
    }
}

fn constants_of(row: u32) -> vec2<f32> {
    return vec2<f32>(SCORE_SCALE, 0f);
}

// -------- prepared --------

// The rows that `prepare_run_query` wrote.
//
// needs: GROUP, HEAD_DIM, Half4, Left, OWN_ROWS, QUERY_HEADS, ROW_BLOCKS, STEPS, WorkItem
// gives: first_row, load_rows, constants_of
// binds: 2 run_queries, 10 run_constants

// [KV head][prepared query][head of the group], and their constants: see attend/query_row.wgsl#f16.
@group(0) @binding(2) var<storage, read> run_queries: array<Half4>;
@group(0) @binding(10) var<storage, read> run_constants: array<vec2<f32>>;

// Unused rows behind the prepared ones.
const RUN_ROWS: u32 = 256u;
// Vectors of four of a prepared query.
const QUERY_ROW: u32 = HEAD_DIM / 4u;

// Row of the item's first query among the prepared ones of a KV head.
fn first_row(item: WorkItem, kv_head: u32) -> u32 {
    let sections = min(arrayLength(&run_constants), arrayLength(&run_queries) / QUERY_ROW);
    let prepared_queries = (sections - RUN_ROWS) / QUERY_HEADS;
    return (kv_head * prepared_queries + item.query) * GROUP;
}

fn load_rows(rows: ptr<function, array<Left, ROW_BLOCKS * STEPS>>, item: WorkItem, first: u32, team: u32, lane: u32) {
    let last = arrayLength(&run_queries) / QUERY_ROW - RUN_ROWS;
    let own = min(first, last) + team * OWN_ROWS;
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        // unroll
        for (var step = 0u; step < STEPS; step++) {
            let at = (own + block * 16u) * QUERY_ROW + step * 4u;
            (*rows)[block * STEPS + step] = coopLoadT<Left>(&run_queries[at], QUERY_ROW);
        }
    }
}

fn constants_of(row: u32) -> vec2<f32> {
    return run_constants[min(row, arrayLength(&run_constants) - 1u)];
}
