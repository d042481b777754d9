// Slot `run_arrivals`: when keys and values are loaded, and when loads are stored to workgroup memory.
//
// Products of a step read its keys and the values of the previous step. Weights are computed between two barriers.
// Values can only be stored there, and so can keys, unless there is room for the keys of two steps. Storing waits for
// the loads.
//
// Every choice has
//   const KEY_STEPS: u32
//     steps that keys have room for
//   fn before_steps(tiles: u32, invocation: u32)
//     when the first keys are stored
//   fn before_products(step: u32, tiles: u32, invocation: u32)
//   fn behind_products(step: u32, tiles: u32, invocation: u32)
//   fn before_weights(step: u32, tiles: u32, invocation: u32)
//   fn behind_weights(step: u32, tiles: u32, invocation: u32)

// -------- ahead --------

// Loads run a whole step ahead and start once the previous loads are stored. Registers suffice if a lane holds one word
// of each, and packed words must be unpacked first anyway. With halves, four words of each, they do not suffice.
//
// needs: load_keys, load_values, store_keys, store_ranges, store_values
// gives: KEY_STEPS, before_steps, before_products, behind_products, before_weights, behind_weights

// A subgroup stores the next keys as soon as its own products are done.
const KEY_STEPS: u32 = 2u;

fn before_steps(tiles: u32, invocation: u32) {
    load_keys(1u, tiles, invocation);
    load_values(0u, tiles, invocation);
}

fn before_products(step: u32, tiles: u32, invocation: u32) {}

fn behind_products(step: u32, tiles: u32, invocation: u32) {
    store_ranges(invocation);
    store_keys(step + 1u, invocation);
    load_keys(step + 2u, tiles, invocation);
}

fn before_weights(step: u32, tiles: u32, invocation: u32) {
    store_values(step, invocation);
    load_values(step + 1u, tiles, invocation);
}

fn behind_weights(step: u32, tiles: u32, invocation: u32) {}

// -------- by_turns --------

// Loads start before the products, and are stored after them: half of the subgroups store before they compute their
// weights, the others after, so that some wait for memory while the others calculate.
//
// needs: SUBGROUPS, load_keys, load_values, store_keys, store_values
// gives: KEY_STEPS, before_steps, before_products, behind_products, before_weights, behind_weights

const KEY_STEPS: u32 = 1u;

fn before_steps(tiles: u32, invocation: u32) {}

fn before_products(step: u32, tiles: u32, invocation: u32) {
    load_keys(step + 1u, tiles, invocation);
    load_values(step, tiles, invocation);
}

fn behind_products(step: u32, tiles: u32, invocation: u32) {}

fn stores_first(invocation: u32) -> bool {
    return invocation / 32u < SUBGROUPS / 2u;
}

fn before_weights(step: u32, tiles: u32, invocation: u32) {
    if (stores_first(invocation)) {
        store_keys(step + 1u, invocation);
        store_values(step, invocation);
    }
}

fn behind_weights(step: u32, tiles: u32, invocation: u32) {
    if (!stores_first(invocation)) {
        store_keys(step + 1u, invocation);
        store_values(step, invocation);
    }
}

// -------- first --------

// Loads start before the products, and are stored after them, before weights are computed. Whole prompts in f16 are
// faster so than by turns; chunks of few queries over many tokens are slower.
//
// needs: load_keys, load_values, store_keys, store_values
// gives: KEY_STEPS, before_steps, before_products, behind_products, before_weights, behind_weights

const KEY_STEPS: u32 = 1u;

fn before_steps(tiles: u32, invocation: u32) {}

fn before_products(step: u32, tiles: u32, invocation: u32) {
    load_keys(step + 1u, tiles, invocation);
    load_values(step, tiles, invocation);
}

fn behind_products(step: u32, tiles: u32, invocation: u32) {}

fn before_weights(step: u32, tiles: u32, invocation: u32) {
    store_keys(step + 1u, invocation);
    store_values(step, invocation);
}

fn behind_weights(step: u32, tiles: u32, invocation: u32) {}
