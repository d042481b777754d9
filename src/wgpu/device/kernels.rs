//! The pipeline cache: compiled kernel variants, owned by the caller.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::join_all;

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

const COMPILATION: Request = Request::call("compilation of a kernel");

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

    /// Compiles every variant of `variants` that is not yet there, so that no later call compiles. In a browser all of
    /// them are under way at once, and this waits for them; elsewhere one is compiled after the other.
    ///
    /// wgpu 30 has no asynchronous creation of pipelines; a browser's `createComputePipeline` compiles in another process,
    /// so that the page does not stand still.
    ///
    /// # Errors
    /// [`Error::Plan`] for a variant that does not exist, [`Error::Gpu`] when the driver rejects a shader: those that it
    /// accepts are there all the same.
    pub async fn prepare(&self, variants: &[Variant]) -> Result<()> {
        let missing = |variant: &&Variant| !self.lock().contains_key(*variant);
        let compiled = variants.iter().filter(missing).map(async |variant| {
            let source = variant.source()?;
            let create = || self.create(variant, source);
            let kernel = guard::captured(&self.device, COMPILATION, create).await?;
            self.lock().entry(variant.clone()).or_insert_with(|| Arc::new(kernel));
            Ok(())
        });
        join_all(compiled).await.into_iter().collect()
    }

    /// The compiled variant.
    ///
    /// # Errors
    /// [`Error::Plan`] for a variant that does not exist, [`Error::Gpu`] when the driver rejects its shader. A browser
    /// tells that later: the next call that waits returns the error, and so does each that waits after a use of the kernel.
    pub fn get(&self, variant: &Variant) -> Result<Arc<Kernel>> {
        if let Some(kernel) = self.lock().get(variant) {
            return Ok(kernel.clone());
        }
        // Compiled outside the lock: a driver may take seconds, and two threads that race compile the same thing.
        let source = variant.source()?;
        let kernel = guard::captured_now(&self.device, COMPILATION, || self.create(variant, source))?;
        Ok(self.lock().entry(variant.clone()).or_insert_with(|| Arc::new(kernel)).clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Variant, Arc<Kernel>>> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn create(&self, variant: &Variant, source: Source) -> Kernel {
        let wgsl = if guard::in_browser(&self.device) { source.for_browsers() } else { source.wgsl };
        let bindings = source.bindings;
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
