//! Token numbers on the device, for gathers.

use crate::plan::{IndexShape, TokenIndices};
use crate::wgpu::device::buffers::{self, ARRAY_USAGES};
use crate::wgpu::device::capabilities::MOST_BINDING_BYTES;
use crate::{Error, Result};

/// Token numbers `[kv_heads, count]`, one word each, in a storage buffer of kvpack or of the caller. Kernels may write
/// them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Indices {
    buffer: wgpu::Buffer,
    offset: u64,
    shape: IndexShape,
}

impl Indices {
    /// The indices in `buffer`, starting at byte `offset`. The caller still owns and fills the buffer. Kernels clamp an
    /// index that is not below [`IndexShape::below`] to the largest that is.
    ///
    /// # Errors
    /// [`Error::Buffer`] when the buffer lacks the usage `STORAGE`, the offset is not a multiple of 256, or the indices
    /// do not lie within the buffer; [`Error::Limit`] when they exceed a binding.
    pub fn from_buffer(buffer: wgpu::Buffer, offset: u64, shape: IndexShape) -> Result<Self> {
        let reject = |reason: String| Err(Error::Buffer { what: "token indices", reason });
        if !buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            return reject(format!("its usages are {:?}; it needs STORAGE", buffer.usage()));
        }
        let indices = Self { buffer, offset, shape };
        if indices.bytes() > MOST_BINDING_BYTES {
            let (needed, allowed) = (indices.bytes(), MOST_BINDING_BYTES);
            let (what, hint) = ("token indices in bytes".into(), "pass fewer tokens at once");
            return Err(Error::Limit { what, needed, allowed, hint });
        }
        let end = offset.checked_add(indices.bytes());
        match end.filter(|&end| offset.is_multiple_of(256) && end <= indices.buffer.size()) {
            Some(_) => Ok(indices),
            None => reject(format!(
                "{} indices of 4 bytes at offset {offset} of {} bytes; they must lie within the buffer, from a multiple of \
                 256 on",
                shape.indices(),
                indices.buffer.size()
            )),
        }
    }

    /// The buffer, for kernels that write indices.
    pub const fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// Indices that are all 0, for kernels to overwrite.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Limit`] or [`Error::DeviceLost`].
    pub fn zeroed(device: &wgpu::Device, shape: IndexShape) -> Result<Self> {
        let buffer = buffers::create_now(device, "token indices", shape.indices() as u64 * 4, ARRAY_USAGES)?;
        Ok(Self { buffer, offset: 0, shape })
    }

    /// Copies token numbers to a new buffer.
    ///
    /// # Errors
    /// Those of [`IndexShape::of`]; [`Error::OutOfMemory`], [`Error::Limit`] or [`Error::DeviceLost`].
    pub fn upload(device: &wgpu::Device, tokens: &[u32], kv_heads: usize, below: u32) -> Result<Self> {
        let shape = IndexShape::of(tokens, kv_heads, below)?;
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let buffer = buffers::create_filled(device, "token indices", bytemuck::cast_slice(tokens), usage)?;
        Ok(Self { buffer, offset: 0, shape })
    }

    /// Copies the indices to the host once all submitted work is done.
    ///
    /// # Errors
    /// [`Error::Buffer`] when the buffer lacks the usage `COPY_SRC`; [`Error::OutOfMemory`]; [`Error::DeviceLost`].
    pub async fn download(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Vec<u32>> {
        if !self.buffer.usage().contains(wgpu::BufferUsages::COPY_SRC) {
            let reason = format!("its usages are {:?}; it needs COPY_SRC", self.buffer.usage());
            return Err(Error::Buffer { what: "a download of token indices", reason });
        }
        let bytes = buffers::read(device, queue, &self.buffer, self.offset, self.bytes()).await?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }

    /// The indices as kernels bind them.
    pub fn binding(&self) -> wgpu::BufferBinding<'_> {
        let size = std::num::NonZeroU64::new(self.bytes());
        wgpu::BufferBinding { buffer: &self.buffer, offset: self.offset, size }
    }

    const fn bytes(&self) -> u64 {
        self.shape.indices() as u64 * 4
    }
}

impl TokenIndices for Indices {
    fn shape(&self) -> IndexShape {
        self.shape
    }
}
