//! Prefixes of prompts that stay in a cache after their requests are done, for requests that begin alike.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use super::ModelCache;
use crate::backend::Backend;
use crate::format::TILE_TOKENS;
use crate::{Error, Result};

/// Prefixes of prompts that a [`ModelCache`] keeps in sequences of its own, so that requests which begin with the same
/// tokens need not compute them again: a system prompt, the turns of a conversation, a document.
///
/// Whole tiles of 128 tokens are kept, named by a hash of their tokens and of all before them. What has the same hash
/// is compared token by token, so that a collision finds nothing wrong. Nothing is copied: pages are shared as by
/// [`ModelCache::fork`], and prefixes that share a beginning share its pages if one was found for the other. All of it
/// happens on the host.
///
/// A prefix stays until its sequence is needed for another or the scheduler [lets it go](PrefixCache::let_go) for its
/// pages, the one that was not used for longest first. [Pinned](PrefixCache::pin) ones stay.
///
/// Tokens are whatever names a row of the model's input: two inputs with the same numbers must be the same. Number the
/// patches of an image by its contents, and let caches of other adapters or models have prefixes of their own.
///
/// ```
/// use kvpack::cache::{ModelCache, PrefixCache, Recipe, TokenRun};
/// use kvpack::cpu::{Cpu, CpuTensor};
/// use kvpack::plan::RowLayout;
/// use kvpack::{AttentionShape, SegmentFormat};
///
/// # futures::executor::block_on(async {
/// let shape = AttentionShape::new(4, 2, 64)?;
/// let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
/// let mut cache = ModelCache::new(&Cpu::new(), &[(shape, recipe)], 2 + 8)?; // two requests, eight prefixes
/// let mut prefixes = PrefixCache::new(2..10);
///
/// let first: Vec<u32> = (0..300).collect();
/// assert_eq!(prefixes.enter(&mut cache, &first, 0)?, 0); // nothing is known yet: all 300 tokens are to be computed
/// let runs = [TokenRun::chunk(0, 300)];
/// cache.reserve_for_append(&runs).await?;
/// cache.begin_append(&runs)?;
/// let rows = CpuTensor::F32((0..300 * 2 * 64).map(|i| (i as f32 * 0.3).sin()).collect());
/// cache.store(0, RowLayout::token_major(300, &shape), &rows, &rows).await?;
/// cache.commit()?;
/// assert_eq!(prefixes.keep(&mut cache, &first, 0)?, 256); // two whole tiles
/// cache.clear(0)?;
///
/// // A request that begins with 200 of these tokens has one tile already.
/// let second: Vec<u32> = (0..200).chain(900..950).collect();
/// assert_eq!(prefixes.enter(&mut cache, &second, 1)?, 128);
/// assert_eq!(cache.length(1)?, 128);
/// # Ok::<(), kvpack::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct PrefixCache {
    /// The sequences of the cache that hold prefixes.
    sequences: Range<usize>,
    /// The prefix of each of them.
    prefixes: Vec<Option<Prefix>>,
    /// Prefixes and their tiles, by the hash of the tokens up to the end of the tile.
    tiles: HashMap<u64, Vec<Tile>>,
    /// Counts uses.
    clock: u64,
}

#[derive(Clone, Debug)]
struct Prefix {
    tokens: Vec<u32>,
    /// When it was kept: no other prefix was then.
    since: u64,
    /// When it was used last.
    used: u64,
    pins: usize,
}

/// A prefix that stays until [`PrefixCache::unpin`] takes this back.
#[must_use = "a prefix stays pinned until this is given to `PrefixCache::unpin`"]
#[derive(Debug, PartialEq, Eq)]
pub struct PinnedPrefix {
    place: usize,
    since: u64,
    tokens: usize,
}

impl PinnedPrefix {
    /// Number of its tokens among those that were asked for.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Where a prefix holds the tokens of a hash: its place, and the number of its tiles up to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    place: usize,
    tiles: usize,
}

impl PrefixCache {
    /// No prefixes yet. They will lie in these sequences of a cache, which nothing else may use.
    pub fn new(sequences: Range<usize>) -> Self {
        Self { sequences, prefixes: Vec::new(), tiles: HashMap::new(), clock: 0 }
    }

    /// Number of tokens that [`PrefixCache::enter`] would find: whole tiles, and never all of a request's tokens, since
    /// the newest has to be computed for its output.
    pub fn found(&self, tokens: &[u32]) -> usize {
        self.longest(tokens, tokens.len().saturating_sub(1)).map_or(0, |tile| tile.tiles * TILE_TOKENS)
    }

    /// Gives an empty sequence the longest known prefix of a request's tokens. Returns the number of tokens that the
    /// sequence has now; the engine computes the others.
    ///
    /// # Errors
    /// Those of [`ModelCache::fork`]. Nothing has changed.
    pub fn enter<B: Backend>(&mut self, cache: &mut ModelCache<B>, tokens: &[u32], sequence: usize) -> Result<usize> {
        self.check_sequence(sequence)?;
        let Some(tile) = self.longest(tokens, tokens.len().saturating_sub(1)) else { return Ok(0) };
        let length = tile.tiles * TILE_TOKENS;
        cache.fork(self.sequences.start + tile.place, sequence)?;
        if let Err(error) = cache.truncate(sequence, length) {
            cache.clear(sequence)?;
            return Err(error);
        }
        self.touch(tile.place);
        Ok(length)
    }

    /// Keeps the whole tiles among the first tokens of a sequence, which are these. Call it once a prompt is stored, or
    /// when a request is done, before its sequence is cleared. Returns the number of tokens that are kept: 0 where
    /// there is no whole tile, a policy has evicted some of them, a layer gave some back behind its sliding window, or
    /// every prefix is pinned.
    ///
    /// # Errors
    /// [`Error::Plan`] when the sequence has fewer tokens, a step is open, or it is one of those that hold prefixes;
    /// [`Error::Sequence`] when there is no such sequence, or the cache lacks one for prefixes. Nothing has changed.
    pub fn keep<B: Backend>(&mut self, cache: &mut ModelCache<B>, tokens: &[u32], sequence: usize) -> Result<usize> {
        self.check_sequence(sequence)?;
        let (length, whole) = (cache.length(sequence)?, tokens.len() / TILE_TOKENS * TILE_TOKENS);
        if length < tokens.len() {
            let reason = format!("{} tokens of a sequence that has {length}", tokens.len());
            return Err(Error::Plan { what: "prefix", reason });
        }
        if whole == 0 || cache.appended(sequence)? < length {
            return Ok(0);
        }
        if let Some(tile) = self.longest(tokens, whole).filter(|tile| tile.tiles * TILE_TOKENS == whole) {
            self.touch(tile.place);
            return Ok(whole);
        }
        self.drop_beginnings(cache, &tokens[..whole])?;
        let Some(place) = self.place_for(cache)? else { return Ok(0) };
        let holder = self.sequences.start + place;
        cache.fork(sequence, holder)?;
        if let Err(error) = cache.truncate(holder, whole) {
            cache.clear(holder)?;
            return Err(error);
        }
        self.insert(place, tokens[..whole].to_vec());
        Ok(whole)
    }

    /// Lets the prefix go that was not used for longest, and says whether there was one that is not pinned: for a
    /// scheduler whose next step does not fit. Pages that other sequences share stay.
    ///
    /// # Errors
    /// [`Error::Plan`] when a step of the cache is open.
    pub fn let_go<B: Backend>(&mut self, cache: &mut ModelCache<B>) -> Result<bool> {
        match self.oldest() {
            Some(place) => self.remove(cache, place).map(|()| true),
            None => Ok(false),
        }
    }

    /// Lets all prefixes go, pinned ones too.
    ///
    /// # Errors
    /// [`Error::Plan`] when a step of the cache is open.
    pub fn clear<B: Backend>(&mut self, cache: &mut ModelCache<B>) -> Result<()> {
        (0..self.prefixes.len()).try_for_each(|place| self.remove(cache, place))
    }

    /// Keeps the longest known prefix of these tokens until it is [unpinned](PrefixCache::unpin) as often. `None` where
    /// none is known.
    pub fn pin(&mut self, tokens: &[u32]) -> Option<PinnedPrefix> {
        let Tile { place, tiles } = self.longest(tokens, tokens.len())?;
        let prefix = self.prefixes[place].as_mut()?;
        prefix.pins = prefix.pins.saturating_add(1);
        Some(PinnedPrefix { place, since: prefix.since, tokens: tiles * TILE_TOKENS })
    }

    /// Takes back a [`PrefixCache::pin`], whatever prefixes came since. Nothing happens where
    /// [`PrefixCache::clear`] let the prefix go.
    pub fn unpin(&mut self, pinned: PinnedPrefix) {
        if let Some(Some(prefix)) = self.prefixes.get_mut(pinned.place)
            && prefix.since == pinned.since
        {
            prefix.pins = prefix.pins.saturating_sub(1);
        }
    }

    /// Number of prefixes.
    pub fn len(&self) -> usize {
        self.prefixes.iter().flatten().count()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    // --- parts -----------------------------------------------------------------------------------------------------

    fn check_sequence(&self, sequence: usize) -> Result<()> {
        if !self.sequences.contains(&sequence) {
            return Ok(());
        }
        let reason = format!("sequence {sequence} is one of {:?}, which hold prefixes", self.sequences);
        Err(Error::Plan { what: "prefix", reason })
    }

    /// The prefix that has most of the first tokens, at most `most` of them.
    fn longest(&self, tokens: &[u32], most: usize) -> Option<Tile> {
        let mut longest = None;
        for (end, hash) in hashes(&tokens[..most.min(tokens.len())]) {
            let Some(tiles) = self.tiles.get(&hash) else { break };
            let same = |tile: &&Tile| {
                self.prefixes[tile.place].as_ref().is_some_and(|prefix| prefix.tokens.get(..end) == tokens.get(..end))
            };
            let Some(found) = tiles.iter().find(same) else { break };
            longest = Some(*found);
        }
        longest
    }

    fn touch(&mut self, place: usize) {
        self.clock += 1;
        let used = self.clock;
        self.prefixes[place].iter_mut().for_each(|prefix| prefix.used = used);
    }

    fn oldest(&self) -> Option<usize> {
        let held = self.prefixes.iter().enumerate().filter_map(|(place, prefix)| Some((place, prefix.as_ref()?)));
        held.filter(|(_, prefix)| prefix.pins == 0).min_by_key(|(_, prefix)| prefix.used).map(|(place, _)| place)
    }

    /// A place without a prefix: a free one, or that of the one that was not used for longest.
    fn place_for<B: Backend>(&mut self, cache: &mut ModelCache<B>) -> Result<Option<usize>> {
        if let Some(free) = self.prefixes.iter().position(Option::is_none) {
            return Ok(Some(free));
        }
        if self.prefixes.len() < self.sequences.len() {
            self.prefixes.push(None);
            return Ok(Some(self.prefixes.len() - 1));
        }
        let oldest = self.oldest();
        if let Some(place) = oldest {
            self.remove(cache, place)?;
        }
        Ok(oldest)
    }

    fn insert(&mut self, place: usize, tokens: Vec<u32>) {
        for (end, hash) in hashes(&tokens) {
            self.tiles.entry(hash).or_default().push(Tile { place, tiles: end / TILE_TOKENS });
        }
        self.prefixes[place] = Some(Prefix { tokens, since: self.clock, used: 0, pins: 0 });
        self.touch(place);
    }

    fn remove<B: Backend>(&mut self, cache: &mut ModelCache<B>, place: usize) -> Result<()> {
        if self.prefixes[place].is_none() {
            return Ok(());
        }
        cache.clear(self.sequences.start + place)?;
        let Some(prefix) = self.prefixes[place].take() else { return Ok(()) };
        for (_, hash) in hashes(&prefix.tokens) {
            if let Some(tiles) = self.tiles.get_mut(&hash) {
                tiles.retain(|tile| tile.place != place);
                if tiles.is_empty() {
                    self.tiles.remove(&hash);
                }
            }
        }
        Ok(())
    }

    /// Lets prefixes go that are no more than the beginning of these tokens.
    fn drop_beginnings<B: Backend>(&mut self, cache: &mut ModelCache<B>, tokens: &[u32]) -> Result<()> {
        for place in 0..self.prefixes.len() {
            let is_beginning = |prefix: &Prefix| prefix.pins == 0 && tokens.starts_with(&prefix.tokens);
            if self.prefixes[place].as_ref().is_some_and(is_beginning) {
                self.remove(cache, place)?;
            }
        }
        Ok(())
    }
}

/// The end of every whole tile of some tokens, and the hash of the tokens up to it.
fn hashes(tokens: &[u32]) -> impl Iterator<Item = (usize, u64)> + '_ {
    let tiles = tokens.chunks_exact(TILE_TOKENS).enumerate();
    tiles.scan(0u64, |before, (tile, tokens)| {
        let mut hasher = DefaultHasher::new();
        (*before, tokens).hash(&mut hasher);
        *before = hasher.finish();
        Some(((tile + 1) * TILE_TOKENS, *before))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hash of two tiles is that of another prefix, of one tile.
    #[test]
    fn a_collision_finds_nothing() {
        let tokens: Vec<u32> = (0..3 * TILE_TOKENS as u32).collect();
        let mut prefixes = PrefixCache::new(0..2);
        let prefix = |first: u32| {
            let tokens = (first..first + TILE_TOKENS as u32).collect();
            Some(Prefix { tokens, since: 0, used: 0, pins: 0 })
        };
        prefixes.prefixes = vec![prefix(0), prefix(7)];
        for (place, (_, hash)) in hashes(&tokens[..2 * TILE_TOKENS]).enumerate() {
            prefixes.tiles.insert(hash, vec![Tile { place, tiles: 1 }]);
        }
        assert_eq!(prefixes.found(&tokens), TILE_TOKENS);
    }
}
