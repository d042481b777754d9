//! Products of activations with packed weights (`kvpack-weights`).

use anyhow::{Result, bail};
use kvpack::cpu::Cpu;
use kvpack::plan::{ElementType, Elements};
use kvpack::wgpu::Wgpu;
use kvpack::wgpu::measure::{self, Encode, Repeats};
use kvpack_report::{Median, Run, Skipped};
use kvpack_weights::{Bits, GroupSize, Groups, LinearShape, PackedCodes, Path, QuantizedLinear};
use serde::Serialize;

use super::UNSTEADY_PERCENT;
use super::output::Style;
use super::timed::{Guard, Timed, WALL_CLOCK, skipped};
use super::wgpu::timer;
use crate::outcome::Wrong;
use crate::print::{self, say};
use crate::provenance;

/// Outputs and inputs of the layers, as models have them.
const LAYERS: [[usize; 2]; 5] = [[4096, 4096], [8192, 8192], [14336, 4096], [8192, 28672], [5120, 13824]];

/// The layer of a software device.
const SMALL_LAYERS: [[usize; 2]; 1] = [[256, 512]];

/// Rows of activations.
const ROWS: [usize; 8] = [1, 4, 8, 16, 64, 256, 512, 4096];

/// Rows on a software device.
const SMALL_ROWS: [usize; 4] = [1, 4, 16, 33];

/// The most rows whose products are timed as those of one token are; more take longer, and are timed less often.
const FEW_ROWS: usize = 16;

/// Inputs of a group.
const GROUP: usize = 128;

/// Outputs that are compared with f64, of each of [`COMPARED_ROWS`] rows.
const COMPARED: usize = 64;

/// Rows whose outputs are compared with f64: all of a few rows.
const COMPARED_ROWS: usize = 64;

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

    /// A layer on the device.
    type Layer;

    /// Stores a layer on the device.
    ///
    /// # Errors
    /// When the device fails, or multiplies with no packed weights.
    fn upload_linear(&self, linear: &QuantizedLinear) -> Result<Self::Layer>;

    /// Binds copies of a layer to f16 activations `[rows, K]`, runs the first, and times them in turns.
    ///
    /// # Errors
    /// When the device fails, or multiplies with no packed weights.
    async fn time_linear(&self, layers: &[Self::Layer], x: &[half::f16], rows: usize) -> Result<TimedProduct>;
}

/// What was found.
pub struct TimedProduct {
    /// The outputs `[rows, N]` of one product.
    pub outputs: Vec<f32>,
    /// Bytes of the layer on the device.
    pub bytes: u64,
    /// The kernel.
    pub path: Path,
    pub time: Median,
    /// The clock.
    pub timer: &'static str,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename = "linear")]
struct LinearReport {
    backend: String,
    run: Run,
    read_gigabytes_per_second: f64,
    rows: Vec<LinearRow>,
    skipped: Vec<Skipped>,
}

#[derive(Serialize)]
struct LinearRow {
    bits: u32,
    outputs: usize,
    inputs: usize,
    rows: usize,
    /// The kernel.
    path: String,
    us: f64,
    /// The clock.
    timer: &'static str,
    teraflops: f64,
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
pub fn run<B: TimedLinear>(backend: &B, driver: String, style: Style) -> Result<()> {
    backend.check_linear()?;
    let mut guard = pollster::block_on(Guard::new(backend))?;
    let bandwidth = pollster::block_on(backend.read_bandwidth())?;
    if style != Style::Json {
        say!("read bandwidth {:.0} GB/s; groups of {GROUP}, f16 activations", bandwidth / 1e9)?;
        say!("bits  outputs × inputs  rows        µs   GB/s  % read  TFLOP/s  kernel")?;
    }
    let mut report = LinearReport {
        backend: backend.name(),
        run: provenance::run(driver, None),
        read_gigabytes_per_second: bandwidth / 1e9,
        rows: Vec::new(),
        skipped: Vec::new(),
    };
    let done = time_rows(backend, &mut guard, style, &mut report);
    // What was measured is printed, whatever came after it.
    if style == Style::Json {
        print::json(&report)?;
    }
    done
}

fn time_rows<B: TimedLinear>(backend: &B, guard: &mut Guard, style: Style, report: &mut LinearReport) -> Result<()> {
    let is_gpu = backend.sizes().is_gpu();
    let layers: &[[usize; 2]] = if is_gpu { &LAYERS } else { &SMALL_LAYERS };
    let rows: &[usize] = if is_gpu { &ROWS } else { &SMALL_ROWS };
    let bandwidth = report.read_gigabytes_per_second * 1e9;
    for bits in [Bits::Four, Bits::Two, Bits::Three, Bits::Eight] {
        // The other widths are timed for the layer in the middle.
        for &[outputs, inputs] in layers.iter().filter(|layer| bits == Bits::Four || **layer == [8192, 8192] || !is_gpu)
        {
            let linear = layer(bits, outputs, inputs)?;
            let packed = (linear.codes().words().len() * 4) as u64;
            let copies = if is_gpu { FOOTPRINT.div_ceil(packed) + 1 } else { 2 };
            let what = format!("{} in {}", linear.shape(), linear.bits());
            let layers = match (0..copies).map(|_| backend.upload_linear(&linear)).collect::<Result<Vec<_>>>() {
                Ok(layers) => layers,
                Err(error) => {
                    report.skipped.push(skipped(what, error)?);
                    continue;
                }
            };
            for &rows in rows {
                match pollster::block_on(timed(backend, &linear, &layers, rows, bandwidth, guard)) {
                    Ok(row) => {
                        if style != Style::Json {
                            print_row(&row)?;
                        }
                        report.rows.push(row);
                    }
                    Err(error) => report.skipped.push(skipped(format!("{rows} rows of {what}"), error)?),
                }
            }
        }
    }
    Ok(())
}

async fn timed<B: TimedLinear>(
    backend: &B,
    linear: &QuantizedLinear,
    layers: &[B::Layer],
    rows: usize,
    bandwidth: f64,
    guard: &mut Guard,
) -> Result<LinearRow> {
    let (outputs, inputs) = (linear.shape().outputs(), linear.shape().inputs());
    let period: Vec<half::f16> = (0..(1 << 20) - 3).map(|i| half::f16::from_f32((i as f32 * 0.7).sin())).collect();
    let x: Vec<half::f16> = period.into_iter().cycle().take(rows * inputs).collect();
    let (product, guard_low_percent) =
        guard.watch(backend, async || backend.time_linear(layers, &x, rows).await).await?;
    compare(linear, product.path, &x, &product.outputs)?;
    let us = product.time.us();
    Ok(LinearRow {
        bits: linear.bits().count(),
        outputs,
        inputs,
        rows,
        path: product.path.to_string(),
        us,
        timer: product.timer,
        teraflops: 2e-6 * (rows * outputs) as f64 * inputs as f64 / us,
        bytes: product.bytes,
        bandwidth_percent: 100.0 * product.bytes as f64 / (us * 1e-6) / bandwidth,
        guard_low_percent,
    })
}

fn print_row(row: &LinearRow) -> Result<()> {
    let layer = format!("{} × {}", row.outputs, row.inputs);
    let rate = row.bytes as f64 / row.us / 1e3;
    let is_steady = row.guard_low_percent <= UNSTEADY_PERCENT;
    let note = if is_steady { "" } else { "  the clock was not steady" };
    let note = if row.timer == WALL_CLOCK { format!("{note}  by the wall clock") } else { note.into() };
    let (percent, teraflops, path) = (row.bandwidth_percent, row.teraflops, &row.path);
    let head = format!("{:4}  {layer:>16}  {:4}  {:8.2}  {rate:5.0}", row.bits, row.rows, row.us);
    say!("{head}  {percent:5.0} %  {teraflops:7.1}  {path}{note}")?;
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

/// Compares some outputs of some rows with f64.
fn compare(linear: &QuantizedLinear, path: Path, x: &[half::f16], got: &[f32]) -> Result<()> {
    let (outputs, inputs) = (linear.shape().outputs(), linear.shape().inputs());
    let rows = x.len() / inputs;
    for output in places(outputs, COMPARED) {
        let weights: Vec<f64> = (0..inputs).map(|input| weight(linear, path, output, input)).collect();
        for row in places(rows, COMPARED_ROWS) {
            let (mut want, mut absolute) = (0.0, 0.0);
            for (x, weight) in x[row * inputs..][..inputs].iter().zip(&weights) {
                let product = x.to_f64() * weight;
                want += product;
                absolute += product.abs();
            }
            let got = f64::from(got[row * outputs + output]);
            let error = (got - want).abs();
            if error.is_nan() || error > 2e-5 * absolute + want.abs() / 2048.0 {
                let what = format!("{} in {}", linear.shape(), linear.bits());
                return Err(Wrong(format!("{what}, row {row}, output {output}: {got}, not {want}")).into());
            }
        }
    }
    Ok(())
}

/// `most` of `count` places, or all, spread evenly. A kernel works on blocks of powers of two: an odd distance meets
/// another place of every block.
fn places(count: usize, most: usize) -> impl Iterator<Item = usize> {
    (0..count).step_by((count / most).max(1) | 1)
}

fn weight(linear: &QuantizedLinear, path: Path, output: usize, input: usize) -> f64 {
    let at = output * linear.groups().count() + linear.groups().of(input);
    // Codes have 8 bits and zeros 9.
    let level = linear.codes().code(output, input) as i16 - linear.zeros()[at] as i16;
    let weight = linear.scales()[at] * f32::from(level);
    if path.rounds_weights() { half::f16::from_f32(weight).to_f64() } else { weight.into() }
}

impl TimedLinear for Cpu {
    fn check_linear(&self) -> Result<()> {
        bail!(ONLY_A_REFERENCE)
    }

    type Layer = ();

    fn upload_linear(&self, _: &QuantizedLinear) -> Result<()> {
        bail!(ONLY_A_REFERENCE)
    }

    async fn time_linear(&self, _: &[()], _: &[half::f16], _: usize) -> Result<TimedProduct> {
        bail!(ONLY_A_REFERENCE)
    }
}

impl TimedLinear for Wgpu {
    type Layer = kvpack_weights::wgpu::Linear;

    fn upload_linear(&self, linear: &QuantizedLinear) -> Result<Self::Layer> {
        Ok(Self::Layer::upload(self.device(), linear)?)
    }

    async fn time_linear(&self, layers: &[Self::Layer], x: &[half::f16], rows: usize) -> Result<TimedProduct> {
        let x = kvpack::wgpu::Tensor::upload(self.device(), self.queue(), Elements::F16(x)).await?;
        let outputs = layers.first().map_or(0, |layer| layer.shape().outputs());
        let y = kvpack::wgpu::Tensor::zeroed(self.device(), rows * outputs, ElementType::F16)?;
        let bound = layers.iter().map(|layer| layer.bind(self.kernels(), &x, rows, &y));
        let bound = bound.collect::<kvpack_weights::Result<Vec<_>>>()?;
        let encode = bound.iter().map(|bound| |pass: &mut wgpu::ComputePass<'_>| bound.encode(pass));
        let encode: Vec<_> = encode.collect();
        let work: Vec<Encode<'_>> = encode.iter().map(|encode| encode as Encode<'_>).collect();
        let repeats = match (self.sizes().is_gpu(), rows > FEW_ROWS) {
            (true, false) => Repeats { warm_up: 200, timed: 64, together: 32 },
            (true, true) => Repeats { warm_up: 12, timed: 12, together: 4 },
            (false, _) => Repeats { warm_up: 1, timed: 3, together: 1 },
        };
        let timing = measure::time(self, &work, repeats).await?;
        let outputs = y.download(self.device(), self.queue()).await?;
        let (bytes, path) = (layers[0].bytes(), bound[0].path());
        let (time, timer) = (Median::of_durations(&timing.sorted), timer(timing.clock));
        Ok(TimedProduct { outputs, bytes, path, time, timer })
    }
}

#[cfg(feature = "cuda")]
impl TimedLinear for kvpack::cuda::Cuda {
    type Layer = kvpack_weights::cuda::Linear;

    fn upload_linear(&self, linear: &QuantizedLinear) -> Result<Self::Layer> {
        Ok(Self::Layer::upload(self.stream(), linear)?)
    }

    async fn time_linear(&self, layers: &[Self::Layer], x: &[half::f16], rows: usize) -> Result<TimedProduct> {
        use std::time::Duration;

        use kvpack::cuda::{Tensor, time_launches};

        let x = Tensor::upload(self.stream(), Elements::F16(x))?;
        let outputs = layers.first().map_or(0, |layer| layer.shape().outputs());
        let y = Tensor::zeroed(self.stream(), rows * outputs, ElementType::F16)?;
        let bound = layers.iter().map(|layer| layer.bind(self.kernels(), &x, rows, &y));
        let bound = bound.collect::<kvpack_weights::Result<Vec<_>>>()?;
        let launch = |at: usize| {
            bound[at % bound.len()].launch(self.stream()).map_err(|error| match error {
                kvpack_weights::Error::Device(error) => error,
                other => kvpack::Error::Gpu { message: other.to_string() },
            })
        };
        let (launches, replays) = if rows > FEW_ROWS { (bound.len().max(8), 12) } else { (bound.len().max(32), 32) };
        let timing = time_launches(self, launch, launches, Duration::from_millis(100), replays)?;
        let outputs = y.download(self.stream())?;
        let (bytes, path) = (layers[0].bytes(), bound[0].path());
        let (time, timer) = (Median::of_durations(&timing.sorted), "CUDA graph, events");
        Ok(TimedProduct { outputs, bytes, path, time, timer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two thirds of the places of a block of 64 are compared, whichever the layer: even distances meet one of 16.
    #[test]
    fn places_of_all_residues_are_compared() {
        for count in [4096, 14336, 8192, 5120, 128] {
            let mut met = [false; 64];
            places(count, COMPARED).for_each(|place| met[place % 64] = true);
            assert!(met.iter().filter(|met| **met).count() >= 42, "{count}");
        }
        assert_eq!(places(3, 64).collect::<Vec<_>>(), [0, 1, 2]);
    }
}
