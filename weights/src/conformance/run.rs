//! How checks run: what a backend returns against what the stored codes say.

use half::f16;
use kvpack_device::ElementType;
use rayon::prelude::*;

use super::layer::{Activations, LayerCase};
use super::report::{Accuracy, Failure, Report};
use crate::backend::{Backend, Product};
use crate::error::{Error, Result};
use crate::linear::QuantizedLinear;
use crate::path::Path;

/// Compares the products of a backend with those of f64. Some kernels multiply with weights in f16.
pub(super) async fn product<B: Backend>(backend: &B, case: &LayerCase) -> kvpack_device::Result<Report> {
    reported(compare_product(backend, case).await)
}

/// Compares the weights of a backend with codes, scales and zeros.
pub(super) async fn dequantize<B: Backend>(backend: &B, case: &LayerCase) -> kvpack_device::Result<Report> {
    reported(compare_weights(backend, case).await)
}

/// Errors of the device stay errors; what a backend refuses is a failure.
fn reported(report: Result<Report>) -> kvpack_device::Result<Report> {
    match report {
        Ok(report) => Ok(report),
        Err(Error::Device(error)) => Err(error),
        Err(error) => {
            Ok(Report { path: None, accuracy: None, failures: vec![Failure::Refused { reason: error.to_string() }] })
        }
    }
}

async fn compare_product<B: Backend>(backend: &B, case: &LayerCase) -> Result<Report> {
    let layer = case.layer()?;
    let (x, before) = (case.activations(), case.outputs_before());
    let Product { runs: [got, again], path } = backend.product(&layer, &x, case.rows, &before).await?;
    let before = before.numbers();
    if let Some(failure) = [&got, &again].into_iter().find_map(|run| other_length(run, &before)) {
        return Ok(Report { path, accuracy: None, failures: vec![failure] });
    }
    let count = case.rows * case.outputs;
    let mut failures: Vec<Failure> = written_behind(count, &again, &before).into_iter().collect();
    let elements = got.iter().zip(&again).filter(|(got, again)| got.to_bits() != again.to_bits()).count();
    if elements > 0 {
        failures.push(Failure::Unrepeated { elements });
    }
    if matches!(case.activations, Activations::NotFinite(_)) {
        let finite = || (0..count).filter(|&index| got[index].is_finite());
        failures.extend(finite().next().map(|index| Failure::Finite { elements: finite().count(), index }));
        return Ok(Report { path, accuracy: None, failures });
    }
    let x: Vec<f64> = x.numbers().into_iter().map(f64::from).collect();
    let rounded = path.is_some_and(Path::rounds_weights);
    let of_output = |output| Compared::of_output(case, &weights(&layer, output, rounded), output, &x, &got);
    let outputs: Vec<Compared> = (0..case.outputs).into_par_iter().map(of_output).collect();
    let all = outputs.into_iter().fold(Compared::default(), Compared::and);
    let accuracy = Accuracy { nmse: all.nmse(), limit: nmse_limit(case.y) };
    failures.extend(all.failure("outputs"));
    if accuracy.nmse.is_nan() || accuracy.nmse > accuracy.limit {
        failures.push(Failure::Inaccurate(accuracy));
    }
    Ok(Report { path, accuracy: Some(accuracy), failures })
}

async fn compare_weights<B: Backend>(backend: &B, case: &LayerCase) -> Result<Report> {
    let (layer, before) = (case.layer()?, case.weights_before());
    let got = backend.dequantize(&layer, &before).await?;
    let before = before.numbers();
    let mut failures: Vec<Failure> = other_length(&got, &before).into_iter().collect();
    if failures.is_empty() {
        failures.extend(written_behind(case.outputs * case.inputs, &got, &before));
        let of_output = |output| {
            let first = output * case.inputs;
            let pairs = got[first..].iter().zip(weights(&layer, output, true));
            pairs.enumerate().fold(Compared::default(), |all, (input, (&got, want))| {
                all.and(Compared::element(first + input, got, want, 0.0))
            })
        };
        let all = (0..case.outputs).into_par_iter().map(of_output).collect::<Vec<_>>();
        failures.extend(all.into_iter().fold(Compared::default(), Compared::and).failure("weights"));
    }
    Ok(Report { path: None, accuracy: None, failures })
}

/// The weights of an output: `scale · (code − zero)`, and in f16 as
/// [`dequantize_f16`](QuantizedLinear::dequantize_f16) rounds them.
fn weights(layer: &QuantizedLinear, output: usize, rounded: bool) -> Vec<f64> {
    let (codes, groups) = (layer.codes(), layer.groups());
    let weight = |input| {
        let at = output * groups.count() + groups.of(input);
        // Codes have 8 bits and zeros 9.
        let level = f32::from(codes.code(output, input) as i16 - layer.zeros()[at] as i16);
        let scale = layer.scales()[at];
        if rounded { f16::from_f32(scale * level).to_f64() } else { f64::from(scale) * f64::from(level) }
    };
    (0..layer.shape().inputs()).map(weight).collect()
}

/// What all outputs together may be off. Roundings of the outputs have about `2⁻²ᵇ / 6` for b bits behind the first. The
/// kernel of one row takes activations as integers of 16 bits, relative to the largest of 32.
const fn nmse_limit(y: ElementType) -> f64 {
    match y {
        ElementType::F32 => 3e-8,
        ElementType::F16 => 2e-7,
        ElementType::Bf16 => 1e-5,
    }
}

fn other_length(got: &[f32], before: &[f32]) -> Option<Failure> {
    let (given, expected) = (got.len(), before.len());
    (given != expected).then_some(Failure::Length { given, expected })
}

fn written_behind(count: usize, got: &[f32], before: &[f32]) -> Option<Failure> {
    let pairs = got[count..].iter().zip(&before[count..]);
    let elements = pairs.filter(|(got, before)| got.to_bits() != before.to_bits()).count();
    (elements > 0).then_some(Failure::WrittenBehind { elements })
}

/// Elements that were compared.
#[derive(Clone, Copy, Default)]
struct Compared {
    error: f64,
    size: f64,
    wrong: usize,
    /// The first that is wrong: its index, what it is, and what it must be.
    first: Option<(usize, f64, f64)>,
}

impl Compared {
    fn element(index: usize, got: f32, want: f64, allowed: f64) -> Self {
        let got = f64::from(got);
        let error = (got - want).abs();
        let is_wrong = error.is_nan() || error > allowed;
        Self {
            error: error * error,
            size: want * want,
            wrong: usize::from(is_wrong),
            first: is_wrong.then_some((index, got, want)),
        }
    }

    /// An output of all rows. Its error is at most 2 · 10⁻⁵ of the sum of all absolute products, and the rounding of
    /// the output. With outliers only all outputs together are judged: an output whose weights at the outliers are 0 is
    /// small, and the activations near them have lost bits.
    fn of_output(case: &LayerCase, weights: &[f64], output: usize, x: &[f64], got: &[f32]) -> Self {
        let step = match case.y {
            ElementType::F32 => 0.0,
            ElementType::F16 => 1.0 / 2048.0,
            ElementType::Bf16 => 1.0 / 256.0,
        };
        let has_outliers = matches!(case.activations, Activations::Outliers { .. });
        x.chunks_exact(case.inputs).enumerate().fold(Self::default(), |all, (row, x)| {
            let (want, absolute) = x.iter().zip(weights).fold((0.0, 0.0), |(sum, absolute), (x, weight)| {
                let product = x * weight;
                (sum + product, absolute + product.abs())
            });
            let index = row * case.outputs + output;
            let allowed = if has_outliers { f64::INFINITY } else { 2e-5 * absolute + step * want.abs() };
            all.and(Self::element(index, got[index], want, allowed))
        })
    }

    fn and(self, other: Self) -> Self {
        Self {
            error: self.error + other.error,
            size: self.size + other.size,
            wrong: self.wrong + other.wrong,
            first: self.first.or(other.first),
        }
    }

    /// Where all outputs must be 0, any other is infinitely wrong.
    fn nmse(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.size }
    }

    fn failure(&self, what: &'static str) -> Option<Failure> {
        let elements = self.wrong;
        self.first.map(|(index, got, want)| Failure::Differs { what, elements, index, got, want })
    }
}
