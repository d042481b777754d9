//! Recipes that store chunks of a context in several formats, by their similarity to a query.

use super::methods::Choice;
use super::parsed::Parsed;
use super::{ChunkOrder, ChunkStores, MOST_STORES, Recipe, StoreId};
use crate::backend::TokenSelection;
use crate::format::AttentionShape;
use crate::plan::TokenRange;
use crate::policy::{ChunkPrecision, ChunkSearch, chunk_search, chunk_shares};
use crate::{Error, Result};

/// Formats of a context's chunks, and the rule that assigns them: `cocktail`, or
/// `mix=f16:0.1,saw-int4:0.3,calibquant:2`.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// From the best chunks to the worst.
    tiers: Vec<Choice>,
    rule: Rule,
    placing: Placing,
    order: ChunkOrder,
}

/// Which chunks get the precisions that the rule gives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Placing {
    /// Those most similar to the query get the best.
    BySimilarity,
    /// As many chunks get each, scattered over the context.
    Scattered,
}

/// An option of mixtures: what Cocktail is compared with.
#[derive(Clone, Copy, Debug)]
pub(super) enum MixtureOption {
    /// `reorder=none`
    Order(ChunkOrder),
    /// `search=none`
    Placing(Placing),
}

impl MixtureOption {
    /// Parses an option; `None` if it is not an option of mixtures.
    pub(super) fn parse(name: &str, value: &str) -> Option<Parsed<Self>> {
        let option = match name {
            "reorder" => Self::Order(ChunkOrder::OfContext),
            "search" => Self::Placing(Placing::Scattered),
            _ => return None,
        };
        Some(match value {
            "none" => Ok(option),
            _ => Err(format!("{name}={value}: none is needed; leave the option out for what the mixture does")),
        })
    }
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
            return Some(tiers.map(|tiers| Self::new(tiers, Rule::Search(ChunkSearch::default()))));
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
            return Err(format!("mix={text}: f16 may come once, with at most {} other methods", MOST_STORES - 1));
        }
        // Invalid shares are invalid for any chunks.
        chunk_shares(&[0.0], &shares).map_err(|error| error.to_string())?;
        Ok(Self::new(tiers, Rule::Shares(shares)))
    }

    const fn new(tiers: Vec<Choice>, rule: Rule) -> Self {
        Self { tiers, rule, placing: Placing::BySimilarity, order: ChunkOrder::ByStore }
    }

    /// Sets an option.
    pub(super) const fn apply(&mut self, option: MixtureOption) {
        match option {
            MixtureOption::Order(order) => self.order = order,
            MixtureOption::Placing(placing) => self.placing = placing,
        }
    }

    /// The order of chunks in their stores: that of the context with the option `reorder=none`.
    pub const fn order(&self) -> ChunkOrder {
        self.order
    }

    /// The stores of the whole chunks of a context, in the order that the recipe asks for, given the similarity of each
    /// chunk's embedding to the query's, `[chunks]`.
    ///
    /// # Errors
    /// As [`Mixture::stores_of`] and [`ChunkStores::new`].
    pub fn chunks_of(&self, context: TokenRange, chunk_tokens: usize, similarities: &[f32]) -> Result<ChunkStores> {
        Ok(ChunkStores::new(context, chunk_tokens, self.stores_of(similarities)?)?.with_order(self.order))
    }

    /// The stores of a layer: f16, then the others in the order of the text. Appended tokens stay in f16.
    pub(super) fn recipe(&self, shape: &AttentionShape) -> Recipe {
        let packed = self.tiers.iter().filter(|tier| !tier.is_f16());
        packed.fold(Recipe::f16(), |recipe, tier| recipe.and_store(*tier.recipe(shape).packed()))
    }

    /// The store of every chunk, given the similarities of the chunks' embeddings with the query's. `cocktail` uses
    /// [`chunk_search`], `mix=` ranks the chunks ([`chunk_shares`]). With the option `search=none` as many chunks get
    /// each store, and which they are does not depend on similarities.
    ///
    /// # Errors
    /// As [`chunk_search`] and [`chunk_shares`].
    pub fn stores_of(&self, similarities: &[f32]) -> Result<Vec<StoreId>> {
        let mut tiers: Vec<usize> = match &self.rule {
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
        if self.placing == Placing::Scattered {
            tiers = scattered(tiers);
        }
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

/// As many of each tier, at places that depend on the number of chunks alone.
fn scattered(mut tiers: Vec<usize>) -> Vec<usize> {
    tiers.sort_unstable();
    // Multiples of 2^64 over the golden ratio, modulo 2^64, fall evenly and in no order.
    let key = |chunk: &usize| (*chunk as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut places: Vec<usize> = (0..tiers.len()).collect();
    places.sort_by_key(key);
    let mut placed = vec![0; tiers.len()];
    places.into_iter().zip(tiers).for_each(|(place, tier)| placed[place] = tier);
    placed
}

fn needed(text: &str) -> String {
    format!(
        "mix={text}: methods with shares and a last one without are needed, as in mix=f16:0.1,saw-int4:0.3,calibquant:2"
    )
}
