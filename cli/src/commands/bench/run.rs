//! Checks and times the rows.

use anyhow::Result;
use indicatif::ProgressBar;
use kvpack::backend::{AttendOptions, QueryBytes, QueryPrecision};
use kvpack::conformance::{BatchFormat, BatchPart, DecodeData, DecodeShape, SequenceData, Workload, rounds_queries};
use kvpack_report::{
    BenchReport, BenchRow, Figures, MOST_PERCENT_OF_READ, RowOutcome, Run, ShapeReport, parts_of, recipe_of,
};

use super::bandwidth::Readings;
use super::timed::{ATTEMPTS, Guard, Timed};

/// What to time and how long.
pub struct BenchPlan {
    /// The steps.
    pub subjects: Vec<Subject>,
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
    /// The formats; f16 first, so that the others can be compared with it.
    pub formats: Vec<BatchFormat>,
}

/// A device under test and the best it has shown.
struct Bench<'a, B> {
    backend: &'a B,
    plan: &'a BenchPlan,
    guard: Guard,
    /// Whether steps differ by the precision of the query.
    rounds_queries: bool,
}

/// Follows a run, so that what was measured is there whatever ends the run.
pub trait Watch {
    /// A row ended: the last of the last shape. Its share of the bandwidth is by the readings so far, and may change.
    ///
    /// # Errors
    /// When the row cannot be handed on; the run ends with that.
    fn row(&mut self, report: &BenchReport) -> Result<()>;

    /// The last shape ended, if only by an error: the figures of its rows are final. It may be told of a shape again.
    ///
    /// # Errors
    /// As [`Watch::row`].
    fn shape(&mut self, report: &BenchReport) -> Result<()>;
}

/// Whoever only wants the report.
pub struct NotWatched;

impl Watch for NotWatched {
    fn row(&mut self, _: &BenchReport) -> Result<()> {
        Ok(())
    }

    fn shape(&mut self, _: &BenchReport) -> Result<()> {
        Ok(())
    }
}

impl BenchPlan {
    /// Characters of the longest name of a row.
    pub fn longest_name(&self) -> usize {
        let names = self.subjects.iter().flat_map(|Subject { decode, formats, .. }| {
            formats.iter().map(|format| recipe_of(format, &decode.shape).unwrap_or_else(|| format.to_string()))
        });
        names.map(|name| name.chars().count()).max().unwrap_or_default()
    }

    /// A report without rows.
    pub fn report<B: Timed>(&self, backend: &B, run: Run) -> BenchReport {
        let not_default = self.not_default.clone();
        BenchReport { backend: backend.name(), not_default, run: Some(run), shapes: Vec::new() }
    }
}

/// Runs all rows. What was measured before an error is in the report all the same.
pub async fn run<B: Timed>(
    backend: &B,
    plan: &BenchPlan,
    report: &mut BenchReport,
    watch: &mut dyn Watch,
) -> Result<()> {
    let progress = ProgressBar::new(plan.subjects.iter().map(|subject| subject.formats.len() as u64).sum())
        .with_style(crate::print::bar());
    let guard = Guard::new(backend).await?;
    let mut bench = Bench { backend, plan, guard, rounds_queries: rounds_queries(backend)? };
    for subject in &plan.subjects {
        let done = bench.shape(subject, report, (&progress, watch)).await;
        let shown = progress.suspend(|| watch.shape(report));
        done?;
        shown?;
    }
    progress.finish_and_clear();
    Ok(())
}

impl<B: Timed> Bench<'_, B> {
    /// Adds a shape to the report, row by row.
    async fn shape(
        &mut self,
        subject: &Subject,
        report: &mut BenchReport,
        (progress, watch): (&ProgressBar, &mut dyn Watch),
    ) -> Result<()> {
        let decode = &subject.decode;
        let data = match &subject.data {
            Some(data) => DecodeData::of_sequence(self.backend, decode.clone(), data.clone()).await,
            None => DecodeData::generated(self.backend, decode.clone()).await,
        };
        let data = match data {
            Err(error) if is_about_the_device(&error) => {
                let skipped = |format| BenchRow::skipped(format, &decode.shape, &error);
                let rows = subject.formats.iter().map(skipped).collect();
                report.shapes.push(ShapeReport::new(decode, None, rows));
                return progress.suspend(|| watch.row(report));
            }
            other => other?,
        };
        let plain = self.backend.plain_step(&data)?;
        let mut readings = self.readings().await?;
        let at = report.shapes.len();
        report.shapes.push(ShapeReport::new(decode, plain, Vec::new()));
        let mut done = self.rows((&data, &subject.formats), readings.best(), report, (progress, watch)).await;
        let shape = &mut report.shapes[at];
        if done.is_ok() {
            done = self.read_again(&mut readings, &shape.rows).await;
        }
        shape.compare_with(readings.bandwidth());
        done
    }

    /// Adds the rows of the last shape, whose share of the bandwidth is by its first reading.
    async fn rows(
        &mut self,
        (data, formats): (&DecodeData<B>, &[BatchFormat]),
        read: f64,
        report: &mut BenchReport,
        (progress, watch): (&ProgressBar, &mut dyn Watch),
    ) -> Result<()> {
        for format in formats {
            progress.set_message(format!("{} {format}", data.decode.name));
            let mut row = self.row(data, format).await?;
            if let Some(shape) = report.shapes.last_mut() {
                if let RowOutcome::Timed(figures) = &mut row.outcome {
                    figures.times_plain_f32 = shape.plain_f32_us.map(|plain_us| plain_us / figures.step_us);
                    figures.percent_of_read = Some(figures.gigabytes_per_second * 1e11 / read)
                        .filter(|percent| *percent <= MOST_PERCENT_OF_READ);
                }
                shape.rows.push(row);
                shape.compare_with_f16();
            }
            progress.inc(1);
            progress.suspend(|| watch.row(report))?;
        }
        Ok(())
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
            Err(error) if is_about_the_device(&error) => {
                return Ok(BenchRow::skipped(format, &data.decode.shape, &error));
            }
            other => other?,
        };
        let report = workload.check(self.backend, data, self.options()).await?;
        let has_byte = |part: &BatchPart| self.rounds_queries && self.plan.query.bytes(&part.format) == QueryBytes::One;
        let exact = match format.parts().iter().any(has_byte) {
            false => None,
            true => {
                let options = AttendOptions { query: QueryPrecision::Int16, ..AttendOptions::default() };
                Some(workload.check(self.backend, data, options).await?)
            }
        };
        let nmse_int16 = exact.as_ref().and_then(|of| of.accuracy).map(|accuracy| accuracy.error.nmse);
        let wrong = [Some(&report), exact.as_ref()].into_iter().flatten().find(|of| !of.passed());
        let outcome = match wrong {
            Some(wrong) => RowOutcome::Wrong { reason: wrong.reason() },
            None => self.time(&workload, data).await?,
        };
        Ok(BenchRow {
            format: format.to_string(),
            recipe: recipe_of(format, &data.decode.shape),
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

/// True if a smaller or another shape, a larger device or another backend would help.
pub fn is_about_the_device(error: &kvpack::Error) -> bool {
    use kvpack::Error::{Format, Limit, OutOfMemory, Unsupported};
    matches!(error, Format { .. } | Limit { .. } | OutOfMemory { .. } | Unsupported { .. })
}
