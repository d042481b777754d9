//! Projections in codes of kvpack-weights in place of dense weights.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use kvpack::cpu::nmse;
use kvpack_cli::{Linear, Model, Product};
use kvpack_weights::quantize::{Grid, Matrix, ScaleType, Symmetry, round_to_nearest};
use kvpack_weights::{Bits, GroupSize, QuantizedLinear};

use crate::rig::Rig;

/// Parses the bits of an option.
///
/// # Errors
/// Which bits there are.
pub fn bits(text: &str) -> Result<Bits, String> {
    let known = || format!("'{text}' bits; 2, 3, 4 and 8 are allowed");
    text.parse().ok().and_then(|bits| Bits::new(bits).ok()).ok_or_else(known)
}

/// Projections of the model in codes, on a device. Those of a folder that `kvpack quantize` wrote are taken as they
/// are, others are rounded to the nearest level.
///
/// # Errors
/// When the codes of a folder have other bits, and what the device reports.
pub fn in_codes<R: Rig>(rig: &R, model: Model, bits: Option<Bits>) -> Result<Model> {
    let Some(bits) = bits else { return Ok(model) };
    named(model.joined()?, bits).with_products(&mut |linear| match linear.codes() {
        Some(codes) => {
            ensure!(codes.bits() == bits, "the weights of the folder have {}, {bits} were asked for", codes.bits());
            rig.product(codes)
        }
        None => rig.product(&rounded(linear, bits)?),
    })
}

/// The same for random weights: projections of one shape have the same codes, each in memory of its own.
///
/// # Errors
/// What the device reports.
pub fn random_in_codes<R: Rig>(rig: &R, model: Model, bits: Option<Bits>) -> Result<Model> {
    let Some(bits) = bits else { return Ok(model) };
    let mut of_shapes: HashMap<Vec<usize>, QuantizedLinear> = HashMap::new();
    named(model.joined()?, bits).with_products(&mut |linear| {
        let shape = linear.weight()?.dims().to_vec();
        if let Some(codes) = of_shapes.get(&shape) {
            return rig.product(codes);
        }
        let codes = rounded(linear, bits)?;
        let product = rig.product(&codes);
        of_shapes.insert(shape, codes);
        product
    })
}

fn named(mut model: Model, bits: Bits) -> Model {
    model.config.name = format!("{} in {bits}", model.config.name);
    model
}

/// A projection in codes, rounded to the nearest level, in groups of 128 inputs where rows are whole groups.
///
/// # Errors
/// When the weight is not dense.
pub fn rounded(linear: &Linear, bits: Bits) -> Result<QuantizedLinear> {
    let weight = linear.weight()?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let (outputs, inputs) = weight.dims2()?;
    let group = [128, 64, 32].into_iter().find(|group| inputs.is_multiple_of(*group)).unwrap_or(128);
    let grid = Grid { bits, group: GroupSize::Inputs(group), symmetry: Symmetry::Asymmetric, scales: ScaleType::F16 };
    let values = weight.flatten_all()?.to_vec1::<f32>()?;
    Ok(round_to_nearest(Matrix::new(outputs, inputs, &values)?, &grid)?)
}

/// The largest error of products against those with the dequantised weights in f32: rounding to the type of the device.
const LARGEST: f64 = 1e-5;

/// Compares products with codes on a device with what the dequantised weights give, for numbers of rows that take one
/// kernel, several, and the way of prompts. False where they differ.
///
/// # Errors
/// What the device reports.
pub fn check<R: Rig>(rig: &R) -> Result<bool> {
    let mut passed = true;
    for (outputs, inputs) in [(96, 64), (96, 576), (128, 4096)] {
        let weight = Tensor::randn(0f32, 0.02, (outputs, inputs), &Device::Cpu)?;
        for bits in [Bits::Four, Bits::Eight] {
            let codes = rounded(&Linear::new(weight.clone(), None), bits)?;
            let dense = Tensor::from_vec(codes.dequantize::<f32>(), (outputs, inputs), &Device::Cpu)?;
            let product = rig.product(&codes)?;
            let mut largest = 0f64;
            for rows in [1, 3, 16, 17, 64, 65, 300] {
                let x = Tensor::randn(0f32, 1.0, (rows, inputs), rig.device())?.to_dtype(rig.dtype())?;
                let on_cpu = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F32);
                let expected = on_cpu(&x)?.matmul(&dense.t()?)?.flatten_all()?.to_vec1::<f32>()?;
                let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
                let given = on_cpu(&product.product(&x)?)?.flatten_all()?.to_vec1::<f32>()?;
                largest = largest.max(nmse(&given, &expected));
            }
            passed &= largest <= LARGEST;
            let verdict = if largest <= LARGEST { "ok" } else { "FAILED" };
            println!(
                "{outputs} x {inputs} in {bits}, 1 to 300 rows: NMSE {largest:.1e} (at most {LARGEST:.0e}): {verdict}"
            );
        }
    }
    Ok(passed)
}

/// Products with codes on the CPU.
pub struct CpuProduct(pub QuantizedLinear);

impl Product for CpuProduct {
    fn product(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let rows = x.dim(0)?;
        let given = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let products = self.0.linear(&given).map_err(candle_core::Error::wrap)?;
        Tensor::from_vec(products, (rows, self.0.shape().outputs()), x.device())?.to_dtype(x.dtype())
    }
}
