//! Kernels bound to their arguments, ready to launch.

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use crate::cuda::Cuda;
use crate::cuda::device::driver::driver_error;
use crate::cuda::device::launch::set_shared_bytes;
use crate::cuda::device::memory::{Memory, same_stream};
use crate::cuda::device::program::Program;
use crate::{Error, Result};

/// Words of the largest argument struct, `StatsCall`.
const CALL_WORDS: usize = 18;

/// The bytes of a kernel's only argument, a struct of up to `CALL_WORDS` words.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct CallBytes([u64; CALL_WORDS]);

// SAFETY: Plain integers. A kernel copies the size of its own struct, and `Launch::new` checked that there are that
// many bytes.
unsafe impl DeviceRepr for CallBytes {}

/// One launch: a kernel, its arguments and its grid.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    /// The stream of the backend that bound the launch, and of its memory.
    stream: Arc<CudaStream>,
    name: &'static str,
    function: CudaFunction,
    call: CallBytes,
    grid: (u32, u32, u32),
    block: u32,
    shared: u32,
    /// The memory that the arguments point at.
    _memory: Vec<Arc<Memory>>,
}

/// Launches that belong together, in order.
#[derive(Clone, Debug, Default)]
pub struct Launches(Vec<Launch>);

/// A kernel and its grid.
pub(super) struct Kernel<'a> {
    pub(super) program: &'a Program,
    pub(super) name: &'static str,
    pub(super) grid: [usize; 2],
    pub(super) block: u32,
    /// Bytes of shared memory in addition to what the kernel itself declares.
    pub(super) shared: usize,
}

impl Launch {
    /// Compiles the kernel unless it is compiled already, and keeps its arguments and the memory that they point at.
    /// The memory must belong to the backend's stream.
    pub(super) fn new<C: bytemuck::Pod>(
        backend: &Cuda,
        kernel: Kernel<'_>,
        call: &C,
        memory: &[&Arc<Memory>],
    ) -> Result<Self> {
        memory.iter().try_for_each(|memory| memory.check_stream(kernel.name, backend.stream()))?;
        let mut bytes = CallBytes([0; CALL_WORDS]);
        bytemuck::bytes_of_mut(&mut bytes.0)[..size_of::<C>()].copy_from_slice(bytemuck::bytes_of(call));
        let [x, y] = kernel.grid;
        let (most_x, most_y) = (i32::MAX as usize, usize::from(u16::MAX));
        if x == 0 || y == 0 || x > most_x || y > most_y {
            return Err(Error::Limit {
                what: format!("blocks of kernel {}", kernel.name),
                needed: x.max(y) as u64,
                allowed: if y > most_y { most_y } else { most_x } as u64,
                hint: "pass fewer tokens at once",
            });
        }
        let function = backend.kernels().function(kernel.program, kernel.name)?;
        if kernel.shared > 0 {
            set_shared_bytes(&function, kernel.name, kernel.shared)?;
        }
        Ok(Self {
            stream: backend.stream().clone(),
            name: kernel.name,
            function,
            call: bytes,
            grid: (x as u32, y as u32, 1),
            block: kernel.block,
            shared: kernel.shared as u32,
            _memory: memory.iter().map(|&memory| memory.clone()).collect(),
        })
    }

    fn check_stream(&self, stream: &CudaStream) -> Result<()> {
        if same_stream(&self.stream, stream) {
            return Ok(());
        }
        let reason = "a backend on another stream bound it; launch it there, or bind it with a backend on this stream";
        Err(Error::Plan { what: self.name, reason: reason.into() })
    }

    fn launch(&self) -> Result<()> {
        let config = LaunchConfig { grid_dim: self.grid, block_dim: (self.block, 1, 1), shared_mem_bytes: self.shared };
        let mut launch = self.stream.launch_builder(&self.function);
        launch.arg(&self.call);
        // SAFETY: The arguments are the bytes of the kernel's own struct. The memory that they point at was checked
        // when they were created, and this launch keeps it alive.
        unsafe { launch.launch(config) }.map(drop).map_err(|error| driver_error(self.name, 0, error))
    }
}

impl Launches {
    pub(super) fn new(launches: Vec<Launch>) -> Self {
        Self(launches)
    }

    /// Launches all kernels on the stream of the backend that bound them. Does not wait, allocate or copy, so that a
    /// CUDA graph can capture the call. The memory must live until the stream has finished: keep this value until then.
    ///
    /// # Errors
    /// [`Error::Plan`] on another stream; errors of the driver.
    pub fn launch(&self, stream: &Arc<CudaStream>) -> Result<()> {
        self.0.iter().try_for_each(|launch| launch.check_stream(stream))?;
        self.0.iter().try_for_each(Launch::launch)
    }

    /// Number of launches.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
