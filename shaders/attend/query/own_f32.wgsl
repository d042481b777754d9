// The given query, scaled. Every workgroup prepares that of its own heads.
//
// needs: HEADS, HEAD_DIM, INVOCATIONS, QUERY_VECTORS, WorkItem, input_row, query
// gives: load_query
// set by plans: SCORE_SCALE

// log2(e) / √D.
const SCORE_SCALE: f32 = 0.12751743f;

// import input = attend/input/f32.wgsl

// Vectors of an invocation.
const OWN_VECTORS: u32 = (HEADS * QUERY_VECTORS + INVOCATIONS - 1u) / INVOCATIONS;

fn load_query(item: WorkItem, y: u32, invocation: u32) {
    var own: array<vec4<f32>, OWN_VECTORS>;
    // unroll
    for (var i = 0u; i < OWN_VECTORS; i++) {
        let at = min(i * INVOCATIONS + invocation, HEADS * QUERY_VECTORS - 1u);
        let row = input_row(item, y, at / QUERY_VECTORS);
        let field = at % QUERY_VECTORS;
        // Channels past HEAD_DIM are padding of the row of keys.
        own[i] = input4(row * (HEAD_DIM / 4u) + min(field, HEAD_DIM / 4u - 1u)) * select(0f, SCORE_SCALE, field < HEAD_DIM / 4u);
    }
    // unroll
    for (var i = 0u; i < OWN_VECTORS; i++) {
        if (i * INVOCATIONS + invocation < HEADS * QUERY_VECTORS) {
            query[i * INVOCATIONS + invocation] = own[i];
        }
    }
}
