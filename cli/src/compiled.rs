//! Kernels that drivers compiled, kept for the next process: compiling takes most of the time of `kvpack check`.
//!
//! wgpu offers that on Vulkan. Nothing is kept where the user has no cache folder.

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::files::{self, Replacement};
use crate::print::note;

/// Bytes of the largest cache that is read: 512 MiB.
const MOST_BYTES: u64 = 512 << 20;

/// The cache of the device that this process opened.
static OPEN: OnceLock<(wgpu::PipelineCache, PathBuf)> = OnceLock::new();

/// The feature that the device needs, where the adapter has it.
pub fn wanted(adapter: &wgpu::Adapter) -> wgpu::Features {
    adapter.features() & wgpu::Features::PIPELINE_CACHE
}

/// The cache for a device, with what earlier processes kept.
pub fn open(device: &wgpu::Device) -> Option<wgpu::PipelineCache> {
    if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
        return None;
    }
    let path = folder()?.join(wgpu::util::pipeline_cache_key(&device.adapter_info())?);
    let data = files::read(&path, MOST_BYTES).ok();
    // SAFETY: the data come from `keep` of an earlier process, in a file of the user's own cache folder that has the
    // name of this adapter; wgpu checks their header, and falls back to an empty cache where driver or version are
    // others.
    let cache = unsafe {
        device.create_pipeline_cache(&wgpu::PipelineCacheDescriptor {
            label: Some("kvpack"),
            data: data.as_deref(),
            fallback: true,
        })
    };
    // A second device of one process has a cache, but does not keep it.
    OPEN.set((cache.clone(), path)).unwrap_or(());
    Some(cache)
}

/// Keeps what was compiled. A folder that cannot be written only costs the next process its time to compile.
pub fn keep() {
    let Some((cache, path)) = OPEN.get() else { return };
    let Some(data) = cache.get_data() else { return };
    // What was there before is all that this process used.
    if std::fs::metadata(path).is_ok_and(|old| old.len() == data.len() as u64) {
        return;
    }
    let write = || {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut file = Replacement::new(path)?;
        file.write(&data)?;
        file.commit()
    };
    if let Err(error) = write() {
        note!("compiled kernels are not kept: {error:#}");
    }
}

/// `kvpack` in the user's cache folder.
fn folder() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || folder("HOME").map(|home| home.join(".cache"));
    let cache = folder("XDG_CACHE_HOME").or_else(home).or_else(|| folder("LOCALAPPDATA"))?;
    Some(cache.join("kvpack"))
}
