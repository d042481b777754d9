// The query as it was given, scaled: every workgroup prepares that of its heads itself.

// log2(e) / √D.
const SCORE_SCALE: f32 = 0.12751743f;

// import input = common/input_f32.wgsl

fn load_query(item: WorkItem, y: u32, invocation: u32) {
    for (var i = invocation; i < HEADS * QUERY_VECTORS; i += INVOCATIONS) {
        let row = item.sequence * QUERY_HEADS + query_head(y, i / QUERY_VECTORS);
        let field = i % QUERY_VECTORS;
        // Channels past HEAD_DIM are padding of the row of keys.
        query[i] = input4(row * (HEAD_DIM / 4u) + min(field, HEAD_DIM / 4u - 1u)) * select(0f, SCORE_SCALE, field < HEAD_DIM / 4u);
    }
}
