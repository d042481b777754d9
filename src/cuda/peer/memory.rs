//! Memory that other ranks write to: slots on the device, and the word that tells the host of a failure.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::result::{free_host, free_sync, malloc_host, malloc_sync, memcpy_htod_sync, memset_d8_async};
use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CUipcMem_flags_enum, CUipcMemHandle, CUresult,
    cuCtxEnablePeerAccess, cuDeviceCanAccessPeer, cuIpcCloseMemHandle, cuIpcGetMemHandle, cuIpcOpenMemHandle_v2,
    cuMemHostGetDevicePointer_v2,
};
use cudarc::driver::{CudaContext, CudaStream};

use super::handle::IPC_BYTES;
use crate::cuda::device::driver::{driver_error, make_current};
use crate::{Error, Result};

/// Words before the slots: who left, what failed, and from the 64th on the numbers of the blocks' next launches.
pub(super) const HEADER_WORDS: usize = 1024;
const LEFT_AT: usize = 0;
const FAILED_AT: usize = 1;
const STEPS_AT: usize = 64;

/// Most blocks of a launch: their numbers fit the header.
pub(super) const MOST_BLOCKS: usize = HEADER_WORDS - STEPS_AT;

/// The slots of this process's ranks.
static OF_PROCESS: Mutex<Option<HashMap<u64, Weak<SlotMemory>>>> = Mutex::new(None);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// The slots of a rank, on its device. Not from a pool: pools have access rights and handles of their own.
#[derive(Debug)]
pub(super) struct SlotMemory {
    pub(super) id: u64,
    context: Arc<CudaContext>,
    address: u64,
}

impl SlotMemory {
    /// Slots of `words` numbered words in all, without any, and a header.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn new(stream: &Arc<CudaStream>, words: usize) -> Result<Arc<Self>> {
        let bytes = HEADER_WORDS * 4 + words * 8;
        let failed = |error| driver_error("slots of a rank", bytes as u64, error);
        stream.context().bind_to_thread().map_err(failed)?;
        // SAFETY: The context is current. The memory is freed once, by `drop`.
        let address = unsafe { malloc_sync(bytes) }.map_err(failed)?;
        let memory = Self { id: NEXT_ID.fetch_add(1, Ordering::Relaxed), context: stream.context().clone(), address };
        // SAFETY: The memory has these bytes, and nothing else uses it yet.
        unsafe { memset_d8_async(address, 0, bytes, stream.cu_stream()) }.map_err(failed)?;
        stream.synchronize().map_err(failed)?;
        // Blocks count their launches from 1: 0 is what unwritten slots hold.
        let mut header = vec![0u32; HEADER_WORDS];
        header[STEPS_AT..].fill(1);
        // SAFETY: The memory begins with the header, and the copy is done when the call returns.
        unsafe { memcpy_htod_sync(address, &header) }.map_err(failed)?;
        let memory = Arc::new(memory);
        let mut all = OF_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        let all = all.get_or_insert_default();
        all.retain(|_, slots| slots.strong_count() > 0);
        all.insert(memory.id, Arc::downgrade(&memory));
        Ok(memory)
    }

    /// The slots of another rank of this process, if they still exist.
    pub(super) fn of_process(id: u64) -> Option<Arc<Self>> {
        let all = OF_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        all.as_ref().and_then(|all| all.get(&id)).and_then(Weak::upgrade)
    }

    /// The driver's handle for other processes, or none where it cannot share memory between them.
    pub(super) fn ipc(&self) -> Option<[u8; IPC_BYTES]> {
        self.context.bind_to_thread().ok()?;
        let mut handle = CUipcMemHandle { reserved: [0; IPC_BYTES] };
        // SAFETY: The address is that of an allocation, which lives as long as `self`.
        unsafe { cuIpcGetMemHandle(&mut handle, self.address) }.result().ok()?;
        Some(handle.reserved.map(|byte| byte as u8))
    }
}

impl Drop for SlotMemory {
    fn drop(&mut self) {
        // A context that fails here has failed before, and its memory is gone with it.
        if make_current(&self.context).is_ok() {
            // SAFETY: Allocated by `new`, freed once. Ranks of this process hold the memory as long as they may use it;
            // `PeerSlots::connect` demands the same of other processes.
            unsafe { free_sync(self.address) }.unwrap_or(());
        }
    }
}

/// The slots of a rank as another rank addresses them.
#[derive(Debug)]
pub(super) enum Mapped {
    /// Of this process, also this rank's own.
    Here(Arc<SlotMemory>),
    /// Of another process.
    Opened { context: Arc<CudaContext>, address: u64 },
}

impl Mapped {
    /// Slots of another rank of this process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the device cannot reach the other's memory; errors of the driver.
    pub(super) fn here(context: &Arc<CudaContext>, slots: Arc<SlotMemory>) -> Result<Self> {
        let failed = |error| driver_error("memory of another device", 0, error);
        context.bind_to_thread().map_err(failed)?;
        if context.cu_device() != slots.context.cu_device() {
            let mut reaches = 0;
            // SAFETY: Writes one integer; both devices exist.
            let asked = unsafe { cuDeviceCanAccessPeer(&mut reaches, context.cu_device(), slots.context.cu_device()) };
            asked.result().map_err(failed)?;
            if reaches == 0 {
                let what = format!(
                    "access of device {} to the memory of device {}",
                    context.ordinal(),
                    slots.context.ordinal()
                );
                let hint = "neither NVLink nor PCIe lets one reach the other here; use cuda::nccl";
                return Err(Error::Unsupported { what, hint: hint.into() });
            }
            // SAFETY: Both contexts are alive, the first is current.
            match unsafe { cuCtxEnablePeerAccess(slots.context.cu_ctx(), 0) } {
                CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
                other => other.result().map_err(failed)?,
            }
        }
        Ok(Self::Here(slots))
    }

    /// Slots of another process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the driver does not open the handle.
    pub(super) fn open(context: &Arc<CudaContext>, ipc: [u8; IPC_BYTES]) -> Result<Self> {
        context.bind_to_thread().map_err(|error| driver_error("memory of another process", 0, error))?;
        let handle = CUipcMemHandle { reserved: ipc.map(|byte| byte as _) };
        let lazily = CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: The context is current. The driver checks the handle, and `drop` closes it.
        let opened = unsafe { cuIpcOpenMemHandle_v2(&mut address, handle, lazily) };
        match opened.result() {
            Ok(()) => Ok(Self::Opened { context: context.clone(), address }),
            Err(error) => Err(Error::Unsupported {
                what: format!("memory of another process on device {}: {error:?}", context.ordinal()),
                hint:
                    "the ranks must be alive, on one host, on devices that reach each other (NVLink or PCIe), and in \
                       one namespace of processes; else use cuda::nccl"
                        .into(),
            }),
        }
    }

    fn header(&self) -> u64 {
        match self {
            Self::Here(slots) => slots.address,
            Self::Opened { address, .. } => *address,
        }
    }

    /// Address of the first slot.
    pub(super) fn slots(&self) -> u64 {
        self.header() + (HEADER_WORDS * 4) as u64
    }

    /// Addresses of the word for those who left, of that for failures, and of the blocks' numbers.
    pub(super) fn words(&self) -> [u64; 3] {
        [LEFT_AT, FAILED_AT, STEPS_AT].map(|word| self.header() + (word * 4) as u64)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Self::Opened { context, address } = self
            && make_current(context).is_ok()
        {
            // SAFETY: Opened by `open`, closed once; the transport has waited for its kernels, or leaks the mapping.
            // A failure means that the context is gone, and the mapping with it.
            unsafe { cuIpcCloseMemHandle(*address) }.result().unwrap_or(());
        }
    }
}

/// A word of the host that kernels write.
#[derive(Debug)]
pub(super) struct HostWord {
    context: Arc<CudaContext>,
    host: *mut u32,
    address: u64,
    is_kept: bool,
}

// SAFETY: The pointer is to memory that this value alone owns on the host, read as a whole word, and that may be freed
// on any thread.
unsafe impl Send for HostWord {}
// SAFETY: Reads through a shared reference are volatile loads of one word that only a device writes.
unsafe impl Sync for HostWord {}

impl HostWord {
    /// A word of 0.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        let failed = |error| driver_error("a word of the host", 4, error);
        context.bind_to_thread().map_err(failed)?;
        // SAFETY: The context is current. The memory is freed once, by `drop`.
        let host: *mut c_void =
            unsafe { malloc_host(4, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP) }.map_err(failed)?;
        let mut word = Self { context: context.clone(), host: host.cast(), address: 0, is_kept: false };
        // SAFETY: The memory has four bytes, aligned to a page, and no kernel knows it yet.
        unsafe { word.host.write_volatile(0) };
        // SAFETY: The memory was made to be addressed by devices.
        unsafe { cuMemHostGetDevicePointer_v2(&mut word.address, host, 0) }.result().map_err(failed)?;
        Ok(word)
    }

    pub(super) fn read(&self) -> u32 {
        // SAFETY: The memory lives as long as `self`. A device may write the word meanwhile, as a whole.
        unsafe { self.host.read_volatile() }
    }

    pub(super) const fn address(&self) -> u64 {
        self.address
    }

    /// Keeps the memory until the process ends: a kernel may still write to it.
    pub(super) fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for HostWord {
    fn drop(&mut self) {
        if !self.is_kept && make_current(&self.context).is_ok() {
            // SAFETY: Allocated by `new`, freed once, after the kernels that may write it.
            unsafe { free_host(self.host.cast()) }.unwrap_or(());
        }
    }
}
