// The query rows that `prepare_query` wrote.
//
// needs: HEADS, INVOCATIONS, QUERY_ROW, WorkItem, prepared_row, query
// gives: load_query
// binds: 2 queries

@group(0) @binding(2) var<storage, read> queries: array<vec4<u32>>;

fn load_query(item: WorkItem, y: u32, invocation: u32) {
    for (var i = invocation; i < HEADS * QUERY_ROW; i += INVOCATIONS) {
        let row = min(prepared_row(item, y, i / QUERY_ROW), arrayLength(&queries) / QUERY_ROW - 1u);
        query[i] = queries[row * QUERY_ROW + i % QUERY_ROW];
    }
}
