//! Times encoded work, by the GPU's clock where it can be trusted.
//!
//! Browsers round both clocks, by up to 0.1 ms. In a browser, time many runs [together](Repeats::together).

use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use std::time::Duration;

use web_time::Instant;

use super::Wgpu;
use super::device::launch::Launch;
use super::device::{Kernels, Tensor, Timestamps, Variant, buffers, guard};
use crate::plan::Elements;
use crate::{Error, Result};

/// Records work into a pass, like [`Launches::encode`](super::Launches::encode).
pub type Encode<'a> = &'a dyn Fn(&mut wgpu::ComputePass<'_>);

/// Maximum number of timed repeats in one measurement: a query set holds 4096 timestamps.
const MOST_REPEATS: usize = 2048;

/// How often to run what is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeats {
    /// Untimed runs before the first measurement.
    pub warm_up: usize,
    /// Number of measurements, 1 to 2048.
    pub timed: usize,
    /// Runs per measurement, at least 1, one after the other in one pass. A measurement is their mean, so that they
    /// share the cost of reading the clock.
    pub together: usize,
}

impl Default for Repeats {
    fn default() -> Self {
        Self { warm_up: 5, timed: 30, together: 1 }
    }
}

/// What a duration was measured with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Timestamps that the GPU wrote at the beginning and the end of a pass.
    Gpu,
    /// The clock of the host, from before a submission until it is known to be done. Includes the cost of submitting.
    Wall,
}

/// Durations of one run each.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// The clock that measured them.
    pub clock: Clock,
    /// The durations, shortest first; at least one.
    pub sorted: Vec<Duration>,
}

impl Timing {
    fn new(clock: Clock, mut durations: Vec<Duration>) -> Self {
        durations.sort();
        Self { clock, sorted: durations }
    }

    /// The middle duration.
    pub fn median(&self) -> Duration {
        self.sorted[self.sorted.len() / 2]
    }

    /// The median as a rate of `bytes` per run, in units of 10^9 bytes per second.
    pub fn gigabytes_per_second(&self, bytes: u64) -> f64 {
        bytes as f64 / self.median().as_secs_f64() / 1e9
    }
}

/// Times `work`. Several pieces are run in turns: copies of a step over different memory show its cost when caches do
/// not help. Runs of one pass wait for each other only where they write the same memory.
///
/// # Errors
/// [`Error::Plan`] when there is no work or the repeats are out of range; [`Error::Gpu`] when encoding or submitting
/// fails; [`Error::OutOfMemory`]; [`Error::DeviceLost`].
pub async fn time(backend: &Wgpu, work: &[Encode<'_>], repeats: Repeats) -> Result<Timing> {
    let Repeats { warm_up, timed, together } = repeats;
    if work.is_empty() || timed == 0 || timed > MOST_REPEATS || together == 0 {
        let reason = format!(
            "{} pieces of work, {timed} measurements of {together} runs; all start at 1, measurements end at 2048",
            work.len()
        );
        return Err(Error::Plan { what: "measurement", reason });
    }
    for run in 0..warm_up {
        submit_one(backend, work[run % work.len()]).await?;
    }
    let batch = |index: usize| {
        move |pass: &mut wgpu::ComputePass<'_>| {
            (index * together..(index + 1) * together).for_each(|run| work[run % work.len()](pass));
        }
    };
    let mean = |duration: Duration| duration / together as u32;
    if backend.capabilities().timestamps != Timestamps::None
        && let Some(durations) = time_on_gpu(backend, &batch, timed).await?
    {
        return Ok(Timing::new(Clock::Gpu, durations.into_iter().map(mean).collect()));
    }
    let mut durations = Vec::with_capacity(timed);
    for index in 0..timed {
        let start = Instant::now();
        submit_one(backend, &batch(index)).await?;
        durations.push(mean(start.elapsed()));
    }
    Ok(Timing::new(Clock::Wall, durations))
}

/// Submits one piece of work and waits for it.
async fn submit_one(backend: &Wgpu, work: Encode<'_>) -> Result<()> {
    let submission = guard::submit(backend.device(), backend.queue(), "kvpack measurement", |encoder| {
        work(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    })?;
    buffers::finished(backend.device(), backend.queue(), submission).await
}

/// Takes all measurements in one submission. Returns `None` if the timestamps are implausible.
async fn time_on_gpu<F: Fn(&mut wgpu::ComputePass<'_>)>(
    backend: &Wgpu,
    batch: &dyn Fn(usize) -> F,
    timed: usize,
) -> Result<Option<Vec<Duration>>> {
    let (device, queue) = (backend.device(), backend.queue());
    let count = 2 * timed as u32;
    let bytes = u64::from(count) * 8;
    let usage = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
    let resolved = buffers::create(device, "timestamps", bytes, usage).await?;
    let start = Instant::now();
    let submission = guard::submit(device, queue, "kvpack measurement", |encoder| {
        let descriptor = wgpu::QuerySetDescriptor { label: Some("timestamps"), ty: wgpu::QueryType::Timestamp, count };
        let queries = device.create_query_set(&descriptor);
        for index in 0..timed {
            let writes = wgpu::ComputePassTimestampWrites {
                query_set: &queries,
                beginning_of_pass_write_index: Some(2 * index as u32),
                end_of_pass_write_index: Some(2 * index as u32 + 1),
            };
            let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes: Some(writes) };
            batch(index)(&mut encoder.begin_compute_pass(&descriptor));
        }
        encoder.resolve_query_set(&queries, 0..count, &resolved, 0);
    })?;
    buffers::finished(device, queue, submission).await?;
    let wall = start.elapsed();
    let bytes = buffers::read(device, queue, &resolved, 0, bytes).await?;
    let stamps: Vec<u64> = bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
    Ok(plausible_durations(&stamps, queue.get_timestamp_period(), wall))
}

/// The durations between pairs of timestamps. `None` if one is not positive, time runs backwards, or they sum to more
/// than the wall time: some drivers write zeros, or the time at which a command was recorded.
fn plausible_durations(stamps: &[u64], nanoseconds: f32, wall: Duration) -> Option<Vec<Duration>> {
    let in_order = stamps.windows(2).all(|pair| pair[0] <= pair[1]);
    let duration =
        |pair: &[u64]| Duration::from_nanos((pair[1].wrapping_sub(pair[0]) as f64 * f64::from(nanoseconds)) as u64);
    let durations: Vec<Duration> = stamps.chunks_exact(2).map(duration).collect();
    let total: Duration = durations.iter().sum();
    // Durations below a thousandth of the wall time measure the recording, not the work.
    let plausible = in_order && !durations.contains(&Duration::ZERO) && total <= wall && total * 1000 >= wall;
    plausible.then_some(durations)
}

/// The read bandwidth of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadBandwidth {
    /// The durations of reading `bytes`.
    pub timing: Timing,
    /// Bytes read by one run.
    pub bytes: u64,
}

impl ReadBandwidth {
    /// In units of 10^9 bytes per second.
    pub fn gigabytes_per_second(&self) -> f64 {
        self.timing.gigabytes_per_second(self.bytes)
    }
}

/// How long a device reads before the first reading that counts. A device that was idle raises its clock meanwhile.
const WAKING: Duration = Duration::from_millis(200);

/// Bytes that a workgroup of `read_bandwidth` reads.
const BLOCK_BYTES: u64 = 16 * 256 * 16;

/// Multiplier of the words to read: word i is i times this, so that the memory cannot compress them.
const PATTERN: u32 = 0x9e37_79b1;

/// Measures how fast the device reads once it is awake. It reads two buffers in turns, each of `bytes` bytes, rounded
/// to blocks of 64 KiB and to what a binding holds. The buffers should be several times larger than the caches.
///
/// # Errors
/// [`Error::OutOfMemory`], [`Error::DeviceLost`], and [`Error::Gpu`] when the sum of the words read is wrong.
pub async fn read_bandwidth(backend: &Wgpu, bytes: u64, repeats: Repeats) -> Result<ReadBandwidth> {
    let (device, queue) = (backend.device(), backend.queue());
    let blocks = (bytes.min(backend.capabilities().limits.binding_bytes) / BLOCK_BYTES).max(1);
    let bytes = blocks * BLOCK_BYTES;
    let words: Vec<u32> = (0..(bytes / 4) as u32).map(|i| i.wrapping_mul(PATTERN)).collect();
    let elements = Elements::F32(bytemuck::cast_slice(&words));
    let inputs = [Tensor::upload(device, queue, elements).await?, Tensor::upload(device, queue, elements).await?];
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let sum = buffers::create_filled(device, "sum of a bandwidth measurement", &[0; 4], usage)?;
    let launches = inputs
        .iter()
        .map(|input| bind_read_bandwidth(backend.kernels(), input, &sum, blocks))
        .collect::<Result<Vec<_>>>()?;
    check_sum(backend, &launches[0], &sum, &words).await?;
    let work = launches.iter().map(|launch| move |pass: &mut wgpu::ComputePass<'_>| launch.encode(pass));
    let work: Vec<_> = work.collect();
    let work: Vec<Encode<'_>> = work.iter().map(|encode| encode as Encode<'_>).collect();
    let start = Instant::now();
    while start.elapsed() < WAKING {
        submit_one(backend, work[0]).await?;
    }
    Ok(ReadBandwidth { timing: time(backend, &work, repeats).await?, bytes })
}

fn bind_read_bandwidth(kernels: &Kernels, input: &Tensor, sum: &wgpu::Buffer, blocks: u64) -> Result<Launch> {
    let most = u64::from(kernels.device().limits().max_compute_workgroups_per_dimension);
    let rows = blocks.div_ceil(most);
    let buffers = [("words", input.binding()), ("sum", sum.as_entire_buffer_binding())];
    planned(
        kernels,
        &Variant::new(&SHADERS, "read_bandwidth"),
        &buffers,
        [blocks.div_ceil(rows) as u32, rows as u32, 1],
    )
}

async fn check_sum(backend: &Wgpu, launch: &Launch, sum: &wgpu::Buffer, words: &[u32]) -> Result<()> {
    submit_one(backend, &|pass| launch.encode(pass)).await?;
    let read = buffers::read(backend.device(), backend.queue(), sum, 0, 4).await?;
    let expected = words.iter().fold(0u32, |sum, &word| sum.wrapping_add(word));
    match bytemuck::pod_read_unaligned::<u32>(&read) {
        read if read == expected => Ok(()),
        read => Err(Error::Gpu { message: format!("the device read a sum of {read:#x}; it should be {expected:#x}") }),
    }
}

/// A fixed amount of arithmetic that shows whether a GPU's clock is stable during a measurement.
///
/// Some drivers lower the clock of a process that leaves gaps between its submissions, and memory-bound work slows down
/// with it. Time the guard before and after a measurement. If the two readings differ by more than a few percent, the
/// measurement is worthless. The guard takes about a millisecond on a large GPU. On a software driver it takes many
/// seconds and serves no purpose.
#[derive(Clone, Debug)]
pub struct ComputeGuard(Launch);

/// How long the guard keeps the device busy, up to `MOST_GUARD_RUNS` runs.
const GUARD_TIME: Duration = Duration::from_millis(100);
const MOST_GUARD_RUNS: usize = 500;

/// Workgroups of the guard.
const GUARD_WORKGROUPS: u32 = 1024;

impl ComputeGuard {
    /// Compiles the kernel and creates its buffer.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or [`Error::DeviceLost`].
    pub fn new(backend: &Wgpu) -> Result<Self> {
        let bytes = u64::from(GUARD_WORKGROUPS) * 128 * 4;
        let results = buffers::create_now(backend.device(), "compute guard", bytes, wgpu::BufferUsages::STORAGE)?;
        let buffers = [("results", results.as_entire_buffer_binding())];
        let variant = Variant::new(&SHADERS, "compute_guard");
        planned(backend.kernels(), &variant, &buffers, [GUARD_WORKGROUPS, 1, 1]).map(Self)
    }

    /// Times the guard without gaps for a tenth of a second or a little more. A device that was idle raises its clock
    /// meanwhile: the shorter the shortest duration, the faster the clock.
    ///
    /// # Errors
    /// As [`time`].
    pub async fn read(&self, backend: &Wgpu) -> Result<Timing> {
        let work: Encode<'_> = &|pass| self.0.encode(pass);
        let first = time(backend, &[work], Repeats { warm_up: 1, timed: 1, together: 1 }).await?.median();
        let timed = GUARD_TIME.as_nanos() / first.as_nanos().max(1);
        time(backend, &[work], Repeats { warm_up: 0, timed: (timed as usize).clamp(3, MOST_GUARD_RUNS), together: 1 })
            .await
    }
}

/// Every variant that measurements use.
pub(crate) fn variants() -> Vec<Variant> {
    vec![Variant::new(&SHADERS, "read_bandwidth"), Variant::new(&SHADERS, "compute_guard")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_that_make_no_sense_are_refused() {
        let wall = Duration::from_micros(100);
        let durations = |stamps: &[u64]| plausible_durations(stamps, 1.0, wall);
        let nanos = |n: &[u64]| Some(n.iter().map(|&n| Duration::from_nanos(n)).collect::<Vec<_>>());
        assert_eq!(durations(&[1000, 3000, 3000, 9000]), nanos(&[2000, 6000]));
        assert_eq!(durations(&[0, 0, 0, 0]), None);
        assert_eq!(durations(&[9000, 3000]), None);
        assert_eq!(durations(&[0, 200_000]), None, "longer than the time on the wall");
        assert_eq!(durations(&[0, 10]), None, "the time at which commands were recorded");
    }

    #[test]
    fn the_median_is_a_rate() {
        let timing = Timing::new(Clock::Wall, [3, 1, 2].map(Duration::from_secs).to_vec());
        assert_eq!(timing.median(), Duration::from_secs(2));
        assert_eq!(timing.gigabytes_per_second(4_000_000_000), 2.0);
    }
}
