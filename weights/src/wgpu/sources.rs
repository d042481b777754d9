//! The shader files, compiled into the library.

use kvpack_device::wgpu::ShaderSources;

/// The files of `shaders/`, for every variant.
pub(super) static SHADERS: ShaderSources =
    ShaderSources { library: "kvpack-weights", files: FILES, tables: &[], unclamped_table: None };

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// Path below `shaders/` and text of every file.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../shaders/", $name)))),*];
    };
}

files![
    "linear/codes/eight.wgsl",
    "linear/codes/four.wgsl",
    "linear/codes/three.wgsl",
    "linear/codes/two.wgsl",
    "linear/element/bf16.wgsl",
    "linear/element/f16.wgsl",
    "linear/element/f32.wgsl",
    "linear/input/bf16.wgsl",
    "linear/input/f16.wgsl",
    "linear/input/f32.wgsl",
    "linear/linear.wgsl",
    "linear/octet.wgsl",
    "linear/order_inputs.wgsl",
    "linear/output/bf16.wgsl",
    "linear/output/f16.wgsl",
    "linear/output/f32.wgsl",
    "linear/scales/half.wgsl",
    "linear/scales/single.wgsl",
];
