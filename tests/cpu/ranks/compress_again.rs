//! Sequences that ranks compress again, against one cache.

use kvpack::Error;
use kvpack::backend::TensorRows;
use kvpack::cache::{Budget, MeasuredQueries, ModelCache, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::policy::{Policy, Selection, Spans};
use kvpack::ranks::Placement;
use kvpack::{AttentionShape, Result};
use pollster::block_on;

use super::evictions::{LAYERS, Prompt, all_policies, check_like_one_cache, rows};
use super::script::{Act, Engine, SEQUENCES, rank, shape};
use super::{LONG, on_ranks};
use any_backend::model_steps::recipe;
use any_backend::random_rows::Random;

const TOKENS: usize = 520;
/// Appended after the prompt was compressed: beyond a turn.
const APPENDED: usize = 150;

/// Compresses a sequence again with queries of its newest tokens.
fn again(engine: &mut Engine, sequence: usize, policy: &Policy) -> Result<Selection> {
    let length = engine.cache().length(sequence)?;
    let appended = match engine {
        Engine::One(cache) => cache.appended(sequence)?,
        Engine::Rank(rank) => block_on(rank.appended(sequence))?,
    };
    let measured = policy.rows_again(appended);
    let mut random = Random::new(77);
    let tensors: Vec<CpuTensor> = (0..LAYERS).map(|_| rows(&mut random, measured, 4)).collect();
    let layout = RowLayout::token_major(measured, &AttentionShape::new(4, 4, 64)?);
    let queries: Vec<_> = tensors
        .iter()
        .map(|tensor| MeasuredQueries { queries: TensorRows { tensor, layout }, known_lse: None })
        .collect();
    let spans = Spans::new(length, &[TokenRange::new(15, length * 4 / 5)?])?;
    match engine {
        Engine::One(cache) => block_on(cache.compress_again(sequence, policy, &spans, &queries)),
        Engine::Rank(rank) => block_on(rank.compress_again(sequence, policy, &spans, &queries)),
    }
}

/// Compresses a prompt, appends, and compresses again, twice: the choices, and what attention returns in between.
fn compressed_again(engine: &mut Engine, policy: &Policy) -> Result<(Vec<Selection>, Vec<Vec<f32>>)> {
    let (mut random, mut outputs) = (Random::new(4), Vec::new());
    let mut chosen = vec![Prompt::new(TOKENS, policy, 3).compress(engine, policy)?];
    for appended in [APPENDED, 40] {
        outputs.extend(engine.act(&Act::Append(vec![TokenRun::chunk(1, appended)]), &mut random)?);
        engine.act(&Act::Append(vec![TokenRun::decode(1)]), &mut random)?;
        chosen.push(again(engine, 1, policy)?);
    }
    for act in [Act::Append(vec![TokenRun::decode(1)]), Act::Fork(1, 2), Act::Append(vec![TokenRun::chunk(2, 9)])] {
        outputs.extend(engine.act(&act, &mut random)?);
    }
    Ok((chosen, outputs))
}

#[test]
fn ranks_keep_again_what_one_cache_keeps() {
    for (index, (name, policy)) in all_policies().into_iter().enumerate() {
        let layers = vec![(shape(), recipe(["f16", "saw-int4"][index % 2])); LAYERS];
        let mut one = Engine::One(ModelCache::new(&Cpu::new(), &layers, SEQUENCES).unwrap());
        let done = compressed_again(&mut one, &policy).unwrap_or_else(|error| panic!("{name}: {error}"));
        let one = (done, one.cache().tokens(0, 2).unwrap());
        let ranks = [2, 7, 3][index % 3];
        let many = on_ranks(ranks, LONG, |transport| {
            let mut engine = Engine::Rank(Box::new(rank(transport, &layers, Placement::new(ranks).unwrap())));
            let done = compressed_again(&mut engine, &policy).unwrap_or_else(|error| panic!("{name}: {error}"));
            (done, engine.cache().tokens(0, 2).unwrap())
        });
        check_like_one_cache(&format!("{name} on {ranks} ranks"), &many, &one);
    }
}

/// What came since a sequence was compressed is counted from the ranks together; none sees all of it.
#[test]
fn appended_tokens_are_counted_over_ranks() {
    let layers = vec![(shape(), recipe("f16")); LAYERS];
    let policy = Policy::streaming(4, 60);
    let counts = |engine: &mut Engine| {
        let mut random = Random::new(2);
        let mut counts = Vec::new();
        Prompt::new(TOKENS, &policy, 3).compress(engine, &policy).unwrap();
        engine.act(&Act::Append(vec![TokenRun::chunk(0, 600)]), &mut random).unwrap();
        for act in [
            Act::Attend(vec![kvpack::plan::QueryRun::causal(1, 1)]),
            Act::Append(vec![TokenRun::chunk(1, 1)]),
            Act::Append(vec![TokenRun::chunk(1, 300)]),
            Act::Truncate(1, TOKENS + 200),
            Act::Forget(0, 300),
        ] {
            engine.act(&act, &mut random).unwrap();
            counts.extend((0..SEQUENCES).map(|sequence| match engine {
                Engine::One(cache) => cache.appended(sequence).unwrap(),
                Engine::Rank(rank) => {
                    let appended = block_on(rank.appended(sequence)).unwrap();
                    assert_eq!(block_on(rank.compression_due(sequence, 201)), Ok(appended >= 201));
                    appended
                }
            }));
        }
        counts
    };
    let expected = counts(&mut Engine::One(ModelCache::new(&Cpu::new(), &layers, SEQUENCES).unwrap()));
    assert_eq!(expected[expected.len() - 3..], [344, 200, 0]);
    for ranks in [2, 3] {
        let many = on_ranks(ranks, LONG, |transport| {
            counts(&mut Engine::Rank(Box::new(rank(transport, &layers, Placement::new(ranks).unwrap()))))
        });
        assert!(many.iter().all(|counts| *counts == expected), "{ranks} ranks: {many:?}, one cache {expected:?}");
    }
}

/// Every rank holds what it held before if one rank has no room, or if the call is wrong.
#[test]
fn a_compression_that_fails_changes_no_rank() {
    let layers = vec![(shape(), recipe("f16")); LAYERS];
    let policy = Policy::snapkv(0.9).unwrap();
    let results = on_ranks(2, LONG, |transport| {
        let mut engine = Engine::Rank(Box::new(rank(transport, &layers, Placement::new(2).unwrap())));
        let mut random = Random::new(1);
        engine.act(&Act::Append(vec![TokenRun::chunk(0, 1536)]), &mut random).unwrap();
        let before = (0..LAYERS).map(|layer| engine.cache().tokens(layer, 0).unwrap()).collect::<Vec<_>>();
        let Engine::Rank(mut rank) = engine else { unreachable!() };
        if rank.rank() == 1 {
            // What is kept needs pages beside those that are held, and too few are free.
            let bytes = rank.cache().memory().allocated_bytes();
            rank = Box::new(rank.with_budget(Budget::of_bytes(bytes)));
        }
        let mut engine = Engine::Rank(rank);
        let refused = again(&mut engine, 0, &policy).map(drop);
        let after = (0..LAYERS).map(|layer| engine.cache().tokens(layer, 0).unwrap()).collect::<Vec<_>>();
        let of_nothing = again(&mut engine, 1, &policy).map(drop);
        // It goes on.
        let outputs = engine.act(&Act::Append(vec![TokenRun::chunk(1, 1)]), &mut random).unwrap();
        (before == after, refused, of_nothing, outputs)
    });
    assert!(matches!(&results[0].1, Err(Error::Plan { reason, .. }) if reason.contains("[1]")), "{:?}", results[0].1);
    assert!(matches!(&results[1].1, Err(Error::NoRoom { .. })), "{:?}", results[1].1);
    for (unchanged, _, of_nothing, outputs) in &results {
        assert!(*unchanged && *outputs == results[0].3);
        assert!(of_nothing.is_err(), "an empty sequence has nothing to keep");
    }
}
