//! Policies and choices over ranks, against one cache.

use kvpack::Error;
use kvpack::backend::{QueriesAndKeys, TensorRows, TokenSelection};
use kvpack::cache::{Budget, DenseLayer, MeasuredQueries, ModelCache, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor, nmse};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::policy::{
    HeadAggregation, MeasuredRows, Merging, Policy, QueryPositions, ScoreRule, Selection, Spans, TextRule, Weighing,
};
use kvpack::policy::{KeepRule, Recent};
use kvpack::ranks::{ContextParallel, Placement, SharedPrompt, ThreadTransport};
use kvpack::{AttentionShape, Result};
use pollster::block_on;

use super::script::{Act, Engine, SEQUENCES, rank, shape};
use super::{LONG, on_ranks};
use any_backend::compressed::policies;
use any_backend::model_steps::recipe;
use any_backend::random_rows::Random;

const TOKENS: usize = 700;
pub const LAYERS: usize = 2;

pub fn rows(random: &mut Random, rows: usize, heads: usize) -> CpuTensor {
    CpuTensor::F32((0..rows * heads * 64).map(|_| random.normal()).collect())
}

/// A prompt of which every layer has keys, values, and the queries that a policy measures.
pub struct Prompt {
    spans: Spans,
    measured: Option<QueryPositions>,
    layers: Vec<(DenseLayer<CpuTensor>, CpuTensor)>,
}

impl Prompt {
    pub fn new(tokens: usize, policy: &Policy, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let images = [TokenRange::new(tokens / 35, tokens * 6 / 7).unwrap()];
        let spans = Spans::new(tokens, &images).unwrap();
        let measured = policy.query_rows(&spans).unwrap();
        let queries = measured.as_ref().map_or(0, QueryPositions::len);
        let layer = |_| {
            let (keys, values) = (rows(&mut random, tokens, 2), rows(&mut random, tokens, 2));
            let rows_of = RowLayout::token_major(tokens, &shape());
            (DenseLayer { rows: rows_of, keys, values }, rows(&mut random, queries, 4))
        };
        let layers = (0..LAYERS).map(layer).collect();
        Self { spans, measured, layers }
    }

    fn queries(&self, layer: usize) -> TensorRows<'_, CpuTensor> {
        let rows = self.measured.as_ref().map_or(0, QueryPositions::len);
        let layout = RowLayout::token_major(rows, &AttentionShape::new(4, 4, 64).unwrap());
        TensorRows { tensor: &self.layers[layer].1, layout }
    }

    /// The log-sum-exps that an engine's own attention would return.
    fn lse(&self, layer: usize) -> Option<CpuTensor> {
        let dense = &self.layers[layer].0;
        let keys = TensorRows { tensor: &dense.keys, layout: dense.rows };
        let rows = self.measured.as_ref()?;
        let input = QueriesAndKeys { shape: shape(), scale: 0.125, rows, queries: self.queries(layer), keys };
        Some(Cpu::new().measure_rows(input).unwrap().lse)
    }

    /// What a rank sees of a layer where the keys of all others are NaN.
    fn seen_by(&self, layer: usize, rank: &ContextParallel<ThreadTransport>) -> DenseLayer<CpuTensor> {
        let mut dense = self.layers[layer].0.clone();
        let share = *rank.cache().share().unwrap();
        if let CpuTensor::F32(keys) = &mut dense.keys {
            let elsewhere = keys.chunks_mut(128).enumerate().filter(|(position, _)| !share.holds(*position));
            elsewhere.for_each(|(_, key)| key.fill(f32::NAN));
        }
        dense
    }

    fn observe_by_ranks(
        &self,
        rank: &mut ContextParallel<ThreadTransport>,
        policy: &Policy,
        given: Given,
    ) -> Result<SharedPrompt<Cpu>> {
        let mut prompt = rank.observe(policy.clone(), self.spans.clone())?;
        for layer in 0..LAYERS {
            let known = self.lse(layer).filter(|_| given == Given::Lse);
            let queries = MeasuredQueries { queries: self.queries(layer), known_lse: known.as_ref() };
            let dense = match given {
                Given::OwnKeys => self.seen_by(layer, rank),
                _ => self.layers[layer].0.clone(),
            };
            block_on(rank.observe_layer(&mut prompt, layer, dense, Some(queries)))?;
        }
        Ok(prompt)
    }

    /// Stores what a policy keeps of the prompt in sequence 1.
    pub fn compress(&self, engine: &mut Engine, policy: &Policy) -> Result<Selection> {
        match engine {
            Engine::One(cache) => {
                let mut prompt = cache.observe(policy.clone(), self.spans.clone())?;
                for (layer, (dense, _)) in self.layers.iter().enumerate() {
                    let queries = MeasuredQueries { queries: self.queries(layer), known_lse: None };
                    prompt.observe(layer, dense.clone(), Some(queries))?;
                }
                block_on(cache.compress(1, &prompt))
            }
            Engine::Rank(rank) => {
                let prompt = self.observe_by_ranks(rank, policy, Given::AllKeys)?;
                block_on(rank.compress(1, &prompt))
            }
        }
    }
}

/// What ranks are given to observe.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Given {
    AllKeys,
    /// The keys of other ranks are NaN.
    OwnKeys,
    /// The log-sum-exps of all rows, too.
    Lse,
}

/// The presets, and policies that aggregate, weigh, prefer and merge otherwise.
pub fn all_policies() -> Vec<(&'static str, Policy)> {
    let [h2o, lookm] = [Policy::h2o(0.4).unwrap(), Policy::lookm(0.4).unwrap()];
    let largest = ScoreRule { aggregation: HeadAggregation::Max, ..h2o.scores };
    let mean = ScoreRule { aggregation: HeadAggregation::Sum, weighing: Weighing::MeanOfVisible, ..h2o.scores };
    let stays = KeepRule::Best { recent: Recent::Share(0.1), text: TextRule::Stays };
    let mut all = policies(0.4);
    all.extend([
        ("max", Policy { scores: largest, ..h2o.clone() }),
        ("mean-of-visible", Policy { scores: mean, ..h2o.clone() }),
        ("text-stays", Policy { keep: stays, ..h2o }),
        ("averaged", Policy { merging: Some(Merging::Averaged), ..lookm.clone() }),
        ("weighted", Policy { merging: Some(Merging::Weighted), ..lookm }),
    ]);
    // One policy measures all rows; for the others the last ones do.
    for (_, policy) in all.iter_mut().filter(|(name, _)| *name != "h2o") {
        if policy.rows == MeasuredRows::All {
            policy.rows = MeasuredRows::Last(60);
        }
    }
    all
}

/// What follows a prompt of which a part stayed: all for two of the policies.
fn acts(tokens: usize, all: bool) -> Vec<Act> {
    if !all {
        return vec![Act::Append(vec![TokenRun::decode(1), TokenRun::chunk(0, 5)])];
    }
    vec![
        Act::Append(vec![TokenRun::decode(1), TokenRun::chunk(0, 5)]),
        Act::Append(vec![TokenRun::chunk(1, 200)]),
        Act::Fork(1, 2),
        Act::Truncate(2, tokens + 50),
        Act::Append((0..SEQUENCES).map(TokenRun::decode).collect()),
    ]
}

/// Compresses and goes on: the choice, and the outputs of all acts.
fn compressed(engine: &mut Engine, policy: &Policy, all: bool) -> (Selection, Vec<Vec<f32>>) {
    let selection = Prompt::new(TOKENS, policy, 3).compress(engine, policy).unwrap();
    let mut random = Random::new(4);
    let outputs = acts(TOKENS, all).iter().flat_map(|act| engine.act(act, &mut random).unwrap()).collect();
    (selection, outputs)
}

/// What was chosen and returned, and the tokens that are stored.
pub type Done<C> = ((C, Vec<Vec<f32>>), usize);

/// Ranks choose and store together what one cache does. Their outputs are the same bits, and like those of the cache.
pub fn check_like_one_cache<C: PartialEq>(what: &str, ranks: &[Done<C>], ((chosen, exact), stored): &Done<C>) {
    assert_eq!(ranks.iter().map(|(_, tokens)| tokens).sum::<usize>(), *stored, "{what}");
    for ((of_rank, outputs), _) in ranks {
        assert!(of_rank == chosen, "{what} keeps other tokens");
        assert!(*outputs == ranks[0].0.1, "{what}: other bits");
    }
    for (one, many) in exact.iter().zip(&ranks[0].0.1) {
        let exact: Vec<f64> = one.iter().map(|&x| x.into()).collect();
        let error = nmse(many, &exact);
        assert!(error <= 1e-6, "{what}: {error:.1e}");
    }
}

/// Every policy keeps on ranks what it keeps in one cache, and attention to it returns the same.
#[test]
fn ranks_keep_what_one_cache_keeps() {
    for (index, (name, policy)) in all_policies().into_iter().enumerate() {
        let layers = vec![(shape(), recipe(["saw-int4", "f16"][index % 2])); LAYERS];
        let mut one = Engine::One(ModelCache::new(&Cpu::new(), &layers, SEQUENCES).unwrap());
        let done = compressed(&mut one, &policy, index < 2);
        let one = (done, one.cache().tokens(0, 1).unwrap());
        for ranks in [2, 3, 7] {
            let many = on_ranks(ranks, LONG, |transport| {
                let mut engine = Engine::Rank(Box::new(rank(transport, &layers, Placement::new(ranks).unwrap())));
                let done = compressed(&mut engine, &policy, index < 2);
                (done, engine.cache().tokens(0, 1).unwrap())
            });
            check_like_one_cache(&format!("{name} on {ranks} ranks"), &many, &one);
        }
    }
}

/// A rank reads the keys at its positions alone, whatever lies at others: also where a prompt is so short that ranks have
/// none, and where turns are longer than a page.
#[test]
fn a_rank_measures_its_own_keys() {
    for (name, policy) in all_policies() {
        for (tokens, ranks, pages) in [(TOKENS, 3, 1), (TOKENS, 2, 2), (100, 3, 1), (129, 2, 1)] {
            // All of the presets suit 700 tokens; short prompts show what ranks without keys do.
            if tokens < TOKENS && !["vlcache", "h2o"].contains(&name) {
                continue;
            }
            let prompt = Prompt::new(tokens, &policy, 8);
            let layers = vec![(shape(), recipe("f16")); LAYERS];
            let mut one = Engine::One(ModelCache::new(&Cpu::new(), &layers, SEQUENCES).unwrap());
            let expected = prompt.compress(&mut one, &policy).unwrap();
            let chosen = on_ranks(ranks, LONG, |transport| {
                let placement = Placement::new(ranks).unwrap().with_turn(pages).unwrap();
                let mut rank = rank(transport, &layers, placement);
                let observed = prompt.observe_by_ranks(&mut rank, &policy, Given::OwnKeys).unwrap();
                block_on(observed.select()).unwrap()
            });
            assert!(chosen.iter().all(|chosen| *chosen == expected), "{name}, {tokens} tokens on {ranks} ranks");
        }
    }
}

/// Log-sum-exps that an engine knows spare an exchange and change nothing; counts need maxima, on ranks as in one cache.
#[test]
fn known_log_sum_exps_serve_ranks() {
    let layers = vec![(shape(), recipe("f16")); LAYERS];
    for (name, policy) in all_policies() {
        let prompt = Prompt::new(TOKENS, &policy, 5);
        let chosen = on_ranks(3, LONG, |transport| {
            let mut rank = rank(transport, &layers, Placement::new(3).unwrap());
            let measured = prompt.observe_by_ranks(&mut rank, &policy, Given::AllKeys).unwrap();
            let known = prompt.observe_by_ranks(&mut rank, &policy, Given::Lse);
            (block_on(measured.select()).unwrap(), known.map(|known| block_on(known.select()).unwrap()))
        });
        for (measured, known) in chosen {
            match known {
                Ok(known) => assert!(known == measured && policy.threshold().is_none(), "{name}"),
                Err(error) => assert!(policy.threshold().is_some() && matches!(error, Error::Plan { .. }), "{error}"),
            }
        }
    }
}

/// All ranks choose the same, because they have the same statistics, even if they were given other queries. A NaN is an
/// error on all ranks, and so are queries of one rank that are too few.
#[test]
fn all_ranks_choose_the_same_or_none_does() {
    let layers = vec![(shape(), recipe("f16")); LAYERS];
    let policy = Policy::h2o(0.4).unwrap();
    let chosen = on_ranks(3, LONG, |transport| {
        let mut rank = rank(transport, &layers, Placement::new(3).unwrap());
        let same = Prompt::new(TOKENS, &policy, 3);
        let mut own = Prompt::new(TOKENS, &policy, rank.rank() as u64);
        own.layers.iter_mut().zip(&same.layers).for_each(|(own, same)| own.0 = same.0.clone());
        let observed = own.observe_by_ranks(&mut rank, &policy, Given::AllKeys).unwrap();
        let mine = block_on(observed.select()).unwrap();
        let stored = block_on(rank.compress(0, &observed)).unwrap();
        // One NaN among the keys of rank 1.
        let mut poisoned = same;
        if let CpuTensor::F32(keys) = &mut poisoned.layers[1].0.keys {
            keys[140 * 128] = f32::NAN;
        }
        let refused = poisoned.observe_by_ranks(&mut rank, &policy, Given::AllKeys).map(drop);
        // A layer that was not observed.
        let empty = rank.observe(policy.clone(), poisoned.spans.clone()).unwrap();
        (mine, stored, refused, block_on(rank.compress(1, &empty)).map(drop))
    });
    for (mine, stored, refused, missing) in &chosen {
        assert!(*mine == chosen[0].0 && *stored == chosen[0].0);
        assert!(matches!(refused, Err(Error::NotANumber { .. })), "{refused:?}");
        assert!(matches!(missing, Err(Error::Selection { .. })), "{missing:?}");
    }
    let refused = on_ranks(2, LONG, |transport| {
        let mut rank = rank(transport, &layers, Placement::new(2).unwrap());
        let prompt = Prompt::new(TOKENS, &policy, 3);
        let mut observed = rank.observe(policy.clone(), prompt.spans.clone()).unwrap();
        let mut layout = prompt.queries(0);
        // Rank 1 has one row less than it says.
        if rank.rank() == 1 {
            layout.layout.token_stride += 1;
        }
        let queries = MeasuredQueries { queries: layout, known_lse: None };
        block_on(rank.observe_layer(&mut observed, 0, prompt.layers[0].0.clone(), Some(queries)))
    });
    assert!(matches!(&refused[0], Err(Error::Plan { reason, .. }) if reason.contains("[1]")), "{refused:?}");
    assert!(matches!(&refused[1], Err(Error::Elements { .. })), "{refused:?}");
}

/// Where one rank has no room for what is kept, none keeps it.
#[test]
fn a_rank_without_room_is_told_to_all() {
    let layers = vec![(shape(), recipe("f16")); 2];
    let results = on_ranks(3, LONG, |transport| {
        let mut rank = rank(transport, &layers, Placement::new(3).unwrap());
        if rank.rank() == 2 {
            return None;
        }
        Some(block_on(rank.reserve_for_append(&[TokenRun::chunk(0, 500)])))
    });
    assert!(results.iter().flatten().all(|result| matches!(result, Err(Error::Transport { .. }))));

    let results = on_ranks(2, LONG, |transport| {
        let mut rank = rank(transport, &layers, Placement::new(2).unwrap());
        if rank.rank() == 1 {
            rank = rank.with_budget(Budget::of_bytes(1));
        }
        let reserved = block_on(rank.reserve_for_append(&[TokenRun::chunk(0, 500)]));
        (rank.cache().length(0).unwrap(), reserved)
    });
    assert!(matches!(&results[0], (0, Err(Error::Plan { reason, .. })) if reason.contains("[1]")), "{results:?}");
    assert!(matches!(&results[1], (0, Err(Error::NoRoom { .. }))), "{results:?}");
}

/// A rank whose prompt is shorter than what rank 0 keeps sizes nothing by that, and says so.
#[test]
fn the_counts_of_another_prompt_are_refused() {
    let layers = vec![(shape(), recipe("f16")); LAYERS];
    let results = on_ranks(2, LONG, |transport| {
        let mut rank = rank(transport, &layers, Placement::new(2).unwrap());
        let policy = Policy::streaming(4, 400);
        let prompt = Prompt::new([TOKENS, 300][rank.rank()], &policy, 3);
        let observed = prompt.observe_by_ranks(&mut rank, &policy, Given::AllKeys).unwrap();
        let refused = block_on(rank.compress(1, &observed)).map(drop);
        (refused, rank.cache().length(1).unwrap(), rank.cache().memory().in_use_bytes())
    });
    let [(first, ..), (second, ..)] = &results[..] else { panic!("two ranks") };
    assert!(matches!(second, Err(Error::Selection { reason }) if reason.contains("keeps 404")), "{second:?}");
    assert!(matches!(first, Err(Error::Transport { .. })), "{first:?}");
    assert!(results.iter().all(|(_, length, bytes)| (*length, *bytes) == (0, 0)));
}
