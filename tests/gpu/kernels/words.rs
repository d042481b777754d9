//! What buffers of a device hold.

use kvpack::plan::ElementType;
use kvpack::wgpu::{Tensor, Wgpu};

/// The words of a buffer.
pub fn words(backend: &Wgpu, buffer: &wgpu::Buffer) -> Vec<u32> {
    let count = buffer.size() as usize / 4;
    let tensor = Tensor::from_buffer(buffer.clone(), 0, count, ElementType::F32).unwrap();
    let floats = pollster::block_on(tensor.download(backend.device(), backend.queue())).unwrap();
    floats.into_iter().map(f32::to_bits).collect()
}
