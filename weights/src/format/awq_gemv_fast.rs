//! AutoAWQ `gemv_fast`: `qweight`, `scales`, `qzeros`, 4 bits. llm-awq names the last one `scaled_zeros`.
//!
//! | tensor | shape | content |
//! | --- | --- | --- |
//! | `qweight` | `[N / 4, K]` i16 | four rows, in blocks of 64 inputs, see below |
//! | `scales` | `[8 · zw, N]` f16 | zw as in [`awq_gemv`](super::awq_gemv) |
//! | `qzeros` | `[8 · zw, N]` f16 | - scale · zero, rounded to f16 |
//!
//! Word i of block B of the rows `4R .. 4R + 3` is `qweight[R, 64·B + i]`. It holds four codes of the row `4R + i /
//! 16`, from the lowest bits up: those at the places `p = 4·(i mod 16) + 0, 1, 2, 3` of the block. Place p of a block
//! holds input `32·(p / 32) + 8·(p mod 4) + 2·(p mod 32 / 8) + p mod 8 / 4`.

use rayon::prelude::*;

use super::awq_gemv::zeros_width;
use super::{Table, by_output, check_whole_groups};
use crate::codes::PackedCodes;
use crate::error::{Error, Result};
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, GroupSize, Groups, LinearShape};

/// Inputs of a block.
const BLOCK: usize = 64;

/// The tensors of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AwqFastTensors {
    /// `[N / 4, K]`.
    pub qweight: Table<u16>,
    /// `[8 · zw, N]`.
    pub scales: Table<f32>,
    /// `[8 · zw, N]`.
    pub scaled_zeros: Table<f32>,
}

/// Reads a layer.
///
/// # Errors
/// [`Error::Size`], [`Error::Tensor`], [`Error::Format`], [`Error::Value`] and [`Error::NonFinite`] for tensors that do
/// not fit each other or the group size, and for scaled zeros that are no multiple of their scale from 0 to 15.
pub fn unpack(tensors: &AwqFastTensors, group: GroupSize) -> Result<QuantizedLinear> {
    let shape = LinearShape::new(tensors.qweight.rows().saturating_mul(4), tensors.qweight.columns())?;
    let (outputs, inputs) = (shape.outputs(), shape.inputs());
    if !inputs.is_multiple_of(BLOCK) {
        let hint = "the inputs are a multiple of 64";
        return Err(Error::Format { format: "AWQ gemv_fast", what: shape.to_string(), hint });
    }
    let size = group.inputs(inputs);
    check_whole_groups("AWQ", shape, size)?;
    let groups = Groups::in_order(shape, group);
    let count = groups.count();
    let stored = 8 * zeros_width(count, size)?;
    let of = || format!("{shape} with groups of {size}");
    tensors.scales.check("scales", stored, outputs, of)?;
    tensors.scaled_zeros.check("scaled_zeros", stored, outputs, of)?;
    let scales: Vec<f32> = {
        let used = tensors.scales.values()[..count * outputs].to_vec();
        by_output(&Table::new(count, outputs, used)?)
    };
    let places = (0..outputs).flat_map(|output| (0..count).map(move |group| (output, group)));
    let zeros = places.zip(&scales).map(|((output, group), &scale)| {
        zero(scale, tensors.scaled_zeros.at(group, output)).ok_or_else(|| Error::Value {
            what: "the scaled zero of output",
            index: output,
            given: format!("{} in group {group} with the scale {scale}", tensors.scaled_zeros.at(group, output)),
            allowed: "minus the scale times a zero from 0 to 15".into(),
        })
    });
    let zeros = zeros.collect::<Result<_>>()?;
    let mut codes = vec![0; shape.weights()];
    codes.par_chunks_exact_mut(inputs).enumerate().for_each(|(output, row)| {
        for place in 0..inputs {
            let (block, place) = (place / BLOCK, place % BLOCK);
            let word = tensors.qweight.at(output / 4, BLOCK * block + 16 * (output % 4) + place / 4);
            row[BLOCK * block + input_at(place)] = (word >> (4 * (place % 4)) & 15) as u8;
        }
    });
    QuantizedLinear::new(PackedCodes::pack(Bits::Four, shape, &codes)?, groups, scales, zeros)
}

/// The input at a place of a block.
fn input_at(place: usize) -> usize {
    32 * (place / 32) + 8 * (place % 4) + 2 * (place % 32 / 8) + place % 8 / 4
}

/// The zero of a stored product, which was rounded to f16: within half a unit in the last place of 11 bits.
fn zero(scale: f32, scaled: f32) -> Option<u16> {
    if scale == 0.0 {
        return (scaled == 0.0).then_some(0);
    }
    let zero = (-scaled / scale).round();
    let is_near = (scaled + zero * scale).abs() <= scaled.abs() / 1024.0 + f32::from(half::f16::MIN_POSITIVE_SUBNORMAL);
    // NaN is near nothing.
    (is_near && (0.0..=15.0).contains(&zero)).then_some(zero as u16)
}
