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
    "linear/add_splits.wgsl",
    "linear/codes.wgsl",
    "linear/dequantize_places.wgsl",
    "linear/dequantize_weights.wgsl",
    "linear/element.wgsl",
    "linear/input.wgsl",
    "linear/integers.wgsl",
    "linear/linear.wgsl",
    "linear/half_octet.wgsl",
    "linear/linear_matrix.wgsl",
    "linear/linear_row.wgsl",
    "linear/linear_rows_matrix.wgsl",
    "linear/linear_tiles.wgsl",
    "linear/matrices.wgsl",
    "linear/octet.wgsl",
    "linear/order_inputs.wgsl",
    "linear/output.wgsl",
    "linear/place.wgsl",
    "linear/prepare_rows.wgsl",
    "linear/scales.wgsl",
    "linear/unit.wgsl",
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
        compile(&Variant::new(&SHADERS, "linear_matrix").with_f16().with_matrices()).unwrap();
        compile(&Variant::new(&SHADERS, "add_splits")).unwrap();
        for element in ["linear/element.wgsl#f32", "linear/element.wgsl#f16", "linear/element.wgsl#bf16"] {
            for (place, parts) in [("linear/place.wgsl#in_order", 2), ("linear/place.wgsl#ordered", 1)] {
                let variant = Variant::new(&SHADERS, "prepare_rows").import("element", element).import("place", place);
                compile(&variant.constant("PARTS", parts)).unwrap();
            }
        }
        for output in ["linear/output.wgsl#f32", "linear/output.wgsl#f16", "linear/output.wgsl#bf16"] {
            for (unit, splits) in [("linear/unit.wgsl#one", 3), ("linear/unit.wgsl#given", 8)] {
                let variant = Variant::new(&SHADERS, "add_splits").import("output", output).import("unit", unit);
                compile(&variant.constant("SPLITS", splits)).unwrap();
            }
        }
        for codes in [
            "linear/codes.wgsl#two",
            "linear/codes.wgsl#three",
            "linear/codes.wgsl#three_by_lane",
            "linear/codes.wgsl#four",
            "linear/codes.wgsl#eight",
        ] {
            for output in ["linear/output.wgsl#f32", "linear/output.wgsl#f16", "linear/output.wgsl#bf16"] {
                for (unit, parts) in [("linear/unit.wgsl#one", 1), ("linear/unit.wgsl#given", 2)] {
                    let halves = ["linear/half_octet.wgsl#half", "linear/half_octet.wgsl#single"][parts - 1];
                    let variant = Variant::new(&SHADERS, "linear_matrix").with_f16().with_matrices();
                    let variant = variant.import("codes", codes).import("output", output).import("unit", unit);
                    let variant = variant.import("half_octet", halves);
                    let variant = variant.constant("PARTS", parts).constant("SPLITS", 4 * parts);
                    compile(&variant.constant("TURN", parts)).unwrap();
                    let variant = Variant::new(&SHADERS, "linear_rows_matrix").with_f16().with_matrices();
                    let variant = variant.import("codes", codes).import("output", output).import("unit", unit);
                    let variant = variant.import("half_octet", halves).constant("SPLITS", parts);
                    compile(&variant.constant("SLICES", 4 * parts)).unwrap();
                }
            }
        }
    }
}
