// Rows and tokens of the kernels that take many queries with cooperative matrices, and what an invocation loads.
//
// gives: Half4, Left, Right, Sums, Eight, SUBGROUPS, ROW_BLOCKS, OWN_ROWS, ROWS, STEPS, EIGHTS, TOKEN_VECTORS,
//   TILE_STEPS, KEY_ROW, KEYS_OF_STEP, VALUE_ROW, WEIGHT_ROW, EIGHTS_OF_STEP, LOADS, ROW_SCORES, MOST_WEIGHT,
//   START_WEIGHT, NO_PRODUCT, arriving_keys, arriving_values, pages, load_keys, load_values
// set by plans: SUBGROUPS, ROW_BLOCKS

// import attend/numbering.wgsl#subgroup
// import attend/work_item.wgsl
// import run_keys = attend/run_keys.wgsl#f16
// import run_values = attend/run_values.wgsl#f16
// import run_queries = attend/run_queries.wgsl#prepared

alias Half4 = vec4<f16>;
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;

struct Eight {
    low: Half4,
    high: Half4,
}

const SUBGROUPS: u32 = 8u;
// Blocks of 16 rows in a subgroup, and its rows.
const ROW_BLOCKS: u32 = 2u;
const OWN_ROWS: u32 = ROW_BLOCKS * 16u;
const ROWS: u32 = SUBGROUPS * OWN_ROWS;

const STEPS: u32 = HEAD_DIM / 16u;
const EIGHTS: u32 = HEAD_DIM / 8u;
// Vectors of eight tokens of a tile's values, and steps of a tile.
const TOKEN_VECTORS: u32 = 16u;
const TILE_STEPS: u32 = 8u;
// Sizes in vectors of four: a key, a channel of values and a row of weights in workgroup memory.
const KEY_ROW: u32 = HEAD_DIM / 4u + 2u;
const KEYS_OF_STEP: u32 = 16u * KEY_ROW;
const VALUE_ROW: u32 = 6u;
const WEIGHT_ROW: u32 = 6u;
// Groups of eight keys, and as many of values, in a step, and those that an invocation moves.
const EIGHTS_OF_STEP: u32 = 2u * HEAD_DIM;
const LOADS: u32 = (EIGHTS_OF_STEP + INVOCATIONS - 1u) / INVOCATIONS;
// Vectors of four scores of a row.
const ROW_SCORES: u32 = 4u;

// Exponents of two: the largest allowed weight, and the largest weight after the reference moved.
const MOST_WEIGHT: f32 = 15f;
const START_WEIGHT: f32 = 6f;
// The product of a token that does not exist: minus infinity, times any unit.
const NO_PRODUCT: f32 = -3.4028234e38f;

// Loads of the invocation in flight.
var<private> arriving_keys: array<KeyWord, LOADS>;
var<private> arriving_values: array<ValueWord, LOADS>;

fn pages() -> u32 {
    return min(run_key_pages(), run_value_pages());
}

// Loads the keys of a step, or its values. Steps beyond the item load those of its last tile.
fn load_keys(step: u32, tiles: u32, invocation: u32) {
    let tile_base = tile_bases[min(step / TILE_STEPS, tiles - 1u)];
    // unroll
    for (var i = 0u; i < LOADS; i++) {
        let at = min(i * INVOCATIONS + invocation, EIGHTS_OF_STEP - 1u);
        // The order of values: tokens 2 vector + p / 4 % 2 + 32 (p % 4) of vectors 2 step + p / 8.
        let p = at % 16u;
        let token = step % TILE_STEPS * 4u + p / 4u + 32u * (p % 4u);
        arriving_keys[i] = load_key(tile_base, token, at / 16u);
    }
}

fn load_values(step: u32, tiles: u32, invocation: u32) {
    let tile_base = tile_bases[min(step / TILE_STEPS, tiles - 1u)];
    load_ranges(tile_base, step % TILE_STEPS, invocation);
    // unroll
    for (var i = 0u; i < LOADS; i++) {
        let at = min(i * INVOCATIONS + INVOCATIONS - 1u - invocation, EIGHTS_OF_STEP - 1u);
        arriving_values[i] = load_value(tile_base, step % TILE_STEPS * 2u + at / HEAD_DIM, at % HEAD_DIM);
    }
}
