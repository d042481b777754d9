//! AutoAWQ `gemm`: `qweight`, `qzeros`, `scales`, 4 bits.
//!
//! | tensor | shape | content |
//! | --- | --- | --- |
//! | `qweight` | `[K, N / 8]` i32 | the bits 4i to 4i + 3 of word c: output `8c + [0, 2, 4, 6, 1, 3, 5, 7][i]` |
//! | `qzeros` | `[K / g, N / 8]` i32 | the zeros in the same order, as they are |
//! | `scales` | `[K / g, N]` f16 | |

use rayon::prelude::*;

use super::{Table, by_output, check_whole_groups};
use crate::codes::PackedCodes;
use crate::error::{Error, Result};
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, GroupSize, Groups, LinearShape};

/// The field of a word that holds output j of 8.
const FIELD: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The tensors of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AwqTensors {
    /// `[K, N / 8]`.
    pub qweight: Table<u32>,
    /// `[K / g, N / 8]`.
    pub qzeros: Table<u32>,
    /// `[K / g, N]`.
    pub scales: Table<f32>,
}

/// Reads a layer.
///
/// # Errors
/// [`Error::Size`], [`Error::Tensor`], [`Error::Format`] and [`Error::NonFinite`] for tensors that do not fit each
/// other or the group size.
pub fn unpack(tensors: &AwqTensors, group: GroupSize) -> Result<QuantizedLinear> {
    let shape = LinearShape::new(tensors.qweight.columns().saturating_mul(8), tensors.qweight.rows())?;
    let (outputs, inputs) = (shape.outputs(), shape.inputs());
    let size = group.inputs(inputs);
    check_whole_groups("AWQ", shape, size)?;
    let groups = Groups::in_order(shape, group);
    let count = groups.count();
    let of = || format!("{shape} with groups of {size}");
    tensors.scales.check("scales", count, outputs, of)?;
    tensors.qzeros.check("qzeros", count, outputs / 8, of)?;
    let mut codes = vec![0; shape.weights()];
    codes.par_chunks_exact_mut(inputs).enumerate().for_each(|(output, row)| {
        row.iter_mut().enumerate().for_each(|(input, code)| *code = field(&tensors.qweight, input, output) as u8);
    });
    let zeros = (0..outputs).flat_map(|output| (0..count).map(move |group| (group, output)));
    let zeros = zeros.map(|(group, output)| field(&tensors.qzeros, group, output) as u16).collect();
    let codes = PackedCodes::pack(Bits::Four, shape, &codes)?;
    QuantizedLinear::new(codes, groups, by_output(&tensors.scales), zeros)
}

/// Writes a layer.
///
/// # Errors
/// [`Error::Format`] for other widths than 4 bits, outputs that are no multiple of 8, groups that do not divide the
/// inputs, act-order, and zeros of 16.
pub fn pack(linear: &QuantizedLinear) -> Result<AwqTensors> {
    let (shape, groups) = (linear.shape(), linear.groups());
    let (outputs, inputs, count) = (shape.outputs(), shape.inputs(), groups.count());
    let refuse = |what: String, hint| Err(Error::Format { format: "AWQ gemm", what, hint });
    if linear.bits() != Bits::Four {
        return refuse(linear.bits().to_string(), "it has 4 bits; write GPTQ");
    }
    if !outputs.is_multiple_of(8) {
        return refuse(format!("{outputs} outputs"), "the outputs must be a multiple of 8");
    }
    if groups.index().is_some() {
        return refuse("groups that are not in order (act-order)".into(), "write GPTQ");
    }
    check_whole_groups("AWQ gemm", shape, groups.size())?;
    if linear.zeros().iter().any(|&zero| u32::from(zero) > Bits::Four.largest()) {
        return refuse("a zero of 16".into(), "such zeros come from GPTQ v1 alone; quantise the layer again");
    }
    let columns = outputs / 8;
    let codes = linear.codes();
    let mut qweight = vec![0u32; inputs * columns];
    qweight.par_chunks_exact_mut(columns).enumerate().for_each(|(input, row)| {
        for output in 0..outputs {
            row[output / 8] |= codes.code(output, input) << (4 * FIELD[output % 8]);
        }
    });
    let mut qzeros = vec![0u32; count * columns];
    let mut scales = vec![0.0; count * outputs];
    for output in 0..outputs {
        for group in 0..count {
            let at = output * count + group;
            qzeros[group * columns + output / 8] |= u32::from(linear.zeros()[at]) << (4 * FIELD[output % 8]);
            scales[group * outputs + output] = linear.scales()[at];
        }
    }
    Ok(AwqTensors {
        qweight: Table::new(inputs, columns, qweight)?,
        qzeros: Table::new(count, columns, qzeros)?,
        scales: Table::new(count, outputs, scales)?,
    })
}

fn field(table: &Table<u32>, row: usize, output: usize) -> u32 {
    table.at(row, output / 8) >> (4 * FIELD[output % 8]) & 15
}
