//! What the benchmark asks of a backend beyond computing.

use kvpack::conformance::{DecodeData, Workload};
use kvpack::{Backend, Result};

/// A backend whose decode steps can be timed.
pub trait Timed: Backend {
    /// Bytes of f16 keys and values up to which a shape is timed where no shape is asked for.
    const LARGEST_DEFAULT: u64;

    /// Bytes of stores to go round, at least, so that every step finds cold caches.
    const FOOTPRINT: u64;

    /// How much of the guard's rate may be missing, as a fraction, before a row is discarded; `None` where it is only
    /// reported, because other programs share the device and a quiet moment may never come.
    const GUARD_TOLERANCE: Option<f64>;

    /// The clock: GPU timestamps or wall clock.
    fn timer(&self) -> String;

    /// Seconds of one decode step over each copy of a workload, once around, all launches of the step counted.
    ///
    /// # Errors
    /// Whatever the backend reports.
    async fn time_round(&self, workload: &Workload<Self>, data: &DecodeData<Self>) -> Result<Vec<f64>>
    where
        Self: Sized;

    /// Bytes per second at which this device reads memory that is in no cache.
    ///
    /// # Errors
    /// Whatever the backend reports.
    async fn read_bandwidth(&self) -> Result<f64>;

    /// The rate, in any unit, of a fixed piece of work that only depends on the clock: it shows whether the device has
    /// slowed down meanwhile.
    ///
    /// # Errors
    /// Whatever the backend reports.
    async fn guard_rate(&self) -> Result<f64>;

    /// Seconds of the same step over plain f32 rows, unpacked; `None` where there is no such baseline.
    ///
    /// # Errors
    /// Whatever the backend reports.
    fn plain_step(&self, data: &DecodeData<Self>) -> Result<Option<f64>>
    where
        Self: Sized;
}

/// The middle of some durations or rates, of which there is at least one.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
