//! Policies and choices over ranks.

use kvpack::Error;
use kvpack::backend::TensorRows;
use kvpack::cache::{Budget, DenseLayer, MeasuredQueries, ModelCache, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor, nmse};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::policy::{Policy, Spans};
use kvpack::ranks::Placement;
use kvpack::{AttentionShape, Result};
use pollster::block_on;

use super::script::{Act, Engine, SEQUENCES, rank, shape};
use super::{LONG, on_ranks};
use crate::any_backend::model_steps::recipe;
use crate::any_backend::random_rows::Random;

const TOKENS: usize = 700;

fn rows(random: &mut Random, rows: usize, heads: usize) -> CpuTensor {
    CpuTensor::F32((0..rows * heads * 64).map(|_| random.normal()).collect())
}

/// Stores what a policy keeps of a prompt in sequence 1, and then decodes.
fn compressed(engine: &mut Engine, policy: Policy, seed: u64) -> Result<Vec<Vec<Vec<f32>>>> {
    let mut random = Random::new(seed);
    let spans = Spans::new(TOKENS, &[TokenRange::new(20, 600)?])?;
    let mut prompt = match engine {
        Engine::One(cache) => cache.observe(policy, spans)?,
        Engine::Rank(rank) => rank.observe(policy, spans)?,
    };
    let measured = prompt.query_rows().map_or(0, |rows| rows.len());
    let mut dense = Vec::new();
    for layer in 0..2 {
        let (keys, values) = (rows(&mut random, TOKENS, 2), rows(&mut random, TOKENS, 2));
        dense.push(DenseLayer { rows: RowLayout::token_major(TOKENS, &shape()), keys, values });
        let queries = rows(&mut random, measured, 4);
        let layout = RowLayout::token_major(measured, &AttentionShape::new(4, 4, 64)?);
        let queries = MeasuredQueries { queries: TensorRows { tensor: &queries, layout }, known_lse: None };
        prompt.observe(layer, dense[layer].clone(), Some(queries))?;
    }
    let selection = match engine {
        Engine::One(cache) => block_on(cache.compress(1, &prompt))?,
        Engine::Rank(rank) => block_on(rank.compress(1, &prompt, dense))?,
    };
    let kept: usize = selection.layers().iter().map(|layer| layer.count()).sum();
    assert!(kept > 0 && kept < TOKENS);
    let mut outputs = Vec::new();
    let acts = [
        Act::Append(vec![TokenRun::decode(1), TokenRun::chunk(0, 5)]),
        Act::Append(vec![TokenRun::chunk(1, 200)]),
        Act::Fork(1, 2),
        Act::Truncate(2, TOKENS + 50),
        Act::Append((0..SEQUENCES).map(TokenRun::decode).collect()),
    ];
    for act in acts {
        outputs.extend(engine.act(&act, &mut random)?);
    }
    Ok(vec![outputs])
}

#[test]
fn what_stays_of_a_prompt_is_spread() {
    let layers = vec![(shape(), recipe("saw-int4")); 2];
    for (name, policy) in [("vlcache", Policy::vlcache(0.3)), ("h2o", Policy::h2o(0.4))] {
        let policy = policy.unwrap();
        let mut one = Engine::One(ModelCache::new(&Cpu::new(), &layers, SEQUENCES).unwrap());
        let expected = compressed(&mut one, policy.clone(), 3).unwrap();
        for ranks in [2, 3] {
            let run = || {
                on_ranks(ranks, LONG, |transport| {
                    let mut engine = Engine::Rank(Box::new(rank(transport, &layers, Placement::new(ranks).unwrap())));
                    let outputs = compressed(&mut engine, policy.clone(), 3).unwrap();
                    (outputs, engine.cache().tokens(0, 1).unwrap())
                })
            };
            let (many, again) = (run(), run());
            assert!(many == again && many.iter().all(|(outputs, _)| *outputs == many[0].0), "{name}: other bits");
            let stored: usize = many.iter().map(|(_, tokens)| tokens).sum();
            assert_eq!(stored, one.cache().tokens(0, 1).unwrap(), "{name}");
            for (one, many) in expected[0].iter().zip(&many[0].0[0]) {
                let exact: Vec<f64> = one.iter().map(|&x| x.into()).collect();
                let error = nmse(many, &exact);
                assert!(error <= 1e-6, "{name} on {ranks} ranks: {error:.1e}");
            }
        }
    }
}

/// Rank 0 decides, also where another rank measured something else.
#[test]
fn all_ranks_keep_what_the_first_chose() {
    let layers = vec![(shape(), recipe("f16")); 2];
    let chosen = on_ranks(3, LONG, |transport| {
        let mut rank = rank(transport, &layers, Placement::new(3).unwrap());
        let spans = Spans::new(TOKENS, &[]).unwrap();
        let mut prompt = rank.observe(Policy::h2o(0.4).unwrap(), spans).unwrap();
        let measured = prompt.query_rows().map_or(0, |rows| rows.len());
        let (mut same, mut own) = (Random::new(3), Random::new(rank.rank() as u64));
        let mut dense = Vec::new();
        for layer in 0..2 {
            let (keys, values) = (rows(&mut same, TOKENS, 2), rows(&mut same, TOKENS, 2));
            dense.push(DenseLayer { rows: RowLayout::token_major(TOKENS, &shape()), keys, values });
            let queries = rows(&mut own, measured, 4);
            let layout = RowLayout::token_major(measured, &AttentionShape::new(4, 4, 64).unwrap());
            let queries = MeasuredQueries { queries: TensorRows { tensor: &queries, layout }, known_lse: None };
            prompt.observe(layer, dense[layer].clone(), Some(queries)).unwrap();
        }
        let mine = block_on(prompt.select()).unwrap();
        (mine, block_on(rank.compress(0, &prompt, dense)).unwrap())
    });
    assert!(chosen[1].0 != chosen[0].0, "the ranks would choose alike by themselves");
    assert!(chosen.iter().all(|(_, kept)| *kept == chosen[0].0));
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
