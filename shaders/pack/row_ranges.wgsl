// Slot `row_ranges`: the ranges or norms of a single row. They are computed, stored with the tile and kept for its
// codes. By default rows have none. A choice may also serve as the `ranges`, `norms` or `field` of the kernel.
//
// needs: Place
// gives: store_row_ranges

// Called by all invocations once the row is in workgroup memory.
fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {}

// -------- affine --------

// Ranges of a single row: one for all its channels, or one for each group of channels. They are stored with the tile,
// and the rounded values are kept for the codes. An invocation owns four channels, then one range.
//
// needs: HEAD_DIM, Place, call, channel_value, range_of_word, range_word
// gives: stored_range, store_row_ranges
// binds: 3 ranges

// import pack/tile.wgsl#grouping

@group(0) @binding(3) var<storage, read_write> ranges: array<u32>;

// Smallest and largest of four channels; later scale and minimum of each group.
var<workgroup> row_extremes: array<vec2<f32>, HEAD_DIM / 4u>;
var<workgroup> row_ranges: array<vec2<f32>, HEAD_DIM / 4u>;

fn stored_range(place: Place, kv_head: u32, token: u32, channel: u32) -> vec2<f32> {
    return row_ranges[channel / call.group];
}

fn joined(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(min(a.x, b.x), max(a.y, b.y));
}

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {
    if (invocation < HEAD_DIM / 4u) {
        let x = vec4<f32>(
            channel_value(invocation * 4u),
            channel_value(invocation * 4u + 1u),
            channel_value(invocation * 4u + 2u),
            channel_value(invocation * 4u + 3u),
        );
        row_extremes[invocation] = vec2<f32>(min(min(x.x, x.y), min(x.z, x.w)), max(max(x.x, x.y), max(x.z, x.w)));
    }
    workgroupBarrier();
    if (invocation < HEAD_DIM / call.group) {
        let count = call.group / 4u;
        let first = invocation * count;
        var extremes = row_extremes[first];
        // Four loads wait for memory together.
        var i = 0u;
        for (; i + 4u <= count; i += 4u) {
            let near = joined(row_extremes[first + i], row_extremes[first + i + 1u]);
            let far = joined(row_extremes[first + i + 2u], row_extremes[first + i + 3u]);
            extremes = joined(extremes, joined(near, far));
        }
        for (; i < count; i++) {
            extremes = joined(extremes, row_extremes[first + i]);
        }
        let word = range_word(extremes.x, extremes.y);
        let tile = place.page * call.kv_heads + kv_head;
        ranges[tile * call.ranges_per_tile + range_index(place.slot, invocation * call.group)] = word;
        row_ranges[invocation] = range_of_word(word);
    }
    workgroupBarrier();
}

// -------- norm --------

// The norm of a single row. It is stored with the tile, and the rounded value is kept for the codes.
//
// needs: Place, call
// gives: stored_norm, store_row_ranges
// binds: 3 ranges

// import pack/half.wgsl#conversions
// import pack/norm.wgsl#row_norm_bits

@group(0) @binding(3) var<storage, read_write> ranges: array<u32>;

var<private> row_norm: f32;

fn stored_norm(place: Place, kv_head: u32, token: u32) -> f32 {
    return row_norm;
}

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {
    let norm = row_norm_bits(invocation);
    if (invocation == 0u) {
        ranges[(place.page * call.kv_heads + kv_head) * call.ranges_per_tile + place.slot] = norm;
    }
    row_norm = half_value(norm);
}

// -------- renormalized --------

// The norm of a single row. The rounded value is kept for the codes; divided by the norm of the levels, it is stored
// with the tile.
//
// needs: HEAD_DIM, Place, call, channel_value, level_field, level_value
// gives: stored_norm, store_row_ranges
// binds: 3 ranges

// import pack/half.wgsl#conversions
// import pack/norm.wgsl#row_norm_bits

@group(0) @binding(3) var<storage, read_write> ranges: array<u32>;

var<private> row_norm: f32;

fn stored_norm(place: Place, kv_head: u32, token: u32) -> f32 {
    return row_norm;
}

fn row_level(channel: u32) -> f32 {
    return level_value(level_field(channel_value(channel), row_norm));
}

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {
    row_norm = half_value(row_norm_bits(invocation));
    if (invocation < HEAD_DIM / 4u) {
        row_squares[invocation] = sum_of_four(vec4<f32>(
            row_level(invocation * 4u),
            row_level(invocation * 4u + 1u),
            row_level(invocation * 4u + 2u),
            row_level(invocation * 4u + 3u),
        ));
    }
    workgroupBarrier();
    if (invocation == 0u) {
        let at = (place.page * call.kv_heads + kv_head) * call.ranges_per_tile + place.slot;
        ranges[at] = renormalized_bits(row_norm, row_sum_of_squares());
    }
}

// -------- sketch --------

// Norms, codes and signs of a single row with a sketch: `format::sketch`, bit for bit. First comes the row's norm, then
// the codes and their residual, which is rotated once more for its norm and its signs.
//
// needs: BITS, HEAD_DIM, INVOCATIONS, Place, call, rounded
// gives: field_bits, store_row_ranges
// binds: 3 ranges

// import pack/half.wgsl#conversions
// import pack/norm.wgsl#row_norm_bits
// import level_fields = pack/level_fields.wgsl#levels
// import common/rotation.wgsl#sketch_row

@group(0) @binding(3) var<storage, read_write> ranges: array<u32>;

const SIGN: u32 = 1u << (BITS - 1u);

var<workgroup> row_fields: array<u32, HEAD_DIM>;

fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return row_fields[channel];
}

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {
    let norm = row_norm_bits(invocation);
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        let field = level_field(rotated[channel], half_value(norm));
        row_fields[channel] = field;
        rotated[channel] = rounded(rotated[channel] - rounded(half_value(norm) * level_value(field)));
    }
    sketch_row(invocation);
    let residual = row_norm_bits(invocation);
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        row_fields[channel] |= select(0u, SIGN, rotated[channel] < 0f);
    }
    if (invocation == 0u) {
        let tile = place.page * call.kv_heads + kv_head;
        ranges[tile * call.ranges_per_tile + place.slot] = norm | (residual << 16u);
    }
    workgroupBarrier();
}
