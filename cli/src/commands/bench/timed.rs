//! What the benchmark asks of a backend beyond computing.

use kvpack::backend::AttendOptions;
use kvpack::conformance::{DecodeData, Workload};
use kvpack::{Backend, Result};
use kvpack_report::{Skipped, Spread, StepTimes};

use super::run::is_about_the_device;
use crate::print::note;

/// The clock of the host.
pub const WALL_CLOCK: &str = "wall clock";

/// A row that the device has no room or no kernel for, which is noted; any other error ends the suite.
///
/// # Errors
/// The error, where it is another.
pub fn skipped(what: impl Into<String>, error: anyhow::Error) -> anyhow::Result<Skipped> {
    use kvpack_weights::Error::Device;
    let of_layer = || match error.downcast_ref() {
        Some(Device(error)) => Some(error),
        _ => None,
    };
    if !error.downcast_ref().or_else(of_layer).is_some_and(is_about_the_device) {
        return Err(error);
    }
    let (what, reason) = (what.into(), format!("{error:#}"));
    note!("skipped {what}: {reason}");
    Ok(Skipped { what, reason })
}

/// Attempts to time a row while the device keeps its clock.
pub const ATTEMPTS: usize = 3;

/// A backend whose decode steps can be timed.
pub trait Timed: Backend + Sized {
    /// How much of the guard's rate may be missing, as a fraction, before a row is discarded; `None` where it is only
    /// reported, because other programs share the device and a quiet moment may never come.
    fn guard_tolerance(&self) -> Option<f64>;

    /// What suits the size of the device.
    fn sizes(&self) -> Sizes;

    /// Times decode steps, all launches of a step counted, going round the copies of a workload, for about as long as
    /// `seconds` and at least once around.
    ///
    /// # Errors
    /// Whatever the backend reports.
    async fn time_steps(
        &self,
        workload: &Workload<Self>,
        data: &DecodeData<Self>,
        options: AttendOptions,
        seconds: f64,
    ) -> Result<StepTimes>;

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
    fn plain_step(&self, data: &DecodeData<Self>) -> Result<Option<f64>>;
}

/// The best that a device has shown.
pub struct Guard {
    best: f64,
}

impl Guard {
    /// Takes a first look: in some processes the clock falls for good before the first row is ready.
    ///
    /// # Errors
    /// Whatever the backend reports.
    pub async fn new<B: Timed>(backend: &B) -> Result<Self> {
        Ok(Self { best: backend.guard_rate().await? })
    }

    /// Returns the rate of the device. Looking at it raises its clock again if it idled.
    ///
    /// # Errors
    /// Whatever the backend reports.
    pub async fn look<B: Timed>(&mut self, backend: &B) -> Result<f64> {
        let rate = backend.guard_rate().await?;
        self.best = self.best.max(rate);
        Ok(rate)
    }

    /// Times something between two looks, and again if the device slowed down meanwhile. Returns the last timing, and
    /// by how many percent the rate before or after was below the best.
    ///
    /// # Errors
    /// Whatever the backend or `time` reports.
    pub async fn watch<B: Timed, T>(
        &mut self,
        backend: &B,
        mut time: impl AsyncFnMut() -> anyhow::Result<T>,
    ) -> anyhow::Result<(T, f64)> {
        let tolerance = backend.guard_tolerance().unwrap_or(f64::INFINITY);
        let mut attempt = 1;
        loop {
            let before = self.look(backend).await?;
            let timed = time().await?;
            let after = self.look(backend).await?;
            let low = self.missing(before.min(after));
            if low <= tolerance || attempt == ATTEMPTS {
                return Ok((timed, low * 100.0));
            }
            attempt += 1;
        }
    }

    /// How much of the best rate another one lacks, as a fraction.
    pub fn missing(&self, rate: f64) -> f64 {
        1.0 - rate / self.best
    }
}

/// What suits the size of a device.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of f16 keys and values up to which a shape is timed where no shape is asked for.
    pub largest_shape: u64,
    /// Bytes of stores to go round, at least, so that every step finds cold caches.
    pub footprint: u64,
    /// Seconds of timed steps for a row, at least. Short on a GPU: after longer runs the guard was seen to read
    /// low more often.
    pub seconds: f64,
}

impl Sizes {
    /// Whether the device is a GPU: others get what they can do in a while.
    pub const fn is_gpu(&self) -> bool {
        self.largest_shape == u64::MAX
    }

    /// Bytes of stores to go round in a suite that has rows of its own: a copy is enough where software computes.
    pub const fn suite_footprint(&self) -> u64 {
        if self.is_gpu() { self.footprint } else { 1 }
    }
}

/// A figure for a table: with `digits` behind the point, half of the distance between its quartiles, and its samples.
/// One sample says nothing of a distance.
pub fn figure(us: f64, spread: Spread, digits: usize) -> String {
    match spread.samples {
        1 => format!("{us:.digits$} (1)"),
        samples => format!("{us:.digits$} ± {:.1} % ({samples})", spread.percent_of(us)),
    }
}

/// The same of a figure that a row may lack.
pub fn figure_or_dash(figure_us: Option<f64>, spread: Option<Spread>, digits: usize) -> String {
    figure_us.zip(spread).map_or("-".into(), |(us, spread)| figure(us, spread, digits))
}

/// What tables of such figures say below.
pub const SPREAD: &str =
    "±: half of the distance between the quartiles of the samples. Brackets: how many samples there are.";

/// The middle of some durations, of which there is at least one.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The channel that stands out of random rows.
pub const OFFSET_CHANNEL: usize = 17;
/// Its mean.
pub const OFFSET: f32 = 3.0;

/// Random numbers of a bell curve, in rows of `head_dim` channels of which one stands out.
pub fn random_rows(elements: usize, head_dim: usize, seed: u64) -> Vec<half::f16> {
    let mut random = fastrand::Rng::with_seed(seed);
    let element = |at: usize| {
        let bell: f32 = (0..3).map(|_| random.f32() - 0.5).sum();
        half::f16::from_f32(if at % head_dim == OFFSET_CHANNEL { OFFSET + bell } else { bell })
    };
    (0..elements).map(element).collect()
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;
    use crate::outcome::Wrong;

    #[test]
    fn only_what_is_about_the_device_is_skipped() {
        let shape = kvpack::AttentionShape::new(2, 1, 80).unwrap();
        let does_not_fit = kvpack::SegmentFormat::turboquant(kvpack::Bits::Four, 64).check(&shape);
        let in_context = does_not_fit.context("4-bit per token").unwrap_err();
        let row = skipped("a row", in_context).unwrap();
        assert!(row.what == "a row" && row.reason.starts_with("4-bit per token: "), "{row:?}");
        assert!(skipped("a row", Wrong("append stored nothing".into()).into()).unwrap_err().is::<Wrong>());
        let lost = kvpack::Error::DeviceLost { message: "a driver".into() };
        assert!(skipped("a row", lost.into()).is_err());
    }
}
