// Weighted sum of values with f32 multiply-adds, for f16 values and for ranges that change inside a tile.
//
// Weights lie in workgroup memory, one vector of four tokens per field group, written by the invocation that scored
// them. Team t works on CHANNELS channels per lane, 32 apart, of channel block t % CHANNEL_BLOCKS, and on
// CHANNEL_BLOCKS of the step's four tiles. Neighbouring lanes read neighbouring vectors.
//
// needs: HEADS, HEAD_DIM, INVOCATIONS, KV_HEADS, STEP_TILES, TILE_TOKENS, WorkItem, enter, finish_output, keep,
//   put_output, sum_parts, tile_bases, write_lse
// gives: ValueVector, CHANNELS, sums, value_pages, begin_values, store_weights, own_channel, add_values, write_states
// binds: 5 values
// set by plans: ValueVector, Weights, CHANNELS, CHANNEL_BLOCKS

alias ValueVector = vec4<u32>;
alias Weights = vec4<f32>;

@group(0) @binding(5) var<storage, read> values: array<ValueVector>;

// Channels of a lane, and blocks of 32 * CHANNELS channels that the teams are spread over: 1, 2 or 4.
const CHANNELS: u32 = 2u;
const CHANNEL_BLOCKS: u32 = 2u;
const TILE_BLOCKS: u32 = STEP_TILES / CHANNEL_BLOCKS;

// import value_field = attend/value_field/f16.wgsl
// import attend/weights_of_step.wgsl
// import attend/add_product.wgsl

// [head][tile of the step][field group]
var<workgroup> step_weights: array<Weights, HEADS * TILE_TOKENS>;
var<workgroup> block_sums: array<f32, TILE_BLOCKS * 32u * CHANNELS * CHANNEL_BLOCKS>;

// [head][channel]
var<private> sums: array<f32, HEADS * CHANNELS>;

fn value_pages() -> u32 {
    return arrayLength(&values) / (VALUE_VECTORS * HEAD_DIM * KV_HEADS);
}

fn begin_values(invocation: u32) {
    // unroll
    for (var i = 0u; i < HEADS * CHANNELS; i++) {
        sums[i] = 0f;
    }
}

fn store_weights(team: u32, lane: u32, parity: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let w = vec4<f32>(weights[head * 4u], weights[head * 4u + 1u], weights[head * 4u + 2u], weights[head * 4u + 3u]);
        step_weights[(head * STEP_TILES + team) * 32u + lane] = Weights(w * enter[head]);
    }
}

fn own_channel(team: u32, lane: u32, k: u32) -> u32 {
    return (team % CHANNEL_BLOCKS * CHANNELS + k) * 32u + lane;
}

fn add_values(first: u32, tiles: u32, team: u32, lane: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            sums[head * CHANNELS + k] *= keep[head];
        }
    }
    let first_tile = team / CHANNEL_BLOCKS * CHANNEL_BLOCKS;
    let end_tile = min(first_tile + CHANNEL_BLOCKS, tiles - first);
    for (var tile = first_tile; tile < end_tile; tile++) {
        let tile_base = tile_bases[first + tile];
        let base = tile_base * (VALUE_VECTORS * HEAD_DIM);
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            begin_value_tile(tile_base, min(own_channel(team, lane, k), HEAD_DIM - 1u), k);
        }
        for (var vector = 0u; vector < VALUE_VECTORS; vector++) {
            var words: array<ValueVector, CHANNELS>;
            // unroll
            for (var k = 0u; k < CHANNELS; k++) {
                words[k] = values[base + vector * HEAD_DIM + min(own_channel(team, lane, k), HEAD_DIM - 1u)];
            }
            for (var plane = 0u; plane < VALUE_PLANES; plane++) {
                // unroll
                for (var w = 0u; w < VALUE_WORD_FIELDS; w++) {
                    let field = (vector * VALUE_WORD_FIELDS + w) * VALUE_PLANES + plane;
                    var v: array<vec4<f32>, CHANNELS>;
                    // unroll
                    for (var k = 0u; k < CHANNELS; k++) {
                        v[k] = value_field(words[k], w, plane, field, k);
                    }
                    // unroll
                    for (var head = 0u; head < HEADS; head++) {
                        let p = vec4<f32>(step_weights[(head * STEP_TILES + tile) * 32u + field]);
                        // unroll
                        for (var k = 0u; k < CHANNELS; k++) {
                            sums[head * CHANNELS + k] = add_product(p, v[k], sums[head * CHANNELS + k]);
                        }
                    }
                }
            }
        }
    }
}

fn write_states(item: WorkItem, y: u32, team: u32, lane: u32, invocation: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let total = sum_parts[head * INVOCATIONS];
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            block_sums[team / CHANNEL_BLOCKS * (32u * CHANNELS * CHANNEL_BLOCKS) + own_channel(team, lane, k)] =
                sums[head * CHANNELS + k];
        }
        workgroupBarrier();
        for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
            var sum = 0f;
            // unroll
            for (var block = 0u; block < TILE_BLOCKS; block++) {
                sum += block_sums[block * (32u * CHANNELS * CHANNEL_BLOCKS) + channel];
            }
            put_output(item, y, head, channel, sum / total);
        }
        finish_output(item, y, head, invocation);
        write_lse(item, y, head, total, invocation);
        workgroupBarrier();
    }
}
