// States that `merge_states` joins.

@group(0) @binding(7) var<storage, read_write> states: array<vec4<f32>>;
