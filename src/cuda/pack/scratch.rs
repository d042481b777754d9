//! Memory that calls of a backend share. The calls run in the order of its stream, so one may overwrite memory that an
//! earlier one has read.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::non_finite_flags::NonFiniteFlags;
use super::write_memory::WriteMemory;
use crate::Result;
use crate::cuda::device::memory::Memory;
use crate::plan::WriteLayout;

/// Minimum size of a table in bytes.
const FIRST_TABLE_BYTES: usize = 16 << 10;

/// Memory that is kept from call to call. It grows when a call needs more.
#[derive(Debug, Default)]
pub(crate) struct PackScratch {
    table: Option<Arc<Memory>>,
    rotated: Option<Arc<Memory>>,
    flags: Option<NonFiniteFlags>,
}

impl PackScratch {
    /// Memory for a table of `bytes` bytes.
    pub(super) fn table(&mut self, stream: &Arc<CudaStream>, bytes: usize) -> Result<Arc<Memory>> {
        room(&mut self.table, stream, "tables", bytes.max(FIRST_TABLE_BYTES))
    }

    /// Memory for the table of a step.
    pub(in crate::cuda) fn write_memory(
        &mut self,
        stream: &Arc<CudaStream>,
        layout: &Arc<WriteLayout>,
    ) -> Result<WriteMemory> {
        Ok(WriteMemory::over(self.table(stream, layout.words() * size_of::<u32>())?, layout))
    }

    /// Memory for rotated rows.
    pub(super) fn rotated(&mut self, stream: &Arc<CudaStream>, bytes: usize) -> Result<Arc<Memory>> {
        room(&mut self.rotated, stream, "rotated rows", bytes)
    }

    /// Flags that nobody reads.
    pub(in crate::cuda) fn flags(&mut self, stream: &Arc<CudaStream>) -> Result<NonFiniteFlags> {
        match &self.flags {
            Some(flags) => Ok(flags.clone()),
            None => Ok(self.flags.insert(NonFiniteFlags::new(stream, 1)?).clone()),
        }
    }
}

fn room(
    kept: &mut Option<Arc<Memory>>,
    stream: &Arc<CudaStream>,
    what: &'static str,
    bytes: usize,
) -> Result<Arc<Memory>> {
    match kept {
        Some(memory) if memory.bytes() >= bytes => Ok(memory.clone()),
        _ => Ok(kept.insert(Memory::zeroed(stream, what, bytes.next_power_of_two())?).clone()),
    }
}
