// The query rows that `prepare_query` left behind.
//
// needs: HEADS, INVOCATIONS, QUERY_HEADS, QUERY_ROW, WorkItem, query, query_head
// gives: load_query
// binds: 2 queries

@group(0) @binding(2) var<storage, read> queries: array<vec4<u32>>;

fn load_query(item: WorkItem, y: u32, invocation: u32) {
    for (var i = invocation; i < HEADS * QUERY_ROW; i += INVOCATIONS) {
        let row = item.span * QUERY_HEADS + query_head(y, i / QUERY_ROW);
        query[i] = queries[row * QUERY_ROW + i % QUERY_ROW];
    }
}
