// chunk_similarity: the cosine similarity of every chunk's embedding with the query's. An embedding of zeros gives 0.
//
//   similarity = q · c / (‖q‖ ‖c‖)
//
// One workgroup owns a chunk. Its invocations own every 64th element, and the three sums are added over the invocations
// in a fixed order. Embeddings are read coalesced.
//
// In bounds: workgroups beyond the chunks return; embeddings were checked against the call when they were bound.
//
// gives: call
// binds: 0 call, 3 similarities

// import rows = pack/rows.wgsl#f32
// import queries = select/queries.wgsl#f32

struct SimilarityCall {
    // Index of the first element of each tensor within its binding.
    first_query: u32,
    first_chunk: u32,
    width: u32,
    chunks: u32,
}

@group(0) @binding(0) var<storage, read> call: SimilarityCall;

@group(0) @binding(3) var<storage, read_write> similarities: array<f32>;

const INVOCATIONS: u32 = 64u;

// ‖q‖², ‖c‖², q · c.
var<workgroup> sums: array<vec3<f32>, INVOCATIONS>;

@compute @workgroup_size(64)
fn chunk_similarity(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let chunk = group.y * groups.x + group.x;
    if (chunk >= call.chunks) {
        return;
    }
    var own = vec3<f32>();
    for (var i = invocation; i < call.width; i += INVOCATIONS) {
        let q = query_element(call.first_query + i);
        let c = element(call.first_chunk + chunk * call.width + i);
        own += vec3<f32>(q * q, c * c, q * c);
    }
    sums[invocation] = own;
    workgroupBarrier();
    for (var distance = INVOCATIONS / 2u; distance > 0u; distance /= 2u) {
        if (invocation < distance) {
            sums[invocation] += sums[invocation + distance];
        }
        workgroupBarrier();
    }
    if (invocation == 0u) {
        let norms = sqrt(sums[0].x) * sqrt(sums[0].y);
        // An embedding with NaN gives NaN, which a search refuses: no comparison with NaN is true.
        var similarity = sums[0].z / norms;
        if (norms == 0f) {
            similarity = 0f;
        }
        similarities[chunk] = similarity;
    }
}
