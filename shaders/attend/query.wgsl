// Slot `query`: loads the query heads of a workgroup into workgroup memory. They are read as `prepare_query` wrote
// them, or every workgroup prepares its own. Integers for step_scores.wgsl#dot, f32 for step_scores.wgsl#fma and
// step_scores.wgsl#groups.
//
// Every choice has
//   fn load_query(item: WorkItem, y: u32, invocation: u32)
//     fills `query`, called by all invocations; a barrier follows

// -------- own --------

// Prepares the query as `prepare_query` would. Every workgroup does this for its own heads, which takes less time than
// a separate launch and waiting for it.
//
// Team t prepares heads t, t + 4, .... Its lane r takes the field groups r and r + 32, of four channels each. The team
// combines the largest magnitude and two sums.
//
// needs: CHUNKS, HEADS, HEAD_DIM, INVOCATIONS, KV_HEADS, QUERY_PLANES, QUERY_ROW, QUERY_VECTORS, WorkItem, input_row,
//   query
// gives: TEAM_HEADS, load_query
// set by plans: SCORE_SCALE

// import input = attend/input.wgsl#f32
// import query_ranges = attend/query_ranges.wgsl
// import attend/prepared_query.wgsl#query_fields
// import team_totals = attend/team_totals.wgsl#memory

// log2(e) / √D.
const SCORE_SCALE: f32 = 0.12751743f;

const TEAMS: u32 = INVOCATIONS / 32u;
const TEAM_HEADS: u32 = (HEADS + TEAMS - 1u) / TEAMS;
// Field groups of a lane, padding of the row of keys included.
const LANE_FIELDS: u32 = (QUERY_VECTORS * 4u + 31u) / 32u;

fn load_query(item: WorkItem, y: u32, invocation: u32) {
    let lane = invocation % 32u;
    let team = invocation / 32u;
    var scaled: array<vec4<f32>, TEAM_HEADS * LANE_FIELDS>;
    // unroll
    for (var own = 0u; own < TEAM_HEADS; own++) {
        let head = min(own * TEAMS + team, HEADS - 1u);
        let query_row = input_row(item, y, head) * (HEAD_DIM / 4u);
        let range_row = (existing_slot(item.range_slot) * KV_HEADS + y / CHUNKS) * HEAD_DIM;
        var parts = vec3<f32>(0f);
        // unroll
        for (var i = 0u; i < LANE_FIELDS; i++) {
            // Channels past HEAD_DIM are padding of the row of keys, and 0.
            let field = min(i * 32u + lane, HEAD_DIM / 4u - 1u);
            let q = input4(query_row + field) * select(0f, SCORE_SCALE, i * 32u + lane < HEAD_DIM / 4u);
            let folded = scale_query(q, range_row + field * 4u);
            let magnitude = abs(folded);
            let largest = max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w));
            parts = vec3<f32>(max(parts.x, largest), parts.y + query_bias(q, range_row + field * 4u), parts.z + (q.x + q.y + q.z + q.w));
            scaled[own * LANE_FIELDS + i] = folded;
        }
        enter_totals(own, parts, own * TEAMS + team, lane);
    }
    totals_entered();
    // unroll
    for (var own = 0u; own < TEAM_HEADS; own++) {
        let head = own * TEAMS + team;
        if (head < HEADS) {
            let totals = team_totals(own, head);
            // unroll
            for (var i = 0u; i < LANE_FIELDS; i++) {
                let field = i * 32u + lane;
                if (field < QUERY_VECTORS * 4u) {
                    let whole = integers(scaled[own * LANE_FIELDS + i], totals.x);
                    let at = place(field);
                    query[head * QUERY_ROW + at / 4u][at % 4u] = bytes(whole);
                    // unroll
                    for (var plane = 0u; plane < QUERY_PLANES - 1u; plane++) {
                        query[head * QUERY_ROW + QUERY_VECTORS + at / 4u][at % 4u] = high_bytes(whole);
                    }
                }
            }
            if (lane == 0u) {
                query[head * QUERY_ROW + QUERY_ROW - 1u] =
                    bitcast<vec4<u32>>(vec4<f32>(totals.x / QUERY_LARGEST * CODE_UNIT, totals.y, totals.z, 0f));
            }
        }
    }
}

// -------- own_f32 --------

// The given query, scaled. Every workgroup prepares that of its own heads.
//
// needs: HEADS, HEAD_DIM, INVOCATIONS, QUERY_VECTORS, WorkItem, input_row, query
// gives: load_query
// set by plans: SCORE_SCALE

// import input = attend/input.wgsl#f32

// log2(e) / √D.
const SCORE_SCALE: f32 = 0.12751743f;

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

// -------- prepared --------

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

// -------- prepared_f32 --------

// The query rows that `prepare_query` wrote, in f32.
//
// needs: HEADS, INVOCATIONS, QUERY_ROW, QUERY_VECTORS, WorkItem, prepared_row, query
// gives: load_query
// binds: 2 queries

@group(0) @binding(2) var<storage, read> queries: array<vec4<f32>>;

fn load_query(item: WorkItem, y: u32, invocation: u32) {
    for (var i = invocation; i < HEADS * QUERY_VECTORS; i += INVOCATIONS) {
        let row = min(prepared_row(item, y, i / QUERY_VECTORS), arrayLength(&queries) / QUERY_ROW - 1u);
        query[i] = queries[row * QUERY_ROW + i % QUERY_VECTORS];
    }
}
