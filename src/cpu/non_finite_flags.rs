//! Flags for tokens that a step could not store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::backend::FlaggedToken;
use crate::counts::{MOST_LAYERS, saturated};
use crate::format::KeyOrValue;
use crate::{Error, Result};

/// The value of a word without a flag.
const NOTHING: u32 = u32::MAX;

/// The first token that steps could not store exactly, for keys and for values of every layer. Clones share the flags.
#[derive(Clone, Debug)]
pub struct NonFiniteFlags {
    /// `[layer][keys, values]`.
    tokens: Arc<[AtomicU32]>,
}

impl NonFiniteFlags {
    /// Flags for `layers` layers, none of them set.
    ///
    /// # Errors
    /// [`Error::Limit`] for more than [`MOST_LAYERS`](crate::plan::MOST_LAYERS).
    pub fn new(layers: usize) -> Result<Self> {
        if layers > MOST_LAYERS {
            let (needed, allowed) = (layers as u64, MOST_LAYERS as u64);
            let hint = "a flag belongs to a layer of one model";
            return Err(Error::Limit { what: "layers of flags".into(), needed, allowed, hint });
        }
        Ok(Self { tokens: (0..2 * layers).map(|_| AtomicU32::new(NOTHING)).collect() })
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.tokens.len() / 2
    }

    /// The flagged tokens, by layer, keys before values.
    pub fn read(&self) -> Vec<FlaggedToken> {
        let flagged = |(at, token): (usize, &AtomicU32)| {
            let token = token.load(Ordering::Relaxed);
            let tensor = if at % 2 == 0 { KeyOrValue::Key } else { KeyOrValue::Value };
            (token != NOTHING).then_some(FlaggedToken { layer: at / 2, tensor, token: token as usize })
        };
        self.tokens.iter().enumerate().filter_map(flagged).collect()
    }

    /// Clears all flags.
    pub fn clear(&self) {
        self.tokens.iter().for_each(|token| token.store(NOTHING, Ordering::Relaxed));
    }

    pub(super) fn set(&self, layer: usize, which: KeyOrValue, token: usize) {
        let at = 2 * layer + usize::from(which == KeyOrValue::Value);
        self.tokens[at].fetch_min(saturated(token), Ordering::Relaxed);
    }

    pub(super) fn check_layer(&self, layer: usize) -> Result<()> {
        if layer < self.layers() {
            return Ok(());
        }
        let reason = format!("the flags cover {} layers; there is no layer {layer}", self.layers());
        Err(Error::Plan { what: "step", reason })
    }
}
