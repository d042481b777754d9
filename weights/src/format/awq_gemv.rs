//! AutoAWQ `gemv`: `qweight`, `qzeros`, `scales`, 4 bits.
//!
//! | tensor | shape | content |
//! | --- | --- | --- |
//! | `qweight` | `[N, K / 8]` i32 | code k of a row at the bits `4·(k mod 8) ..` of word `k / 8` |
//! | `qzeros` | `[N, zw]` i32 | zero of group g at the bits `4·(g mod 8) ..` of word `g / 8` |
//! | `scales` | `[N, 8 · zw]` f16 | |
//!
//! `zw = ceil(ceil((K / g) / 8) / m) · m` with m = 1 for groups of 128 and more, 2 for 64 and 4 for 32. What lies
//! behind the last group is ignored.

use super::awq_gemm::AwqTensors;
use super::check_whole_groups;
use crate::codes::{PackedCodes, get};
use crate::error::{Error, Result};
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, GroupSize, Groups, LinearShape};

/// Reads a layer.
///
/// # Errors
/// [`Error::Size`], [`Error::Tensor`], [`Error::Format`] and [`Error::NonFinite`] for tensors that do not fit each
/// other or the group size.
pub fn unpack(tensors: &AwqTensors, group: GroupSize) -> Result<QuantizedLinear> {
    let shape = LinearShape::new(tensors.qweight.rows(), tensors.qweight.columns().saturating_mul(8))?;
    let size = group.inputs(shape.inputs());
    check_whole_groups("AWQ", shape, size)?;
    let groups = Groups::in_order(shape, group);
    let width = zeros_width(groups.count(), size)?;
    let of = || format!("{shape} with groups of {size}");
    tensors.qzeros.check("qzeros", shape.outputs(), width, of)?;
    tensors.scales.check("scales", shape.outputs(), 8 * width, of)?;
    let places = (0..shape.outputs()).flat_map(|output| (0..groups.count()).map(move |group| (output, group)));
    let zeros = places
        .clone()
        .map(|(output, group)| get(&tensors.qzeros.values()[output * width..][..width], Bits::Four, group) as u16);
    let scales = places.map(|(output, group)| tensors.scales.at(output, group));
    let (zeros, scales) = (zeros.collect(), scales.collect());
    let codes = PackedCodes::new(Bits::Four, shape, tensors.qweight.values().to_vec())?;
    QuantizedLinear::new(codes, groups, scales, zeros)
}

/// Words of zeros for each output (`calculate_zeros_width` of AutoAWQ).
pub(super) fn zeros_width(groups: usize, size: usize) -> Result<usize> {
    let multiple = match size {
        128.. => 1,
        64 => 2,
        32 => 4,
        _ => {
            let hint = "they are 32, 64, or 128 and more";
            return Err(Error::Format { format: "AWQ gemv", what: format!("groups of {size}"), hint });
        }
    };
    Ok(groups.div_ceil(8).next_multiple_of(multiple))
}
