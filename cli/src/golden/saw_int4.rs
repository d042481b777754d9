//! The op of SAW-INT4.

use anyhow::Result;
use kvpack::format::Rotation;
use kvpack::format::interchange::saw_int4::{RowRounding, pack, quantize_row};

use super::file::GoldenFile;
use super::{Outputs, named};

/// `saw.quantize`: rows rotated, quantised and packed as the published kernel does.
pub fn quantize(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    let [_, _, head_dim] = file.input("x")?.axes()?;
    let rotation = match file.number("hadamard_order")? as usize {
        0 => None,
        order => Some(Rotation::hadamard(order)),
    };
    let rounding = if file.flag("bf16_roundtrip") { RowRounding::Bf16 } else { RowRounding::F32 };
    let (mut packed, mut scale_zero, mut values) = (Vec::new(), Vec::new(), Vec::new());
    for row in file.input("x")?.f32()?.chunks_exact(head_dim) {
        let quantized = quantize_row(row, rotation, rounding)?;
        packed.extend(pack(&quantized.codes)?.into_iter().map(f64::from));
        scale_zero.extend([quantized.scale, quantized.zero].map(f64::from));
        values.extend(quantized.dequantize().into_iter().map(f64::from));
    }
    let outputs = named([("packed", packed), ("scale_zero", scale_zero), ("dequant", values)]);
    Ok(vec![("format::saw_int4", outputs)])
}
