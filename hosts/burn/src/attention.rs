//! kvpack's attention over burn tensors. The integration is what lies between the marks.

use crate::Result;

// --- integration
use burn::backend::wgpu::{CubeBackend, CubeTensor};
use burn::cubecl::wgpu::{AutoCompiler, WgpuServer};
use burn::tensor::{DType, Device, Tensor};
use kvpack::plan::ElementType::{F16, F32};
use kvpack::wgpu::{LayerTensors, Tensor as KvTensor, Wgpu, WrittenStep};

/// burn's device, and kvpack on it.
pub fn open() -> Result<(Device, Wgpu)> {
    let (device, setup) = Device::wgpu_options().init_with_setup()?;
    Ok((device, Wgpu::new(setup.device, setup.queue)?))
}

/// A tensor of burn in its own memory. cubecl first submits the work that writes it, and keeps the memory while the
/// tensor is held.
pub fn lend(tensor: &Tensor<2>) -> Result<KvTensor> {
    lend_computed(computed(tensor)?)
}

/// A tensor whose kernels have been given to cubecl: until then burn collects operations to fuse them.
fn computed(tensor: &Tensor<2>) -> Result<CubeTensor> {
    let tensor = tensor.clone().try_into_primitive::<burn::backend::Wgpu>().map_err(|e| format!("{e:?}"))?;
    Ok(tensor.client.clone().resolve_tensor_float::<CubeBackend>(tensor).map_err(|e| format!("{e:?}"))?)
}

fn lend_computed(tensor: CubeTensor) -> Result<KvTensor> {
    tensor.is_contiguous().then_some(()).ok_or("a view is not lent: lend a contiguous tensor")?;
    let held = tensor.client.get_resource::<WgpuServer<AutoCompiler>>(tensor.handle)?;
    let of = [(DType::F16, F16), (DType::F32, F32)].into_iter().find(|of| of.0 == tensor.dtype);
    let (at, of) = (held.resource(), of.ok_or_else(|| format!("{:?} is not lent", tensor.dtype))?.1);
    Ok(KvTensor::from_buffer(at.buffer.clone(), at.offset, tensor.meta.num_elements(), of)?.kept_by(held))
}

/// Stores a layer's keys and values and attends, in one submission.
pub fn attend(step: &WrittenStep<'_>, layer: usize, [q, k, v]: [&Tensor<2>; 3]) -> Result<Tensor<2>> {
    let output = Tensor::empty(q.dims(), (&q.device(), q.dtype()));
    // All are computed before one is lent, so that cubecl submits once.
    let [k, v, q, o] = [computed(k)?, computed(v)?, computed(q)?, computed(&output)?];
    let [keys, values, queries, o] = [lend_computed(k)?, lend_computed(v)?, lend_computed(q)?, lend_computed(o)?];
    let lent = LayerTensors { keys, values, queries, output: o };
    step.submit(layer, &lent)?;
    Ok(output)
}
// --- end

/// Lines of code between the marks, without those that are empty or comments.
pub fn lines() -> usize {
    let lines = include_str!("attention.rs").lines().skip_while(|line| *line != "// --- integration");
    let lines = lines.take_while(|line| *line != "// --- end");
    lines.filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with("//")).count()
}
