// Tokens of full pages that a step packs, window by window: those of `places/windows.wgsl`.
//
// needs: TILE_TOKENS, call
// gives: token_of, has_token

// import pack/step_table.wgsl

fn token_of(token: u32, kv_head: u32) -> u32 {
    return entry_at(token / TILE_TOKENS).x * call.kv_heads * TILE_TOKENS + token % TILE_TOKENS;
}

fn has_token(token: u32) -> bool {
    return token / TILE_TOKENS < entry_count() && has_entry(token / TILE_TOKENS);
}
