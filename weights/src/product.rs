//! Weights from codes, and their product with activations: the CPU reference of every kernel.

use rayon::prelude::*;

use crate::codes;
use crate::error::{Result, check_elements};
use crate::linear::QuantizedLinear;

/// The number types of the reference: f32 and f64.
pub trait Real: sealed::Real {}

impl Real for f32 {}
impl Real for f64 {}

mod sealed {
    /// What the reference computes with.
    pub trait Real:
        Copy + Send + Sync + std::ops::Mul<Output = Self> + std::ops::Add<Output = Self> + From<f32> + From<i16>
    {
    }

    impl Real for f32 {}
    impl Real for f64 {}
}

impl QuantizedLinear {
    /// The weights `[N, K]`. In f32 they are exact if the scales were f16 or bf16.
    pub fn dequantize<T: Real>(&self) -> Vec<T> {
        let inputs = self.shape().inputs();
        let mut weights = vec![T::from(0.0f32); self.shape().weights()];
        weights.par_chunks_exact_mut(inputs).enumerate().for_each(|(output, row)| self.row_into(output, row));
        weights
    }

    /// The weights `[N, K]` as a device dequantises them: each is the f16 next to that of
    /// [`dequantize`](Self::dequantize) in f32.
    pub fn dequantize_f16(&self) -> Vec<half::f16> {
        self.dequantize::<f32>().into_par_iter().map(half::f16::from_f32).collect()
    }

    /// `y = x · Wᵀ` for rows of activations `x [M, K]`: `y [M, N]`.
    ///
    /// The weights stay packed: one row of them is unpacked at a time. Sums run in the order of the inputs, in `T`.
    ///
    /// # Errors
    /// [`Error::Elements`](crate::Error::Elements) for activations that are no rows of K.
    pub fn linear<T: Real>(&self, x: &[T]) -> Result<Vec<T>> {
        let (outputs, inputs) = (self.shape().outputs(), self.shape().inputs());
        let rows = x.len() / inputs;
        check_elements("the activations", x.len(), rows * inputs, || format!("rows of {inputs} inputs"))?;
        let zero = T::from(0.0f32);
        // Transposed, so that each task writes one part.
        let mut by_output = vec![zero; outputs * rows];
        let tasks = by_output.par_chunks_exact_mut(rows.max(1)).enumerate();
        tasks.for_each_init(
            || vec![zero; inputs],
            |weights, (output, sums)| {
                self.row_into(output, weights);
                for (sum, x) in sums.iter_mut().zip(x.chunks_exact(inputs)) {
                    *sum = x.iter().zip(&*weights).fold(zero, |sum, (&x, &weight)| sum + x * weight);
                }
            },
        );
        Ok((0..rows * outputs).map(|at| by_output[at % outputs * rows + at / outputs]).collect())
    }

    /// The weights of an output.
    fn row_into<T: Real>(&self, output: usize, row: &mut [T]) {
        let (words, groups, bits) = (self.codes().row(output), self.groups(), self.bits());
        let count = groups.count();
        let scales = &self.scales()[output * count..][..count];
        let zeros = &self.zeros()[output * count..][..count];
        for (input, weight) in row.iter_mut().enumerate() {
            let group = groups.of(input);
            // Codes have 8 bits and zeros 9: their difference fits 16 bits.
            let level = codes::get(words, bits, input) as i16 - zeros[group] as i16;
            *weight = T::from(scales[group]) * T::from(level);
        }
    }
}
