//! Which tokens of a prompt stay, on the device.

use crate::backend::Backend;
use crate::plan::TokenIndices;
use crate::policy::{LayerSelection, Selection};
use crate::{Error, Result};

/// What a policy decided of all layers of a prompt.
pub(super) struct Decided<B: Backend> {
    /// Tokens of the prompt.
    pub(super) tokens: usize,
    pub(super) kv_heads: usize,
    pub(super) layers: Vec<DecidedLayer<B>>,
}

/// The same of one layer.
pub(super) struct DecidedLayer<B: Backend> {
    /// Positions of the kept tokens, `[kv_heads, count]`, ascending; `None` where none are kept.
    pub(super) kept: Option<B::Indices>,
    /// Where scores were no numbers, as [`ScoredTokens`](crate::backend::ScoredTokens) has it; `None` where the host decided.
    pub(super) not_numbers: Option<B::Words>,
}

impl<B: Backend> Decided<B> {
    /// What the host decided.
    pub(super) async fn upload(backend: &B, selection: Selection) -> Result<Self> {
        let (mut layers, mut shape) = (Vec::new(), (0, 0));
        for layer in selection.layers() {
            shape = (layer.tokens(), layer.kv_heads());
            let kept = match layer.count() {
                0 => None,
                _ => Some(backend.upload_indices(&layer.indices(), layer.kv_heads(), layer.tokens() as u32).await?),
            };
            layers.push(DecidedLayer { kept, not_numbers: None });
        }
        let (tokens, kv_heads) = shape;
        Ok(Self { tokens, kv_heads, layers })
    }

    /// The decision on the host, once the device has made it.
    ///
    /// # Errors
    /// [`Error::NotANumber`] when a score was NaN; [`Error::DeviceLost`].
    pub(super) async fn selection(&self, backend: &B) -> Result<Selection> {
        let mut selected = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            if let Some(not_numbers) = &layer.not_numbers {
                let found = backend.download_words(not_numbers).await?.into_iter().find(|&from_end| from_end > 0);
                if let Some(from_end) = found {
                    return Err(Error::NotANumber { what: "scores", index: self.tokens - from_end as usize });
                }
            }
            let kept = match &layer.kept {
                None => vec![Vec::new(); self.kv_heads],
                Some(kept) => {
                    let count = kept.shape().count();
                    backend.download_indices(kept).await?.chunks(count).map(<[u32]>::to_vec).collect()
                }
            };
            selected.push(LayerSelection::new(self.tokens, kept)?);
        }
        Selection::new(selected)
    }
}
