//! The pipeline cache: compiled kernel variants, owned by the caller.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::join_all;

use super::buffers;
use super::encoded::Submissions;
use super::guard::{self, Request};
use super::shader::{Binding, Source, Variant};
use super::sources::ShaderSources;
use crate::{Error, Result};

/// Which run-time checks wgpu adds to the shaders of trusted launches. Checked launches have all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Checks {
    /// None. Kernels stay in bounds by themselves for every call that safe code can make. `docs/in-bounds.md` lists the
    /// facts behind this for the kernels of kvpack, and the tests that try to break it.
    #[default]
    Trusted,
    /// Only wgpu's clamps of indices. Loops and divisions get no checks: loop bounds are constants and clamped numbers
    /// of the kernels, and divisors are constants and sizes of checked shapes.
    Indices,
    /// All checks that wgpu inserts, in all kernels: clamped indices, loop counters and guarded divisions. On an H200
    /// they make a decode step over 4 bits a third slower.
    Safe,
}

const COMPILATION: Request = Request::call("compilation of a kernel");

/// Compiled kernels of one device. Cheap to share. Kernels are compiled on first use, or ahead of time with
/// [`Kernels::prepare`].
#[derive(Debug)]
pub struct Kernels {
    device: wgpu::Device,
    checks: Checks,
    /// The count of indices out of bounds, if the kernels count them.
    counter: Option<wgpu::Buffer>,
    compiled: Mutex<HashMap<Variant, HashMap<Checks, Arc<Kernel>>>>,
    /// The driver's cache of compiled kernels, if the caller keeps one.
    pipelines: Option<wgpu::PipelineCache>,
    submissions: Submissions,
}

/// One compiled variant. It stays within the crate: only a [`Launch`](super::Launch) binds and launches it.
#[derive(Debug)]
pub(super) struct Kernel {
    sources: &'static ShaderSources,
    pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
    bindings: Vec<Binding>,
    label: String,
}

impl Kernels {
    /// An empty cache for `device`.
    pub fn new(device: &wgpu::Device, checks: Checks) -> Self {
        Self {
            device: device.clone(),
            checks,
            counter: None,
            compiled: Mutex::default(),
            pipelines: None,
            submissions: Submissions::new(device),
        }
    }

    /// An empty cache of kernels that count out-of-bounds indices in addition to wgpu's run-time checks. It serves
    /// tests and the diagnosis of a device. A kernel binds one more storage buffer than its plan lists, so the device
    /// must allow 11. If it allows fewer than 13, some kernels are replaced by others.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub fn counting(device: &wgpu::Device) -> Result<Self> {
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let counter = buffers::create_filled(device, "indices out of bounds", &[0; 4], usage)?;
        Ok(Self { counter: Some(counter), ..Self::new(device, Checks::Safe) })
    }

    /// The same kernels, compiled through a pipeline cache of `device`. The caller may fill it with the data of an
    /// earlier process, and read it when all kernels are compiled. It needs [`wgpu::Features::PIPELINE_CACHE`].
    #[must_use]
    pub fn with_pipeline_cache(self, cache: wgpu::PipelineCache) -> Self {
        Self { pipelines: Some(cache), ..self }
    }

    /// Out-of-bounds indices in all work submitted so far. `None` unless the kernels count them
    /// ([`Kernels::counting`]).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub async fn out_of_bounds(&self, queue: &wgpu::Queue) -> Result<Option<u32>> {
        let Some(counter) = &self.counter else { return Ok(None) };
        let bytes = buffers::read(&self.device, queue, counter, 0, 4).await?;
        Ok(Some(bytemuck::pod_read_unaligned(&bytes)))
    }

    /// Storage buffers that plans may bind to a kernel: all that the device allows, except the counter of
    /// [`Kernels::counting`].
    pub fn storage_buffers(&self) -> u32 {
        self.device.limits().max_storage_buffers_per_shader_stage.saturating_sub(u32::from(self.counter.is_some()))
    }

    /// Notices when the commands of a pass are submitted.
    pub const fn submissions(&self) -> &Submissions {
        &self.submissions
    }

    pub(super) fn counter(&self) -> Option<&wgpu::Buffer> {
        self.counter.as_ref()
    }

    /// The device that the kernels are compiled for.
    pub fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// Compiles every variant of `variants` that is missing, so that no later trusted launch compiles. A browser
    /// compiles all of them concurrently, and this waits for them. Elsewhere they are compiled one after the other.
    ///
    /// wgpu 30 cannot create pipelines asynchronously. In a browser `createComputePipeline` compiles in another
    /// process, so the page stays responsive.
    ///
    /// # Errors
    /// [`Error::Plan`] for a variant that does not exist; [`Error::Gpu`] when the driver rejects a shader. The shaders
    /// that it accepts stay compiled.
    pub async fn prepare(&self, variants: &[Variant]) -> Result<()> {
        let is_missing = |variant: &&Variant| self.compiled(variant, self.checks).is_none();
        let compiled = variants.iter().filter(is_missing).map(async |variant| {
            let source = variant.source()?;
            let create = || self.create(variant, source, self.checks);
            let kernel = guard::captured(&self.device, COMPILATION, create).await?;
            self.keep(variant, self.checks, kernel);
            Ok(())
        });
        join_all(compiled).await.into_iter().collect()
    }

    /// The checks of trusted launches.
    pub(super) const fn checks(&self) -> Checks {
        self.checks
    }

    /// The variant compiled with these checks. Compiles it on first use.
    ///
    /// # Errors
    /// [`Error::Plan`] for a variant that does not exist; [`Error::Gpu`] when the driver rejects its shader. A browser
    /// reports the rejection later: the next call that waits returns it, and so does each waiting call after a use of
    /// the kernel.
    pub(super) fn get(&self, variant: &Variant, checks: Checks) -> Result<Arc<Kernel>> {
        if let Some(kernel) = self.compiled(variant, checks) {
            return Ok(kernel);
        }
        // Compiled outside the lock: a driver may take seconds. Two threads that race compile the same kernel.
        let source = variant.source()?;
        let kernel = guard::captured_now(&self.device, COMPILATION, || self.create(variant, source, checks))?;
        Ok(self.keep(variant, checks, kernel))
    }

    fn compiled(&self, variant: &Variant, checks: Checks) -> Option<Arc<Kernel>> {
        let kept = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        kept.get(variant)?.get(&checks).cloned()
    }

    /// Keeps a kernel, unless another thread has kept one meanwhile. Returns the one that is kept.
    fn keep(&self, variant: &Variant, checks: Checks, kernel: Kernel) -> Arc<Kernel> {
        let mut kept = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        kept.entry(variant.clone()).or_default().entry(checks).or_insert_with(|| Arc::new(kernel)).clone()
    }

    fn create(&self, variant: &Variant, source: Source, checks: Checks) -> Kernel {
        let sources = variant.sources();
        let source = if self.counter.is_some() { source.counted() } else { source };
        let wgsl = if guard::in_browser(&self.device) { source.for_browsers() } else { source.wgsl };
        let bindings = source.bindings;
        let label = variant.label();
        let descriptor =
            wgpu::ShaderModuleDescriptor { label: Some(&label), source: wgpu::ShaderSource::Wgsl(wgsl.into()) };
        let reads_unclamped = bindings.iter().any(|binding| Some(binding.name.as_str()) == sources.unclamped_table);
        let checks = if reads_unclamped { Checks::Safe } else { checks };
        let module = match checks {
            Checks::Safe => self.device.create_shader_module(descriptor),
            // SAFETY: Only `Launch::trusted` asks for this. Its caller vouches that the kernel indexes within the
            // buffers that are bound, has no endless loop and never divides by zero, whatever the buffers contain.
            Checks::Trusted => unsafe {
                self.device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
            },
            // SAFETY: As above. This relies only on two of the facts: loops end, and nothing divides by zero.
            Checks::Indices => unsafe {
                let checks =
                    wgpu::ShaderRuntimeChecks { bounds_checks: true, ..wgpu::ShaderRuntimeChecks::unchecked() };
                self.device.create_shader_module_trusted(descriptor, checks)
            },
        };
        let entries: Vec<wgpu::BindGroupLayoutEntry> =
            bindings.iter().map(|binding| layout_entry(binding, sources.is_table(&binding.name))).collect();
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
            cache: self.pipelines.as_ref(),
        });
        Kernel { sources, pipeline, layout, bindings, label }
    }
}

impl Kernel {
    /// Binds buffers by their names in the shader.
    ///
    /// # Errors
    /// [`Error::Plan`] when a buffer of the shader is not among `buffers`, or one is read and written, which wgpu would
    /// refuse only when the caller's commands are finished; [`Error::Gpu`] when wgpu refuses one.
    pub(super) fn bind(
        &self,
        device: &wgpu::Device,
        buffers: &[(&str, wgpu::BufferBinding<'_>)],
    ) -> Result<wgpu::BindGroup> {
        let bound = self
            .bindings
            .iter()
            .map(|binding| {
                let (_, buffer) =
                    buffers.iter().find(|(name, _)| *name == binding.name).ok_or_else(|| Error::Plan {
                        what: "bind group",
                        reason: format!("{} is missing the buffer '{}'", self.label, binding.name),
                    })?;
                Ok((binding, buffer))
            })
            .collect::<Result<Vec<_>>>()?;
        self.check_apart(&bound)?;
        let entries: Vec<_> = bound
            .iter()
            .map(|&(binding, buffer)| wgpu::BindGroupEntry {
                binding: binding.index,
                resource: wgpu::BindingResource::Buffer(buffer.clone()),
            })
            .collect();
        guard::captured_now(device, Request::call("bind group"), || {
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(&self.label),
                layout: &self.layout,
                entries: &entries,
            })
        })
    }

    /// Checks that no buffer is bound both read-only and for writing. wgpu refuses this even for disjoint parts.
    fn check_apart(&self, bound: &[(&Binding, &wgpu::BufferBinding<'_>)]) -> Result<()> {
        let (written, read): (Vec<_>, Vec<_>) = bound.iter().copied().partition(|(binding, _)| binding.writable);
        for (to, written) in written {
            if let Some((from, _)) = read.iter().find(|(_, read)| read.buffer == written.buffer) {
                let (from, to, label) = (&from.name, &to.name, &self.label);
                let reason = format!("{label} reads '{from}' and writes '{to}', and both lie in one buffer");
                return Err(Error::Plan { what: "bind group", reason });
            }
        }
        Ok(())
    }

    /// Tables that it binds.
    pub(super) fn tables(&self) -> usize {
        self.bindings.iter().filter(|binding| self.sources.is_table(&binding.name)).count()
    }

    /// The pipeline.
    pub(super) fn pipeline(&self) -> &wgpu::ComputePipeline {
        &self.pipeline
    }
}

fn layout_entry(binding: &Binding, is_table: bool) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding: binding.index,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Storage { read_only: !binding.writable },
            has_dynamic_offset: is_table,
            // Sizes known here are checked once. wgpu compares the others with the shader at every dispatch.
            min_binding_size: NonZeroU64::new(binding.least_bytes),
        },
        count: None,
    }
}
