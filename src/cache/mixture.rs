//! Recipes that store chunks of a context in several formats, by their similarity to a query.

use super::methods::Choice;
use super::parsed::Parsed;
use super::{MOST_STORES, Recipe, StoreId};
use crate::backend::TokenSelection;
use crate::format::AttentionShape;
use crate::policy::{ChunkPrecision, ChunkSearch, chunk_search, chunk_shares};
use crate::{Error, Result};

/// Formats of a context's chunks, and the rule that assigns them: `cocktail`, or
/// `mix=f16:0.1,saw-int4:0.3,calibquant:2`.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// From the best chunks to the worst.
    tiers: Vec<Choice>,
    rule: Rule,
}

#[derive(Clone, Debug, PartialEq)]
enum Rule {
    /// Cocktail's search: f16 above the upper threshold, the last tier below the lower threshold.
    Search(ChunkSearch),
    /// Fractions of all tiers except the last.
    Shares(Vec<f64>),
}

impl Mixture {
    /// Parses a mixture; `None` if the text is not one. Errors are messages.
    pub(super) fn parse(text: &str) -> Option<Parsed<Self>> {
        if text == "cocktail" {
            let tiers = ["f16", "kivi:4", "kivi:2"].into_iter().map(Choice::parse).collect::<Parsed<_>>();
            return Some(tiers.map(|tiers| Self { tiers, rule: Rule::Search(ChunkSearch::default()) }));
        }
        text.strip_prefix("mix=").map(Self::parse_tiers)
    }

    fn parse_tiers(text: &str) -> Parsed<Self> {
        let (first, last) = text.rsplit_once(',').ok_or_else(|| needed(text))?;
        let (mut tiers, mut shares) = (Vec::new(), Vec::new());
        for tier in first.split(',') {
            let (method, share) = tier.rsplit_once(':').ok_or_else(|| needed(text))?;
            tiers.push(Choice::parse(method)?);
            shares.push(share.parse::<f64>().map_err(|_| needed(text))?);
        }
        tiers.push(Choice::parse(last)?);
        let packed = tiers.iter().filter(|tier| !tier.is_f16()).count();
        if packed >= MOST_STORES || tiers.len() - packed > 1 {
            return Err(format!("mix={text}: f16 may come once, beside at most {} other methods", MOST_STORES - 1));
        }
        // Invalid shares are invalid for any chunks.
        chunk_shares(&[0.0], &shares).map_err(|error| error.to_string())?;
        Ok(Self { tiers, rule: Rule::Shares(shares) })
    }

    /// The stores of a layer: f16, then the others in the order of the text. Appended tokens stay in f16.
    pub(super) fn recipe(&self, shape: &AttentionShape) -> Recipe {
        let packed = self.tiers.iter().filter(|tier| !tier.is_f16());
        packed.fold(Recipe::f16(), |recipe, tier| recipe.and_store(*tier.recipe(shape).packed()))
    }

    /// The store of every chunk, given the similarities of the chunks' embeddings with the query's. `cocktail` uses
    /// [`chunk_search`], `mix=` ranks the chunks ([`chunk_shares`]).
    ///
    /// # Errors
    /// As [`chunk_search`] and [`chunk_shares`].
    pub fn stores_of(&self, similarities: &[f32]) -> Result<Vec<StoreId>> {
        let tiers: Vec<usize> = match &self.rule {
            Rule::Shares(shares) => chunk_shares(similarities, shares)?,
            Rule::Search(search) => {
                let tier = |precision| match precision {
                    ChunkPrecision::F16 => 0,
                    ChunkPrecision::Int4 => 1,
                    ChunkPrecision::Int2 => 2,
                };
                chunk_search(similarities, *search)?.1.into_iter().map(tier).collect()
            }
        };
        Ok(tiers.into_iter().map(|tier| self.store(tier)).collect())
    }

    /// [`Self::stores_of`] for embeddings on a device: the query's, `[width]`, and the chunks', `[chunks, width]`.
    ///
    /// # Errors
    /// [`Error::Chunks`] when the embeddings have no elements or differ in width; [`Error::NotANumber`] when one holds
    /// NaN; as [`Mixture::stores_of`], and [`Error::DeviceLost`].
    pub async fn search<B: TokenSelection>(
        &self,
        backend: &B,
        query: &B::Tensor,
        chunks: &B::Tensor,
    ) -> Result<Vec<StoreId>> {
        if backend.elements(chunks) == 0 {
            return Err(Error::Chunks { reason: "there are no embeddings to compare".into() });
        }
        let similarities = backend.chunk_similarity(query, chunks)?;
        self.stores_of(&backend.download(&similarities).await?)
    }

    /// The last store that takes chunks.
    pub(super) fn last_store(&self) -> StoreId {
        StoreId::at(self.tiers.iter().filter(|tier| !tier.is_f16()).count())
    }

    /// The store of a tier.
    fn store(&self, tier: usize) -> StoreId {
        if self.tiers[tier].is_f16() {
            return StoreId::F16;
        }
        let packed_before = self.tiers[..tier].iter().filter(|tier| !tier.is_f16()).count();
        StoreId::at(packed_before + 1)
    }
}

fn needed(text: &str) -> String {
    format!(
        "mix={text}: methods with shares and a last one without are needed, as in mix=f16:0.1,saw-int4:0.3,calibquant:2"
    )
}
