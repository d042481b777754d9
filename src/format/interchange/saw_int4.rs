//! SAW-INT4's own storage and arithmetic (arXiv 2604.19157), equal to its published kernel to the bit.
//!
//! A row (one token of one head) has one scale and one real-valued zero point, `value = (code − zero) · scale`. Its
//! codes fill bytes half by half: byte `j` holds channel `j` in its low nibble and channel `j + head_dim / 2` in its
//! high nibble.
//!
//! It differs from kvpack's own codec ([`SegmentFormat::saw_int4`](crate::format::SegmentFormat::saw_int4)) in
//! rounding. Ties go up, not to the even code. A spread below 1e-8 counts as 1e-8. Scale and zero are f32; kvpack's
//! scale and minimum are f16.

use half::bf16;

use crate::format::Rotation;
use crate::{Error, Result};

/// The precision to which the row is rounded between rotation and quantisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowRounding {
    /// No rounding: the row stays f32.
    F32,
    /// bf16, to nearest even.
    Bf16,
}

/// A quantised row.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedRow {
    /// One code per channel, 0 to 15.
    pub codes: Vec<u8>,
    /// Distance between neighbouring codes.
    pub scale: f32,
    /// The code of the value 0. In general it is not an integer.
    pub zero: f32,
}

/// Rotates and quantises a row: `scale = max(max − min, 1e-8) / 15`, `zero = −min / scale`,
/// `code = trunc(x / scale + zero + 0.5)`.
///
/// # Errors
/// [`Error::Format`] when the rotation does not fit a row of this length.
pub fn quantize_row(row: &[f32], rotation: Option<Rotation>, rounding: RowRounding) -> Result<QuantizedRow> {
    let mut row = row.to_vec();
    if let Some(rotation) = rotation {
        rotation.rotate(&mut row)?;
    }
    if rounding == RowRounding::Bf16 {
        row.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    }
    let min = row.iter().copied().fold(f32::INFINITY, f32::min);
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (max - min).max(1e-8) / 15.0;
    let zero = -min / scale;
    let codes = row.iter().map(|x| (x / scale + zero + 0.5).trunc() as u8).collect();
    Ok(QuantizedRow { codes, scale, zero })
}

impl QuantizedRow {
    /// The values of the codes, still rotated.
    pub fn dequantize(&self) -> Vec<f32> {
        self.codes.iter().map(|&code| (f32::from(code) - self.zero) * self.scale).collect()
    }
}

/// Packs the codes of a row: its first half into low nibbles, its second half into high nibbles.
///
/// ```
/// use kvpack::format::interchange::saw_int4::{pack, unpack};
/// assert_eq!(pack(&[1, 2, 3, 4])?, [0x31, 0x42]);
/// assert_eq!(unpack(&[0x31, 0x42]), [1, 2, 3, 4]);
/// # Ok::<(), kvpack::Error>(())
/// ```
///
/// # Errors
/// [`Error::Format`] when the number of codes is odd or one is above 15.
pub fn pack(codes: &[u8]) -> Result<Vec<u8>> {
    let reject = |reason: String| Error::Format { format: "nibbles of the two halves of a row".into(), reason };
    if !codes.len().is_multiple_of(2) {
        return Err(reject(format!("{} codes cannot be split into two halves", codes.len())));
    }
    if let Some(at) = codes.iter().position(|&code| code > 15) {
        return Err(reject(format!("code {} at {at} is above 15", codes[at])));
    }
    let (low, high) = codes.split_at(codes.len() / 2);
    Ok(low.iter().zip(high).map(|(low, high)| low | high << 4).collect())
}

/// Unpacks a row that [`pack`] packed.
pub fn unpack(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| byte & 15).chain(bytes.iter().map(|byte| byte >> 4)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ties_go_up() {
        let row: Vec<f32> = (0..16).map(|i| i as f32).chain([0.5, 1.5, 2.5, 13.5]).collect();
        let quantized = quantize_row(&row, None, RowRounding::F32).unwrap();
        assert_eq!((quantized.scale, quantized.zero), (1.0, 0.0));
        assert_eq!(quantized.codes[16..], [1, 2, 3, 14]);
    }

    #[test]
    fn odd_rows_and_large_codes_are_refused() {
        assert!(pack(&[1, 2, 3]).is_err());
        assert!(pack(&[1, 16]).is_err());
        for order in [0, 3, 512] {
            assert!(quantize_row(&[1.0; 64], Some(Rotation::hadamard(order)), RowRounding::F32).is_err());
        }
    }

    proptest! {
        #[test]
        fn everything_comes_back(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            prop_assert_eq!(pack(&unpack(&bytes)).unwrap(), bytes);
        }
    }
}
