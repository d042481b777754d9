// Scores that `scores` stored, calibrated: score' = slope · score + offset, one map per prepared query and query head.
//
// needs: HEADS, LANE_TOKENS, LOG2_E, QUERY_HEADS, TILE_TOKENS, WorkItem, query_head, token_scores
// gives: load_query, score_tile
// binds: 2 stored_scores, 3 extremes
// set by plans: TAU_1, TAU_2

// import common/ordered.wgsl

// Natural-log scores [query head][token], tile after tile. The tiles of an item follow its first one.
@group(0) @binding(2) var<storage, read> stored_scores: array<f32>;
// Largest score and largest negated score of every prepared query and query head, ordered.
@group(0) @binding(3) var<storage, read> extremes: array<vec2<u32>>;

const TAU_1: f32 = 0f;
const TAU_2: f32 = 0f;

// Slope and offset of every head, in units of log2.
var<private> score_maps: array<vec2<f32>, HEADS>;
var<private> score_rows: array<u32, HEADS>;

fn load_query(item: WorkItem, y: u32, invocation: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let row = query_head(y, head);
        let extreme = extremes[min(item.query, arrayLength(&extremes) / QUERY_HEADS - 1u) * QUERY_HEADS + row];
        let largest = from_ordered(extreme.x);
        let smallest = -from_ordered(extreme.y);
        let low = smallest - TAU_1;
        // Equal scores (for example of a single token) all go to the lower end, because the formula would divide by
        // 1e-8.
        let spread = largest - smallest;
        let slope = select(max((largest - TAU_2 - low) / (spread + 1e-8f), 0f), 0f, spread == 0f);
        score_maps[head] = vec2<f32>(slope, low - slope * smallest) * LOG2_E;
        score_rows[head] = row;
    }
}

fn score_tile(item: WorkItem, tile: u32, lane: u32) {
    let first = min(item.scores + tile, arrayLength(&stored_scores) / (QUERY_HEADS * TILE_TOKENS) - 1u) * QUERY_HEADS;
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            let score = stored_scores[(first + score_rows[head]) * TILE_TOKENS + i * 32u + lane];
            token_scores[head * LANE_TOKENS + i] = score_maps[head].x * score + score_maps[head].y;
        }
    }
}
