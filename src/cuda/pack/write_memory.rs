//! The table of a step on the device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::cuda::device::memory::Memory;
use crate::cuda::table_upload::TableUpload;
use crate::plan::{TableSection, WriteLayout, WriteTable};
use crate::{Error, Result};

/// The table of a step on the device. One serves all layers of a model. It belongs to the stream that it was created
/// on.
#[derive(Clone, Debug)]
pub struct WriteMemory {
    layout: Arc<WriteLayout>,
    table: Arc<Memory>,
}

impl WriteMemory {
    /// Memory for the steps of a layout. Its table begins as that of a step that writes nothing.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(stream: &Arc<CudaStream>, layout: &Arc<WriteLayout>) -> Result<Self> {
        let table = Memory::zeroed(stream, "table of a step", layout.words() * size_of::<u32>())?;
        Ok(Self { layout: layout.clone(), table })
    }

    /// A table in memory of this library that is large enough.
    pub(super) fn over(table: Arc<Memory>, layout: &Arc<WriteLayout>) -> Self {
        Self { layout: layout.clone(), table }
    }

    /// Writes a table to the device, in the order of the stream that the memory was created on: once per step, whatever
    /// the number of layers, and between replays of a graph that captured the layers. The call itself must not be
    /// captured.
    ///
    /// # Errors
    /// [`Error::Plan`] when the table belongs to another layout, or the stream is not the memory's.
    pub fn write(&self, stream: &Arc<CudaStream>, table: &WriteTable) -> Result<()> {
        table.check_layout(&self.layout)?;
        self.table.write(stream, "table of a step", 0, bytemuck::cast_slice(table.words()))
    }

    /// Adds a table to what a step uploads, instead of writing it.
    ///
    /// # Errors
    /// [`Error::Plan`] when the table belongs to another layout.
    pub(in crate::cuda) fn stage(&self, table: &WriteTable, upload: &mut TableUpload) -> Result<()> {
        table.check_layout(&self.layout)?;
        upload.copy(bytemuck::cast_slice(table.words()), 0, (&self.table, 0))
    }

    /// The layout.
    pub const fn layout(&self) -> &Arc<WriteLayout> {
        &self.layout
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.table.bytes()
    }

    /// Address of a section.
    pub(super) fn address(&self, section: TableSection) -> u64 {
        self.table.address() + (self.layout.first_entry(section) * 4 * size_of::<u32>()) as u64
    }

    pub(super) const fn table(&self) -> &Arc<Memory> {
        &self.table
    }

    pub(super) fn check_layout(&self, layout: &WriteLayout) -> Result<()> {
        if *self.layout == *layout {
            return Ok(());
        }
        Err(Error::Plan { what: "step", reason: "its memory was made for another layout".into() })
    }
}
