//! What `web/page.js` calls.

use js_sys::Function;
use kvpack::Error;
use kvpack::conformance::{Check, checks};
use kvpack::cpu::Cpu;
use kvpack::wgpu::{Path, Requirements, Wgpu, choose_adapter, open_device};
use serde::Serialize;
use wasm_bindgen::prelude::*;
use wgpu::ExperimentalFeatures;

use crate::bench::{self, Bench};
use crate::check;
use crate::javascript::{JsResult, object, thrown, whole};
use crate::quality::{self, Quality};

/// Panics say where they were, on the console.
#[wasm_bindgen(start)]
fn start() {
    console_error_panic_hook::set_once();
}

/// What the page measures on: WebGPU, or the CPU reference in wasm.
#[wasm_bindgen]
pub struct Session(On);

enum On {
    Gpu(Wgpu),
    Cpu(Cpu),
}

/// What a device offers.
#[derive(Serialize)]
struct Device {
    path: String,
    f16: bool,
    subgroups: bool,
    timestamps: bool,
    buffer_bytes: u64,
    binding_bytes: u64,
    storage_buffers: u32,
    workgroup_bytes: u32,
    workgroup_invocations: u32,
}

#[wasm_bindgen]
impl Session {
    /// On WebGPU, with kernels of at most the path of this name. Rejects with an `Adapter` error where there is none.
    #[wasm_bindgen(js_name = gpu)]
    pub async fn gpu(path: Option<String>) -> JsResult<Session> {
        let path = path.map_or(Ok(Path::Matrices), |path| path.parse()).map_err(thrown)?;
        let adapter = choose_adapter(None).await.map_err(thrown)?;
        let requirements = Requirements::of(&adapter, ExperimentalFeatures::disabled()).restricted_to(path);
        let (device, queue) = open_device(&adapter, requirements).await.map_err(thrown)?;
        let backend = Wgpu::new(device, queue).map_err(thrown)?;
        Ok(Self(On::Gpu(backend.restricted_to(path))))
    }

    /// On the CPU reference.
    pub fn cpu() -> Session {
        Self(On::Cpu(Cpu::new()))
    }

    /// What the device offers; nothing for the CPU reference.
    pub fn device(&self) -> JsResult<JsValue> {
        let On::Gpu(gpu) = &self.0 else { return Ok(JsValue::UNDEFINED) };
        let (limits, capabilities) = (gpu.device().limits(), gpu.capabilities());
        object(&Device {
            path: capabilities.path().to_string(),
            f16: capabilities.f16,
            subgroups: capabilities.subgroups.is_some(),
            timestamps: capabilities.timestamps != kvpack::wgpu::Timestamps::None,
            buffer_bytes: limits.max_buffer_size,
            binding_bytes: limits.max_storage_buffer_binding_size,
            storage_buffers: limits.max_storage_buffers_per_shader_stage,
            workgroup_bytes: limits.max_compute_workgroup_storage_size,
            workgroup_invocations: limits.max_compute_invocations_per_workgroup,
        })
    }

    /// The `GPUDevice`; nothing for the CPU reference.
    #[wasm_bindgen(js_name = gpuDevice, unchecked_return_type = "GPUDevice | undefined")]
    pub fn gpu_device(&self) -> JsValue {
        let On::Gpu(gpu) = &self.0 else { return JsValue::UNDEFINED };
        gpu.device().as_webgpu().map_or(JsValue::UNDEFINED, |device| device.clone().into())
    }

    /// Calls `told` with the reason when the device is lost.
    #[wasm_bindgen(js_name = onLost)]
    pub fn on_lost(&self, told: Function) {
        if let On::Gpu(gpu) = &self.0 {
            gpu.device().set_device_lost_callback(move |_, reason| {
                // An exception of the page's own function is the page's.
                let _ = told.call1(&JsValue::NULL, &reason.into());
            });
        }
    }

    /// Names of the conformance checks whose name contains `filter`, or one of its parts between commas.
    pub fn checks(&self, filter: &str) -> Vec<String> {
        named(&checks(), filter)
    }

    /// Those of these checks that are quick.
    #[wasm_bindgen(js_name = quickChecks)]
    pub fn quick_checks(&self, filter: &str) -> Vec<String> {
        let quick: Vec<Check> = checks().into_iter().filter(Check::is_quick).collect();
        named(&quick, filter)
    }

    /// Runs the check of this name and returns a row. Rejects on a lost device.
    pub async fn check(&self, name: &str) -> JsResult<JsValue> {
        let found = checks().into_iter().find(|check| check.name() == name);
        let found = found.ok_or_else(|| js_sys::Error::new(&format!("there is no check '{name}'")))?;
        let row = match &self.0 {
            On::Gpu(gpu) => check::check(gpu, &found).await,
            On::Cpu(cpu) => check::check(cpu, &found).await,
        };
        object(&row.map_err(thrown)?)
    }

    /// Names of the shapes that can be timed, largest first.
    #[wasm_bindgen(js_name = benchShapes)]
    pub fn bench_shapes(&self) -> Vec<String> {
        bench::shapes().into_iter().map(|shape| shape.name).collect()
    }

    /// Begins to time a shape, or the one that suits the device.
    pub async fn bench(&self, shape: Option<String>) -> JsResult<BenchRun> {
        let run = match &self.0 {
            On::Gpu(gpu) => Bench::new(gpu, shape.as_deref()).await.map(|bench| BenchOn::Gpu(gpu.clone(), bench)),
            On::Cpu(cpu) => Bench::new(cpu, shape.as_deref()).await.map(|bench| BenchOn::Cpu(cpu.clone(), bench)),
        };
        run.map(BenchRun).map_err(thrown)
    }

    /// Begins to measure what packing costs, on the bytes of `smollm2_kv.safetensors`.
    pub async fn quality(&self, file: Vec<u8>) -> JsResult<QualityRun> {
        let run = match &self.0 {
            On::Gpu(gpu) => Quality::new(gpu, &file).await.map(|quality| QualityOn::Gpu(gpu.clone(), quality)),
            On::Cpu(cpu) => Quality::new(cpu, &file).await.map(|quality| QualityOn::Cpu(cpu.clone(), quality)),
        };
        run.map(QualityRun).map_err(thrown)
    }
}

/// A shape that is being timed, a format at a time.
#[wasm_bindgen]
pub struct BenchRun(BenchOn);

enum BenchOn {
    Gpu(Wgpu, Bench<Wgpu>),
    Cpu(Cpu, Bench<Cpu>),
}

#[wasm_bindgen]
impl BenchRun {
    /// The formats, by name.
    pub fn formats(&self) -> Vec<String> {
        bench::formats().iter().map(ToString::to_string).collect()
    }

    /// 10⁹ bytes per second at which the device reads memory.
    #[wasm_bindgen(getter)]
    pub fn read(&self) -> f64 {
        let read = match &self.0 {
            BenchOn::Gpu(_, bench) => bench.read(),
            BenchOn::Cpu(_, bench) => bench.read(),
        };
        read / 1e9
    }

    /// Checks and times the format at `index`, and returns its row.
    pub async fn row(&mut self, index: f64) -> JsResult<JsValue> {
        let index = whole("format", index)?;
        let format = bench::formats().get(index).copied().ok_or_else(|| no_such("format", index))?;
        let row = match &mut self.0 {
            BenchOn::Gpu(gpu, bench) => bench.row(gpu, format).await,
            BenchOn::Cpu(cpu, bench) => bench.row(cpu, format).await,
        };
        object(row.map_err(thrown)?)
    }

    /// Takes the last row back.
    #[wasm_bindgen(js_name = discardLast)]
    pub fn discard_last(&mut self) {
        match &mut self.0 {
            BenchOn::Gpu(_, bench) => bench.discard_last(),
            BenchOn::Cpu(_, bench) => bench.discard_last(),
        }
    }

    /// All rows so far, as `kvpack bench --json` writes them.
    pub fn report(&self) -> JsResult<JsValue> {
        object(match &self.0 {
            BenchOn::Gpu(_, bench) => bench.report(),
            BenchOn::Cpu(_, bench) => bench.report(),
        })
    }
}

/// Real data whose loss is being measured, a format at a time.
#[wasm_bindgen]
pub struct QualityRun(QualityOn);

enum QualityOn {
    Gpu(Wgpu, Quality<Wgpu>),
    Cpu(Cpu, Quality<Cpu>),
}

#[wasm_bindgen]
impl QualityRun {
    /// The formats, by name.
    pub fn formats(&self) -> Vec<String> {
        quality::formats().iter().map(ToString::to_string).collect()
    }

    /// Measures the format at `index`, and returns its row.
    pub async fn row(&mut self, index: f64) -> JsResult<JsValue> {
        let index = whole("format", index)?;
        let format = quality::formats().get(index).copied().ok_or_else(|| no_such("format", index))?;
        let row = match &mut self.0 {
            QualityOn::Gpu(gpu, quality) => quality.row(gpu, format).await,
            QualityOn::Cpu(cpu, quality) => quality.row(cpu, format).await,
        };
        object(row.map_err(thrown)?)
    }

    /// All rows so far.
    pub fn report(&self) -> JsResult<JsValue> {
        object(match &self.0 {
            QualityOn::Gpu(_, quality) => quality.report(),
            QualityOn::Cpu(_, quality) => quality.report(),
        })
    }
}

/// Names of these checks that contain `filter`, or one of its parts between commas.
fn named(checks: &[Check], filter: &str) -> Vec<String> {
    let names = checks.iter().map(|check| check.name().to_string());
    names.filter(|name| filter.split(',').any(|part| name.contains(part))).collect()
}

fn no_such(what: &'static str, index: usize) -> JsValue {
    thrown(Error::Plan { what: "measurement", reason: format!("there is no {what} {index}") })
}
