//! compressed-tensors `pack-quantized`: `weight_packed`, `weight_scale`, `weight_zero_point`, `weight_shape`,
//! `weight_g_idx`.
//!
//! | tensor | shape | content |
//! | --- | --- | --- |
//! | `weight_packed` | `[N, ceil(K · b / 32)]` i32 | each row a dense little-endian bit stream of codes + 2^(b - 1) |
//! | `weight_scale` | `[N, ceil(K / g)]` f16, bf16 or f32 | |
//! | `weight_zero_point` | `[ceil(N · b / 32), ceil(K / g)]` i32 | columns are such streams along N; not if symmetric |
//! | `weight_shape` | `[2]` i64 | N, K |
//! | `weight_g_idx` | `[K]` i32 | the group of each input with act-order; with a -1 in it, groups are in order |
//!
//! Codes and zeros are signed there. Here both are raised by 2^(b - 1), as they are stored; symmetric means a zero of
//! 2^(b - 1). Versions of compressed-tensors before dense 3-bit streams put 10 codes into a word and left two bits
//! idle. Their tensors are wider for most K, and those are refused. For some K below 160, none of them a multiple of 32,
//! both layouts have the same width. Such layers are refused in either layout.

use super::Table;
use crate::codes::{PackedCodes, get_from};
use crate::error::{Error, Result};
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, GroupSize, Groups, LinearShape};

/// Codes of 3 bits in a word of older versions.
const OLD_CODES: usize = 10;

/// The tensors of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct CompressedTensors {
    /// `[N, ceil(K · b / 32)]`.
    pub weight_packed: Table<u32>,
    /// `[N, ceil(K / g)]`.
    pub weight_scale: Table<f32>,
    /// `[ceil(N · b / 32), ceil(K / g)]`; without it the layer is symmetric.
    pub weight_zero_point: Option<Table<u32>>,
    /// N and K.
    pub weight_shape: [i64; 2],
    /// `[K]`; without it, and with a -1 in it, groups are in order.
    pub weight_g_idx: Option<Vec<i32>>,
}

/// Reads a layer.
///
/// # Errors
/// [`Error::Size`], [`Error::Tensor`], [`Error::Elements`], [`Error::Value`] and [`Error::NonFinite`] for tensors that
/// do not fit each other; [`Error::Tensor`] for 3 bits in a size at which two layouts have the same width.
pub fn unpack(tensors: &CompressedTensors, bits: Bits, group: GroupSize) -> Result<QuantizedLinear> {
    let [outputs, inputs] = tensors.weight_shape.map(|size| usize::try_from(size).unwrap_or(0));
    let shape = LinearShape::new(outputs, inputs)?;
    let in_order = Groups::in_order(shape, group);
    let (count, size) = (in_order.count(), in_order.size());
    let of = || format!("{shape} with {bits} and groups of {size}");
    tensors.weight_packed.check("weight_packed", outputs, bits.words(inputs), of)?;
    tensors.weight_scale.check("weight_scale", outputs, count, of)?;
    check_dense("weight_packed", bits, inputs)?;
    let groups = match &tensors.weight_g_idx {
        None => in_order,
        // The package makes an index of -1 and fills it if the quantiser has one.
        Some(index) if index.contains(&-1) => in_order,
        Some(index) => {
            let index = index.iter().enumerate().map(|(index, &group)| {
                u32::try_from(group).map_err(|_| Error::Value {
                    what: "weight_g_idx of input",
                    index,
                    given: group.to_string(),
                    allowed: format!("0 to {}", count - 1),
                })
            });
            Groups::indexed(shape, GroupSize::Inputs(size), index.collect::<Result<_>>()?)?
        }
    };
    let zeros = match &tensors.weight_zero_point {
        None => vec![bits.middle() as u16; outputs * count],
        Some(packed) => {
            packed.check("weight_zero_point", bits.words(outputs), count, of)?;
            // Another width of `weight_packed` has shown the layout.
            if bits.words(inputs) == old_words(inputs) {
                check_dense("weight_zero_point", bits, outputs)?;
            }
            let places = (0..outputs).flat_map(|output| (0..count).map(move |group| (output, group)));
            places.map(|(output, group)| get_from(|word| packed.at(word, group), bits, output) as u16).collect()
        }
    };
    let codes = PackedCodes::new(bits, shape, tensors.weight_packed.values().to_vec())?;
    QuantizedLinear::new(codes, groups, tensors.weight_scale.values().to_vec(), zeros)
}

/// Refuses a number of codes at which the layout of older versions has as many words as a dense stream. Up to 10 codes
/// the two are the same.
fn check_dense(name: &str, bits: Bits, codes: usize) -> Result<()> {
    if bits != Bits::Three || codes <= OLD_CODES || bits.words(codes) != old_words(codes) {
        return Ok(());
    }
    let reason = format!(
        "{codes} codes of 3 bits fill {} words both in the layout of older versions of compressed-tensors and in the \
         dense one, so it cannot be told which one this is; quantise to 4 bits, or in sizes that are multiples of 32",
        bits.words(codes)
    );
    Err(Error::Tensor { name: name.into(), reason })
}

/// The words of a row of 3-bit codes in older versions.
fn old_words(codes: usize) -> usize {
    codes.div_ceil(OLD_CODES)
}
