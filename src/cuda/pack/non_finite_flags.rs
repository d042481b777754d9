//! Flags for tokens that a step could not store.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::backend::FlaggedToken;
use crate::cuda::device::memory::{Memory, bytes_of};
use crate::format::KeyOrValue;
use crate::{Error, Result};

/// The value of a word without a flag.
const NOTHING: u32 = u32::MAX;

/// The first token that steps could not store exactly, for keys and for values of every layer: words `[layer][keys,
/// values]`, which are 2³² − 1 if there is no such token. Clones share the flags.
#[derive(Clone, Debug)]
pub struct NonFiniteFlags {
    memory: Arc<Memory>,
    layers: usize,
}

impl NonFiniteFlags {
    /// Flags for `layers` layers, at least one, none of them set.
    ///
    /// # Errors
    /// [`Error::Plan`] for no layers, [`Error::OutOfMemory`], [`Error::Limit`] for more layers than memory can hold.
    pub fn new(stream: &Arc<CudaStream>, layers: usize) -> Result<Self> {
        if layers == 0 {
            return Err(Error::Plan { what: "non-finite flags", reason: "at least one layer is needed".into() });
        }
        let bytes = bytes_of("non-finite flags", layers, 2 * size_of::<u32>())?;
        let memory = Memory::zeroed(stream, "non-finite flags", bytes)?;
        let flags = Self { memory, layers };
        flags.clear(stream)?;
        Ok(flags)
    }

    /// Number of layers.
    pub const fn layers(&self) -> usize {
        self.layers
    }

    /// The flagged tokens, after all work queued on the stream, by layer, keys before values.
    ///
    /// # Errors
    /// [`Error::Plan`] when the flags were created on another stream; [`Error::DeviceLost`].
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<Vec<FlaggedToken>> {
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&self.memory.download(stream, "non-finite flags")?);
        let flagged = |(at, token): (usize, u32)| {
            let tensor = if at.is_multiple_of(2) { KeyOrValue::Key } else { KeyOrValue::Value };
            (token != NOTHING).then_some(FlaggedToken { layer: at / 2, tensor, token: token as usize })
        };
        Ok(words.into_iter().enumerate().filter_map(flagged).collect())
    }

    /// Clears all flags, in the order of the stream. A graph can capture it.
    ///
    /// # Errors
    /// [`Error::Plan`] when the flags were created on another stream; errors of the driver.
    pub fn clear(&self, stream: &Arc<CudaStream>) -> Result<()> {
        self.memory.fill(stream, "non-finite flags", 0xff)
    }

    /// Address of the words of a layer.
    pub(super) fn address(&self, layer: usize) -> u64 {
        self.memory.address() + (layer * 2 * size_of::<u32>()) as u64
    }

    pub(super) const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(super) fn check_layer(&self, layer: usize) -> Result<()> {
        if layer < self.layers {
            return Ok(());
        }
        let reason = format!("the flags cover {} layers; there is no layer {layer}", self.layers);
        Err(Error::Plan { what: "step", reason })
    }
}
