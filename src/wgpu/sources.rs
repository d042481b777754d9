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
    "common/call.wgsl",
    "common/code_range.wgsl",
    "common/field_codes.wgsl",
    "common/field_f16.wgsl",
    "common/flat.wgsl",
    "common/grouping.wgsl",
    "common/half.wgsl",
    "common/ordered.wgsl",
    "common/ranges_of_span.wgsl",
    "common/ranges_of_tile.wgsl",
    "common/rows_f16.wgsl",
    "common/rows_f32.wgsl",
    "common/tile.wgsl",
    "compute_guard.wgsl",
    "dequantize.wgsl",
    "find_non_finite.wgsl",
    "quantize.wgsl",
    "ranges_span.wgsl",
    "ranges_tile.wgsl",
    "read_bandwidth.wgsl",
];
