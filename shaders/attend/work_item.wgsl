// A work item: a run of tiles of one span and some neighbouring queries, for one KV head and HEADS of the query heads
// that share it: all those of up to QUERIES queries, or, where QUERIES is 1, a chunk of one query's.
//
// Workgroup (y, x): item x (unless the slot `item_of` says otherwise), KV head y / CHUNKS, heads (y % CHUNKS) * HEADS onwards of its group. What reads the same
// keys and values starts together, and the items start in the order of the plan.
// 128 invocations form four teams of 32. A team owns one of the four tiles of a step; lane r of it owns the tile's
// tokens r, r + 32, r + 64, r + 96. (A team is a subgroup, or part of one, only where invocations are numbered by
// attend/numbering.wgsl#subgroup, as for shuffles and matrices; nothing else depends on how the device forms those.)
//
// Tables are read from memory that a caller may have written. What is read becomes an index only after it was
// clamped to what exists, here once for an item and where rows are addressed, so that no table, whatever it holds,
// leads out of bounds.
//
// needs: pages
// gives: WorkItem, items, page_table, TILE_TOKENS, INVOCATIONS, STEP_TILES, LANE_TOKENS, HEAD_DIM, KV_HEADS,
//   QUERY_HEADS, GROUP, QUERIES, HEADS, CHUNKS, MAX_TILES, LOG2_E, LN_2, LOWEST, tile_bases, token_scores, read_item,
//   read_tile_base, keep_tile_base, query_head, query_of, head_exists, input_row, prepared_row, set_scores_lowest
// binds: 0 items, 1 page_table
// set by plans: INVOCATIONS, HEAD_DIM, KV_HEADS, QUERY_HEADS, QUERIES, HEADS, CHUNKS, MAX_TILES

// import item_of = attend/item_of.wgsl

struct WorkItem {
    page_offset: u32,
    tokens: u32,
    // First of its prepared queries.
    query: u32,
    // Row of states of its first query, and from there to the next query's.
    state: u32,
    range_slot: u32,
    // First of its queries in the tensor.
    row: u32,
    first_state: u32,
    states: u32,
    queries: u32,
    stride: u32,
    // First tile of its stored scores; of a masked item, where its bits begin in the page table, or the tokens at its
    // beginning that are hidden.
    scores: u32,
    // Tokens at its end that the first query does not see; each further one sees one more. Read by `attend_run`, and
    // where workgroups take the queries of an item one by one.
    later: u32,
    // From `scores` of a query to that of the next.
    score_stride: u32,
}

@group(0) @binding(0) var<storage, read> items: array<WorkItem>;
@group(0) @binding(1) var<storage, read> page_table: array<u32>;

const TILE_TOKENS: u32 = 128u;
const INVOCATIONS: u32 = 128u;
const STEP_TILES: u32 = 4u;
const LANE_TOKENS: u32 = 4u;

const HEAD_DIM: u32 = 128u;
const KV_HEADS: u32 = 8u;
const QUERY_HEADS: u32 = 32u;
const GROUP: u32 = QUERY_HEADS / KV_HEADS;
// Most queries of an item.
const QUERIES: u32 = 1u;
// Heads of one workgroup, those of all its queries, and workgroups that share the query heads of a KV head.
const HEADS: u32 = 4u;
const CHUNKS: u32 = 1u;
// Most tiles of an item.
const MAX_TILES: u32 = 64u;

const LOG2_E: f32 = 1.4426950408889634f;
const LN_2: f32 = 0.6931471805599453f;
// The score of a token that does not exist: exp2 of it is 0 beside any real score.
const LOWEST: f32 = -1e30f;

// Tile index, in tiles from the start of the shard, of every tile of the item.
var<workgroup> tile_bases: array<u32, MAX_TILES>;

// Scores of the invocation's tokens, in units of log2: [head][token].
var<private> token_scores: array<f32, HEADS * LANE_TOKENS>;

// An item of at least one token and query, and at most MAX_TILES and QUERIES.
fn read_item(index: u32) -> WorkItem {
    var item = items[index];
    item.tokens = clamp(item.tokens, 1u, MAX_TILES * TILE_TOKENS);
    item.queries = clamp(item.queries, 1u, QUERIES);
    return item;
}

// An item starts with reads that do not depend on each other: of pages, queries and ranges. They are written without a
// branch, and nothing is stored before all are under way, so that it waits for the slowest and not for one
// after the other.

// The index of tile `invocation`, of the last tile where there is no such tile. MAX_TILES is at most INVOCATIONS.
fn read_tile_base(page_offset: u32, tiles: u32, kv_head: u32, invocation: u32) -> u32 {
    let page = page_table[min(page_offset + min(invocation, tiles - 1u), arrayLength(&page_table) - 1u)];
    return min(page, pages() - 1u) * KV_HEADS + kv_head;
}

fn keep_tile_base(tile_base: u32, tiles: u32, invocation: u32) {
    if (invocation < tiles) {
        tile_bases[invocation] = tile_base;
    }
}

// Query head of head `head` of the workgroup. The last chunk of a group may be short, and an item may have fewer
// queries than others; surplus heads repeat the last one and write nothing.
fn query_head(y: u32, head: u32) -> u32 {
    return y / CHUNKS * GROUP + min(y % CHUNKS * HEADS + head % GROUP, GROUP - 1u);
}

// Which of the item's queries it is of.
fn query_of(item: WorkItem, head: u32) -> u32 {
    return min(head / GROUP, item.queries - 1u);
}

fn head_exists(item: WorkItem, y: u32, head: u32) -> bool {
    return y % CHUNKS * HEADS + head % GROUP < GROUP && head / GROUP < item.queries;
}

// Its row of the queries, [row][query head].
fn input_row(item: WorkItem, y: u32, head: u32) -> u32 {
    return (item.row + query_of(item, head)) * QUERY_HEADS + query_head(y, head);
}

// Its row of the prepared queries, [prepared query][query head].
fn prepared_row(item: WorkItem, y: u32, head: u32) -> u32 {
    return (item.query + query_of(item, head)) * QUERY_HEADS + query_head(y, head);
}

fn set_scores_lowest() {
    // unroll
    for (var i = 0u; i < HEADS * LANE_TOKENS; i++) {
        token_scores[i] = LOWEST;
    }
}
