//! The tokens of every sequence spread over ranks.

use std::fmt;

use super::agreement::agree;
use super::purpose::Purpose;
use super::transport::{StateExchange, TensorOf, Transport};
use super::{Placement, RankShare};
use crate::backend::{AttentionStates, Backend};
use crate::cache::{Budget, ModelCache, Recipe, TokenRun};
use crate::counts::filled;
use crate::format::AttentionShape;
use crate::plan::{ElementType, Elements, QueryRun, RowLayout, TokenRange};
use crate::{Error, Result};

/// One rank of several that share all sequences: a [`ModelCache`] that stores the positions of its rank, and the
/// exchange of attention states with the others.
///
/// Every rank makes the same calls with the same arguments: the same runs, forks, truncations. Every rank passes the
/// keys, values and queries of all new tokens, and stores those that the [`Placement`] gives it. A step goes like that
/// of a [`ModelCache`]. What attention returns is the same on all ranks, bit for bit, and that of all tokens.
///
/// Calls that attend, and those that say so, exchange something and wait for the other ranks. All others work on the
/// rank alone. Ranks that wait for each other in different calls return [`Error::Transport`], which names the calls if
/// they exchange as much; calls that attend are not compared. See [`Transport`] for what happens when a rank fails: the
/// step is abandoned, and [`rejoin`](ContextParallel::rejoin) goes on with a new transport.
///
/// ```
/// use std::time::Duration;
/// use kvpack::cache::{Recipe, TokenRun};
/// use kvpack::cpu::{Cpu, CpuTensor};
/// use kvpack::plan::{ElementType, RowLayout};
/// use kvpack::ranks::{ContextParallel, Placement, ThreadTransport};
/// use kvpack::{AttentionShape, Result, SegmentFormat};
///
/// let shape = AttentionShape::new(8, 2, 64)?;
/// let layers = vec![(shape, Recipe::pack_all(SegmentFormat::saw_int4())); 2];
/// let one_rank = |transport: ThreadTransport| -> Result<Vec<f32>> {
///     futures::executor::block_on(async {
///         let mut rank = ContextParallel::new(transport, &layers, 1, Placement::new(2)?).await?;
///         let runs = [TokenRun::prompt(0, 300)];
///         rank.reserve_for_append(&runs).await?; // all ranks have room, or none has
///         rank.begin_append(&runs)?;
///         let mut output = CpuTensor::F32(vec![0.0; 300 * 8 * 64]);
///         for layer in 0..2 {
///             let of = |phase: f32, n: usize| CpuTensor::F32((0..n).map(|i| (i as f32 * 0.3 + phase).sin()).collect());
///             let (keys, queries) = (of(0.0, 300 * 2 * 64), of(1.0, 300 * 8 * 64));
///             rank.store(layer, RowLayout::token_major(300, &shape), &keys, &keys).await?;
///             rank.attend_into(layer, &queries, &mut output).await?; // states, exchange and merge
///         }
///         rank.commit()?;
///         assert_eq!(rank.cache().length(0)?, 300);
///         assert_eq!(rank.cache().tokens(0, 0)?, [172, 128][rank.rank()]);
///         Ok(output.to_f32())
///     })
/// };
/// let ranks = ThreadTransport::connect(vec![Cpu::new(); 2], Duration::from_secs(5))?;
/// let outputs: Vec<Result<Vec<f32>>> = std::thread::scope(|scope| {
///     let threads: Vec<_> = ranks.into_iter().map(|transport| scope.spawn(|| one_rank(transport))).collect();
///     threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
/// });
/// assert_eq!(outputs[0], outputs[1]);
/// # Ok::<(), kvpack::Error>(())
/// ```
pub struct ContextParallel<T: Transport>
where
    T::Backend: Backend,
{
    pub(super) cache: ModelCache<T::Backend>,
    pub(super) transport: T,
    /// Room for the states of all ranks, by shape, and its rows.
    rooms: Vec<StateRoom<TensorOf<T>>>,
}

struct StateRoom<T> {
    shape: AttentionShape,
    rows: usize,
    gathered: AttentionStates<T>,
}

impl<T: Transport> ContextParallel<T>
where
    T::Backend: Backend + Clone,
{
    /// The cache of this rank, empty, for layers and sequences that are the same on all ranks. Sinks that take part in
    /// the softmax are counted on rank 0 alone. Waits for the others.
    ///
    /// # Errors
    /// [`Error::Plan`] when the placement has other ranks than the transport; as [`ModelCache::new`] and
    /// [`ModelCache::with_share`]; [`Error::Transport`].
    pub async fn new(
        transport: T,
        layers: &[(AttentionShape, Recipe)],
        sequences: usize,
        placement: Placement,
    ) -> Result<Self> {
        if placement.ranks() != transport.ranks() {
            let (placed, ranks) = (placement.ranks(), transport.ranks());
            let reason = format!("a placement on {placed} ranks, and a transport between {ranks}");
            return Err(Error::Plan { what: "ranks", reason });
        }
        let share = placement.share(transport.rank())?;
        let layers: Vec<_> = layers.iter().map(|(shape, recipe)| (*shape, of_rank(recipe, share))).collect();
        let cache = ModelCache::new(transport.backend(), &layers, sequences).and_then(|cache| cache.with_share(share));
        // The others learn of an error here, and wait for nobody later.
        let mut transport = transport;
        let agreed = agree(&mut transport, Purpose::Caches, cache.as_ref().map(|_| ()));
        agreed.await?;
        Ok(Self { cache: cache?, transport, rooms: Vec::new() })
    }
}

/// The recipe of a layer on one rank: of all parts that are merged, one has the sinks. Those of the others are −∞, which
/// add nothing. So whatever refuses sinks is refused by every rank, and none waits for another in vain.
fn of_rank(recipe: &Recipe, share: RankShare) -> Recipe {
    let attention = recipe.attention().clone();
    match attention.scoring().filter(|_| share.rank() > 0).cloned() {
        Some(scoring) => recipe.clone().with_attention(attention.with_scoring(scoring.with_empty_sinks())),
        None => recipe.clone(),
    }
}

impl<T: Transport> ContextParallel<T>
where
    T::Backend: Backend,
{
    /// The cache of this rank. Its lengths are those of the sequences; [`ModelCache::tokens`] is what this rank stores.
    pub const fn cache(&self) -> &ModelCache<T::Backend> {
        &self.cache
    }

    /// The cache of this rank, for calls that other ranks make as well: swapping, room, prefixes. A call that opens a
    /// step or changes a sequence on one rank alone parts the ranks.
    pub const fn cache_mut(&mut self) -> &mut ModelCache<T::Backend> {
        &mut self.cache
    }

    /// The transport: for engines that encode steps themselves and exchange states by
    /// [`merge_states`](Transport::merge_states).
    pub const fn transport_mut(&mut self) -> &mut T {
        &mut self.transport
    }

    /// The same with a budget for this rank's cache: [`ModelCache::with_budget`].
    #[must_use]
    pub fn with_budget(self, budget: Budget) -> Self {
        Self { cache: self.cache.with_budget(budget), ..self }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.transport.ranks()
    }

    // --- steps -----------------------------------------------------------------------------------------------------

    /// Allocates the room that appending needs on every rank, unless it exists: [`ModelCache::reserve_for_append`].
    /// Waits for the other ranks. Where one has no room, all return an error, so that no rank waits in a step that
    /// another could not open. Room that is reserved for several steps ahead makes this call rare.
    ///
    /// # Errors
    /// As [`ModelCache::reserve_for_append`], on this rank or another ([`Error::Plan`] names it); [`Error::Transport`].
    pub async fn reserve_for_append(&mut self, runs: &[TokenRun]) -> Result<()> {
        let reserved = self.cache.reserve_for_append(runs).await;
        self.agree(Purpose::StepRoom, reserved).await
    }

    /// Opens a step that appends these token runs: [`ModelCache::begin_append`]. Works on this rank alone. Runs that
    /// one rank refuses all refuse, but for [`Error::NoRoom`], which
    /// [`reserve_for_append`](ContextParallel::reserve_for_append) rules out.
    ///
    /// # Errors
    /// As [`ModelCache::begin_append`].
    pub fn begin_append(&mut self, runs: &[TokenRun]) -> Result<()> {
        self.cache.begin_append(runs)
    }

    /// [`ModelCache::begin_append_seeing`] on this rank.
    ///
    /// # Errors
    /// As [`ModelCache::begin_append_seeing`].
    pub fn begin_append_seeing(&mut self, runs: &[TokenRun], queries: &[QueryRun]) -> Result<()> {
        self.cache.begin_append_seeing(runs, queries)
    }

    /// Opens a step that attends to what the ranks hold, and stores nothing: [`ModelCache::begin_attend`].
    ///
    /// # Errors
    /// As [`ModelCache::begin_attend`].
    pub fn begin_attend(&mut self, queries: &[QueryRun]) -> Result<()> {
        self.cache.begin_attend(queries)
    }

    /// Stores what this rank is to hold of the open step's tokens in one layer. Keys and values are those of all tokens
    /// of the step; of tokens that other ranks hold they are not read, but for the first keys of a sequence whose
    /// centre is their mean.
    ///
    /// # Errors
    /// As [`ModelCache::store`].
    pub async fn store(
        &mut self,
        layer: usize,
        rows: RowLayout,
        keys: &TensorOf<T>,
        values: &TensorOf<T>,
    ) -> Result<()> {
        self.cache.store(layer, rows, keys, values).await
    }

    /// Attends with the open step's queries in one layer to what all ranks hold, into a tensor of the layout of the
    /// queries, whose element type is used. Exchanges the states of all ranks. Allocates where a step has more rows
    /// than any before; [`reserve_rows`](ContextParallel::reserve_rows) does so ahead.
    ///
    /// # Errors
    /// As [`ModelCache::attend_states`]; [`Error::Elements`] when the output is shorter than the queries;
    /// [`Error::Transport`].
    pub async fn attend_into(&mut self, layer: usize, queries: &TensorOf<T>, output: &mut TensorOf<T>) -> Result<()> {
        self.merge(layer, queries, output, None).await
    }

    /// [`ContextParallel::attend_into`] that also returns the log-sum-exps, f32 `[rows, query_heads]`, to be merged
    /// with attention over tokens that no rank holds.
    ///
    /// # Errors
    /// As [`ContextParallel::attend_into`].
    pub async fn attend_states(&mut self, layer: usize, queries: &TensorOf<T>) -> Result<AttentionStates<TensorOf<T>>> {
        let elements = self.cache.plan(layer)?.elements();
        let head_dim = self.cache.shape(layer)?.head_dim();
        let mut outputs = self.zeros(elements, ElementType::F32).await?;
        let mut lse = self.zeros(elements / head_dim, ElementType::F32).await?;
        self.merge(layer, queries, &mut outputs, Some(&mut lse)).await?;
        Ok(AttentionStates { outputs, lse })
    }

    /// [`ContextParallel::attend_into`] into a new tensor.
    ///
    /// # Errors
    /// As [`ContextParallel::attend_into`].
    pub async fn attend(&mut self, layer: usize, queries: &TensorOf<T>, output: ElementType) -> Result<TensorOf<T>> {
        let mut to = self.zeros(self.cache.plan(layer)?.elements(), output).await?;
        self.merge(layer, queries, &mut to, None).await?;
        Ok(to)
    }

    /// Allocates room for the states of all ranks in steps of this many rows of queries.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Limit`].
    pub async fn reserve_rows(&mut self, rows: usize) -> Result<()> {
        for layer in 0..self.cache.layers() {
            let shape = *self.cache.shape(layer)?;
            self.room_for(shape, rows).await?;
        }
        Ok(())
    }

    /// Commits the open step on this rank: [`ModelCache::commit`]. It waits until what the step exchanged is there: a
    /// transport that queues its work, as those of CUDA do, tells of a
    /// failure no earlier, and later layers were computed from what did not arrive. Outputs that are read before the
    /// step is committed may be such, unless [`Transport::wait`] came first.
    ///
    /// # Errors
    /// As [`ModelCache::commit`]; [`Error::Transport`]: the step is open and is to be abandoned.
    pub fn commit(&mut self) -> Result<()> {
        self.transport.wait()?;
        self.cache.commit()
    }

    /// Rolls back the open step on this rank: [`ModelCache::abandon`].
    pub fn abandon(&mut self) {
        self.cache.abandon();
    }

    // --- sequences -------------------------------------------------------------------------------------------------

    /// [`ModelCache::fork`] on this rank.
    ///
    /// # Errors
    /// As [`ModelCache::fork`].
    pub fn fork(&mut self, source: usize, target: usize) -> Result<()> {
        self.cache.fork(source, target)
    }

    /// [`ModelCache::truncate`] on this rank: `length` is a position of the sequence.
    ///
    /// # Errors
    /// As [`ModelCache::truncate`].
    pub fn truncate(&mut self, sequence: usize, length: usize) -> Result<()> {
        self.cache.truncate(sequence, length)
    }

    /// [`ModelCache::forget`] on this rank: whole pages of these positions.
    ///
    /// # Errors
    /// As [`ModelCache::forget`].
    pub fn forget(&mut self, sequence: usize, positions: TokenRange) -> Result<()> {
        self.cache.forget(sequence, positions)
    }

    /// [`ModelCache::clear`] on this rank.
    ///
    /// # Errors
    /// As [`ModelCache::clear`].
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.cache.clear(sequence)
    }

    /// [`ModelCache::pack_windows`] on every rank. Waits for the others: where one has no room, all return an error.
    ///
    /// # Errors
    /// As [`ModelCache::pack_windows`], on this rank or another; [`Error::Transport`]. Ranks that had room have packed.
    pub async fn pack_windows(&mut self, sequence: usize) -> Result<()> {
        let packed = self.cache.pack_windows(sequence).await;
        self.agree(Purpose::Windows, packed).await
    }

    /// Gives an empty sequence the centres of rank `root`, one for each layer, on all ranks:
    /// [`ModelCache::set_centres`]. The tensors of the other ranks are overwritten. Without this call every rank makes
    /// the centre of the first keys that it is given, which are the same on all.
    ///
    /// # Errors
    /// As [`ModelCache::set_centres`], on this rank or another; [`Error::Transport`].
    pub async fn set_centres(&mut self, sequence: usize, centres: &mut [TensorOf<T>], root: usize) -> Result<()> {
        let right = match centres.len() == self.cache.layers() {
            true => Ok(()),
            false => {
                let reason = format!("{} centres for {} layers", centres.len(), self.cache.layers());
                Err(Error::Plan { what: "centre", reason })
            }
        };
        self.agree(Purpose::Centres, right).await?;
        for (layer, centre) in centres.iter_mut().enumerate() {
            let shape = *self.cache.shape(layer)?;
            self.transport.broadcast(centre, shape.kv_heads() * shape.head_dim(), root)?;
        }
        self.transport.wait()?;
        let centres: Vec<&TensorOf<T>> = centres.iter().collect();
        let set = self.cache.set_centres(sequence, &centres).await;
        self.agree(Purpose::Centres, set).await
    }

    // --- parts -----------------------------------------------------------------------------------------------------

    async fn merge(
        &mut self,
        layer: usize,
        queries: &TensorOf<T>,
        output: &mut TensorOf<T>,
        lse: Option<&mut TensorOf<T>>,
    ) -> Result<()> {
        let (shape, rows) = (*self.cache.shape(layer)?, self.cache.plan(layer)?.rows());
        let states = self.cache.attend_states(layer, queries).await?;
        let at = self.room_for(shape, rows).await?;
        let gathered = &mut self.rooms[at].gathered;
        self.transport.merge_states(StateExchange { shape, rows, states: &states, gathered }, output, lse)
    }

    /// The place of room for states of a shape, with at least as many rows.
    async fn room_for(&mut self, shape: AttentionShape, rows: usize) -> Result<usize> {
        let at = self.rooms.iter().position(|room| room.shape == shape);
        if let Some(at) = at.filter(|&at| self.rooms[at].rows >= rows) {
            return Ok(at);
        }
        let room = StateRoom { shape, rows, gathered: self.transport.room_for_states(&shape, rows).await? };
        match at {
            Some(at) => self.rooms[at] = room,
            None => self.rooms.push(room),
        }
        Ok(at.unwrap_or(self.rooms.len() - 1))
    }

    async fn zeros(&self, elements: usize, of: ElementType) -> Result<TensorOf<T>> {
        const WHAT: &str = "outputs of all ranks";
        match of {
            ElementType::F32 => self.upload(Elements::F32(&filled(WHAT, elements, 0.0)?)).await,
            ElementType::F16 => self.upload(Elements::F16(&filled(WHAT, elements, half::f16::ZERO)?)).await,
            ElementType::Bf16 => self.upload(Elements::Bf16(&filled(WHAT, elements, half::bf16::ZERO)?)).await,
        }
    }

    async fn upload(&self, elements: Elements<'_>) -> Result<TensorOf<T>> {
        use crate::backend::Device;
        self.transport.backend().upload(elements).await
    }
}

impl<T: Transport> fmt::Debug for ContextParallel<T>
where
    T::Backend: Backend,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextParallel")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("cache", &self.cache)
            .finish_non_exhaustive()
    }
}
