//! The shader files, compiled into the library.

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// The text of `shaders/{name}`.
        pub fn file(name: &str) -> Option<&'static str> {
            match name {
                $($name => Some(include_str!(concat!("../../shaders/", $name))),)*
                _ => None,
            }
        }
    };
}

files![
    "append.wgsl",
    "attend.wgsl",
    "common/call.wgsl",
    "common/code_range.wgsl",
    "common/extremes_none.wgsl",
    "common/extremes_reset.wgsl",
    "common/field_codes.wgsl",
    "common/field_f16.wgsl",
    "common/flat.wgsl",
    "common/grouping.wgsl",
    "common/half.wgsl",
    "common/input_f16.wgsl",
    "common/input_f32.wgsl",
    "common/key_codes.wgsl",
    "common/key_field_channel_tokens.wgsl",
    "common/key_field_f16.wgsl",
    "common/key_field_token_channels.wgsl",
    "common/key_ranges_folded.wgsl",
    "common/key_ranges_token.wgsl",
    "common/ordered.wgsl",
    "common/output_f16.wgsl",
    "common/output_f32.wgsl",
    "common/query_ranges_none.wgsl",
    "common/query_ranges_span.wgsl",
    "common/query_row_f32.wgsl",
    "common/query_row_int.wgsl",
    "common/ranges_of_span.wgsl",
    "common/ranges_of_tile.wgsl",
    "common/rows_f16.wgsl",
    "common/rows_f32.wgsl",
    "common/scores_dot.wgsl",
    "common/scores_fma.wgsl",
    "common/scores_stored.wgsl",
    "common/softmax_loop.wgsl",
    "common/states.wgsl",
    "common/tile.wgsl",
    "common/value_codes.wgsl",
    "common/value_field_channel_tokens.wgsl",
    "common/value_field_f16.wgsl",
    "common/value_field_token_channels.wgsl",
    "common/value_ranges_folded.wgsl",
    "common/value_ranges_token.wgsl",
    "common/values_dot.wgsl",
    "common/values_fma.wgsl",
    "common/work_item.wgsl",
    "common/workgroup_max_atomic.wgsl",
    "common/workgroup_max_subgroup.wgsl",
    "compute_guard.wgsl",
    "dequantize.wgsl",
    "find_non_finite.wgsl",
    "merge_states.wgsl",
    "prepare_query.wgsl",
    "quantize.wgsl",
    "ranges_span.wgsl",
    "ranges_tile.wgsl",
    "read_bandwidth.wgsl",
    "scores.wgsl",
    "weighted_values.wgsl",
];
