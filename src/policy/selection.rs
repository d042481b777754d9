//! The decision of a policy: the kept tokens of every layer and KV head, and the tokens that merge into them.

use crate::counts::{TokenCount, collected, reserved};
use crate::format::MOST_HEADS;
use crate::{Error, Result};

/// A row that merges into a kept row. The kept row becomes `Σ weight · row(from)` over the merges that name it. A kept
/// token into which others merge has a merge of its own, from itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Merge {
    /// Position of the merged token.
    pub from: u32,
    /// Position of the kept token.
    pub into: u32,
    /// Its share of the result.
    pub weight: f32,
}

/// The kept tokens of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSelection {
    tokens: TokenCount,
    kept: Vec<Vec<u32>>,
    merges: Vec<Vec<Merge>>,
}

impl LayerSelection {
    /// Kept positions of each KV head of a prompt of `tokens` tokens, without merges.
    ///
    /// # Errors
    /// [`Error::Selection`] when there are no heads, heads keep different numbers of tokens, or positions do not ascend
    /// or do not exist; [`Error::Limit`] when the prompt is longer than [`MOST_TOKENS`](crate::plan::MOST_TOKENS).
    pub fn new(tokens: usize, kept: Vec<Vec<u32>>) -> Result<Self> {
        let reject = |reason: String| Err(Error::Selection { reason });
        let Some(count) = kept.first().map(Vec::len) else { return reject("a layer has at least one KV head".into()) };
        for (head, kept) in kept.iter().enumerate() {
            if kept.len() != count {
                return reject(format!("KV head {head} keeps {} tokens, head 0 keeps {count}", kept.len()));
            }
            if kept.windows(2).any(|pair| pair[0] >= pair[1]) {
                return reject(format!("the kept positions of KV head {head} must ascend"));
            }
            if let Some(&last) = kept.last().filter(|&&last| last as usize >= tokens) {
                return reject(format!("KV head {head} keeps token {last} of a prompt of {tokens}"));
            }
        }
        let merges = vec![Vec::new(); kept.len()];
        Ok(Self { tokens: TokenCount::new(tokens)?, kept, merges })
    }

    /// All tokens of a prompt.
    ///
    /// # Errors
    /// As [`LayerSelection::new`]; [`Error::Selection`] when there are more KV heads than [`MOST_HEADS`];
    /// [`Error::OutOfMemory`] when the host has no memory for the positions.
    pub fn all(tokens: usize, kv_heads: usize) -> Result<Self> {
        if kv_heads > MOST_HEADS {
            let reason = format!("{kv_heads} KV heads; a layer has at most {MOST_HEADS}");
            return Err(Error::Selection { reason });
        }
        let count = TokenCount::new(tokens)?;
        let mut kept = reserved("KV heads of a layer", kv_heads)?;
        for _ in 0..kv_heads {
            kept.push(collected("kept tokens", count.positions())?);
        }
        Self::new(tokens, kept)
    }

    /// Adds merges of each KV head, as [`merge_plan`](super::merge_plan) returns them.
    ///
    /// # Errors
    /// [`Error::Selection`] when there is not one list per head, or a merge goes into a token that is not kept, comes
    /// from another kept token or one that does not exist, or has a weight that is not finite.
    pub fn with_merges(mut self, merges: Vec<Vec<Merge>>) -> Result<Self> {
        let reject = |reason: String| Err(Error::Selection { reason });
        if merges.len() != self.kept.len() {
            return reject(format!("merges for {} KV heads; the layer has {}", merges.len(), self.kept.len()));
        }
        for (head, (merges, kept)) in merges.iter().zip(&self.kept).enumerate() {
            for &Merge { from, into, weight } in merges {
                let is_kept = |token: u32| kept.binary_search(&token).is_ok();
                if !is_kept(into) || from as usize >= self.tokens() || (from != into && is_kept(from)) {
                    return reject(format!(
                        "KV head {head} merges token {from} into {into}; merge evicted tokens into kept ones"
                    ));
                }
                if !weight.is_finite() {
                    return reject(format!("KV head {head} merges token {from} into {into} with weight {weight}"));
                }
            }
        }
        self.merges = merges;
        Ok(self)
    }

    /// Tokens of the prompt.
    pub const fn tokens(&self) -> usize {
        self.tokens.get()
    }

    /// KV heads.
    pub fn kv_heads(&self) -> usize {
        self.kept.len()
    }

    /// Number of tokens that each head keeps.
    pub fn count(&self) -> usize {
        self.kept.first().map_or(0, Vec::len)
    }

    /// Kept positions of a KV head, ascending; empty for a head that does not exist.
    pub fn kept(&self, kv_head: usize) -> &[u32] {
        self.kept.get(kv_head).map_or(&[], Vec::as_slice)
    }

    /// Merges of a KV head; empty for a head that does not exist.
    pub fn merges(&self, kv_head: usize) -> &[Merge] {
        self.merges.get(kv_head).map_or(&[], Vec::as_slice)
    }

    /// The tokens at `places` among the kept tokens of every head.
    ///
    /// # Errors
    /// [`Error::Selection`] when `places` has other heads or covers more tokens than are kept.
    pub(crate) fn at(&self, places: &Self) -> Result<Self> {
        if (places.kv_heads(), places.tokens()) != (self.kv_heads(), self.count()) {
            let reason = format!(
                "places among {} tokens of {} KV heads, and {} of {} are held",
                places.tokens(),
                places.kv_heads(),
                self.count(),
                self.kv_heads()
            );
            return Err(Error::Selection { reason });
        }
        let of_head =
            |(kept, places): (&Vec<u32>, &Vec<u32>)| places.iter().map(|&place| kept[place as usize]).collect();
        Self::new(self.tokens(), self.kept.iter().zip(&places.kept).map(of_head).collect())
    }

    /// The tokens at the same places among the kept tokens of every head. Places ascend.
    ///
    /// # Errors
    /// [`Error::Selection`] when a place does not exist.
    pub(crate) fn of_places(&self, places: &[u32]) -> Result<Self> {
        let count = self.count();
        if let Some(place) = places.iter().find(|&&place| place as usize >= count) {
            return Err(Error::Selection { reason: format!("place {place} among {count} kept tokens") });
        }
        let of_head = |kept: &Vec<u32>| places.iter().map(|&place| kept[place as usize]).collect();
        Self::new(self.tokens(), self.kept.iter().map(of_head).collect())
    }

    /// Kept positions `[kv_heads, count]`, in the order that kernels read.
    pub fn indices(&self) -> Vec<u32> {
        self.kept.concat()
    }
}

/// The kept tokens of all layers. All KV heads of a layer keep the same number; layers may differ.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    layers: Vec<LayerSelection>,
}

impl Selection {
    /// The selections of a model's layers.
    ///
    /// # Errors
    /// [`Error::Selection`] when there are no layers, or layers differ in the length of the prompt or in KV heads.
    pub fn new(layers: Vec<LayerSelection>) -> Result<Self> {
        let shape = |layer: &LayerSelection| (layer.tokens(), layer.kv_heads());
        match layers.first().map(shape) {
            None => Err(Error::Selection { reason: "a model has at least one layer".into() }),
            Some(first) => match layers.iter().position(|layer| shape(layer) != first) {
                Some(other) => Err(Error::Selection {
                    reason: format!("layer {other} and layer 0 differ in the length of the prompt or in KV heads"),
                }),
                None => Ok(Self { layers }),
            },
        }
    }

    /// The layers.
    pub fn layers(&self) -> &[LayerSelection] {
        &self.layers
    }

    /// Fraction of kept tokens over all layers and heads.
    pub fn ratio(&self) -> f64 {
        let kept: usize = self.layers.iter().map(LayerSelection::count).sum();
        let all: usize = self.layers.iter().map(LayerSelection::tokens).sum();
        if all == 0 { 0.0 } else { kept as f64 / all as f64 }
    }
}
