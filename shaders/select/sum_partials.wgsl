// What parts of the keys found, combined: statistics of their scores, or counts.

// -------- call --------

// A call sums the parts of all rows.
//
// gives: call
// binds: 0 call

struct SumCall {
    // Rows of all query heads.
    rows: u32,
    parts: u32,
}

@group(0) @binding(0) var<storage, read> call: SumCall;

// -------- sum_partials --------

// sum_partials: combines the statistics of all parts of the keys.
//
//   max = max over parts,  lse = max + ln Σ sum_part · exp(max_part − max)
//
// One invocation owns one row of one query head and takes the parts in their order. Reads are coalesced.
//
// In bounds: invocations beyond `rows` return; the buffers were made by the plan for `parts` parts of `rows` rows.
//
// binds: 1 partials, 2 row_max, 3 row_lse

// import pack/flat.wgsl
// import select/sum_partials.wgsl#call

// (max, sum) as [part][row].
@group(0) @binding(1) var<storage, read> partials: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read_write> row_max: array<f32>;
@group(0) @binding(3) var<storage, read_write> row_lse: array<f32>;

@compute @workgroup_size(64)
fn sum_partials(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let row = flat_index(group, groups, invocation);
    if (row >= call.rows) {
        return;
    }
    var largest = partials[row].x;
    for (var part = 1u; part < call.parts; part++) {
        largest = max(largest, partials[part * call.rows + row].x);
    }
    var sum = 0f;
    for (var part = 0u; part < call.parts; part++) {
        let stats = partials[part * call.rows + row];
        sum += stats.y * exp(stats.x - largest);
    }
    row_max[row] = largest;
    row_lse[row] = largest + log(sum);
}

// -------- sum_counts --------

// sum_counts: sums the counts of all parts of the keys.
//
// One invocation owns one row of one query head. Reads are coalesced.
//
// In bounds: as in sum_partials.
//
// binds: 1 partials, 2 counts

// import pack/flat.wgsl
// import select/sum_partials.wgsl#call

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
