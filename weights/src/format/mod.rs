//! The stored forms of quantised layers, to the bit, without files.
//!
//! | module | reads | writes |
//! | --- | --- | --- |
//! | [`gptq`] | GPTQ v1 and v2, 2, 3, 4 and 8 bits, with or without act-order | v2 (and v1) |
//! | [`awq_gemm`] | AutoAWQ `gemm`, 4 bits | the same |
//! | [`awq_gemv`] | AutoAWQ `gemv`, 4 bits | |
//! | [`awq_gemv_fast`] | AutoAWQ `gemv_fast`, 4 bits | |
//! | [`compressed_tensors`] | compressed-tensors `pack-quantized`, 2, 3, 4 and 8 bits | |

pub mod awq_gemm;
pub mod awq_gemv;
pub mod awq_gemv_fast;
pub mod compressed_tensors;
pub mod gptq;

use crate::error::{Error, Result, check_elements};
use crate::shape::LinearShape;

/// A tensor of two axes in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table<T> {
    rows: usize,
    columns: usize,
    values: Vec<T>,
}

impl<T> Table<T> {
    /// A tensor of `rows` times `columns` values.
    ///
    /// # Errors
    /// [`Error::Elements`] for another number of values.
    pub fn new(rows: usize, columns: usize, values: Vec<T>) -> Result<Self> {
        let of = || format!("a tensor of {rows} times {columns}");
        check_elements("the list of values", values.len(), rows.saturating_mul(columns), of)?;
        Ok(Self { rows, columns, values })
    }

    /// The size of the first axis.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The size of the second axis.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// All values.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Refuses another shape.
    fn check(&self, what: &'static str, rows: usize, columns: usize, of: impl Fn() -> String) -> Result<()> {
        if (self.rows, self.columns) == (rows, columns) {
            return Ok(());
        }
        let reason = format!("its shape is [{}, {}]; {} needs [{rows}, {columns}]", self.rows, self.columns, of());
        Err(Error::Tensor { name: what.into(), reason })
    }
}

impl<T: Copy> Table<T> {
    /// The value at a place.
    fn at(&self, row: usize, column: usize) -> T {
        self.values[row * self.columns + column]
    }
}

/// Scales stored `[groups, N]` as `[N, groups]`.
fn by_output(scales: &Table<f32>) -> Vec<f32> {
    let (groups, outputs) = (scales.rows(), scales.columns());
    (0..outputs).flat_map(|output| (0..groups).map(move |group| scales.at(group, output))).collect()
}

/// Refuses a group size that does not divide the inputs.
fn check_whole_groups(format: &'static str, shape: LinearShape, size: usize) -> Result<()> {
    if shape.inputs().is_multiple_of(size) {
        return Ok(());
    }
    let what = format!("groups of {size} in {shape}");
    Err(Error::Format { format, what, hint: "the group size must divide the number of inputs" })
}
