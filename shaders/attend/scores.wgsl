// scores: q · k / √D of packed keys (CalibQuant, Algorithm 1), with the extremes that calibration needs.
//
// Writes the natural-log score of every token of a work item for HEADS query heads. Records their largest score and
// largest negated score in the extremes of the query over the span. Items have one query.
//
// A team of 32 lanes owns a tile; a lane owns four of its tokens. There are no barriers in the loop. Keys are read once
// per chunk of query heads, and 4 bytes are written per token and query head.
//
// In bounds: as `attend`; scores have room for every tile that a query sees, extremes for every prepared query.
//
// gives: pages
// binds: 5 stored_scores, 6 extremes

// import attend/work_item.wgsl
// import step_scores = attend/step_scores.wgsl#dot
// import common/ordered.wgsl#ordered

// Natural-log scores [query head][token], tile after tile. The tiles of an item follow its first one.
@group(0) @binding(5) var<storage, read_write> stored_scores: array<f32>;
// Largest score and largest negated score of every prepared query and query head, ordered; `prepare_query` resets them.
@group(0) @binding(6) var<storage, read_write> extremes: array<atomic<u32>>;

var<workgroup> item_extremes: array<atomic<u32>, 2u * HEADS>;

var<private> largest: array<f32, HEADS>;
var<private> smallest: array<f32, HEADS>;

fn pages() -> u32 {
    return key_pages();
}

@compute @workgroup_size(128)
fn scores(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    if (!has_item(group)) {
        return;
    }
    let item = item_of(group);
    let lane = invocation % 32u;
    let tiles = (item.tokens + TILE_TOKENS - 1u) / TILE_TOKENS;
    keep_tile_base(read_tile_base(item.page_offset, tiles, group.x / CHUNKS, invocation), tiles, invocation);
    load_query(item, group.x, invocation);
    if (invocation < 2u * HEADS) {
        atomicStore(&item_extremes[invocation], 0u);
    }
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        largest[head] = LOWEST;
        smallest[head] = -LOWEST;
    }
    workgroupBarrier();

    for (var tile = invocation / 32u; tile < tiles; tile += STEP_TILES) {
        score_tile(item, tile, lane);
        let first = min(item.scores + tile, arrayLength(&stored_scores) / (QUERY_HEADS * TILE_TOKENS) - 1u) * QUERY_HEADS;
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            if (tile * TILE_TOKENS + i * 32u + lane < item.tokens) {
                // unroll
                for (var head = 0u; head < HEADS; head++) {
                    let score = token_scores[head * LANE_TOKENS + i] * LN_2;
                    stored_scores[(first + query_head(group.x, head)) * TILE_TOKENS + i * 32u + lane] = score;
                    largest[head] = max(largest[head], score);
                    smallest[head] = min(smallest[head], score);
                }
            }
        }
    }
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        atomicMax(&item_extremes[head * 2u], ordered(largest[head]));
        atomicMax(&item_extremes[head * 2u + 1u], ordered(-smallest[head]));
    }
    workgroupBarrier();
    if (invocation < 2u * HEADS) {
        let row = min(item.query, arrayLength(&extremes) / (2u * QUERY_HEADS) - 1u) * QUERY_HEADS + query_head(group.x, invocation / 2u);
        atomicMax(&extremes[row * 2u + invocation % 2u], atomicLoad(&item_extremes[invocation]));
    }
}
