//! Bench: how fast is this device? Decode steps on one shape, each checked before it is timed, as `kvpack bench` does.

use kvpack::backend::{AttendOptions, Attention};
use kvpack::conformance::{BatchFormat, DecodeData, DecodeShape, Workload, decode_formats, decode_shapes};
use kvpack::cpu::Cpu;
use kvpack::plan::{AttendPlan, ElementType};
use kvpack::wgpu::measure::{self, Clock, Encode, Repeats};
use kvpack::wgpu::{AttendStep, AttendTensors, Launches, Scratch, Store, Tensor, Wgpu};
use kvpack::{Backend, Error, Result, SegmentFormat};
use kvpack_report::{BenchReport, BenchRow, Figures, RowOutcome, ShapeReport, StepTimes, parts_of, recipe_of};
use web_time::{Duration, Instant};

/// The shapes that the page offers, largest first: those of `kvpack bench` whose data a page can make and hold.
const SHAPES: [&str; 4] = ["g4-b32-8k", "g3-d64-b8-8k", "g4-b1-4k", "g1-b1-4k"];

/// Seconds of one measurement, at least: the clocks of browsers are rounded to 0.1 ms.
const MEASUREMENT: f64 = 0.02;
/// Measurements of a row. The report has their median.
const MEASUREMENTS: usize = 7;
/// Most steps of one measurement.
const MOST_TOGETHER: usize = 200;

/// The shapes that the page offers, largest first.
pub fn shapes() -> Vec<DecodeShape> {
    let mut shapes = decode_shapes();
    shapes.retain(|shape| SHAPES.contains(&shape.name.as_str()));
    shapes.sort_by_key(|shape| SHAPES.iter().position(|name| *name == shape.name));
    shapes
}

/// The shape that suits a device which reads `bytes_per_second`: the largest whose f16 keys and values
/// it reads in 2 ms.
pub fn fitting_shape(bytes_per_second: f64) -> DecodeShape {
    let mut shapes = shapes();
    let smallest = shapes.len() - 1;
    let fits = |shape: &DecodeShape| shape.code_bytes(&SegmentFormat::F16.into()) as f64 <= bytes_per_second * 2e-3;
    let chosen = shapes.iter().position(fits).unwrap_or(smallest);
    shapes.swap_remove(chosen)
}

/// Bytes of stores that steps go round, at least, so that they find cold caches: what the device reads in half a
/// millisecond, within bounds.
fn footprint(bytes_per_second: f64) -> u64 {
    ((bytes_per_second * 5e-4) as u64).clamp(2 << 20, 32 << 20)
}

/// The formats that the page times: f16, and every width with one range per channel.
pub fn formats() -> Vec<SegmentFormat> {
    let per_channel = |format: &SegmentFormat| *format == SegmentFormat::F16 || format.key.has_span_ranges();
    decode_formats().into_iter().filter(per_channel).collect()
}

/// A backend whose decode steps the page can time.
pub trait Timed: Backend + Sized {
    /// Times the steps over all copies of a workload, in turns.
    ///
    /// # Errors
    /// Whatever the backend reports.
    fn time_steps(&self, workload: &Workload<Self>, data: &DecodeData<Self>)
    -> impl Future<Output = Result<StepTimes>>;

    /// Bytes per second at which the device reads memory.
    ///
    /// # Errors
    /// Whatever the backend reports.
    fn read_bandwidth(&self) -> impl Future<Output = Result<f64>>;
}

/// A shape that is being measured.
pub struct Bench<B: Backend> {
    data: DecodeData<B>,
    read: f64,
    report: BenchReport,
}

impl<B: Timed> Bench<B> {
    /// Makes the data of the shape of this name, or of the one that suits the device.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such shape; when the data do not fit the device.
    pub async fn new(backend: &B, shape: Option<&str>) -> Result<Self> {
        let read = backend.read_bandwidth().await?;
        let decode = match shape {
            None => fitting_shape(read),
            Some(name) => shapes().into_iter().find(|shape| shape.name == name).ok_or_else(|| Error::Plan {
                what: "shape of the benchmark",
                reason: format!("there is no '{name}'; the page has {}", SHAPES.join(", ")),
            })?,
        };
        let shape = ShapeReport::new(&decode, None, Vec::new());
        let data = DecodeData::generated(backend, decode).await?;
        Ok(Self {
            data,
            read,
            report: BenchReport { backend: backend.name(), not_default: Vec::new(), run: None, shapes: vec![shape] },
        })
    }

    /// Stores the batch in a format, checks the outputs, times the steps, and adds the row to the report.
    ///
    /// # Errors
    /// Whatever the backend reports, but for a format that does not fit: that is a row too.
    pub async fn row(&mut self, backend: &B, format: SegmentFormat) -> Result<&BenchRow> {
        let format = BatchFormat::from(format);
        let row = match self.measured(backend, &format).await {
            Err(error @ (Error::Limit { .. } | Error::OutOfMemory { .. } | Error::Unsupported { .. })) => {
                BenchRow::skipped(&format, &self.data.decode.shape, &error)
            }
            row => row?,
        };
        let rows = &mut self.report.shapes[0].rows;
        rows.push(row);
        Ok(&rows[rows.len() - 1])
    }

    async fn measured(&self, backend: &B, format: &BatchFormat) -> Result<BenchRow> {
        let workload = Workload::new(backend, &self.data, format.clone(), footprint(self.read)).await?;
        let checked = workload.check(backend, &self.data, AttendOptions::default()).await?;
        let outcome = match checked.passed() {
            false => RowOutcome::Wrong { reason: checked.reason() },
            true => {
                let times = backend.time_steps(&workload, &self.data).await?;
                let mut figures = Figures::new(times, workload.step_bytes);
                // Only f16 itself is what the others are compared with, whatever was measured first.
                let f16 = self.report.shapes[0].rows.iter().find(|row| row.format == SegmentFormat::F16.to_string());
                let f16 = f16.and_then(|row| row.outcome.figures());
                figures.times_f16 = f16.map(|f16| f16.step_us / figures.step_us);
                let mut outcome = RowOutcome::Timed(figures);
                outcome.compare_with(Some(self.read));
                outcome
            }
        };
        Ok(BenchRow {
            format: format.to_string(),
            recipe: recipe_of(format, &self.data.decode.shape),
            parts: parts_of(format),
            nmse: checked.accuracy.map(|accuracy| accuracy.error.nmse),
            nmse_int16: None,
            bytes: workload.step_bytes,
            copies: workload.plans.len(),
            outcome,
        })
    }

    /// Takes the last row back, to measure it again.
    pub fn discard_last(&mut self) {
        self.report.shapes[0].rows.pop();
    }

    /// What was measured so far, as `kvpack bench --json` writes it.
    pub fn report(&self) -> &BenchReport {
        &self.report
    }

    /// Bytes per second at which the device reads memory.
    pub fn read(&self) -> f64 {
        self.read
    }
}

impl Timed for Wgpu {
    async fn time_steps(&self, workload: &Workload<Self>, data: &DecodeData<Self>) -> Result<StepTimes> {
        let mut steps: Vec<BoundAttendStep> = Vec::with_capacity(workload.plans.len());
        for plan in &workload.plans {
            let step = BoundAttendStep::new(self, plan, workload, data, steps.first()).await?;
            steps.push(step);
        }
        let encode: Vec<_> =
            steps.iter().map(|step| |pass: &mut wgpu::ComputePass<'_>| step.launches.encode(pass)).collect();
        let work: Vec<Encode<'_>> = encode.iter().map(|encode| encode as Encode<'_>).collect();
        let first = measure::time(self, &work, Repeats { warm_up: 2, timed: 3, together: 1 }).await?;
        let together = (MEASUREMENT / first.median().as_secs_f64().max(1e-6)).ceil() as usize;
        let repeats = Repeats { warm_up: 1, timed: MEASUREMENTS, together: together.clamp(1, MOST_TOGETHER) };
        let timing = measure::time(self, &work, repeats).await?;
        let timer = match timing.clock {
            Clock::Gpu => "GPU timestamps",
            Clock::Wall => "wall clock",
        };
        let samples = timing.sorted.iter().map(Duration::as_secs_f64).collect();
        Ok(StepTimes::new(timer, steps.swap_remove(0).labels, samples))
    }

    async fn read_bandwidth(&self) -> Result<f64> {
        let rough = measure::read_bandwidth(self, 2 << 20, Repeats { warm_up: 1, timed: 3, together: 1 }).await?;
        let half = footprint(rough.gigabytes_per_second() * 1e9) / 2;
        let read = measure::read_bandwidth(self, half, Repeats { warm_up: 2, timed: 5, together: 8 }).await?;
        Ok(read.gigabytes_per_second() * 1e9)
    }
}

/// The step over one copy, with tables of its own. All steps write the same states and output, so that each waits for
/// the one before, as the steps of a model's layers do.
struct BoundAttendStep {
    launches: Launches,
    labels: Vec<String>,
    scratch: Scratch,
    output: Tensor,
}

impl BoundAttendStep {
    async fn new(
        backend: &Wgpu,
        plan: &AttendPlan,
        workload: &Workload<Wgpu>,
        data: &DecodeData<Wgpu>,
        first: Option<&Self>,
    ) -> Result<Self> {
        let (device, queries) = (backend.device(), data.queries());
        let step = AttendStep::new(backend.capabilities(), plan, queries.element_type(), AttendOptions::default())?;
        let own = Scratch::new(device, step.scratch()).await?;
        let (scratch, output) = match first {
            Some(first) => (Scratch { tables: own.tables, ..first.scratch.clone() }, first.output.clone()),
            None => (own, Tensor::zeroed(device, queries.elements(), ElementType::F32)?),
        };
        let stores: Vec<&Store> = workload.stores();
        let launches =
            step.bind(backend.kernels(), &stores, &scratch, AttendTensors { queries, output: &output, lse: None })?;
        backend.queue().write_buffer(&scratch.tables, 0, step.tables());
        Ok(Self { launches, labels: step.launch_labels(), scratch, output })
    }
}

impl Timed for Cpu {
    async fn time_steps(&self, workload: &Workload<Self>, data: &DecodeData<Self>) -> Result<StepTimes> {
        let stores = workload.stores();
        let mut seconds = Vec::with_capacity(MEASUREMENTS);
        for plan in workload.plans.iter().cycle().take(MEASUREMENTS) {
            let start = Instant::now();
            self.attend(plan, &stores, data.queries(), AttendOptions::default()).await?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(StepTimes::new("wall clock", Vec::new(), seconds))
    }

    async fn read_bandwidth(&self) -> Result<f64> {
        let words: Vec<u64> = (0..1 << 20).collect();
        let pass = || {
            let start = Instant::now();
            std::hint::black_box(words.iter().fold(0, |sum: u64, word| sum.wrapping_add(*word)));
            size_of_val(words.as_slice()) as f64 / start.elapsed().as_secs_f64().max(1e-6)
        };
        Ok((0..5).map(|_| pass()).fold(0.0, f64::max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_its_shapes_and_formats() {
        assert_eq!(shapes().iter().map(|shape| shape.name.as_str()).collect::<Vec<_>>(), SHAPES);
        assert_eq!(formats().len(), 6, "f16 and five widths");
        let fitting = |gigabytes: f64| fitting_shape(gigabytes * 1e9).name;
        assert_eq!([600.0, 30.0, 10.0, 1.0].map(fitting), SHAPES);
    }
}
