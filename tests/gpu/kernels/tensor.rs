//! Tensors: kvpack's own, and those in buffers of engines.

use half::f16;
use kvpack::Error;
use kvpack::backend::Device;
use kvpack::plan::ElementType;
use kvpack::wgpu::Tensor;
use pollster::block_on;

use crate::gpu_device::shared;

fn buffer(size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    let descriptor = wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false };
    shared().device().create_buffer(&descriptor)
}

#[test]
fn elements_come_back() {
    let backend = shared();
    for count in [1, 2, 3, 1001] {
        let singles: Vec<f32> = (0..count).map(|i| i as f32 * 0.25 - 7.0).collect();
        let halves: Vec<f16> = singles.iter().map(|&x| f16::from_f32(x)).collect();
        let tensor = block_on(backend.upload(singles.as_slice().into())).unwrap();
        assert_eq!(block_on(backend.download(&tensor)).unwrap(), singles);
        let tensor = block_on(backend.upload(halves.as_slice().into())).unwrap();
        assert_eq!(block_on(backend.download(&tensor)).unwrap(), singles);
        assert_eq!(backend.elements(&tensor), count);
        let last = tensor.slice(count - 1, 1).unwrap();
        assert_eq!(block_on(backend.download(&last)).unwrap(), singles[count - 1..]);
    }
}

#[test]
fn hostile_buffers_are_refused() {
    let storage = wgpu::BufferUsages::STORAGE;
    let refused = |usage, offset, elements, element_type| {
        let tensor = Tensor::from_buffer(buffer(64, usage), offset, elements, element_type);
        assert!(matches!(tensor, Err(Error::Buffer { .. })), "{usage:?} {offset} {elements}: {tensor:?}");
    };
    refused(wgpu::BufferUsages::COPY_SRC, 0, 1, ElementType::F32);
    refused(storage, 2, 1, ElementType::F32);
    refused(storage, 1, 1, ElementType::F16);
    refused(storage, 0, 0, ElementType::F32);
    refused(storage, 0, 17, ElementType::F32);
    refused(storage, 4, 16, ElementType::F32);
    refused(storage, 0, usize::MAX, ElementType::F32);
    refused(storage, u64::MAX - 3, 1, ElementType::F32);
    refused(storage, 62, 2, ElementType::F16);
    assert!(Tensor::from_buffer(buffer(64, storage), 62, 1, ElementType::F16).is_ok());
    // A last element that no whole word holds cannot be bound.
    assert!(Tensor::from_buffer(buffer(66, storage), 64, 1, ElementType::F16).is_err());
}

#[test]
fn downloads_need_a_usage() {
    let backend = shared();
    let tensor = Tensor::from_buffer(buffer(64, wgpu::BufferUsages::STORAGE), 0, 16, ElementType::F32).unwrap();
    assert!(matches!(block_on(backend.download(&tensor)), Err(Error::Buffer { .. })));
    assert!(tensor.slice(0, 17).is_err());
    assert!(tensor.slice(usize::MAX, 2).is_err());
    assert!(tensor.slice(16, 0).is_err());
}

#[test]
fn tensors_beyond_a_binding_are_refused() {
    let backend = shared();
    let limit = backend.capabilities().limits.binding_bytes;
    let tensor = Tensor::zeroed(backend.device(), (limit / 4) as usize + 1, ElementType::F32);
    assert!(matches!(tensor, Err(Error::Limit { .. })), "{tensor:?}");
    let tensor = Tensor::zeroed(backend.device(), usize::MAX, ElementType::F32);
    assert!(matches!(tensor, Err(Error::Limit { .. })), "{tensor:?}");
}
