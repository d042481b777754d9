//! Flags for what a step could not store.

use crate::backend::FlaggedToken;
use crate::format::KeyOrValue;
use crate::wgpu::device::buffers::{self, Place};
use crate::wgpu::device::guard::{self, Request};
use crate::{Error, Result};
use std::sync::Arc;

/// What a word holds that is not set.
const NOTHING: u32 = u32::MAX;

/// Which tokens steps could not store as they were: for keys and for values of every layer the first, one word each,
/// and 2³² − 1 where there is none. Each word is a buffer of its own: wgpu orders all that writes one buffer, so that
/// kernels for keys and for values, and those of several layers, would wait for each other. Clones share the flags.
#[derive(Clone, Debug)]
pub struct NonFiniteFlags {
    // [layer], of keys and of values.
    words: Arc<[[wgpu::Buffer; 2]]>,
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
        let create = || buffers::create_filled(device, "non-finite flag", &NOTHING.to_ne_bytes(), usage);
        let words = (0..layers).map(|_| Ok([create()?, create()?])).collect::<Result<_>>()?;
        Ok(Self { words })
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.words.len()
    }

    /// The word of the keys or of the values of a layer below [`layers`](Self::layers), with the usages
    /// `STORAGE | COPY_SRC | COPY_DST`: for an engine that copies it beside something else that it reads back.
    pub fn word(&self, layer: usize, which: KeyOrValue) -> Option<&wgpu::Buffer> {
        self.words.get(layer).map(|[keys, values]| match which {
            KeyOrValue::Key => keys,
            KeyOrValue::Value => values,
        })
    }

    /// What was flagged once all submitted work is done, by layer, keys before values.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub async fn read(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Vec<FlaggedToken>> {
        let places: Vec<_> =
            self.words.as_flattened().iter().map(|buffer| Place { buffer, offset: 0, bytes: 4 }).collect();
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&buffers::read_all(device, queue, &places).await?);
        let flagged = |(index, token): (usize, u32)| {
            let tensor = if index % 2 == 0 { KeyOrValue::Key } else { KeyOrValue::Value };
            (token != NOTHING).then_some(FlaggedToken { layer: index / 2, tensor, token: token as usize })
        };
        Ok(words.into_iter().enumerate().filter_map(flagged).collect())
    }

    /// Unsets all, before the next submission.
    ///
    /// # Errors
    /// [`Error::Gpu`] when wgpu refuses the copy.
    pub fn clear(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<()> {
        guard::captured_now(device, Request::call("clearing of non-finite flags"), || {
            for word in self.words.as_flattened() {
                queue.write_buffer(word, 0, &NOTHING.to_ne_bytes());
            }
        })
    }

    /// The word of a layer that steps write.
    pub(super) fn binding(&self, layer: usize, which: KeyOrValue) -> Result<wgpu::BufferBinding<'_>> {
        let word = self.word(layer, which).map(wgpu::Buffer::as_entire_buffer_binding);
        word.ok_or_else(|| missing(self.layers(), layer))
    }

    pub(super) fn check_layer(&self, layer: usize) -> Result<()> {
        if layer < self.layers() { Ok(()) } else { Err(missing(self.layers(), layer)) }
    }
}

fn missing(layers: usize, layer: usize) -> Error {
    Error::Plan { what: "step", reason: format!("flags of {layers} layers have none of layer {layer}") }
}
