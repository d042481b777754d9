enable f16;

enable wgpu_cooperative_matrix;

// ----------------------------------------------------------------------------------------------------
// shaders/attend/attend_matrix.wgsl
// ----------------------------------------------------------------------------------------------------

// attend_matrix: `attend` of f16 keys and values with cooperative matrices, for many query heads per KV head.
//
//   s_t = q · k_t / √D,  lse = ln Σ exp(s_t),  output = Σ exp(s_t - lse) v_t
//
// over the tokens of one work item, for one KV head and up to eight of its query heads. Products are 16 × 16 × 16, in
// f16 with f32 sums. The query is prepared here; `merge_states` merges the items.
//
// A row of a left operand is 16 consecutive halves of a tile in memory order: eight channels of the keys of two
// neighbouring tokens, or eight tokens of the values of two neighbouring channels. A column of a right operand
// multiplies only one of the two: column 2 h is eight zeros followed by eight halves of head h, and column 2 h + 1 is
// the same eight halves followed by zeros. A column begins eight halves after the previous one, so that both share
// their common part.
//
// Four subgroups of 32 take steps of two tiles. Subgroup t scores 64 tokens of tile t / 2, computes the weights of
// OWN_HEADS heads, and sums half of the channels of tile t / 2. As in attend/softmax_loop.wgsl, weights are relative to
// the step's maximum, and a step's sums are added to the running ones in f32. There are two barriers per step of 256
// tokens:
//
//   scores -> workgroup memory | sums of the last step, weights -> workgroup memory | sums of values -> workgroup memory
//
// Memory: keys and values are read once, in blocks of 512 consecutive bytes; half of a step's values are read before
// its weights are known. Workgroup memory holds query and weights in columns, scores and sums in blocks
// (`matrix_workgroup_bytes` counts them). SPIR-V with cooperative matrices has the memory model of Vulkan, which has no
// coherent variables, so nothing is merged here.
//
// In bounds: as `attend`; blocks lie within tiles, since HEAD_DIM is a multiple of 64. Control flow around products is
// uniform: it depends on the item alone. Loops are bounded by an item's tiles and by constants. Divisors are powers of
// two from 2^-95 on, and sums of weights, of which the largest is 2^14.
//
// gives: pages
// binds: 3 keys, 5 values
// set by plans: SCORE_SCALE, QUERY_PARTS

alias Half4 = vec4<f16>;
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;

@group(0) @binding(3) var<storage, read> keys: array<Half4>;
@group(0) @binding(5) var<storage, read> values: array<Half4>;

// log2(e) / √D.
const SCORE_SCALE: f32 = 0.12751743f;
// f16 summands of a query: 1 if it is given in f16, otherwise 2.
const QUERY_PARTS: u32 = 1u;
// The largest element of a query in f16 is at least this, and less than twice as much.
const QUERY_LARGEST: f32 = 16384f;
// Weights are relative to 2^-14 of the step's largest. f16 holds weights down to 2^-28 of the largest at full
// precision, and rounds at 2^-38 of it.
const WEIGHT_LOG2: f32 = 14f;

// Tiles of a step.
const TILES: u32 = 2u;
// Vectors of eight channels, and of eight tokens of a tile.
const VECTORS: u32 = HEAD_DIM / 8u;
const TOKEN_VECTORS: u32 = 16u;
// Blocks of 32 tokens of a tile; of 32 channels; and those of a subgroup.
const TOKEN_BLOCKS: u32 = 4u;
const CHANNEL_BLOCKS: u32 = HEAD_DIM / 32u;
const OWN_BLOCKS: u32 = CHANNEL_BLOCKS / 2u;
// Vectors of tokens whose values are loaded before the weights are known.
const EARLY: u32 = 8u;
// Heads whose weights a subgroup computes.
const OWN_HEADS: u32 = (HEADS + 3u) / 4u;
// Vectors of four channels of a query that a lane prepares.
const LANE_FIELDS: u32 = (HEAD_DIM + 127u) / 128u;

// Sizes in vectors of four halves: a tile, a left block of it, and a row of the block.
const TILE_SIZE: u32 = HEAD_DIM * 32u;
const LEFT_BLOCK: u32 = 64u;
const LEFT_ROW: u32 = 4u;
// Distances in the same unit: between columns of a right operand, between heads, and eight heads with the zeros behind
// them.
const COLUMN: u32 = 2u;
const HEAD_COLUMNS: u32 = 4u;
const COLUMNS: u32 = 34u;
// Distance between columns of a block of sums, chosen so that lanes use different banks, and between such blocks.
const SUM_COLUMN: u32 = 20u;
const SUM_BLOCK: u32 = 320u;

// [part][vector][column]
var<workgroup> query_columns: array<Half4, QUERY_PARTS * VECTORS * COLUMNS>;
// [tile][vector][column]
var<workgroup> weight_columns: array<Half4, TILES * TOKEN_VECTORS * COLUMNS>;
// [tile][block][column][row]
var<workgroup> scores: array<f32, TILES * TOKEN_BLOCKS * SUM_BLOCK>;
var<workgroup> step_sums: array<f32, TILES * CHANNEL_BLOCKS * SUM_BLOCK>;

// For each of the subgroup's heads: the factor of its scores, the running maximum, and the lane's part of the sum of
// weights.
var<private> score_units: array<f32, OWN_HEADS>;
var<private> running_max: array<f32, OWN_HEADS>;
var<private> weight_sum: array<f32, OWN_HEADS>;
// What the last step's sums and those before it are multiplied with, to be relative to the running maximum.
var<private> rescale_step: array<f32, OWN_HEADS>;
var<private> rescale_acc: array<f32, OWN_HEADS>;
// [head][channel block]: of channel `own_channel(lane, block)`.
var<private> sums: array<f32, OWN_HEADS * CHANNEL_BLOCKS>;

fn pages() -> u32 {
    return arrayLength(&values) / (TILE_SIZE * KV_HEADS);
}

fn own_channel(lane: u32, block: u32) -> u32 {
    return block * 32u + 2u * (lane % 16u) + 1u - lane / 16u;
}

// Heads beyond HEADS have a zero query.
fn load_query(item: WorkItem, y: u32, team: u32, lane: u32) {
    let invocation = team * 32u + lane;
    for (var i = invocation; i < QUERY_PARTS * VECTORS * COLUMNS; i += INVOCATIONS) {
        let place = i % COLUMNS;
        if (place % HEAD_COLUMNS < 2u || place / HEAD_COLUMNS >= HEADS) {
            query_columns[i] = Half4();
        }
    }
    for (var i = invocation; i < TILES * TOKEN_VECTORS * COLUMNS; i += INVOCATIONS) {
        weight_columns[i] = Half4();
    }
    // unroll
    for (var own = 0u; own < OWN_HEADS; own++) {
        let head = team * OWN_HEADS + own;
        var q: array<vec4<f32>, LANE_FIELDS>;
        var largest = 0f;
        // unroll
        for (var i = 0u; i < LANE_FIELDS; i++) {
            let field = min(i * 32u + lane, HEAD_DIM / 4u - 1u);
            q[i] = input4(input_row(item, y, head) * (HEAD_DIM / 4u) + field);
            let magnitude = abs(q[i]);
            largest = max(largest, max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)));
        }
        // The power of two below the largest magnitude, so that elements that are exact in f16 stay exact.
        let unit = bitcast<f32>(clamp(bitcast<u32>(subgroupMax(largest)) & 0x7f800000u, 0x10000000u, 0x70000000u));
        score_units[own] = unit * (SCORE_SCALE / QUERY_LARGEST);
        // unroll
        for (var i = 0u; i < LANE_FIELDS; i++) {
            let field = i * 32u + lane;
            if (field < HEAD_DIM / 4u && head < HEADS) {
                var rest = q[i] / unit * QUERY_LARGEST;
                // unroll
                for (var part = 0u; part < QUERY_PARTS; part++) {
                    // A driver may treat a conversion and its inverse as nothing, and the rest as zero.
                    let rounded = quantizeToF16(rest);
                    let column = head * HEAD_COLUMNS + 2u + field % 2u;
                    query_columns[(part * VECTORS + field / 2u) * COLUMNS + column] = Half4(rounded);
                    rest -= rounded;
                }
            }
        }
    }
}

// Scores of two blocks of tokens, before their unit.
fn score_tokens(tile_base: u32, team: u32) {
    var blocks: array<Sums, 2>;
    blocks[0] = Sums();
    blocks[1] = Sums();
    let first = tile_base * TILE_SIZE + team % 2u * 2u * LEFT_BLOCK;
    // unroll
    for (var vector = 0u; vector < VECTORS; vector++) {
        let at = first + vector * (TOKEN_BLOCKS * LEFT_BLOCK);
        let k0 = coopLoadT<Left>(&keys[at], LEFT_ROW);
        let k1 = coopLoadT<Left>(&keys[at + LEFT_BLOCK], LEFT_ROW);
        // unroll
        for (var part = 0u; part < QUERY_PARTS; part++) {
            let q = coopLoad<Right>(&query_columns[(part * VECTORS + vector) * COLUMNS], COLUMN);
            blocks[0] = coopMultiplyAdd(k0, q, blocks[0]);
            blocks[1] = coopMultiplyAdd(k1, q, blocks[1]);
        }
    }
    coopStore(blocks[0], &scores[team * 2u * SUM_BLOCK], SUM_COLUMN);
    coopStore(blocks[1], &scores[(team * 2u + 1u) * SUM_BLOCK], SUM_COLUMN);
}

// Adds the sums of the last step to the running ones.
fn take_sums(team: u32, lane: u32) {
    // unroll
    for (var own = 0u; own < OWN_HEADS; own++) {
        let column = (2u * (team * OWN_HEADS + own) + lane / 16u) * SUM_COLUMN + lane % 16u;
        // unroll
        for (var block = 0u; block < CHANNEL_BLOCKS; block++) {
            let sum = step_sums[block * SUM_BLOCK + column] + step_sums[(CHANNEL_BLOCKS + block) * SUM_BLOCK + column];
            let at = own * CHANNEL_BLOCKS + block;
            sums[at] = sums[at] * rescale_acc[own] + sum * rescale_step[own];
        }
    }
}

// Weights of the subgroup's heads. A lane has the eight tokens of vector lane % 16 of the values of tile lane / 16.
fn weigh(item: WorkItem, first: u32, team: u32, lane: u32) {
    let tile = lane / 16u;
    let vector = lane % 16u;
    // unroll
    for (var own = 0u; own < OWN_HEADS; own++) {
        let head = team * OWN_HEADS + own;
        // Scores of the tokens 2 vector + i / 4 + 32 (i % 4).
        var s: array<f32, 8>;
        var largest = LOWEST;
        // unroll
        for (var i = 0u; i < 8u; i++) {
            let column = 2u * head + 1u - i / 4u;
            let score = scores[(tile * TOKEN_BLOCKS + i % 4u) * SUM_BLOCK + column * SUM_COLUMN + vector];
            let token = (first + tile) * TILE_TOKENS + i % 4u * 32u + 2u * vector + i / 4u;
            s[i] = select(LOWEST, score * score_units[own], token < item.tokens);
            largest = max(largest, s[i]);
        }
        let step_max = subgroupMax(largest);
        let new_max = max(running_max[own], step_max);
        rescale_acc[own] = exp2(running_max[own] - new_max);
        rescale_step[own] = exp2(step_max - new_max);
        running_max[own] = new_max;
        // The sum of the rounded weights, so that the mean of the values is exact.
        var sum = 0f;
        // unroll
        for (var half = 0u; half < 2u; half++) {
            let exponents = vec4<f32>(s[half * 4u], s[half * 4u + 1u], s[half * 4u + 2u], s[half * 4u + 3u]);
            let p = Half4(exp2(exponents - (step_max - WEIGHT_LOG2)));
            weight_columns[(tile * TOKEN_VECTORS + vector) * COLUMNS + head * HEAD_COLUMNS + 2u + half] = p;
            let rounded = vec4<f32>(p);
            sum += (rounded.x + rounded.y) + (rounded.z + rounded.w);
        }
        weight_sum[own] = weight_sum[own] * rescale_acc[own] + sum * rescale_step[own];
    }
}

fn write_states(item: WorkItem, y: u32, team: u32, lane: u32) {
    // unroll
    for (var own = 0u; own < OWN_HEADS; own++) {
        let head = team * OWN_HEADS + own;
        let total = subgroupAdd(weight_sum[own]);
        if (head < HEADS) {
            // unroll
            for (var block = 0u; block < CHANNEL_BLOCKS; block++) {
                let mean = sums[own * CHANNEL_BLOCKS + block] / total;
                write_state_channel(item, y, head, own_channel(lane, block), mean);
            }
            if (lane == 0u) {
                write_state_lse(item, y, head, (running_max[own] - WEIGHT_LOG2 + log2(total)) * LN_2);
            }
        }
    }
}

@compute @workgroup_size(128)
fn attend_matrix(@builtin(workgroup_id) group: vec3<u32>, numbering: Numbering) {
    if (!has_item(group)) {
        return;
    }
    let item = item_of(group);
    let y = group.x;
    let invocation = number(numbering);
    let lane = invocation % 32u;
    let team = invocation / 32u;
    let tiles = (item.tokens + TILE_TOKENS - 1u) / TILE_TOKENS;

    let read_base = read_tile_base(item.page_offset, tiles, y / CHUNKS, invocation);
    load_query(item, y, team, lane);
    keep_tile_base(read_base, tiles, invocation);
    // unroll
    for (var own = 0u; own < OWN_HEADS; own++) {
        running_max[own] = LOWEST;
        weight_sum[own] = 0f;
    }
    // unroll
    for (var i = 0u; i < OWN_HEADS * CHANNEL_BLOCKS; i++) {
        sums[i] = 0f;
    }
    workgroupBarrier();
    for (var first = 0u; first < tiles; first += TILES) {
        // The last step of an odd number of tiles takes the last tile twice. Its second copy has no weight.
        let tile_base = tile_bases[min(first + team / 2u, tiles - 1u)];
        score_tokens(tile_base, team);

        let first_value = tile_base * TILE_SIZE + team % 2u * OWN_BLOCKS * LEFT_BLOCK;
        var early: array<Left, EARLY * OWN_BLOCKS>;
        // unroll
        for (var vector = 0u; vector < EARLY; vector++) {
            // unroll
            for (var block = 0u; block < OWN_BLOCKS; block++) {
                let at = first_value + (vector * CHANNEL_BLOCKS + block) * LEFT_BLOCK;
                early[vector * OWN_BLOCKS + block] = coopLoadT<Left>(&values[at], LEFT_ROW);
            }
        }
        workgroupBarrier();

        if (first > 0u) {
            take_sums(team, lane);
        }
        weigh(item, first, team, lane);
        workgroupBarrier();

        var blocks: array<Sums, OWN_BLOCKS>;
        // unroll
        for (var block = 0u; block < OWN_BLOCKS; block++) {
            blocks[block] = Sums();
        }
        let own_weights = team / 2u * TOKEN_VECTORS;
        // unroll
        for (var vector = 0u; vector < EARLY; vector++) {
            let p = coopLoad<Right>(&weight_columns[(own_weights + vector) * COLUMNS], COLUMN);
            // unroll
            for (var block = 0u; block < OWN_BLOCKS; block++) {
                blocks[block] = coopMultiplyAdd(early[vector * OWN_BLOCKS + block], p, blocks[block]);
            }
        }
        // unroll
        for (var late = 0u; late < TOKEN_VECTORS - EARLY; late++) {
            let p = coopLoad<Right>(&weight_columns[(own_weights + EARLY + late) * COLUMNS], COLUMN);
            // unroll
            for (var block = 0u; block < OWN_BLOCKS; block++) {
                let at = first_value + ((EARLY + late) * CHANNEL_BLOCKS + block) * LEFT_BLOCK;
                let v = coopLoadT<Left>(&values[at], LEFT_ROW);
                blocks[block] = coopMultiplyAdd(v, p, blocks[block]);
            }
        }
        // unroll
        for (var block = 0u; block < OWN_BLOCKS; block++) {
            coopStore(blocks[block], &step_sums[(team * OWN_BLOCKS + block) * SUM_BLOCK], SUM_COLUMN);
        }
    }
    workgroupBarrier();
    take_sums(team, lane);
    write_states(item, y, team, lane);
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/numbering.wgsl#subgroup
// ----------------------------------------------------------------------------------------------------

// Invocations numbered subgroup by subgroup. An aligned group of neighbours shares a subgroup that has at least as many
// lanes. Subgroups whose size divides that of the workgroup have been full wherever kernels have run. If they were not,
// results would be wrong, but nothing would be out of bounds.
//
// needs: INVOCATIONS
// gives: Numbering, number

struct Numbering {
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) lane: u32,
}

fn number(numbering: Numbering) -> u32 {
    return (numbering.subgroup * numbering.size + numbering.lane) % INVOCATIONS;
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/work_item.wgsl
// ----------------------------------------------------------------------------------------------------

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
const KV_HEADS: u32 = 2u;
const QUERY_HEADS: u32 = 16u;
const GROUP: u32 = QUERY_HEADS / KV_HEADS;
// Most queries of an item.
const QUERIES: u32 = 1u;
// Heads of one workgroup, those of all its queries, and workgroups that share the query heads of a KV head.
const HEADS: u32 = 8u;
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

// Of attend/item_of.wgsl, by default:

// False for a workgroup without queries, which then does nothing.
fn has_item(group: vec3<u32>) -> bool {
    return true;
}

fn item_of(group: vec3<u32>) -> WorkItem {
    return read_item(group.y);
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/states.wgsl#states
// ----------------------------------------------------------------------------------------------------

// Attention states: [state][query head], a row of HEAD_DIM outputs and the natural log-sum-exp, padded to 16 bytes.
//
// needs: HEAD_DIM, QUERY_HEADS, WorkItem, head_exists, query_head, query_of
// gives: FIELDS, STATE_ROW, state_row, write_state_channel, write_state_lse

const FIELDS: u32 = HEAD_DIM / 4u;
const STATE_ROW: u32 = FIELDS + 1u;

fn state_row(item: WorkItem, y: u32, head: u32) -> u32 {
    let state = min(item.state + query_of(item, head) * item.stride, arrayLength(&states) / (QUERY_HEADS * STATE_ROW) - 1u);
    return (state * QUERY_HEADS + query_head(y, head)) * STATE_ROW;
}

fn write_state_channel(item: WorkItem, y: u32, head: u32, channel: u32, output: f32) {
    if (head_exists(item, y, head)) {
        states[state_row(item, y, head) + channel / 4u][channel % 4u] = output;
    }
}

fn write_state_lse(item: WorkItem, y: u32, head: u32, lse: f32) {
    if (head_exists(item, y, head)) {
        states[state_row(item, y, head) + FIELDS].x = lse;
    }
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/merge.wgsl#later
// ----------------------------------------------------------------------------------------------------

// States that `merge_states` joins.
//
// gives: states
// binds: 7 states

@group(0) @binding(7) var<storage, read_write> states: array<vec4<f32>>;

// ----------------------------------------------------------------------------------------------------
// shaders/attend/input.wgsl#f16
// ----------------------------------------------------------------------------------------------------

// A dense f16 tensor, read four elements at a time.
//
// gives: input4
// binds: 2 inputs

@group(0) @binding(2) var<storage, read> inputs: array<vec2<u32>>;

fn input4(index: u32) -> vec4<f32> {
    let words = inputs[min(input_at(index), arrayLength(&inputs) - 1u)];
    return without_infinities(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)));
}

// Of attend/input_rows.wgsl, by default:

fn input_at(index: u32) -> u32 {
    return index;
}

// ----------------------------------------------------------------------------------------------------
// shaders/common/ordered.wgsl#infinities
// ----------------------------------------------------------------------------------------------------

// NaN in place of infinities. All scores of an infinite query may be minus infinity, as if it saw no token.
//
// gives: without_infinities

fn without_infinities(x: vec4<f32>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(x);
    let exponent = vec4<u32>(0x7f800000u);
    return bitcast<vec4<f32>>(select(bits, bits | vec4<u32>(0x00400000u), (bits & exponent) == exponent));
}
