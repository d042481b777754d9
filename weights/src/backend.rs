//! What conformance needs of a device: numbers go in and come out on the host.

use half::{bf16, f16};
use kvpack_device::{ElementType, Elements};

use crate::error::Result;
use crate::linear::QuantizedLinear;
use crate::path::Path;

/// A device that multiplies with layers and dequantises them, for comparisons. Engines call the `Linear` of the module
/// of their device.
pub trait Backend {
    /// Uploads a layer and `x [rows, K]`, joins them with a tensor that holds `y`, and runs the product twice. `y` has
    /// `rows · N` elements or more.
    fn product(
        &self,
        layer: &QuantizedLinear,
        x: &HostTensor,
        rows: usize,
        y: &HostTensor,
    ) -> impl Future<Output = Result<Product>>;

    /// Uploads a layer, dequantises it into a tensor that holds `weights`, and returns the whole tensor.
    fn dequantize(&self, layer: &QuantizedLinear, weights: &HostTensor) -> impl Future<Output = Result<Vec<f32>>>;
}

/// What [`Backend::product`] returns.
#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    /// The whole tensor of outputs after each of the two runs.
    pub runs: [Vec<f32>; 2],
    /// The kernel; `None` on a CPU.
    pub path: Option<Path>,
}

/// The elements of a tensor, on the host.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    /// In f32.
    F32(Vec<f32>),
    /// In f16.
    F16(Vec<f16>),
    /// In bf16.
    Bf16(Vec<bf16>),
}

impl HostTensor {
    /// Numbers, each rounded to the nearest of the type.
    pub fn new(element_type: ElementType, numbers: &[f32]) -> Self {
        match element_type {
            ElementType::F32 => Self::F32(numbers.to_vec()),
            ElementType::F16 => Self::F16(numbers.iter().map(|&number| f16::from_f32(number)).collect()),
            ElementType::Bf16 => Self::Bf16(numbers.iter().map(|&number| bf16::from_f32(number)).collect()),
        }
    }

    /// What a tensor of a device is filled with.
    pub fn elements(&self) -> Elements<'_> {
        match self {
            Self::F32(numbers) => Elements::F32(numbers),
            Self::F16(numbers) => Elements::F16(numbers),
            Self::Bf16(numbers) => Elements::Bf16(numbers),
        }
    }

    /// Its type.
    pub fn element_type(&self) -> ElementType {
        match self {
            Self::F32(_) => ElementType::F32,
            Self::F16(_) => ElementType::F16,
            Self::Bf16(_) => ElementType::Bf16,
        }
    }

    /// Its numbers.
    pub fn numbers(&self) -> Vec<f32> {
        match self {
            Self::F32(numbers) => numbers.clone(),
            Self::F16(numbers) => numbers.iter().map(|&number| number.into()).collect(),
            Self::Bf16(numbers) => numbers.iter().map(|&number| number.into()).collect(),
        }
    }
}
