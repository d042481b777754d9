//! What is done to one cache and to those of ranks alike.

use kvpack::backend::Device;
use kvpack::cache::{ModelCache, Recipe, TokenRun};
use kvpack::cpu::{Cpu, nmse};
use kvpack::plan::{ElementType, QueryRun, RowLayout, TokenRange};
use kvpack::ranks::{ContextParallel, Placement, ThreadTransport};
use kvpack::{AttentionShape, Result};
use pollster::block_on;

use super::{LONG, on_ranks};
use any_backend::random_rows::Random;

/// The outputs of every layer, for every act.
pub type Outputs = Vec<Vec<Vec<f32>>>;

pub const SEQUENCES: usize = 3;

/// One thing that an engine does.
#[derive(Clone, Debug)]
pub enum Act {
    /// Appends, and the queries of what was appended attend.
    Append(Vec<TokenRun>),
    /// Queries that attend, and store nothing.
    Attend(Vec<QueryRun>),
    Abandon(Vec<TokenRun>),
    Fork(usize, usize),
    Truncate(usize, usize),
    Clear(usize),
    /// Forgets whole pages up to a position.
    Forget(usize, usize),
    PackWindows(usize),
}

/// One cache, or that of one rank.
pub enum Engine {
    One(ModelCache<Cpu>),
    Rank(Box<ContextParallel<ThreadTransport>>),
}

/// Calls that both have.
macro_rules! of_both {
    ($engine:expr, $cache:ident => $call:expr) => {
        match $engine {
            Engine::One($cache) => $call,
            Engine::Rank($cache) => $call,
        }
    };
}

impl Engine {
    pub fn cache(&self) -> &ModelCache<Cpu> {
        match self {
            Self::One(cache) => cache,
            Self::Rank(rank) => rank.cache(),
        }
    }

    /// Does one thing with random rows, and returns the outputs of all layers.
    pub fn act(&mut self, act: &Act, random: &mut Random) -> Result<Vec<Vec<f32>>> {
        match act {
            Act::Append(runs) => {
                let rows = runs.iter().map(TokenRun::tokens).sum();
                of_both!(self, of => block_on(of.reserve_for_append(runs)))?;
                of_both!(self, of => of.begin_append(runs))?;
                let outputs = self.layers(rows, true, random)?;
                of_both!(self, of => of.commit())?;
                return Ok(outputs);
            }
            Act::Attend(queries) => {
                of_both!(self, of => of.begin_attend(queries))?;
                let outputs = self.layers(queries.iter().map(|run| run.queries).sum(), false, random)?;
                of_both!(self, of => of.commit())?;
                return Ok(outputs);
            }
            Act::Abandon(runs) => {
                of_both!(self, of => block_on(of.reserve_for_append(runs)))?;
                of_both!(self, of => of.begin_append(runs))?;
                of_both!(self, of => of.abandon());
            }
            Act::Fork(source, target) => of_both!(self, of => of.fork(*source, *target))?,
            Act::Truncate(sequence, length) => of_both!(self, of => of.truncate(*sequence, *length))?,
            Act::Clear(sequence) => of_both!(self, of => of.clear(*sequence))?,
            Act::Forget(sequence, to) => {
                of_both!(self, of => of.forget(*sequence, TokenRange::new(0, *to)?))?;
            }
            Act::PackWindows(sequence) => of_both!(self, of => block_on(of.pack_windows(*sequence)))?,
        }
        Ok(Vec::new())
    }

    fn layers(&mut self, rows: usize, stores: bool, random: &mut Random) -> Result<Vec<Vec<f32>>> {
        let mut outputs = Vec::new();
        for layer in 0..self.cache().layers() {
            let shape = *self.cache().shape(layer)?;
            let mut tensor = |heads: usize| {
                let x: Vec<f32> = (0..rows * heads * shape.head_dim()).map(|_| random.normal()).collect();
                block_on(Cpu::new().upload(x[..].into())).unwrap()
            };
            let [keys, values, queries] = [shape.kv_heads(), shape.kv_heads(), shape.query_heads()].map(&mut tensor);
            if stores {
                let layout = RowLayout::token_major(rows, &shape);
                of_both!(self, of => block_on(of.store(layer, layout, &keys, &values)))?;
            }
            let output = match self {
                Self::One(cache) => block_on(cache.attend(layer, &queries, ElementType::F32))?,
                Self::Rank(rank) => block_on(rank.attend(layer, &queries, ElementType::F32))?,
            };
            outputs.push(output.to_f32());
        }
        Ok(outputs)
    }
}

pub fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

/// What one cache returns for a script, act by act.
pub fn on_one(layers: &[(AttentionShape, Recipe)], acts: &[Act], seed: u64) -> Vec<Vec<Vec<f32>>> {
    let mut engine = Engine::One(ModelCache::new(&Cpu::new(), layers, SEQUENCES).unwrap());
    let mut random = Random::new(seed);
    acts.iter().map(|act| engine.act(act, &mut random).unwrap_or_else(|error| panic!("{act:?}: {error}"))).collect()
}

/// The cache of a rank.
pub fn rank(
    transport: ThreadTransport,
    layers: &[(AttentionShape, Recipe)],
    placement: Placement,
) -> ContextParallel<ThreadTransport> {
    block_on(ContextParallel::new(transport, layers, SEQUENCES, placement)).unwrap()
}

/// What every rank returns for a script, and what it stores of every sequence afterwards.
pub fn on_many(
    layers: &[(AttentionShape, Recipe)],
    acts: &[Act],
    seed: u64,
    placement: Placement,
) -> Vec<(Outputs, Vec<usize>)> {
    on_ranks(placement.ranks(), LONG, |transport| {
        let mut engine = Engine::Rank(Box::new(rank(transport, layers, placement)));
        let mut random = Random::new(seed);
        let run = |act: &Act| engine.act(act, &mut random).unwrap_or_else(|error| panic!("{act:?}: {error}"));
        let outputs = acts.iter().map(run).collect();
        let stored = (0..SEQUENCES).map(|sequence| engine.cache().tokens(0, sequence).unwrap()).collect();
        (outputs, stored)
    })
}

/// Checks that ranks return what one cache returns, all the same bits, and again in a second run.
pub fn check(name: &str, layers: &[(AttentionShape, Recipe)], acts: &[Act], seed: u64, placement: Placement) {
    let one = on_one(layers, acts, seed);
    let many = on_many(layers, acts, seed, placement);
    let again = on_many(layers, acts, seed, placement);
    for (rank, ((outputs, _), (second, _))) in many.iter().zip(&again).enumerate() {
        assert!(*outputs == many[0].0, "{name}: rank {rank} returns other bits than rank 0");
        assert!(outputs == second, "{name}: rank {rank} returns other bits in a second run");
    }
    for ((act, one), many) in acts.iter().zip(&one).zip(&many[0].0) {
        for (one, many) in one.iter().zip(many) {
            let exact: Vec<f64> = one.iter().map(|&x| x.into()).collect();
            let error = nmse(many, &exact);
            assert!(error <= 1e-6, "{name}, {placement:?}: {act:?} has an NMSE of {error:.1e}");
        }
    }
}
