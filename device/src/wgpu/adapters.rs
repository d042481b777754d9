//! Chooses an adapter and opens a device, for callers that have no wgpu device of their own.
//!
//! The wgpu environment variables apply: `WGPU_BACKEND`, `WGPU_ADAPTER_NAME`, and those of
//! [`wgpu::InstanceFlags::with_env`], such as `WGPU_VALIDATION`.

use futures::FutureExt;

use super::Requirements;
use crate::{Error, Result};

/// All adapters that `WGPU_BACKEND` admits, best first: hardware before software, native APIs before OpenGL.
///
/// # Errors
/// [`Error::Adapter`] when `WGPU_BACKEND` names no graphics API, or the program was built without any.
pub async fn adapters() -> Result<Vec<wgpu::Adapter>> {
    let built_in = wgpu::Instance::enabled_backend_features();
    let admitted = admitted();
    if (built_in & admitted).is_empty() {
        let given = std::env::var("WGPU_BACKEND").unwrap_or_default();
        let reason = format!(
            "WGPU_BACKEND is '{given}' and the program was built with {built_in:?}; enable a backend among the features \
             of wgpu, and unset WGPU_BACKEND or name one of vulkan, metal, dx12 and gl"
        );
        return Err(Error::Adapter { reason });
    }
    let instance = instance(admitted);
    let mut adapters = instance.enumerate_adapters(admitted).await;
    adapters.sort_by_key(|adapter| rank(&adapter.get_info()));
    Ok(adapters)
}

/// Chooses the best adapter whose name contains `name`. Without a `name`, `WGPU_ADAPTER_NAME` is used; if that is unset
/// too, the best adapter is returned. Case does not matter.
///
/// # Errors
/// [`Error::Adapter`] when no adapter matches; the message lists the adapters found.
pub async fn choose_adapter(name: Option<&str>) -> Result<wgpu::Adapter> {
    let from_environment = std::env::var("WGPU_ADAPTER_NAME").ok();
    let wanted = name.or(from_environment.as_deref()).unwrap_or("").trim().to_lowercase();
    let (mut fitting, others): (Vec<_>, Vec<_>) =
        adapters().await?.into_iter().partition(|adapter| adapter.get_info().name.to_lowercase().contains(&wanted));
    if !fitting.is_empty() {
        return Ok(fitting.swap_remove(0));
    }
    let reason = match others.is_empty() {
        true => "no adapter was found; install a driver for Vulkan, Metal or DX12, or use the CPU backend".into(),
        false => {
            let names: Vec<String> = others.iter().map(|adapter| format!("'{}'", adapter.get_info().name)).collect();
            format!("no adapter name contains '{wanted}'; the adapters are {}", names.join(", "))
        }
    };
    Err(Error::Adapter { reason })
}

/// Opens a device on `adapter` with the features and limits of `requirements`.
///
/// # Errors
/// [`Error::Adapter`] when the adapter cannot meet them.
pub async fn open_device(adapter: &wgpu::Adapter, requirements: Requirements) -> Result<(wgpu::Device, wgpu::Queue)> {
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("kvpack"),
        required_features: requirements.features,
        required_limits: requirements.limits,
        experimental_features: requirements.experimental,
        ..Default::default()
    };
    let opened = adapter.request_device(&descriptor).await;
    opened.map_err(|error| Error::Adapter { reason: format!("could not open '{}': {error}", adapter.get_info().name) })
}

/// The instance of the process, made when it is asked for first.
///
/// An instance loads the drivers and, when its last adapter is gone, unloads them. A driver that is loaded and unloaded
/// again and again leaks: NVIDIA's, on Linux, was not found any more after 23 devices. An instance whose interfaces are
/// others than those of the last one, since `WGPU_BACKEND` has changed, takes its place.
#[cfg(not(target_family = "wasm"))]
fn instance(admitted: wgpu::Backends) -> wgpu::Instance {
    use std::sync::{Mutex, PoisonError};

    static INSTANCE: Mutex<Option<(wgpu::Backends, wgpu::Instance)>> = Mutex::new(None);
    let mut instance = INSTANCE.lock().unwrap_or_else(PoisonError::into_inner);
    match &*instance {
        Some((backends, instance)) if *backends == admitted => instance.clone(),
        _ => instance.insert((admitted, new_instance(admitted))).1.clone(),
    }
}

/// A browser's instance loads nothing, and stays on its thread.
#[cfg(target_family = "wasm")]
fn instance(admitted: wgpu::Backends) -> wgpu::Instance {
    new_instance(admitted)
}

fn new_instance(backends: wgpu::Backends) -> wgpu::Instance {
    let from_environment = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    wgpu::Instance::new(wgpu::InstanceDescriptor { backends, ..from_environment })
}

fn admitted() -> wgpu::Backends {
    wgpu::Backends::from_env().unwrap_or(wgpu::Backends::all())
}

/// The adapter of a device, which wgpu does not tell: an adapter of the same description. None in a browser, where
/// adapters cannot be listed at once; there are no matrices there either.
pub(super) fn adapter_of(device: &wgpu::Device) -> Option<wgpu::Adapter> {
    let info = device.adapter_info();
    let backend = wgpu::Backends::from(info.backend);
    // An engine may have made its device in spite of `WGPU_BACKEND`.
    let of_process = if admitted().contains(backend) { admitted() } else { backend };
    let adapters = instance(of_process).enumerate_adapters(backend).now_or_never()?;
    adapters.into_iter().find(|adapter| adapter.get_info() == info)
}

/// Lower is better.
fn rank(info: &wgpu::AdapterInfo) -> (u8, bool) {
    let device = match info.device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    };
    (device, info.backend == wgpu::Backend::Gl)
}
