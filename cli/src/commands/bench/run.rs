//! Checks and times the rows.

use anyhow::Result;
use indicatif::ProgressBar;
use kvpack::SegmentFormat;
use kvpack::backend::{AttendOptions, QueryBytes, QueryPrecision};
use kvpack::conformance::{BatchFormat, BatchPart, DecodeData, DecodeShape, SequenceData, Workload};
use kvpack_report::{BenchReport, BenchRow, Figures, RowOutcome, Run, ShapeReport, parts_of};

use super::bandwidth::Readings;
use super::timed::{ATTEMPTS, Guard, Timed};

/// What to time and how long.
pub struct BenchPlan {
    /// The steps.
    pub subjects: Vec<Subject>,
    /// The formats; f16 first, so that the others can be compared with it.
    pub formats: Vec<BatchFormat>,
    /// Bytes of stores to go round, at least.
    pub footprint: u64,
    /// Seconds of timed steps for a row, at least.
    pub seconds: f64,
    /// How the query enters integer dot products.
    pub query: QueryPrecision,
    /// What of this is not what a user gets who sets nothing.
    pub not_default: Vec<String>,
}

/// A decode step to time.
pub struct Subject {
    /// Its shape.
    pub decode: DecodeShape,
    /// Keys, values and queries of one sequence; Gaussian ones where there are none.
    pub data: Option<SequenceData>,
}

/// A device under test and the best it has shown.
struct Bench<'a, B> {
    backend: &'a B,
    plan: &'a BenchPlan,
    guard: Guard,
}

/// Runs all rows.
pub async fn run<B: Timed>(backend: &B, run: Run, plan: &BenchPlan) -> Result<BenchReport> {
    let progress = ProgressBar::new((plan.subjects.len() * plan.formats.len()) as u64).with_style(crate::print::bar());
    let mut bench = Bench { backend, plan, guard: Guard::new(backend).await? };
    let mut shapes = Vec::with_capacity(plan.subjects.len());
    for subject in &plan.subjects {
        shapes.push(bench.shape(subject, &progress).await?);
    }
    progress.finish_and_clear();
    let not_default = plan.not_default.clone();
    Ok(BenchReport { backend: backend.name(), not_default, run: Some(run), shapes })
}

impl<B: Timed> Bench<'_, B> {
    async fn shape(&mut self, subject: &Subject, progress: &ProgressBar) -> Result<ShapeReport> {
        let decode = &subject.decode;
        let data = match &subject.data {
            Some(data) => DecodeData::of_sequence(self.backend, decode.clone(), data.clone()).await,
            None => DecodeData::generated(self.backend, decode.clone()).await,
        };
        let data = match data {
            Err(error) if is_about_the_device(&error) => {
                let rows = self.plan.formats.iter().map(|format| BenchRow::skipped(format, &error)).collect();
                return Ok(ShapeReport::new(decode, None, rows));
            }
            other => other?,
        };
        let plain = self.backend.plain_step(&data)?;
        let mut readings = self.readings().await?;
        let mut rows: Vec<BenchRow> = Vec::with_capacity(self.plan.formats.len());
        for format in &self.plan.formats {
            progress.set_message(format!("{} {format}", decode.name));
            let mut row = self.row(&data, format).await?;
            if let RowOutcome::Timed(figures) = &mut row.outcome {
                let f16 = rows.first().filter(|row| row.format == SegmentFormat::F16.to_string());
                let f16 = f16.and_then(|row| row.outcome.figures()).map(|f16| f16.step_us);
                figures.times_f16 = f16.map(|f16| f16 / figures.step_us);
                figures.times_plain_f32 = plain.map(|plain| plain * 1e6 / figures.step_us);
            }
            rows.push(row);
            progress.inc(1);
        }
        self.read_again(&mut readings, &rows).await?;
        let bandwidth = readings.bandwidth();
        if let Some(read) = bandwidth {
            rows.iter_mut().for_each(|row| row.outcome.beside(read));
        }
        let read_gigabytes_per_second = bandwidth.map(|read| read / 1e9);
        Ok(ShapeReport { read_gigabytes_per_second, ..ShapeReport::new(decode, plain, rows) })
    }

    /// A first reading of the bandwidth, on a device that is awake: the guard keeps it busy until it has raised its
    /// clock.
    async fn readings(&mut self) -> Result<Readings> {
        self.guard.look(self.backend).await?;
        Ok(Readings::new(self.backend.guard_tolerance(), self.backend.read_bandwidth().await?))
    }

    /// Reads the bandwidth after the rows, and again where readings or rows contradict it.
    async fn read_again(&mut self, readings: &mut Readings, rows: &[BenchRow]) -> Result<()> {
        let rates = rows.iter().filter_map(|row| row.outcome.figures());
        let fastest = rates.map(|figures| figures.gigabytes_per_second * 1e9).fold(0.0, f64::max);
        for _ in 0..ATTEMPTS {
            self.guard.look(self.backend).await?;
            readings.add(self.backend.read_bandwidth().await?);
            if readings.stand_beside(fastest) {
                break;
            }
        }
        Ok(())
    }

    /// Stores the batch, checks the outputs and times the steps.
    async fn row(&mut self, data: &DecodeData<B>, format: &BatchFormat) -> Result<BenchRow> {
        let workload = Workload::new(self.backend, data, format.clone(), self.plan.footprint).await;
        let workload = match workload {
            Err(error) if is_about_the_device(&error) => return Ok(BenchRow::skipped(format, &error)),
            other => other?,
        };
        let report = workload.check(self.backend, data, self.options()).await?;
        let has_byte = |part: &BatchPart| self.plan.query.bytes(&part.format) == QueryBytes::One;
        let nmse_int16 = match format.parts().iter().any(has_byte) {
            false => None,
            true => {
                let options = AttendOptions { query: QueryPrecision::Int16, ..AttendOptions::default() };
                let exact = workload.check(self.backend, data, options).await?;
                exact.accuracy.map(|accuracy| accuracy.error.nmse)
            }
        };
        let outcome = match report.passed() {
            false => RowOutcome::Wrong { reason: report.reason() },
            true => self.time(&workload, data).await?,
        };
        Ok(BenchRow {
            format: format.to_string(),
            parts: parts_of(format),
            nmse: report.accuracy.map(|accuracy| accuracy.error.nmse),
            nmse_int16,
            bytes: workload.step_bytes,
            copies: workload.plans.len(),
            outcome,
        })
    }

    fn options(&self) -> AttendOptions {
        AttendOptions { query: self.plan.query, ..AttendOptions::default() }
    }

    /// Times a workload twice between two looks at the guard, again if the device slowed down before, between or after.
    async fn time(&mut self, workload: &Workload<B>, data: &DecodeData<B>) -> Result<RowOutcome> {
        let mut low = 0.0;
        for _ in 0..ATTEMPTS {
            let before = self.guard.look(self.backend).await?;
            let times = self.backend.time_steps(workload, data, self.options(), self.plan.seconds).await?;
            let again = self.backend.time_steps(workload, data, self.options(), self.plan.seconds).await?;
            let after = self.guard.look(self.backend).await?;
            let apart = 1.0 - (times.seconds / again.seconds).min(again.seconds / times.seconds);
            low = self.guard.missing(before.min(after)).max(apart);
            if self.backend.guard_tolerance().is_none_or(|tolerance| low <= tolerance) {
                let figures = Figures::new(times, workload.step_bytes);
                return Ok(RowOutcome::Timed(Figures { guard_low_percent: low * 100.0, ..figures }));
            }
        }
        let reason = format!("the device ran {:.0} % below its best before or after it", low * 100.0);
        Ok(RowOutcome::Discarded { reason, guard_low_percent: low * 100.0 })
    }
}

/// True if a smaller shape, a larger device or another backend would help.
fn is_about_the_device(error: &kvpack::Error) -> bool {
    use kvpack::Error::{Limit, OutOfMemory, Unsupported};
    matches!(error, Limit { .. } | OutOfMemory { .. } | Unsupported { .. })
}
