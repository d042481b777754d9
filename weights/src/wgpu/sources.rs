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
    "linear/dequantize_places.wgsl",
    "linear/dequantize_weights.wgsl",
    "linear/element/bf16.wgsl",
    "linear/element/f16.wgsl",
    "linear/element/f32.wgsl",
    "linear/input/bf16.wgsl",
    "linear/input/f16.wgsl",
    "linear/input/f32.wgsl",
    "linear/linear.wgsl",
    "linear/linear_matrix.wgsl",
    "linear/linear_rows_matrix.wgsl",
    "linear/linear_tiles.wgsl",
    "linear/matrices.wgsl",
    "linear/octet.wgsl",
    "linear/order_inputs.wgsl",
    "linear/output/bf16.wgsl",
    "linear/output/f16.wgsl",
    "linear/output/f32.wgsl",
    "linear/place/in_order.wgsl",
    "linear/place/ordered.wgsl",
    "linear/prepare_rows.wgsl",
    "linear/scales/half.wgsl",
    "linear/scales/single.wgsl",
    "linear/unit/given.wgsl",
    "linear/unit/one.wgsl",
    "linear/weights.wgsl",
];

#[cfg(test)]
mod tests {
    use kvpack_device::wgpu::Variant;
    use naga::back::spv;
    use naga::valid::{Capabilities, ValidationFlags, Validator};

    use super::*;

    /// Compiles a variant to SPIR-V. No software device has the matrices of kernels.
    fn compile(variant: &Variant) -> Result<(), String> {
        let source = variant.source().map_err(|error| error.to_string())?;
        let parsed = naga::front::wgsl::parse_str(&source.wgsl);
        let module = parsed.map_err(|error| error.emit_to_string(&source.wgsl))?;
        let validated = Validator::new(ValidationFlags::all(), Capabilities::all()).validate(&module);
        let info = validated.map_err(|error| error.emit_to_string(&source.wgsl))?;
        let options = spv::Options { lang_version: (1, 6), ..Default::default() };
        spv::write_vec(&module, &info, &options, None).map(|_| ()).map_err(|error| error.to_string())
    }

    #[test]
    fn kernels_with_matrices_compile() {
        for bits in ["two", "three", "four", "eight"] {
            let codes = FILES.iter().find(|(name, _)| *name == format!("linear/codes/{bits}.wgsl")).unwrap().0;
            for output in ["linear/output/f32.wgsl", "linear/output/f16.wgsl", "linear/output/bf16.wgsl"] {
                for (unit, parts) in [("linear/unit/one.wgsl", 1), ("linear/unit/given.wgsl", 2)] {
                    let variant = Variant::new(&SHADERS, "linear_matrix").with_f16().with_matrices();
                    let variant = variant.import("codes", codes).import("output", output).import("unit", unit);
                    compile(&variant.constant("PARTS", parts)).unwrap();
                    let variant = Variant::new(&SHADERS, "linear_rows_matrix").with_f16().with_matrices();
                    let variant = variant.import("codes", codes).import("output", output).import("unit", unit);
                    compile(&variant.constant("SLICES", 2 * parts)).unwrap();
                }
            }
        }
    }
}
