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
