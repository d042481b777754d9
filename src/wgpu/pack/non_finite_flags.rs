//! Flags for tokens that a step could not store.

use crate::backend::FlaggedToken;
use crate::format::KeyOrValue;
use crate::wgpu::device::buffers::{self, Place};
use crate::wgpu::device::encoded::Encoders;
use crate::wgpu::device::guard::{self, Request};
use crate::{Error, Result};
use std::sync::Arc;

/// The value of a word without a flag.
const NOTHING: u32 = u32::MAX;

/// The first token that steps could not store exactly, for keys and for values of every layer. Each flag is one word,
/// which is 2³² − 1 if there is no such token. Each word is a buffer of its own: wgpu orders all kernels that write one
/// buffer, so that kernels for keys and values, and those of several layers, would wait for each other. Clones share
/// the flags.
#[derive(Clone, Debug)]
pub struct NonFiniteFlags {
    // [layer], with one word for keys and one for values.
    words: Arc<[[wgpu::Buffer; 2]]>,
    encoders: Encoders,
}

impl NonFiniteFlags {
    /// Flags for `layers` layers, at least one, none of them set.
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
        Ok(Self { words, encoders: Encoders::default() })
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.words.len()
    }

    /// The word for the keys or the values of a layer below [`layers`](Self::layers), with the usages `STORAGE |
    /// COPY_SRC | COPY_DST`. An engine may copy it together with something else that it reads back.
    pub fn word(&self, layer: usize, which: KeyOrValue) -> Option<&wgpu::Buffer> {
        self.words.get(layer).map(|[keys, values]| match which {
            KeyOrValue::Key => keys,
            KeyOrValue::Value => values,
        })
    }

    /// The flagged tokens once all submitted work is done, by layer, keys before values.
    ///
    /// # Errors
    /// [`Error::NotSubmitted`], [`Error::DeviceLost`].
    pub async fn read(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Vec<FlaggedToken>> {
        self.encoders.check_submitted(device, "reading of non-finite flags")?;
        let places: Vec<_> =
            self.words.as_flattened().iter().map(|buffer| Place { buffer, offset: 0, bytes: 4 }).collect();
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&buffers::read_all(device, queue, &places).await?);
        let flagged = |(index, token): (usize, u32)| {
            let tensor = if index % 2 == 0 { KeyOrValue::Key } else { KeyOrValue::Value };
            (token != NOTHING).then_some(FlaggedToken { layer: index / 2, tensor, token: token as usize })
        };
        Ok(words.into_iter().enumerate().filter_map(flagged).collect())
    }

    /// Clears all flags, before the next submission.
    ///
    /// # Errors
    /// [`Error::NotSubmitted`]; [`Error::Gpu`] when wgpu refuses the copy.
    pub fn clear(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<()> {
        self.encoders.check_submitted(device, "clearing of non-finite flags")?;
        guard::captured_now(device, Request::call("clearing of non-finite flags"), || {
            for word in self.words.as_flattened() {
                queue.write_buffer(word, 0, &NOTHING.to_ne_bytes());
            }
        })
    }

    /// Who encodes steps that may set flags.
    pub(in crate::wgpu) const fn encoders(&self) -> &Encoders {
        &self.encoders
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
    Error::Plan { what: "step", reason: format!("the flags cover {layers} layers; there is no layer {layer}") }
}
