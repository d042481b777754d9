//! What a benchmark measured, in the JSON that `kvpack bench --json` and the page in the browser write.

use kvpack::conformance::{BatchFormat, DecodeShape};
use serde::Serialize;

/// A whole run.
#[derive(Serialize)]
pub struct BenchReport {
    /// The device.
    pub backend: String,
    /// The shapes, in the order of the registry.
    pub shapes: Vec<ShapeReport>,
}

/// One decode shape.
#[derive(Serialize)]
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
    /// Microseconds of the same step over plain f32 rows, where the backend has that baseline.
    pub plain_f32_us: Option<f64>,
    /// One row for each format.
    pub rows: Vec<BenchRow>,
}

/// One format on one shape.
#[derive(Serialize)]
pub struct BenchRow {
    /// The format.
    pub format: String,
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
#[derive(Serialize)]
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
    /// The device slowed down around every attempt.
    Discarded {
        /// How much of the guard's rate was missing at the last attempt, in percent.
        guard_low_percent: f64,
    },
}

/// The figures of a row.
#[derive(Serialize)]
pub struct Figures {
    /// The clock: GPU timestamps or wall clock.
    pub timer: &'static str,
    /// The kernel launches of a step; empty where it is no series of launches.
    pub launches: Vec<String>,
    /// Microseconds of a whole step, the median.
    pub step_us: f64,
    /// 10⁹ bytes per second of the bytes that must be read.
    pub gigabytes_per_second: f64,
    /// 10⁹ bytes per second at which the device reads memory, measured before the rows of the shape.
    pub read_gigabytes_per_second: f64,
    /// The former in percent of the latter.
    pub percent_of_read: f64,
    /// How many times faster than our own f16 kernel on the same shape; none where that row has no figures.
    pub times_f16: Option<f64>,
    /// How many times faster than plain f32 rows.
    pub times_plain_f32: Option<f64>,
    /// How much of the guard's best rate was missing before or after, in percent.
    pub guard_low_percent: f64,
}

/// Steps that were timed.
#[derive(Clone, Debug)]
pub struct StepTimes {
    /// The clock.
    pub timer: &'static str,
    /// Kernel launches of one step; empty where a step is no series of launches.
    pub launches: Vec<String>,
    /// Seconds of a step, the median.
    pub seconds: f64,
}

impl ShapeReport {
    /// The rows of a shape, `plain_seconds` beside them where the step was timed over plain f32 rows too.
    pub fn new(decode: &DecodeShape, plain_seconds: Option<f64>, rows: Vec<BenchRow>) -> Self {
        Self {
            shape: decode.name.clone(),
            sequences: decode.sequences,
            tokens: decode.tokens,
            query_heads: decode.shape.query_heads(),
            kv_heads: decode.shape.kv_heads(),
            head_dim: decode.shape.head_dim(),
            plain_f32_us: plain_seconds.map(|seconds| seconds * 1e6),
            rows,
        }
    }
}

/// The formats of the parts that sequences are stored in.
pub fn parts_of(format: &BatchFormat) -> Vec<String> {
    format.parts_alone().map(|part| part.to_string()).collect()
}

impl BenchRow {
    /// A format that did not fit.
    pub fn skipped(format: &BatchFormat, error: &kvpack::Error) -> Self {
        let outcome = RowOutcome::Skipped { reason: error.to_string() };
        Self {
            format: format.to_string(),
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
    /// The figures of steps that each read `bytes`, on a device that reads `read` bytes per second.
    pub fn new(times: StepTimes, bytes: u64, read: f64) -> Self {
        let rate = bytes as f64 / times.seconds;
        Self {
            timer: times.timer,
            launches: times.launches,
            step_us: times.seconds * 1e6,
            gigabytes_per_second: rate / 1e9,
            read_gigabytes_per_second: read / 1e9,
            percent_of_read: rate / read * 100.0,
            times_f16: None,
            times_plain_f32: None,
            guard_low_percent: 0.0,
        }
    }
}

impl RowOutcome {
    /// The figures, if the row was timed.
    pub fn figures(&self) -> Option<&Figures> {
        match self {
            Self::Timed(figures) => Some(figures),
            Self::Wrong { .. } | Self::Skipped { .. } | Self::Discarded { .. } => None,
        }
    }
}
