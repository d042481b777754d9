//! Arrays of integers that kernels write.

use crate::wgpu::device::buffers::{self, ARRAY_USAGES};
use crate::{Error, Result};

/// A dense array of `u32` in a storage buffer that kernels write, such as counts or places among kept tokens.
#[derive(Clone, Debug)]
pub struct Words {
    buffer: wgpu::Buffer,
    len: usize,
}

impl Words {
    /// An array of zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Limit`] or [`Error::DeviceLost`]; [`Error::NoTokens`] when it is empty.
    pub fn zeroed(device: &wgpu::Device, what: &'static str, len: usize) -> Result<Self> {
        check_len(what, len)?;
        let buffer = buffers::create_now(device, what, len as u64 * 4, ARRAY_USAGES)?;
        Ok(Self { buffer, len })
    }

    /// Copies the words to the host once all submitted work is done.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or [`Error::DeviceLost`].
    pub async fn download(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Vec<u32>> {
        let bytes = buffers::read(device, queue, &self.buffer, 0, self.len as u64 * 4).await?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }

    /// Number of words. It is at least 1.
    #[expect(clippy::len_without_is_empty, reason = "there is at least one word")]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// The buffer.
    pub const fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    pub(super) fn binding(&self) -> wgpu::BufferBinding<'_> {
        self.buffer.as_entire_buffer_binding()
    }
}

fn check_len(what: &'static str, len: usize) -> Result<()> {
    if len == 0 {
        return Err(Error::NoTokens { what, hint: "a buffer holds at least one word" });
    }
    Ok(())
}
