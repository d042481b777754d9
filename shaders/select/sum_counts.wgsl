// sum_counts: sums the counts of all parts of the keys.
//
// One invocation owns one row of one query head. Reads are coalesced.
//
// In bounds: as in sum_partials.
//
// binds: 0 call, 1 partials, 2 counts

// import pack/flat.wgsl

struct SumCall {
    // Rows of all query heads.
    rows: u32,
    parts: u32,
}

@group(0) @binding(0) var<storage, read> call: SumCall;
// [part][row].
@group(0) @binding(1) var<storage, read> partials: array<u32>;
@group(0) @binding(2) var<storage, read_write> counts: array<u32>;

@compute @workgroup_size(64)
fn sum_counts(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let row = flat_index(group, groups, invocation);
    if (row >= call.rows) {
        return;
    }
    var sum = 0u;
    for (var part = 0u; part < call.parts; part++) {
        sum += partials[part * call.rows + row];
    }
    counts[row] = sum;
}
