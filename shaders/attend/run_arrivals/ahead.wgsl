// Loads run a whole step ahead and start once the previous loads are stored. Registers suffice if a lane holds one word
// of each, and packed words must be unpacked first anyway. With halves, four words of each, they do not suffice.
//
// needs: load_keys, load_values, store_keys, store_values
// gives: KEY_STEPS, before_steps, before_products, behind_products, before_weights, behind_weights

// A subgroup stores the next keys as soon as its own products are done.
const KEY_STEPS: u32 = 2u;

fn before_steps(tiles: u32, invocation: u32) {
    load_keys(1u, tiles, invocation);
    load_values(0u, tiles, invocation);
}

fn before_products(step: u32, tiles: u32, invocation: u32) {}

fn behind_products(step: u32, tiles: u32, invocation: u32) {
    store_keys(step + 1u, invocation);
    load_keys(step + 2u, tiles, invocation);
}

fn before_weights(step: u32, tiles: u32, invocation: u32) {
    store_values(step, invocation);
    load_values(step + 1u, tiles, invocation);
}

fn behind_weights(step: u32, tiles: u32, invocation: u32) {}
