//! Times work by the clock of the device.

use crate::cuda::sources::SOURCES;
use std::time::Duration;

use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::sys::CUgraphInstantiate_flags;
use cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
use cudarc::driver::{CudaEvent, CudaGraph, DriverError, LaunchConfig, PushKernelArg};

use super::Cuda;
use super::attend::launch::BoundAttendStep;
use super::device::driver::{LEAST_TIMING_DRIVER, check_driver, driver_error};
use super::device::memory::Memory;
use super::device::program::Program;
use crate::{Error, Result};

/// Bytes that a block of `read_bandwidth` reads at once.
const READ_BYTES: usize = 16 * 256 * 16;

/// Passes of a bandwidth measurement. They last long enough for a device that was idle to raise its clock.
const READ_PASSES: usize = 400;

/// Runs of the guard, which take some tens of milliseconds in all.
const GUARD_RUNS: usize = 500;

/// Multiplier of the words to read: word i is i times this, so that the memory cannot compress them.
const PATTERN: u32 = 0x9e37_79b1;

const PROGRAM: &[&str] = &["read_bandwidth.cu", "compute_guard.cu"];

/// Measured durations of steps.
#[derive(Clone, Debug, PartialEq)]
pub struct AttendTiming {
    /// Durations of one step, shortest first; at least one. Each is the mean over one replay of the graph.
    pub sorted: Vec<Duration>,
    /// Steps in the graph.
    pub steps_per_graph: usize,
}

impl AttendTiming {
    /// The middle duration.
    pub fn median(&self) -> Duration {
        self.sorted[self.sorted.len() / 2]
    }
}

fn failed(error: DriverError) -> Error {
    driver_error("measurement", 0, error)
}

/// Captures `steps_per_graph` steps in one CUDA graph, cycling through `steps`, and times replays of it without gaps
/// between them. Untimed replays of about `warm_up` run first.
///
/// An idle device lowers its clock, and takes some tens of milliseconds of work to raise it again.
///
/// # Errors
/// [`Error::Plan`] when there are no steps; [`Error::Adapter`] for a driver that is too old; other errors of the
/// driver.
pub fn time_steps(
    backend: &Cuda,
    steps: &[BoundAttendStep],
    steps_per_graph: usize,
    warm_up: Duration,
    replays: usize,
) -> Result<AttendTiming> {
    if steps.is_empty() {
        return Err(Error::Plan { what: "measurement", reason: "there are no steps to time".into() });
    }
    time_launches(backend, |index| steps[index % steps.len()].launch(), steps_per_graph, warm_up, replays)
}

/// [`time_steps`] for any launches: `launch` launches step 0, 1, … of the graph.
///
/// # Errors
/// [`Error::Plan`] when there are no steps; [`Error::Adapter`] for a driver that is too old; errors of `launch` and of
/// the driver.
pub fn time_launches(
    backend: &Cuda,
    launch: impl Fn(usize) -> Result<()>,
    steps_per_graph: usize,
    warm_up: Duration,
    replays: usize,
) -> Result<AttendTiming> {
    if steps_per_graph == 0 {
        return Err(Error::Plan { what: "measurement", reason: "there are no steps to time".into() });
    }
    let graph = capture(backend, || (0..steps_per_graph).try_for_each(&launch))?;
    let replay = || graph.launch().map_err(failed);
    let first = timed(backend, 2, replay)?.into_iter().min().unwrap_or_default();
    let warm = warm_up.as_nanos() / first.as_nanos().max(1);
    let mut sorted = timed(backend, warm as usize + replays.max(1), replay)?.split_off(warm as usize);
    sorted.iter_mut().for_each(|duration| *duration /= steps_per_graph as u32);
    sorted.sort();
    Ok(AttendTiming { sorted, steps_per_graph })
}

/// The launches of `work` as a graph. The capture ends even if a launch fails, so that the stream stays usable.
fn capture(backend: &Cuda, work: impl FnOnce() -> Result<()>) -> Result<CudaGraph> {
    let stream = backend.stream();
    stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed)?;
    let launched = work();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(failed);
    launched?;
    graph?.ok_or_else(|| Error::Gpu { message: "the driver captured no graph".into() })
}

/// Queues `work` `times` times and returns the duration of each run on the device.
fn timed(backend: &Cuda, times: usize, work: impl Fn() -> Result<()>) -> Result<Vec<Duration>> {
    check_driver("durations", LEAST_TIMING_DRIVER)?;
    let (stream, context) = (backend.stream(), backend.stream().context());
    let event = || context.new_event(Some(CU_EVENT_DEFAULT)).map_err(failed);
    let events = (0..=times).map(|_| event()).collect::<Result<Vec<_>>>()?;
    events[0].record(stream).map_err(failed)?;
    for event in &events[1..] {
        work()?;
        event.record(stream).map_err(failed)?;
    }
    let between = |pair: &[CudaEvent]| {
        let milliseconds = pair[0].elapsed_ms(&pair[1]).map_err(failed)?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    };
    events.windows(2).map(between).collect()
}

/// The device's read bandwidth in bytes per second: the best of several passes over `bytes` bytes, which should be
/// several times the size of the caches.
///
/// # Errors
/// [`Error::Limit`] from 16 GiB on, where 32 bits cannot count the words; [`Error::OutOfMemory`],
/// [`Error::DeviceLost`], [`Error::Adapter`] for a driver that is too old, and [`Error::Gpu`] when the sum of the words
/// read is wrong.
pub fn read_bandwidth(backend: &Cuda, bytes: usize) -> Result<f64> {
    let blocks = (bytes / READ_BYTES).max(1);
    let count = words_to_read(blocks)?;
    let words: Vec<u32> = (0..count).map(|i| i.wrapping_mul(PATTERN)).collect();
    let memory = Memory::upload(backend.stream(), "memory to read", bytemuck::cast_slice(&words))?;
    let sum = Memory::zeroed(backend.stream(), "sum of a bandwidth measurement", 4)?;
    let program = Program { sources: &SOURCES, files: PROGRAM, defines: Vec::new() };
    let function = backend.kernels().function(&program, "read_bandwidth")?;
    let grid = (8 * backend.kernels().facts().multiprocessors) as u32;
    let config = LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
    let (from, count, to) = (memory.address(), blocks as u32, sum.address());
    let launch = || {
        let mut builder = backend.stream().launch_builder(&function);
        builder.arg(&from).arg(&count).arg(&to);
        // SAFETY: The arguments match the kernel. The memory consists of `count` whole blocks and lives until the end
        // of this function, which waits for every launch.
        unsafe { builder.launch(config) }.map(|_| ()).map_err(failed)
    };
    launch()?;
    let read: u32 = bytemuck::pod_read_unaligned(&sum.download(backend.stream(), "sum")?);
    let expected = words.iter().fold(0u32, |sum, &word| sum.wrapping_add(word));
    if read != expected {
        return Err(Error::Gpu { message: format!("the device read a sum of {read:#x}; it should be {expected:#x}") });
    }
    let best = timed(backend, READ_PASSES, launch)?.into_iter().min().unwrap_or(Duration::MAX);
    Ok((blocks * READ_BYTES) as f64 / best.as_secs_f64())
}

/// Words in `blocks` blocks, if 32 bits can count them.
fn words_to_read(blocks: usize) -> Result<u32> {
    let bytes = blocks * READ_BYTES;
    u32::try_from(bytes / 4).map_err(|_| Error::Limit {
        what: "the bytes of a measurement of bandwidth".into(),
        needed: bytes as u64,
        allowed: 4 * u64::from(u32::MAX),
        hint: "read fewer bytes; several times the size of the caches is enough",
    })
}

/// Duration of a fixed amount of arithmetic, the best of many runs. It depends only on the clock.
///
/// # Errors
/// [`Error::Adapter`] for a driver that is too old; other errors of the driver.
pub fn compute_guard(backend: &Cuda) -> Result<Duration> {
    let grid = 2 * backend.kernels().facts().multiprocessors;
    let results = Memory::zeroed(backend.stream(), "results of the guard", grid * 256 * 4)?;
    let program = Program { sources: &SOURCES, files: PROGRAM, defines: Vec::new() };
    let function = backend.kernels().function(&program, "compute_guard")?;
    let config = LaunchConfig { grid_dim: (grid as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
    let to = results.address();
    let launch = || {
        let mut builder = backend.stream().launch_builder(&function);
        builder.arg(&to);
        // SAFETY: The argument matches the kernel. There is a result for every thread, and the memory lives until the
        // end of this function, which waits for every launch.
        unsafe { builder.launch(config) }.map(|_| ()).map_err(failed)
    };
    Ok(timed(backend, GUARD_RUNS, launch)?.into_iter().min().unwrap_or(Duration::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_counted_by_32_bits() {
        let most = (16usize << 30) / READ_BYTES;
        assert_eq!(words_to_read(most - 1), Ok(u32::MAX - READ_BYTES as u32 / 4 + 1));
        assert!(matches!(words_to_read(most), Err(Error::Limit { .. })));
    }
}
