//! The tables of all parts of a step, in one copy.

use std::sync::Arc;

use cudarc::driver::result::memset_d8_async;
use cudarc::driver::{CudaFunction, DeviceRepr, LaunchConfig, PushKernelArg};

use crate::cuda::backend::Cuda;
use crate::cuda::device::driver::driver_error;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::pinned::Pinned;
use crate::cuda::device::program::Program;
use crate::cuda::sources::SOURCES;
use crate::{Error, Result};

/// Threads of a block of `step_tables`.
const THREADS: usize = 256;

/// Most blocks that share a job.
const MOST_BLOCKS: usize = 64;

/// Bytes of a row that is copied. Tables begin at multiples of it, and their memory ends at one.
const ROW: usize = 16;

/// The kernel that brings tables to the parts.
const STEP_TABLES: &str = "step_tables";

/// `TableJob` of `cuda/step_tables.cu`.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct TableJob {
    from: u64,
    to: u64,
    shards: u64,
    page_bytes: u64,
    count: u32,
    layers: u32,
}

// SAFETY: A struct of C layout without padding, the same on both sides. Addresses are plain integers.
unsafe impl DeviceRepr for TableJob {}

/// Where the addresses of the pages of a segment go, for all layers of a part.
#[derive(Clone, Debug)]
pub(super) struct PagePlaces {
    /// `[layer][page]`
    pub addresses: Arc<Memory>,
    /// `[layer][shard]`
    pub shards: Arc<Memory>,
    pub page_bytes: usize,
    /// Pages of a layer.
    pub pages: usize,
    pub layers: usize,
}

/// Collects the tables of a step, copies them to the device at once, and has one kernel bring them to their places. A
/// copy and a launch for every table would take as long as a short step.
#[derive(Debug, Default)]
pub(super) struct TableUpload {
    bytes: Vec<u8>,
    /// `from` counts bytes from the start of the upload until it is sent.
    jobs: Vec<TableJob>,
    ready: Option<Ready>,
}

/// What a first upload made.
#[derive(Debug)]
struct Ready {
    function: CudaFunction,
    host: Pinned,
    device: Arc<Memory>,
}

impl TableUpload {
    /// The sources of the kernel, and its name.
    pub(super) const fn kernel() -> (Program, &'static str) {
        (Program { sources: &SOURCES, files: &["step_tables.cu"], defines: Vec::new() }, STEP_TABLES)
    }

    /// Forgets what was collected.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.jobs.clear();
    }

    /// Adds bytes that go to `at` bytes from the start of `to`. From their end to `room` bytes there will be zeros.
    ///
    /// # Errors
    /// [`Error::Buffer`] when that is more than the memory has.
    pub(super) fn copy(&mut self, bytes: &[u8], room: usize, (to, at): (&Memory, usize)) -> Result<()> {
        let length = room.max(bytes.len()).next_multiple_of(ROW);
        if !at.is_multiple_of(ROW) || at.checked_add(length).is_none_or(|end| end > to.bytes()) {
            let reason = format!("{length} bytes from byte {at} on, of {}", to.bytes());
            return Err(Error::Buffer { what: "table of a step", reason });
        }
        let from = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(from + length, 0);
        let job = TableJob {
            from: from as u64,
            to: to.address() + at as u64,
            shards: 0,
            page_bytes: 0,
            count: (length / ROW) as u32,
            layers: 1,
        };
        self.jobs.push(job);
        Ok(())
    }

    /// Adds the words of the pages of a segment, of which there are as many as `places` has room for.
    ///
    /// # Errors
    /// [`Error::Buffer`] when there are fewer.
    pub(super) fn pages(&mut self, words: impl Iterator<Item = u32>, places: &PagePlaces) -> Result<()> {
        let from = self.bytes.len();
        self.bytes.extend(words.take(places.pages).flat_map(u32::to_ne_bytes));
        let given = (self.bytes.len() - from) / size_of::<u32>();
        if given != places.pages {
            let reason = format!("{given} words for {} pages", places.pages);
            return Err(Error::Buffer { what: "pages of a step", reason });
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(ROW), 0);
        self.jobs.push(TableJob {
            from: from as u64,
            to: places.addresses.address(),
            shards: places.shards.address(),
            page_bytes: places.page_bytes as u64,
            count: places.pages as u32,
            layers: places.layers as u32,
        });
        Ok(())
    }

    /// Queues what was collected: a copy, a launch, and a write that nobody reads. Kernels of the step may read tables
    /// before the kernel before them is complete. Behind the write, the launch is. The call must not be captured.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], errors of the driver, and those of a kernel that is compiled.
    pub(super) fn send(&mut self, backend: &Cuda) -> Result<()> {
        if self.jobs.is_empty() {
            return Ok(());
        }
        let jobs_at = self.bytes.len();
        let needed = jobs_at + size_of_val(self.jobs.as_slice()) + ROW;
        let ready = match self.ready.take().filter(|ready| ready.device.bytes() >= needed) {
            Some(ready) => ready,
            None => Ready::new(backend, needed.next_power_of_two())?,
        };
        let Ready { function, host, device } = self.ready.insert(ready);
        self.jobs.iter_mut().for_each(|job| job.from += device.address());
        self.bytes.extend_from_slice(bytemuck::cast_slice(&self.jobs));
        host.upload("tables of a step", &self.bytes, device)?;
        let most = |of: fn(&TableJob) -> u32| self.jobs.iter().map(of).max().unwrap_or(0);
        let blocks = (most(|job| job.count) as usize).div_ceil(THREADS).clamp(1, MOST_BLOCKS);
        let grid_dim = (blocks as u32, self.jobs.len() as u32, most(|job| job.layers));
        let config = LaunchConfig { grid_dim, block_dim: (THREADS as u32, 1, 1), shared_mem_bytes: 0 };
        let jobs = device.address() + jobs_at as u64;
        let mut launch = backend.stream().launch_builder(function);
        launch.arg(&jobs);
        // SAFETY: The only argument matches the kernel: as many jobs as there are rows of blocks, which the copy before
        // has brought. Each reads what the copy brought, and writes to memory whose size was checked when it was added,
        // or that was made for its pages. That memory is freed in the order of the stream.
        unsafe { launch.launch(config) }.map_err(|error| driver_error(STEP_TABLES, 0, error))?;
        let last = device.address() + (device.bytes() - ROW) as u64;
        // SAFETY: The last row of the memory, which lies behind the jobs.
        unsafe { memset_d8_async(last, 0, ROW, backend.stream().cu_stream()) }
            .map_err(|error| driver_error(STEP_TABLES, ROW as u64, error))
    }
}

impl Ready {
    fn new(backend: &Cuda, bytes: usize) -> Result<Self> {
        let (program, name) = TableUpload::kernel();
        Ok(Self {
            function: backend.kernels().function(&program, name)?,
            host: Pinned::new(backend.stream(), bytes)?,
            device: Memory::zeroed(backend.stream(), "tables of a step", bytes)?,
        })
    }
}
