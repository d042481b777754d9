//! A layer in codes.

use crate::codes::PackedCodes;
use crate::error::{Error, Result, check_elements, check_finite};
use crate::shape::{Bits, Groups, LinearShape};

/// The weights W `[N, K]` of a layer `y = x · Wᵀ`, as codes with a scale and a zero for each group of inputs of an
/// output.
///
/// `W[n, k] = scale[n, g] · (code[n, k] - zero[n, g])` with `g = groups.of(k)`. All formats of this crate are read into
/// this form. Scales that were f16 or bf16 are exact in f32, and so is the product with an integer of 9 bits.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedLinear {
    codes: PackedCodes,
    groups: Groups,
    /// `[N, groups]`.
    scales: Vec<f32>,
    /// `[N, groups]`.
    zeros: Vec<u16>,
}

impl QuantizedLinear {
    /// A layer of codes `[N, K]`, and scales and zeros `[N, groups]`.
    ///
    /// Zeros are integers from 0 to 2^b. The last is what a GPTQ checkpoint (v1) can mean and no code reaches.
    ///
    /// # Errors
    /// [`Error::Elements`], [`Error::NonFinite`] and [`Error::Value`] for lists that do not fit, groups of another
    /// number of inputs, scales that are not finite and zeros beyond 2^b.
    pub fn new(codes: PackedCodes, groups: Groups, scales: Vec<f32>, zeros: Vec<u16>) -> Result<Self> {
        let shape = codes.shape();
        let needed = shape.outputs() * groups.count();
        check_elements("the division into groups", groups.inputs(), shape.inputs(), || shape.to_string())?;
        let of = || format!("{shape} with {} groups", groups.count());
        check_elements("the list of scales", scales.len(), needed, of)?;
        check_elements("the list of zeros", zeros.len(), needed, of)?;
        check_finite("scale", &scales)?;
        let most = codes.bits().largest() + 1;
        if let Some(index) = zeros.iter().position(|&zero| u32::from(zero) > most) {
            let given = zeros[index].to_string();
            return Err(Error::Value { what: "zero", index, given, allowed: format!("0 to {most}") });
        }
        Ok(Self { codes, groups, scales, zeros })
    }

    /// N and K.
    pub fn shape(&self) -> LinearShape {
        self.codes.shape()
    }

    /// Bits of a code.
    pub fn bits(&self) -> Bits {
        self.codes.bits()
    }

    /// The codes.
    pub fn codes(&self) -> &PackedCodes {
        &self.codes
    }

    /// The group of each input.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Scales, `[N, groups]`.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Zeros, `[N, groups]`.
    pub fn zeros(&self) -> &[u16] {
        &self.zeros
    }

    /// True if all zeros are 2^(b - 1).
    pub fn is_symmetric(&self) -> bool {
        self.zeros.iter().all(|&zero| u32::from(zero) == self.bits().middle())
    }

    /// The inputs in the order of their groups: element j is the input that comes j-th. Inputs of one group stay in
    /// order.
    pub fn order_by_group(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.shape().inputs() as u32).collect();
        if self.groups.index().is_some() {
            order.sort_by_key(|&input| self.groups.of(input as usize));
        }
        order
    }

    /// The same layer for inputs in another order: its input j is input `order[j]` here.
    ///
    /// With [`order_by_group`](Self::order_by_group) the groups of a layer with act-order become neighbours, as kernels
    /// want them; its activations are then permuted likewise.
    ///
    /// # Errors
    /// [`Error::Elements`] and [`Error::Value`] for a list that is no permutation of the inputs.
    pub fn permuted(&self, order: &[u32]) -> Result<Self> {
        let shape = self.shape();
        check_elements("the order of inputs", order.len(), shape.inputs(), || shape.to_string())?;
        let mut seen = vec![false; shape.inputs()];
        for (index, &input) in order.iter().enumerate() {
            match seen.get_mut(input as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => {
                    return Err(Error::Value {
                        what: "the order of inputs, at",
                        index,
                        given: input.to_string(),
                        allowed: format!("0 to {}, each once", shape.inputs() - 1),
                    });
                }
            }
        }
        let from = self.codes.unpack();
        let rows = from.chunks_exact(shape.inputs());
        let codes: Vec<u8> = rows.flat_map(|row| order.iter().map(|&input| row[input as usize])).collect();
        let index = order.iter().map(|&input| self.groups.of(input as usize) as u32).collect();
        let size = crate::shape::GroupSize::Inputs(self.groups.size());
        Ok(Self {
            codes: PackedCodes::pack(self.bits(), shape, &codes)?,
            groups: Groups::indexed(shape, size, index)?,
            scales: self.scales.clone(),
            zeros: self.zeros.clone(),
        })
    }
}
