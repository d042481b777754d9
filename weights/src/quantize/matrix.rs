//! Weights and activations as quantisers take them.

use crate::error::{Result, check_elements, check_finite};
use crate::shape::LinearShape;

/// Finite f32 values `[rows, columns]`, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    shape: LinearShape,
    values: &'a [f32],
}

impl<'a> Matrix<'a> {
    /// A matrix of `rows` times `columns` values.
    ///
    /// # Errors
    /// [`Error::Size`](crate::Error::Size) for sizes of 0 or beyond those of a layer,
    /// [`Error::Elements`](crate::Error::Elements) and [`Error::NonFinite`](crate::Error::NonFinite).
    pub fn new(rows: usize, columns: usize, values: &'a [f32]) -> Result<Self> {
        let shape = LinearShape::new(rows, columns)?;
        check_elements("the matrix", values.len(), shape.weights(), || format!("{rows} times {columns} values"))?;
        check_finite("element", values)?;
        Ok(Self { shape, values })
    }

    /// Rows: outputs of weights, tokens of activations.
    pub fn rows(&self) -> usize {
        self.shape.outputs()
    }

    /// Columns: inputs.
    pub fn columns(&self) -> usize {
        self.shape.inputs()
    }

    /// All values.
    pub fn values(&self) -> &'a [f32] {
        self.values
    }

    /// As the shape of a layer.
    pub(super) fn shape(&self) -> LinearShape {
        self.shape
    }
}
