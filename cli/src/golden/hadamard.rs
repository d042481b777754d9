//! The blocked Walsh-Hadamard transform.

use anyhow::Result;
use kvpack::backend::Device;
use kvpack::format::{Direction, Rotation};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::wgpu::{HadamardPlan, Tensor, Wgpu};
use kvpack::{AttentionShape, cpu};
use pollster::block_on;

use super::file::GoldenFile;
use super::{Outputs, named};

/// `hadamard` on a GPU, both ways like [`hadamard`].
pub fn hadamard_on_gpu(file: &GoldenFile, gpu: &Wgpu) -> Result<Vec<(&'static str, Outputs)>> {
    let [tokens, head_dim] = file.input("x")?.axes()?;
    let shape = AttentionShape::new(1, 1, head_dim)?;
    let rotation = Rotation::hadamard(file.number("order")? as usize);
    let rows = block_on(gpu.upload(file.input("x")?.f32()?.as_slice().into()))?;
    [("hadamard (wgpu)", Direction::Forward), ("hadamard back (wgpu)", Direction::Inverse)]
        .into_iter()
        .map(|(name, direction)| {
            let plan = HadamardPlan::new(&shape, RowLayout::token_major(tokens, &shape), rotation, direction)?;
            let output = Tensor::zeroed(gpu.device(), plan.elements(), ElementType::F32)?;
            let launches = plan.bind(gpu.kernels(), &rows, &output)?;
            let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            launches.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
            gpu.queue().submit([encoder.finish()]);
            let rotated = block_on(gpu.download(&output))?;
            Ok((name, named([("y", rotated.into_iter().map(f64::from).collect())])))
        })
        .collect()
}

/// `hadamard`: rotated, and rotated back (the transform is its own inverse).
pub fn hadamard(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    let [_, head_dim] = file.input("x")?.axes()?;
    let rotation = Rotation::hadamard(file.number("order")? as usize);
    [("hadamard", Direction::Forward), ("hadamard back", Direction::Inverse)]
        .into_iter()
        .map(|(name, direction)| {
            let mut rows = file.input("x")?.f32()?;
            cpu::hadamard(&mut rows, head_dim, rotation, direction)?;
            Ok((name, named([("y", rows.into_iter().map(f64::from).collect())])))
        })
        .collect()
}
