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

// import attend/numbering.wgsl#subgroup
// import attend/work_item.wgsl
// import attend/states.wgsl#states
// import input = attend/input.wgsl#f32

alias Half4 = vec4<f16>;
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;

@group(0) @binding(3) var<storage, read> keys: array<Half4>;
@group(0) @binding(5) var<storage, read> values: array<Half4>;

// log2(e) / √D.
const SCORE_SCALE: f32 = 0.12751743f;
// f16 summands of a query: 1 if it is given in f16, otherwise 2.
const QUERY_PARTS: u32 = 2u;
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
