//! Flags for what a step could not store.

use crate::backend::FlaggedToken;
use crate::format::KeyOrValue;
use crate::wgpu::device::buffers;
use crate::wgpu::device::guard::{self, Request};
use crate::{Error, Result};

/// What a word holds that is not set.
const NOTHING: u32 = u32::MAX;

/// Which tokens steps could not store as they were: for keys and for values of every layer the first, one word each, and 2³² − 1
/// where there is none. Keys and values have buffers of their own, so that their kernels do not wait for each other. Clones share
/// the flags.
#[derive(Clone, Debug)]
pub struct NonFiniteFlags {
    keys: wgpu::Buffer,
    values: wgpu::Buffer,
    layers: usize,
}

impl NonFiniteFlags {
    /// Flags for so many layers, at least one, none of them set.
    ///
    /// # Errors
    /// [`Error::Plan`] for no layers, [`Error::OutOfMemory`], [`Error::Limit`] or [`Error::DeviceLost`].
    pub fn new(device: &wgpu::Device, layers: usize) -> Result<Self> {
        if layers == 0 {
            return Err(Error::Plan { what: "non-finite flags", reason: "at least one layer is needed".into() });
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let words = vec![NOTHING; layers];
        let create = || buffers::create_filled(device, "non-finite flags", bytemuck::cast_slice(&words), usage);
        Ok(Self { keys: create()?, values: create()?, layers })
    }

    /// Number of layers.
    pub const fn layers(&self) -> usize {
        self.layers
    }

    /// The words of keys or of values, `[layer]`, with the usages `STORAGE | COPY_SRC | COPY_DST`: for an engine that copies
    /// them beside something else that it reads back.
    pub const fn buffer(&self, which: KeyOrValue) -> &wgpu::Buffer {
        match which {
            KeyOrValue::Key => &self.keys,
            KeyOrValue::Value => &self.values,
        }
    }

    /// What was flagged once all submitted work is done, by layer, keys before values.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub async fn read(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Vec<FlaggedToken>> {
        let bytes = self.layers as u64 * 4;
        let keys = buffers::read(device, queue, &self.keys, 0, bytes).await?;
        let values = buffers::read(device, queue, &self.values, 0, bytes).await?;
        let words = |bytes: &[u8]| bytemuck::pod_collect_to_vec::<u8, u32>(bytes);
        let flagged = |(layer, (key, value)): (usize, (u32, u32))| {
            let of_layer = [(KeyOrValue::Key, key), (KeyOrValue::Value, value)].into_iter();
            let set = of_layer.filter(|(_, token)| *token != NOTHING);
            set.map(move |(tensor, token)| FlaggedToken { layer, tensor, token: token as usize })
        };
        Ok(words(&keys).into_iter().zip(words(&values)).enumerate().flat_map(flagged).collect())
    }

    /// Unsets all, before the next submission.
    ///
    /// # Errors
    /// [`Error::Gpu`] when wgpu refuses the copy.
    pub fn clear(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<()> {
        let words = vec![NOTHING; self.layers];
        guard::captured_now(device, Request::call("clearing of non-finite flags"), || {
            for buffer in [&self.keys, &self.values] {
                queue.write_buffer(buffer, 0, bytemuck::cast_slice(&words));
            }
        })
    }

    pub(super) fn check_layer(&self, layer: usize) -> Result<()> {
        if layer < self.layers {
            return Ok(());
        }
        let reason = format!("flags of {} layers have none of layer {layer}", self.layers);
        Err(Error::Plan { what: "step", reason })
    }
}
