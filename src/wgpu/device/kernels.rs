//! The pipeline cache: compiled kernel variants, owned by the caller.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::guard::{self, Request};
use super::shader::{Binding, Source, Variant};
use crate::{Error, Result};

/// Whether the shaders carry wgpu's run-time checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Checks {
    /// Bounds checks, loop bounds and division guards as wgpu inserts them.
    #[default]
    Safe,
    /// None of them. Faster; each kernel's header argues why it stays in bounds for any checked plan.
    Trusted,
}

/// Compiled kernels of one device. Cheap to share; compiling is lazy, or ahead of time with [`Kernels::prepare`].
#[derive(Debug)]
pub struct Kernels {
    device: wgpu::Device,
    checks: Checks,
    compiled: Mutex<HashMap<Variant, Arc<Kernel>>>,
}

/// One compiled variant.
#[derive(Debug)]
pub struct Kernel {
    pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
    bindings: Vec<Binding>,
    label: String,
}

impl Kernels {
    /// An empty cache for `device`.
    pub fn new(device: &wgpu::Device, checks: Checks) -> Self {
        Self { device: device.clone(), checks, compiled: Mutex::default() }
    }

    /// The device that the kernels are compiled for.
    pub fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// Compiles every variant of `variants` that is not yet there, so that no later call compiles.
    ///
    /// # Errors
    /// [`Error::Gpu`] when the driver rejects a shader.
    pub fn prepare(&self, variants: &[Variant]) -> Result<()> {
        variants.iter().try_for_each(|variant| self.get(variant).map(drop))
    }

    /// The compiled variant.
    ///
    /// # Errors
    /// [`Error::Plan`] for a variant that does not exist, [`Error::Gpu`] when the driver rejects its shader.
    pub fn get(&self, variant: &Variant) -> Result<Arc<Kernel>> {
        if let Some(kernel) = self.compiled.lock().unwrap_or_else(PoisonError::into_inner).get(variant) {
            return Ok(kernel.clone());
        }
        // Compiled outside the lock: a driver may take seconds, and two threads that race compile the same thing.
        let kernel = Arc::new(self.compile(variant)?);
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(compiled.entry(variant.clone()).or_insert(kernel).clone())
    }

    fn compile(&self, variant: &Variant) -> Result<Kernel> {
        let source = variant.source()?;
        let compile = || self.create(variant, source);
        guard::captured_now(&self.device, Request::call("compilation of a kernel"), compile)
    }

    fn create(&self, variant: &Variant, source: Source) -> Kernel {
        let Source { wgsl, bindings } = source;
        let label = variant.label();
        let descriptor =
            wgpu::ShaderModuleDescriptor { label: Some(&label), source: wgpu::ShaderSource::Wgsl(wgsl.into()) };
        let module = match self.checks {
            Checks::Safe => self.device.create_shader_module(descriptor),
            // SAFETY: no kernel of this crate indexes out of the buffers that its plan checked (each shader's header
            // gives the argument), has an unbounded loop, or divides by zero.
            Checks::Trusted => unsafe {
                self.device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
            },
        };
        let entries: Vec<wgpu::BindGroupLayoutEntry> = bindings.iter().map(layout_entry).collect();
        let layout = self
            .device
            .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(&label), entries: &entries });
        let pipeline_layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(&label),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(&label),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some(variant.entry_point()),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Every kernel writes its workgroup memory before it reads it.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        Kernel { pipeline, layout, bindings, label }
    }
}

impl Kernel {
    /// Binds buffers by the names that the shader gives them.
    ///
    /// # Errors
    /// [`Error::Plan`] when a buffer of the shader is not among `buffers`, [`Error::Gpu`] when wgpu refuses one.
    pub fn bind(&self, device: &wgpu::Device, buffers: &[(&str, wgpu::BufferBinding<'_>)]) -> Result<wgpu::BindGroup> {
        let entries = self
            .bindings
            .iter()
            .map(|binding| {
                let (_, buffer) =
                    buffers.iter().find(|(name, _)| *name == binding.name).ok_or_else(|| Error::Plan {
                        what: "bind group",
                        reason: format!("{} was given no buffer '{}'", self.label, binding.name),
                    })?;
                Ok(wgpu::BindGroupEntry {
                    binding: binding.index,
                    resource: wgpu::BindingResource::Buffer(buffer.clone()),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        guard::captured_now(device, Request::call("bind group"), || {
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(&self.label),
                layout: &self.layout,
                entries: &entries,
            })
        })
    }

    /// The pipeline.
    pub fn pipeline(&self) -> &wgpu::ComputePipeline {
        &self.pipeline
    }
}

fn layout_entry(binding: &Binding) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding: binding.index,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Storage { read_only: !binding.writable },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    }
}
