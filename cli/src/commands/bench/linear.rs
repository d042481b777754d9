//! Products of a few rows of activations with packed weights (`kvpack-weights`).

use anyhow::{Result, bail};
use kvpack::cpu::Cpu;
use kvpack::plan::{ElementType, Elements};
use kvpack::wgpu::Wgpu;
use kvpack::wgpu::measure::{self, Encode, Repeats};
use kvpack_report::{Median, Run};
use kvpack_weights::{Bits, GroupSize, Groups, LinearShape, PackedCodes, QuantizedLinear};
use serde::Serialize;

use super::UNSTEADY_PERCENT;
use super::timed::{Guard, Timed};
use crate::outcome::Wrong;
use crate::print::{self, say};
use crate::provenance;

/// Outputs and inputs of the layers, as models have them.
const LAYERS: [[usize; 2]; 5] = [[4096, 4096], [8192, 8192], [14336, 4096], [8192, 28672], [5120, 13824]];

/// The layer of a software device.
const SMALL_LAYERS: [[usize; 2]; 1] = [[256, 512]];

/// Rows of activations.
const ROWS: [usize; 3] = [1, 4, 16];

/// Inputs of a group.
const GROUP: usize = 128;

/// Outputs that are compared with f64, of every row.
const COMPARED: usize = 64;

/// Bytes that the copies of a layer hold together, at least: several times the cache of any GPU.
const FOOTPRINT: u64 = 384 << 20;

const ONLY_A_REFERENCE: &str =
    "the CPU multiplies with packed weights only as a reference; --suite linear times wgpu and CUDA";

/// A device that multiplies with packed weights.
pub trait TimedLinear: Timed {
    /// Refuses a backend that has no product to time, before anything is measured.
    ///
    /// # Errors
    /// On the CPU.
    fn check_linear(&self) -> Result<()> {
        Ok(())
    }

    /// Binds `copies` copies of a layer to f16 activations `[rows, K]`, runs the first, and times them in turns.
    ///
    /// # Errors
    /// When the device fails, or multiplies with no packed weights.
    async fn time_linear(&self, linear: &QuantizedLinear, x: &[half::f16], copies: usize) -> Result<TimedProduct>;
}

/// What was found.
pub struct TimedProduct {
    /// The outputs `[rows, N]` of one product.
    pub outputs: Vec<f32>,
    /// Bytes of the layer on the device.
    pub bytes: u64,
    pub time: Median,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename = "linear")]
struct LinearReport {
    backend: String,
    run: Run,
    read_gigabytes_per_second: f64,
    rows: Vec<LinearRow>,
}

#[derive(Serialize)]
struct LinearRow {
    bits: u32,
    outputs: usize,
    inputs: usize,
    rows: usize,
    us: f64,
    bytes: u64,
    /// Of the read bandwidth, by the bytes of codes and scales.
    bandwidth_percent: f64,
    /// How much of the guard's best rate was missing before or after, in percent.
    guard_low_percent: f64,
}

/// Times all rows and prints them.
///
/// # Errors
/// When the device fails; [`Wrong`] when a product differs from f64 products over the stored codes.
pub fn run<B: TimedLinear>(backend: &B, driver: String, json: bool) -> Result<()> {
    backend.check_linear()?;
    let is_gpu = backend.sizes().is_gpu();
    let layers: &[[usize; 2]] = if is_gpu { &LAYERS } else { &SMALL_LAYERS };
    let run = provenance::run(driver, backend.guard_tolerance());
    let mut guard = pollster::block_on(Guard::new(backend))?;
    let bandwidth = pollster::block_on(backend.read_bandwidth())?;
    if !json {
        say!("read bandwidth {:.0} GB/s; groups of {GROUP}, f16 activations", bandwidth / 1e9)?;
        say!("bits  outputs × inputs  rows        µs   GB/s  % read")?;
    }
    let mut found = Vec::new();
    for bits in [Bits::Four, Bits::Two, Bits::Three, Bits::Eight] {
        // The other widths are timed for the layer in the middle.
        for &[outputs, inputs] in layers.iter().filter(|layer| bits == Bits::Four || **layer == [8192, 8192] || !is_gpu)
        {
            let linear = layer(bits, outputs, inputs)?;
            for rows in ROWS {
                let row = pollster::block_on(timed(backend, &linear, rows, bandwidth, &mut guard))?;
                if !json {
                    print_row(&row)?;
                }
                found.push(row);
            }
        }
    }
    if json {
        let read_gigabytes_per_second = bandwidth / 1e9;
        print::json(&LinearReport { backend: backend.name(), run, read_gigabytes_per_second, rows: found })?;
    }
    Ok(())
}

async fn timed<B: TimedLinear>(
    backend: &B,
    linear: &QuantizedLinear,
    rows: usize,
    bandwidth: f64,
    guard: &mut Guard,
) -> Result<LinearRow> {
    let (outputs, inputs) = (linear.shape().outputs(), linear.shape().inputs());
    let x: Vec<half::f16> = (0..rows * inputs).map(|i| half::f16::from_f32((i as f32 * 0.7).sin())).collect();
    let packed = (linear.codes().words().len() * 4) as u64;
    let copies = if backend.sizes().is_gpu() { FOOTPRINT.div_ceil(packed) as usize + 1 } else { 2 };
    let (product, guard_low_percent) =
        guard.watch(backend, async || backend.time_linear(linear, &x, copies).await).await?;
    compare(linear, &x, &product.outputs)?;
    let us = product.time.us();
    let bandwidth_percent = 100.0 * product.bytes as f64 / (us * 1e-6) / bandwidth;
    let bits = linear.bits().count();
    Ok(LinearRow { bits, outputs, inputs, rows, us, bytes: product.bytes, bandwidth_percent, guard_low_percent })
}

fn print_row(row: &LinearRow) -> Result<()> {
    let layer = format!("{} × {}", row.outputs, row.inputs);
    let rate = row.bytes as f64 / row.us / 1e3;
    let is_steady = row.guard_low_percent <= UNSTEADY_PERCENT;
    let note = if is_steady { "" } else { "  the clock was not steady" };
    let percent = row.bandwidth_percent;
    say!("{:4}  {layer:>16}  {:4}  {:8.2}  {rate:5.0}  {percent:5.0} %{note}", row.bits, row.rows, row.us)?;
    Ok(())
}

/// A layer whose codes and zeros look random.
fn layer(bits: Bits, outputs: usize, inputs: usize) -> Result<QuantizedLinear> {
    let shape = LinearShape::new(outputs, inputs)?;
    let groups = Groups::in_order(shape, GroupSize::Inputs(GROUP));
    let random = |at: usize| (at as u32).wrapping_mul(0x9e37_79b9).rotate_left(13) ^ 0x5bd1_e995;
    let words = (0..outputs * bits.words(inputs)).map(random).collect();
    let count = outputs * groups.count();
    let scales = (0..count).map(|at| half::f16::from_f32(0.01 + 0.001 * (at % 7) as f32).to_f32()).collect();
    let zeros = (0..count).map(|at| (random(at) % (bits.largest() + 1)) as u16).collect();
    Ok(QuantizedLinear::new(PackedCodes::new(bits, shape, words)?, groups, scales, zeros)?)
}

/// Compares some outputs of every row with f64.
fn compare(linear: &QuantizedLinear, x: &[half::f16], got: &[f32]) -> Result<()> {
    let (outputs, inputs, groups) = (linear.shape().outputs(), linear.shape().inputs(), linear.groups().count());
    for (row, x) in x.chunks_exact(inputs).enumerate() {
        for output in (0..outputs).step_by((outputs / COMPARED).max(1)) {
            let (mut want, mut absolute) = (0.0, 0.0);
            for (input, x) in x.iter().enumerate() {
                let at = output * groups + linear.groups().of(input);
                let level = f64::from(linear.codes().code(output, input)) - f64::from(linear.zeros()[at]);
                let product = x.to_f64() * f64::from(linear.scales()[at]) * level;
                want += product;
                absolute += product.abs();
            }
            let got = f64::from(got[row * outputs + output]);
            if (got - want).abs() > 2e-5 * absolute + want.abs() / 2048.0 {
                let what = format!("{} in {}", linear.shape(), linear.bits());
                return Err(Wrong(format!("{what}, row {row}, output {output}: {got}, not {want}")).into());
            }
        }
    }
    Ok(())
}

impl TimedLinear for Cpu {
    fn check_linear(&self) -> Result<()> {
        bail!(ONLY_A_REFERENCE)
    }

    async fn time_linear(&self, _: &QuantizedLinear, _: &[half::f16], _: usize) -> Result<TimedProduct> {
        bail!(ONLY_A_REFERENCE)
    }
}

impl TimedLinear for Wgpu {
    async fn time_linear(&self, linear: &QuantizedLinear, x: &[half::f16], copies: usize) -> Result<TimedProduct> {
        let (outputs, inputs) = (linear.shape().outputs(), linear.shape().inputs());
        let rows = x.len() / inputs;
        let x = kvpack::wgpu::Tensor::upload(self.device(), self.queue(), Elements::F16(x)).await?;
        let y = kvpack::wgpu::Tensor::zeroed(self.device(), rows * outputs, ElementType::F16)?;
        let layers = (0..copies).map(|_| kvpack_weights::wgpu::Linear::upload(self.device(), linear));
        let layers = layers.collect::<kvpack_weights::Result<Vec<_>>>()?;
        let bound = layers.iter().map(|layer| layer.bind(self.kernels(), &x, rows, &y));
        let bound = bound.collect::<kvpack_weights::Result<Vec<_>>>()?;
        let encode = bound.iter().map(|bound| |pass: &mut wgpu::ComputePass<'_>| bound.encode(pass));
        let encode: Vec<_> = encode.collect();
        let work: Vec<Encode<'_>> = encode.iter().map(|encode| encode as Encode<'_>).collect();
        let (warm_up, timed) = if self.sizes().is_gpu() { (200, 64) } else { (1, 3) };
        let together = if self.sizes().is_gpu() { 32 } else { 1 };
        let timing = measure::time(self, &work, Repeats { warm_up, timed, together }).await?;
        let outputs = y.download(self.device(), self.queue()).await?;
        Ok(TimedProduct { outputs, bytes: layers[0].bytes(), time: Median::of_durations(&timing.sorted) })
    }
}

#[cfg(feature = "cuda")]
impl TimedLinear for kvpack::cuda::Cuda {
    async fn time_linear(&self, linear: &QuantizedLinear, x: &[half::f16], copies: usize) -> Result<TimedProduct> {
        use std::time::Duration;

        use kvpack::cuda::{Tensor, time_launches};

        let (outputs, inputs) = (linear.shape().outputs(), linear.shape().inputs());
        let rows = x.len() / inputs;
        let x = Tensor::upload(self.stream(), Elements::F16(x))?;
        let y = Tensor::zeroed(self.stream(), rows * outputs, ElementType::F16)?;
        let layers = (0..copies).map(|_| kvpack_weights::cuda::Linear::upload(self.stream(), linear));
        let layers = layers.collect::<kvpack_weights::Result<Vec<_>>>()?;
        let bound = layers.iter().map(|layer| layer.bind(self.kernels(), &x, rows, &y));
        let bound = bound.collect::<kvpack_weights::Result<Vec<_>>>()?;
        let launch = |at: usize| {
            bound[at % bound.len()].launch(self.stream()).map_err(|error| match error {
                kvpack_weights::Error::Device(error) => error,
                other => kvpack::Error::Gpu { message: other.to_string() },
            })
        };
        let timing = time_launches(self, launch, bound.len().max(32), Duration::from_millis(100), 32)?;
        let outputs = y.download(self.stream())?;
        Ok(TimedProduct { outputs, bytes: layers[0].bytes(), time: Median::of_durations(&timing.sorted) })
    }
}
