//! What a benchmark measured, in the JSON that `kvpack bench --json` and the page in the browser write.

use std::time::Duration;

use kvpack::conformance::{BatchFormat, DecodeShape};
use kvpack::{AttentionShape, SegmentFormat};
use serde::{Deserialize, Serialize};

use crate::{Run, recipes};

/// A whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename = "bench")]
pub struct BenchReport {
    /// The device and what of it is used.
    pub backend: String,
    /// What of the run is not what a user gets who sets nothing: checks, path, precision of the query.
    #[serde(default)]
    pub not_default: Vec<String>,
    /// The run; none in a browser.
    pub run: Option<Run>,
    /// The shapes, in the order of the registry.
    pub shapes: Vec<ShapeReport>,
}

/// One decode shape.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShapeReport {
    /// Its name in the registry.
    pub shape: String,
    /// Sequences of the batch.
    pub sequences: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Query heads.
    pub query_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// 10⁹ bytes per second at which the device reads memory: the best of the readings before and after the rows.
    pub read_gigabytes_per_second: Option<f64>,
    /// Microseconds of the same step over plain f32 rows, where the backend has that baseline.
    pub plain_f32_us: Option<f64>,
    /// One row for each format.
    pub rows: Vec<BenchRow>,
}

impl BenchReport {
    /// Takes up the shapes of another report of the same backend, driver, build and options: rows of a shape that is
    /// known join it. Dates and commands of both are kept.
    ///
    /// # Errors
    /// The other report, where one of these differs, or a shape of the same name has other sizes.
    pub fn join(&mut self, other: Self) -> Result<(), Box<Self>> {
        let build = |report: &Self| report.run.as_ref().map(|run| (run.commit.clone(), run.driver.clone()));
        let of_name = |shape: &ShapeReport| self.shapes.iter().find(|known| known.shape == shape.shape);
        let has_sizes = |shape: &ShapeReport| of_name(shape).is_none_or(|known| known.described() == shape.described());
        if self.backend != other.backend
            || self.not_default != other.not_default
            || build(self) != build(&other)
            || !other.shapes.iter().all(has_sizes)
        {
            return Err(Box::new(other));
        }
        for shape in other.shapes {
            match self.shapes.iter_mut().find(|known| known.shape == shape.shape) {
                Some(known) => known.rows.extend(shape.rows),
                None => self.shapes.push(shape),
            }
        }
        if let (Some(run), Some(other)) = (&mut self.run, other.run) {
            run.join(&other);
        }
        Ok(())
    }
}

/// One format on one shape.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchRow {
    /// The format.
    pub format: String,
    /// The recipe that packs in this format, where one does.
    #[serde(default)]
    pub recipe: Option<String>,
    /// The formats of the parts that sequences are stored in; a single one where they are whole.
    pub parts: Vec<String>,
    /// Normalised mean square error against f64 over the stored data, from the check before the timing; none where
    /// there was none.
    pub nmse: Option<f64>,
    /// The same with a query of 16 bits, where the step takes one of 8: what the query adds is the difference.
    pub nmse_int16: Option<f64>,
    /// Bytes that a step must read: codes and ranges.
    pub bytes: u64,
    /// Copies of the batch that the steps went round.
    pub copies: usize,
    /// The figures, or why there are none.
    #[serde(flatten)]
    pub outcome: RowOutcome,
}

/// The figures of a row, or why there are none.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum RowOutcome {
    /// It was timed.
    Timed(Figures),
    /// The outputs were wrong, so nothing was timed.
    Wrong {
        /// What was wrong.
        reason: String,
    },
    /// It did not fit the device.
    Skipped {
        /// What did not fit.
        reason: String,
    },
    /// The device slowed down around every attempt, or the row contradicts the read bandwidth.
    Discarded {
        /// What was wrong.
        reason: String,
        /// How much of the guard's rate was missing at the last attempt, in percent.
        guard_low_percent: f64,
    },
}

/// The figures of a row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// The clock: GPU timestamps or wall clock.
    pub timer: String,
    /// The kernel launches of a step; empty where it is no series of launches.
    pub launches: Vec<String>,
    /// Microseconds of a whole step, the median.
    pub step_us: f64,
    /// How far the samples lie apart; none in reports of older builds.
    #[serde(default)]
    pub spread: Option<Spread>,
    /// 10⁹ bytes per second of the bytes that must be read.
    pub gigabytes_per_second: f64,
    /// 10⁹ bytes per second at which the device reads memory, the best reading around the rows of the shape.
    pub read_gigabytes_per_second: Option<f64>,
    /// The former in percent of the latter, at most [`MOST_PERCENT_OF_READ`]; none where readings of the latter
    /// contradict each other.
    pub percent_of_read: Option<f64>,
    /// How many times faster than our own f16 kernel on the same shape; none where that row has no figures.
    pub times_f16: Option<f64>,
    /// How many times faster than plain f32 rows.
    pub times_plain_f32: Option<f64>,
    /// How much of the guard's best rate was missing before or after, in percent.
    pub guard_low_percent: f64,
}

/// A step that seems to read faster than this, in percent of the read bandwidth, says that one of the two was measured
/// wrong: the readings of the bandwidth agree within one percent.
pub const MOST_PERCENT_OF_READ: f64 = 101.0;

/// Steps that were timed.
#[derive(Clone, Debug)]
pub struct StepTimes {
    /// The clock.
    pub timer: &'static str,
    /// Kernel launches of one step; empty where a step is no series of launches.
    pub launches: Vec<String>,
    /// Seconds of a step, the median.
    pub seconds: f64,
    /// How far the samples lie apart.
    pub spread: Spread,
}

impl StepTimes {
    /// The times of some samples, in seconds, of which there is at least one.
    pub fn new(timer: &'static str, launches: Vec<String>, samples: Vec<f64>) -> Self {
        let Median { seconds, spread } = Median::of(samples);
        Self { timer, launches, seconds, spread }
    }

    /// Without what was timed.
    pub const fn median(&self) -> Median {
        Median { seconds: self.seconds, spread: self.spread }
    }
}

/// The median of some samples, and how far they lie apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Median {
    /// Seconds.
    pub seconds: f64,
    /// The samples.
    pub spread: Spread,
}

impl Median {
    /// Of samples in seconds, of which there is at least one.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| samples.get((samples.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
        let spread = Spread { samples: samples.len(), low_us: at(0.25) * 1e6, high_us: at(0.75) * 1e6 };
        Self { seconds: at(0.5), spread }
    }

    /// Of durations, of which there is at least one.
    pub fn of_durations(durations: &[Duration]) -> Self {
        Self::of(durations.iter().map(Duration::as_secs_f64).collect())
    }

    /// In microseconds.
    pub fn us(&self) -> f64 {
        self.seconds * 1e6
    }

    /// Of each of `parts` equal parts of what was timed, and `more` seconds of something else.
    #[must_use]
    pub fn part(&self, parts: usize, more: f64) -> Self {
        let of = |time: f64, more: f64| time / parts as f64 + more;
        let Spread { samples, low_us, high_us } = self.spread;
        let spread = Spread { samples, low_us: of(low_us, more * 1e6), high_us: of(high_us, more * 1e6) };
        Self { seconds: of(self.seconds, more), spread }
    }
}

/// How far the samples of a figure lie apart: half of them are between its quartiles.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// How many there are. A sample may be the mean of several steps.
    pub samples: usize,
    /// The lower quartile, in microseconds.
    pub low_us: f64,
    /// The upper quartile, in microseconds.
    pub high_us: f64,
}

impl Spread {
    /// Half of the distance between the quartiles, in percent of `middle_us`.
    pub fn percent_of(&self, middle_us: f64) -> f64 {
        (self.high_us - self.low_us) / 2.0 / middle_us * 100.0
    }
}

impl ShapeReport {
    /// The step in words.
    pub fn described(&self) -> String {
        format!(
            "{} sequence{} of {} tokens, {} query heads over {} KV heads × {}",
            self.sequences,
            if self.sequences == 1 { "" } else { "s" },
            self.tokens,
            self.query_heads,
            self.kv_heads,
            self.head_dim
        )
    }

    /// The rows of a shape, with `plain_seconds` where the step was timed over plain f32 rows too.
    pub fn new(decode: &DecodeShape, plain_seconds: Option<f64>, rows: Vec<BenchRow>) -> Self {
        Self {
            shape: decode.name.clone(),
            sequences: decode.sequences,
            tokens: decode.tokens,
            query_heads: decode.shape.query_heads(),
            kv_heads: decode.shape.kv_heads(),
            head_dim: decode.shape.head_dim(),
            read_gigabytes_per_second: None,
            plain_f32_us: plain_seconds.map(|seconds| seconds * 1e6),
            rows,
        }
    }
}

impl ShapeReport {
    /// Compares the rows with the bandwidth of the device, in bytes per second, as [`RowOutcome::compare_with`] does,
    /// and then with the f16 row as far as that has kept its figures.
    pub fn compare_with(&mut self, read: Option<f64>) {
        self.rows.iter_mut().for_each(|row| row.outcome.compare_with(read));
        self.read_gigabytes_per_second = read.map(|read| read / 1e9);
        self.compare_with_f16();
    }

    /// Says of every row how many times faster than the f16 row it is; none where that has no figures.
    pub fn compare_with_f16(&mut self) {
        let f16 = self.rows.iter().find(|row| row.format == SegmentFormat::F16.to_string());
        let f16_us = f16.and_then(|row| row.outcome.figures()).map(|figures| figures.step_us);
        for row in &mut self.rows {
            if let RowOutcome::Timed(figures) = &mut row.outcome {
                figures.times_f16 = f16_us.map(|f16_us| f16_us / figures.step_us);
            }
        }
    }
}

/// The formats of the parts that sequences are stored in.
pub fn parts_of(format: &BatchFormat) -> Vec<String> {
    format.parts_alone().map(|part| part.to_string()).collect()
}

/// The recipe that stores whole sequences in this format.
pub fn recipe_of(format: &BatchFormat, shape: &AttentionShape) -> Option<String> {
    match format.parts() {
        [part] => recipes::of_format(&part.format, shape),
        _ => None,
    }
}

impl BenchRow {
    /// What the row is called: its recipe, or its format where no recipe has it.
    pub fn name(&self) -> &str {
        self.recipe.as_deref().unwrap_or(&self.format)
    }

    /// A format that did not fit.
    pub fn skipped(format: &BatchFormat, shape: &AttentionShape, error: &kvpack::Error) -> Self {
        let outcome = RowOutcome::Skipped { reason: error.to_string() };
        Self {
            format: format.to_string(),
            recipe: recipe_of(format, shape),
            parts: parts_of(format),
            nmse: None,
            nmse_int16: None,
            bytes: 0,
            copies: 0,
            outcome,
        }
    }
}

impl Figures {
    /// The figures of steps that each read `bytes`, not yet compared with the bandwidth of the device.
    pub fn new(times: StepTimes, bytes: u64) -> Self {
        let rate = bytes as f64 / times.seconds;
        Self {
            timer: times.timer.into(),
            launches: times.launches,
            step_us: times.seconds * 1e6,
            spread: Some(times.spread),
            gigabytes_per_second: rate / 1e9,
            read_gigabytes_per_second: None,
            percent_of_read: None,
            times_f16: None,
            times_plain_f32: None,
            guard_low_percent: 0.0,
        }
    }
}

impl RowOutcome {
    /// Compares the figures with the bandwidth of the device, in bytes per second; `None` where its readings contradict
    /// each other. A row that contradicts the bandwidth loses its figures.
    pub fn compare_with(&mut self, read: Option<f64>) {
        let Self::Timed(figures) = self else { return };
        let Some(read) = read else {
            (figures.read_gigabytes_per_second, figures.percent_of_read) = (None, None);
            return;
        };
        let percent = figures.gigabytes_per_second * 1e11 / read;
        if percent > MOST_PERCENT_OF_READ {
            let reason = format!(
                "{:.0} GB/s in {:.1} µs would be {percent:.0} % of the read bandwidth, {:.0} GB/s; one of the two is wrong",
                figures.gigabytes_per_second,
                figures.step_us,
                read / 1e9
            );
            *self = Self::Discarded { reason, guard_low_percent: figures.guard_low_percent };
        } else {
            figures.read_gigabytes_per_second = Some(read / 1e9);
            figures.percent_of_read = Some(percent);
        }
    }

    /// What came of the row, in a word.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Timed(_) => "timed",
            Self::Wrong { .. } => "wrong",
            Self::Skipped { .. } => "skipped",
            Self::Discarded { .. } => "discarded",
        }
    }

    /// Why there are no figures.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Timed(_) => None,
            Self::Wrong { reason } | Self::Skipped { reason } | Self::Discarded { reason, .. } => Some(reason),
        }
    }

    /// The figures, if the row was timed.
    pub fn figures(&self) -> Option<&Figures> {
        match self {
            Self::Timed(figures) => Some(figures),
            Self::Wrong { .. } | Self::Skipped { .. } | Self::Discarded { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(bytes: u64, seconds: f64) -> RowOutcome {
        let times = StepTimes::new("wall clock", Vec::new(), vec![seconds]);
        RowOutcome::Timed(Figures::new(times, bytes))
    }

    #[test]
    fn half_of_the_samples_are_between_the_quartiles() {
        let times = StepTimes::new("clock", Vec::new(), (1..=100).rev().map(f64::from).collect());
        assert_eq!((times.seconds, times.spread.samples), (51.0, 100));
        assert_eq!((times.spread.low_us, times.spread.high_us), (26e6, 76e6));
        assert_eq!(times.spread.percent_of(50e6), 50.0);
    }

    fn row(format: &str, outcome: RowOutcome) -> BenchRow {
        let (format, parts) = (format.to_owned(), vec![format.to_owned()]);
        BenchRow { format, recipe: None, parts, nmse: None, nmse_int16: None, bytes: 0, copies: 1, outcome }
    }

    fn shape(name: &str, tokens: usize, rows: Vec<BenchRow>) -> ShapeReport {
        let decode = DecodeShape::even(name, AttentionShape::new(4, 2, 64).unwrap(), 1, tokens);
        ShapeReport::new(&decode, None, rows)
    }

    fn times_f16(shape: &ShapeReport) -> Vec<Option<f64>> {
        shape.rows.iter().map(|row| row.outcome.figures().and_then(|figures| figures.times_f16)).collect()
    }

    #[test]
    fn nothing_is_faster_than_a_discarded_f16_row() {
        let rows = vec![row("f16", timed(4_500, 4e-6)), row("4-bit per channel", timed(900, 1e-6))];
        let mut shape = shape("s", 128, rows);
        shape.compare_with_f16();
        assert_eq!(times_f16(&shape), [Some(1.0), Some(4.0)]);
        // The f16 row alone is above 101 %.
        shape.compare_with(Some(1.1e9));
        assert_eq!(times_f16(&shape), [None, None]);
        assert_eq!((shape.rows[0].outcome.word(), shape.rows[1].outcome.word()), ("discarded", "timed"));
    }

    fn report(commit: &str, options: &[&str], shapes: Vec<ShapeReport>) -> BenchReport {
        let run = Run {
            commit: Some(commit.into()),
            date: "2026-01-02 03:04 UTC".into(),
            command: format!("kvpack bench --shape {}", shapes[0].shape),
            driver: "D 1".into(),
            guard_percent: None,
        };
        let not_default = options.iter().map(|&option| option.to_owned()).collect();
        BenchReport { backend: "Card".into(), not_default, run: Some(run), shapes }
    }

    #[test]
    fn reports_of_one_build_join_their_rows() {
        let with = |format: &str| vec![row(format, timed(1, 1e-6))];
        let first = report("abc", &[], vec![shape("s", 128, with("f16"))]);
        let mut all = first.clone();
        let second = vec![shape("s", 128, with("4-bit per channel")), shape("t", 128, with("f16"))];
        all.join(report("abc", &[], second)).unwrap();
        let formats: Vec<&str> = all.shapes[0].rows.iter().map(|row| row.format.as_str()).collect();
        assert_eq!((all.shapes.len(), formats), (2, vec!["f16", "4-bit per channel"]));
        all.join(report("abc", &[], vec![shape("t", 128, Vec::new())])).unwrap();
        let run = all.run.as_ref().unwrap();
        assert_eq!(run.command, "kvpack bench --shape s; kvpack bench --shape t");
        for other in [
            report("abd", &[], vec![shape("u", 128, Vec::new())]),
            report("abc", &["query int8"], vec![shape("u", 128, Vec::new())]),
            report("abc", &[], vec![shape("s", 256, Vec::new())]),
            BenchReport { backend: "Card 2".into(), ..first },
        ] {
            assert!(all.join(other).is_err());
        }
        assert_eq!(all.shapes.len(), 2);
    }

    #[test]
    fn a_row_above_the_bandwidth_has_no_figures() {
        let mut row = timed(4_500, 1e-6);
        row.compare_with(Some(4.5e9));
        assert_eq!(row.figures().and_then(|figures| figures.percent_of_read), Some(100.0));
        // Seen: 189 %, because the bandwidth was read on a sleeping device.
        let mut row = timed(4_250, 0.5e-6);
        row.compare_with(Some(4.5e9));
        assert!(matches!(&row, RowOutcome::Discarded { reason, .. } if reason.contains("189 %")), "{row:?}");
        let mut row = timed(4_540, 1e-6);
        row.compare_with(Some(4.5e9));
        assert!(row.figures().is_some(), "readings agree within one percent");
    }
}
