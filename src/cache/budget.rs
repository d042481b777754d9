//! What a cache may allocate on its device.

/// When calls of a cache allocate memory, and how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Growth {
    /// Only `reserve` and `reserve_kind` allocate. Every other call takes what is free, or fails.
    None,
    /// What a call lacks, and no more.
    Exact,
    /// What a call lacks, or as much as the store holds already where that is more and the budget has it: few shards.
    #[default]
    Doubling,
}

/// The memory that a cache may hold on its device, and when it allocates it.
///
/// Every call that would leave the budget fails with [`Error::NoRoom`](crate::Error::NoRoom) before anything has
/// changed. Bytes are those of the stores of all layers: tiles, tile ranges, span ranges and centres, in use or free
/// ([`CacheMemory::allocated_bytes`](super::CacheMemory::allocated_bytes)). While span ranges grow, the old ones exist
/// next to the new ones until they are copied. A shard that a larger one is to replace counts until it is gone: where the
/// budget has no room for both, the store gets another shard.
///
/// ```
/// use kvpack::cache::{Budget, Growth, ModelCache, Recipe, StoreRoom, TokenRun};
/// use kvpack::cpu::Cpu;
/// use kvpack::{AttentionShape, Error};
///
/// # futures::executor::block_on(async {
/// let shape = AttentionShape::new(4, 2, 64)?;
/// let layers = vec![(shape, Recipe::f16()); 2];
/// let mut cache = ModelCache::new(&Cpu::new(), &layers, 3)?.with_budget(Budget::unlimited().growing(Growth::None));
/// cache.reserve(&[StoreRoom { pages: 2, spans: 2 }]).await?;
///
/// let runs = [0, 1, 2].map(|sequence| TokenRun::chunk(sequence, 100));
/// assert!(cache.fits(&runs[..2])?);
/// assert!(!cache.fits(&runs)?); // three pages are needed, and two are there
/// assert!(matches!(cache.reserve_for_append(&runs).await, Err(Error::NoRoom { needed: 3, free: 2, .. })));
/// # Ok::<(), kvpack::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Budget {
    bytes: u64,
    growth: Growth,
}

impl Budget {
    /// As much as the device has, by doubling.
    pub const fn unlimited() -> Self {
        Self::of_bytes(u64::MAX)
    }

    /// At most `bytes` bytes over all layers. Stores grow by doubling while the budget allows it.
    pub const fn of_bytes(bytes: u64) -> Self {
        Self { bytes, growth: Growth::Doubling }
    }

    /// The same with another growth.
    #[must_use]
    pub const fn growing(self, growth: Growth) -> Self {
        Self { growth, ..self }
    }

    /// Its bytes, `u64::MAX` where it has no limit.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// When calls allocate.
    pub const fn growth(&self) -> Growth {
        self.growth
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::unlimited()
    }
}
