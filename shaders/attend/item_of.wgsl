// Slot `item_of`: the item of a workgroup. By default workgroup (y, x) has item x, with all its queries.
//
// needs: WorkItem, read_item
// gives: has_item, item_of

// False for a workgroup without queries, which then does nothing.
fn has_item(group: vec3<u32>) -> bool {
    return true;
}

fn item_of(group: vec3<u32>) -> WorkItem {
    return read_item(group.y);
}

// -------- spread --------

// Items whose queries are spread over workgroups: workgroup (y, x, z) takes QUERIES queries of item z, from query
// x · QUERIES on. Where they are taken one by one, each further query may see a token more at the end, and its scores
// are those that follow, or it sees a token less at the beginning (attend/logits.wgsl#bent).
//
// In bounds: the section of items has one for every z; what remains is clamped as in `read_item`.
//
// needs: MAX_TILES, QUERIES, TILE_TOKENS, WorkItem, items
// gives: has_item, item_of

fn has_item(group: vec3<u32>) -> bool {
    return group.y * QUERIES < items[group.z].queries;
}

fn item_of(group: vec3<u32>) -> WorkItem {
    var item = items[group.z];
    let first = group.y * QUERIES;
    item.tokens = clamp(item.tokens - min(max(item.later, first) - first, item.tokens), 1u, MAX_TILES * TILE_TOKENS);
    item.queries = clamp(item.queries - first, 1u, QUERIES);
    item.query += first;
    item.row += first;
    item.state += first * item.stride;
    item.first_state += first * item.stride;
    item.scores += first * item.score_stride;
    return item;
}
