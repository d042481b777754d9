//! Recipes: how a cache stores keys and values.

use std::fmt;

use crate::backend::QueryPrecision;
use crate::format::{Bits, Calibration, SegmentFormat};
use crate::plan::{LayerAttention, StoreFormat};
use crate::{Error, Result};

/// A store of a recipe, by its place in [`Recipe::stores`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreId(pub u8);

impl StoreId {
    /// The f16 store, which every recipe has.
    pub const F16: Self = Self(0);
    /// The first packed store.
    pub const PACKED: Self = Self(1);

    /// The store at a place in a recipe's list, which has no more than [`MOST_STORES`].
    pub(super) fn at(index: usize) -> Self {
        Self(u8::try_from(index).unwrap_or(u8::MAX))
    }

    /// Its place among the stores.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store {}", self.0)
    }
}

/// The rule for tokens that decoding appends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Appended {
    /// They stay in f16 (CalibQuant).
    Keep,
    /// Each token is packed as it arrives, into the open tile of a store. This needs a format whose codes and ranges
    /// depend on the token alone: see [`SegmentFormat::takes_single_tokens`].
    AtOnce(StoreId),
    /// They are packed tile by tile: each full tile of 128 as soon as there are at least `newer` newer tokens. Between
    /// `newer` and `newer + 127` of the newest tokens are then in f16 (the residual window of KIVI).
    Tiles {
        /// The store that takes the tiles. If its ranges are those of whole spans, a recipe adds a store with [tile
        /// ranges](SegmentFormat::with_tile_ranges) for them and names that store, so that the tiles of a sequence are
        /// one span.
        to: StoreId,
        /// Minimum number of newer tokens that stay in f16.
        newer: usize,
    },
}

/// How a [`KvCache`](super::KvCache) stores and attends: an f16 store, any number of packed stores, and the rules that
/// assign tokens to them.
///
/// ```
/// use kvpack::cache::{Appended, Recipe, StoreId};
/// use kvpack::{Bits, Calibration, SegmentFormat};
/// let recipe = Recipe::calibquant(Bits::One).with_calibration(Calibration::new(0.0, 3.0)?);
/// assert_eq!(recipe.appended(), Appended::Keep);
///
/// // 4 bits for what matters, 2 bits for the rest, and f16 for what is new.
/// let (recipe, two_bits) = Recipe::pack_all(SegmentFormat::saw_int4()).with_store(SegmentFormat::calibquant(Bits::Two))?;
/// assert_eq!((recipe.stores().len(), two_bits), (3, StoreId(2)));
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// The first is f16.
    stores: Vec<StoreFormat>,
    appended: Appended,
    sink: usize,
    query: QueryPrecision,
    centred: bool,
    attention: LayerAttention,
    /// Where appended tiles would go but for its ranges of whole spans: the last store is theirs instead.
    tiles_of: Option<StoreId>,
}

/// Maximum number of stores in a recipe.
pub const MOST_STORES: usize = 16;

impl Recipe {
    /// Everything in f16: the baseline. Spans for packed stores are also stored in f16.
    pub fn f16() -> Self {
        Self::of(SegmentFormat::F16, Appended::Keep)
    }

    /// CalibQuant (arXiv 2502.14882): packed spans (the visual tokens) with one range per channel and span, shrunk at 1
    /// bit as in the published code; text and decoded tokens in f16.
    ///
    /// Scores are not calibrated until [`Recipe::with_calibration`] sets the offsets: the published code uses (0, 3),
    /// and [`Calibration::search`] finds the best ones for given data.
    pub fn calibquant(bits: Bits) -> Self {
        Self::of(SegmentFormat::calibquant(bits), Appended::Keep)
    }

    /// Packed spans and decoded tokens in `packed`: each token as it arrives if the format [takes single
    /// tokens](SegmentFormat::takes_single_tokens), otherwise as soon as tokens fill a tile.
    pub fn pack_all(packed: SegmentFormat) -> Self {
        let to = StoreId::PACKED;
        let at_once = packed.takes_single_tokens();
        Self::of(packed, if at_once { Appended::AtOnce(to) } else { Appended::Tiles { to, newer: 0 } })
    }

    /// Adds a store to the recipe, and returns the id by which spans name it.
    ///
    /// # Errors
    /// [`Error::Limit`] beyond [`MOST_STORES`].
    pub fn with_store(mut self, store: impl Into<StoreFormat>) -> Result<(Self, StoreId)> {
        check_stores(self.stores.len() + 1)?;
        let id = StoreId::at(self.named_stores());
        self = self.and_store(store.into());
        Ok((self, id))
    }

    /// Adds a store whose number was checked already.
    pub(super) fn and_store(mut self, store: StoreFormat) -> Self {
        self.stores.insert(self.named_stores(), store);
        let appended = self.asked_of_appended();
        self.with_appended(appended)
    }

    /// Number of stores that spans of a prompt can name. A store for appended tiles alone follows them.
    pub(super) fn named_stores(&self) -> usize {
        self.stores.len() - usize::from(self.tiles_of.is_some())
    }

    /// The rule for appended tokens before tiles got a store of their own.
    const fn asked_of_appended(&self) -> Appended {
        match (self.appended, self.tiles_of) {
            (Appended::Tiles { newer, .. }, Some(to)) => Appended::Tiles { to, newer },
            (appended, _) => appended,
        }
    }

    /// Packs appended tokens tile by tile, behind a residual window of at least `newer` newest tokens in f16.
    #[must_use]
    pub fn with_window(self, newer: usize) -> Self {
        let appended = match self.asked_of_appended() {
            _ if !self.packs() => Appended::Keep,
            Appended::Keep => Appended::Tiles { to: StoreId::PACKED, newer },
            Appended::AtOnce(to) | Appended::Tiles { to, .. } => Appended::Tiles { to, newer },
        };
        self.with_appended(appended)
    }

    /// Keeps appended tokens among the first `sink` tokens in f16. Tokens that a policy keeps of a prompt, and the chunks
    /// of a mixture, go where those put them.
    #[must_use]
    pub fn with_sink(self, sink: usize) -> Self {
        Self { sink, ..self }
    }

    /// Calibrates the scores of spans in all packed stores that the recipe has by now.
    #[must_use]
    pub fn with_calibration(mut self, calibration: Calibration) -> Self {
        self.stores.iter_mut().skip(1).for_each(|store| store.calibration = Some(calibration));
        self
    }

    /// Replaces the rule for appended tokens.
    ///
    /// ```
    /// use kvpack::cache::{Appended, Recipe, StoreId};
    /// use kvpack::{Bits, SegmentFormat};
    /// // Prompts have one range per channel and span, and the tiles of what is appended ranges of their own.
    /// let recipe = Recipe::calibquant(Bits::Two).with_window(128);
    /// assert_eq!(recipe.appended(), Appended::Tiles { to: StoreId(2), newer: 128 });
    /// assert_eq!(recipe.clone().with_appended(recipe.appended()), recipe);
    /// assert_eq!(recipe.stores()[2].format, SegmentFormat::calibquant(Bits::Two).with_tile_ranges());
    /// ```
    #[must_use]
    pub fn with_appended(mut self, appended: Appended) -> Self {
        let of_tiles = self.tiles_of.map(|to| (StoreId::at(self.named_stores()), to));
        self.stores.truncate(self.named_stores());
        // The current rule names the store that only appended tiles use, so that store is rebuilt.
        let appended = match (appended, of_tiles) {
            (Appended::Tiles { to, newer }, Some((alone, named))) if to == alone => {
                Appended::Tiles { to: named, newer }
            }
            (appended, _) => appended,
        };
        (self.appended, self.tiles_of) = (appended, None);
        if let Appended::Tiles { to, newer } = appended
            && let Some(store) = self.stores.get(to.index()).filter(|store| store.format.has_span_ranges())
        {
            let tiles = StoreFormat { format: store.format.with_tile_ranges(), ..*store };
            self.stores.push(tiles);
            self.appended = Appended::Tiles { to: StoreId::at(self.stores.len() - 1), newer };
            self.tiles_of = Some(to);
        }
        self
    }

    /// Sets the precision of the query.
    #[must_use]
    pub fn with_query(self, query: QueryPrecision) -> Self {
        Self { query, ..self }
    }

    /// Centres keys in every store. The centre of a sequence is the mean of its first
    /// [`CENTRE_TOKENS`](super::CENTRE_TOKENS) tokens, or one that the engine sets
    /// ([`KvCache::set_centre`](super::KvCache::set_centre)). Attention is the same, since softmax ignores what all
    /// scores of a query have in common. Ranges and norms of tokens are smaller if a model's keys have a bias.
    ///
    /// The mean is taken over one call: over the first part of a prompt, a first chunk, or the key of a single token if
    /// decoding begins with it. Formats with a range per channel do not benefit, and a cache refuses them.
    ///
    /// (SageAttention, arXiv 2410.02367, subtracts the mean of all keys before it rounds them. NSNQuant, arXiv
    /// 2505.18231, centres as part of a normalisation.)
    #[must_use]
    pub fn with_centre(self) -> Self {
        Self { centred: true, ..self }
    }

    /// The same recipe for a layer that scores, or sees, otherwise than causal attention does by default. Layers of a
    /// model that attend alike share their page tables.
    ///
    /// ```
    /// use kvpack::cache::Recipe;
    /// use kvpack::plan::LayerAttention;
    /// // Five local layers of Gemma 3, then a global one.
    /// let local = Recipe::f16().with_attention(LayerAttention::default().with_window(511));
    /// let recipes = [vec![local; 5], vec![Recipe::f16()]].concat();
    /// assert_eq!(recipes[4].attention().window(), Some(511));
    /// ```
    #[must_use]
    pub fn with_attention(self, attention: LayerAttention) -> Self {
        Self { attention, ..self }
    }

    fn of(packed: SegmentFormat, appended: Appended) -> Self {
        let mut stores = vec![StoreFormat::from(SegmentFormat::F16)];
        let appended = if packed == SegmentFormat::F16 { Appended::Keep } else { appended };
        if packed != SegmentFormat::F16 {
            stores.push(packed.into());
        }
        let (sink, query, centred) = (0, QueryPrecision::default(), false);
        let attention = LayerAttention::default();
        let recipe = Self { stores, appended: Appended::Keep, sink, query, centred, attention, tiles_of: None };
        recipe.with_appended(appended)
    }

    /// The stores: f16, and the packed ones.
    pub fn stores(&self) -> &[StoreFormat] {
        &self.stores
    }

    /// Precision of query and weights where packed keys and values are multiplied as integers.
    pub const fn query(&self) -> QueryPrecision {
        self.query
    }

    /// The rule for appended tokens.
    pub const fn appended(&self) -> Appended {
        self.appended
    }

    /// Appended tokens among this many first tokens of a sequence stay in f16, in whole tiles if tiles are packed.
    /// These attention sinks (StreamingLLM, arXiv 2309.17453) cost little to keep and much to lose.
    pub const fn sink(&self) -> usize {
        self.sink
    }

    /// Whether keys are centred: [`Recipe::with_centre`].
    pub const fn is_centred(&self) -> bool {
        self.centred
    }

    /// How its layer attends.
    pub const fn attention(&self) -> &LayerAttention {
        &self.attention
    }

    /// The first packed store, or the f16 store where there is none.
    pub fn packed(&self) -> &StoreFormat {
        &self.stores[self.stores.len().min(2) - 1]
    }

    /// Whether packing changes anything.
    pub fn packs(&self) -> bool {
        self.stores.len() > 1
    }

    /// The store of spans that name `store`: that store, or f16 if there is no other.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such store.
    pub fn resolve(&self, store: StoreId) -> Result<StoreId> {
        if !self.packs() {
            return Ok(StoreId::F16);
        }
        if store.index() < self.stores.len() {
            return Ok(store);
        }
        let reason = format!("{store} of a recipe whose stores are 0 to {}", self.stores.len() - 1);
        Err(Error::Plan { what: "store", reason })
    }

    /// The store that tokens are packed into after they were stored in f16, if any: windows, or parts of prompts.
    pub(super) fn packed_later(&self) -> Option<StoreId> {
        match self.appended {
            Appended::Tiles { to, .. } => Some(to),
            Appended::Keep => self.packs().then_some(StoreId::PACKED),
            Appended::AtOnce(_) => None,
        }
    }

    /// Whether decoding appends single tokens to this store. The f16 store takes kept, windowed and sink tokens.
    pub(super) fn takes_tokens(&self, store: StoreId) -> bool {
        match self.appended {
            Appended::AtOnce(to) => store == to || (store == StoreId::F16 && self.sink > 0),
            Appended::Keep | Appended::Tiles { .. } => store == StoreId::F16,
        }
    }

    /// Checks that every store supports what the recipe requires of it.
    pub(super) fn check(&self) -> Result<()> {
        check_stores(self.stores.len())?;
        if let Appended::AtOnce(to) | Appended::Tiles { to, .. } = self.appended {
            if to == StoreId::F16 || to.index() >= self.stores.len() {
                let reason = format!(
                    "appended tokens are to be packed into {to}; the packed stores are 1 to {}",
                    self.stores.len() - 1
                );
                return Err(Error::Plan { what: "recipe", reason });
            }
            let packed = self.stores[to.index()].format;
            if matches!(self.appended, Appended::AtOnce(_)) && !packed.takes_single_tokens() {
                let reason = packed.why_no_single_tokens();
                return Err(Error::Format { format: packed.to_string(), reason });
            }
        }
        if self.centred {
            self.attention.check_centred()?;
        }
        if self.stores.iter().any(|store| store.calibration.is_some()) {
            self.attention.check_calibrated()?;
        }
        let mut uncentred = self.stores.iter().map(|store| store.format).filter(|format| !format.key.takes_centre());
        match uncentred.next().filter(|_| self.centred) {
            Some(format) => Err(Error::Format { format: format.to_string(), reason: format.why_no_centre() }),
            None => Ok(()),
        }
    }
}

/// Checks that a recipe may have this many stores.
fn check_stores(stores: usize) -> Result<()> {
    if stores <= MOST_STORES {
        return Ok(());
    }
    let (needed, allowed) = (stores as u64, MOST_STORES as u64);
    let hint = "give spans of like precision the same store";
    Err(Error::Limit { what: "the stores of a recipe".into(), needed, allowed, hint })
}
