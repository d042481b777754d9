//! Decisions about tokens, on the device.

use crate::backend::Backend;
use crate::counts::saturated;
use crate::plan::TokenIndices;
use crate::policy::{LayerSelection, ScoreRequest, Selection};
use crate::{Error, Result};

/// A policy's decision for all layers of a prompt.
pub(super) struct Decided<B: Backend> {
    /// Tokens of the prompt.
    pub(super) tokens: usize,
    pub(super) kv_heads: usize,
    pub(super) layers: Vec<DecidedLayer<B>>,
}

/// The decision for one layer.
pub(super) struct DecidedLayer<B: Backend> {
    /// Places of the kept tokens among the candidates, `[kv_heads, count]`, ascending; `None` if no token is kept.
    pub(super) kept: Option<B::Indices>,
    /// The places of NaN scores, as in [`ScoredTokens`](crate::backend::ScoredTokens); `None` if the host decided.
    pub(super) not_numbers: Option<B::Words>,
}

impl<B: Backend> DecidedLayer<B> {
    /// The decision to keep nothing of a layer.
    pub(super) const fn none() -> Self {
        Self { kept: None, not_numbers: None }
    }

    /// Tokens that every KV head keeps.
    pub(super) fn count(&self) -> usize {
        self.kept.as_ref().map_or(0, |kept| kept.shape().count())
    }

    /// Uploads the host's decision.
    pub(super) async fn upload(backend: &B, layer: &LayerSelection) -> Result<Self> {
        let kept = match layer.count() {
            0 => None,
            _ => Some(backend.upload_indices(&layer.indices(), layer.kv_heads(), saturated(layer.tokens())).await?),
        };
        Ok(Self { kept, not_numbers: None })
    }

    /// Lets the device choose the `count` best tokens by their column sums, `[kv_heads, tokens]`.
    pub(super) fn by_scores(
        backend: &B,
        sums: &B::Tensor,
        (kv_heads, count): (usize, usize),
        request: &ScoreRequest<'_>,
    ) -> Result<Self> {
        let scored = backend.token_scores(sums, kv_heads, request)?;
        let kept = match count {
            0 => None,
            count => Some(backend.top_k(&scored.scores, kv_heads, count)?),
        };
        Ok(Self { kept, not_numbers: Some(scored.not_numbers) })
    }

    /// Downloads the decision over `tokens` tokens once the device has made it.
    ///
    /// # Errors
    /// [`Error::NotANumber`] when a score was NaN; [`Error::DeviceLost`].
    pub(super) async fn selection(&self, backend: &B, tokens: usize, kv_heads: usize) -> Result<LayerSelection> {
        if let Some(not_numbers) = &self.not_numbers {
            let found = backend.download_words(not_numbers).await?.into_iter().find(|&from_end| from_end > 0);
            if let Some(from_end) = found {
                return Err(Error::NotANumber { what: "scores", index: tokens - from_end as usize });
            }
        }
        let kept = match &self.kept {
            None => vec![Vec::new(); kv_heads],
            Some(kept) => {
                let count = kept.shape().count();
                backend.download_indices(kept).await?.chunks(count).map(<[u32]>::to_vec).collect()
            }
        };
        LayerSelection::new(tokens, kept)
    }
}

impl<B: Backend> Decided<B> {
    /// Uploads the host's decision.
    pub(super) async fn upload(backend: &B, selection: Selection) -> Result<Self> {
        let (mut layers, mut shape) = (Vec::new(), (0, 0));
        for layer in selection.layers() {
            shape = (layer.tokens(), layer.kv_heads());
            layers.push(DecidedLayer::upload(backend, layer).await?);
        }
        let (tokens, kv_heads) = shape;
        Ok(Self { tokens, kv_heads, layers })
    }

    /// Downloads the decision once the device has made it.
    ///
    /// # Errors
    /// As [`DecidedLayer::selection`].
    pub(super) async fn selection(&self, backend: &B) -> Result<Selection> {
        let mut selected = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            selected.push(layer.selection(backend, self.tokens, self.kv_heads).await?);
        }
        Selection::new(selected)
    }
}
