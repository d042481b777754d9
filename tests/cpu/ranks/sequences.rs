//! Appends, forks, truncations, releases and windows over ranks, against one cache.

use kvpack::cache::{ModelCache, PrefixCache, Recipe, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor, nmse};
use kvpack::plan::{ElementType, LayerAttention, QueryRun, RowLayout, Scoring, TokenRange, Visible};
use kvpack::ranks::Placement;
use kvpack::{AttentionShape, Bits, TILE_TOKENS};

use pollster::block_on;

use super::script::{Act, SEQUENCES, check, on_many, rank, shape};
use super::{LONG, on_ranks};
use any_backend::model_steps::recipe;
use any_backend::random_rows::Random;

/// A script of an engine: sequences join, grow, branch, are cut and leave.
fn random_acts(seed: u64, count: usize, cuts: usize) -> Vec<Act> {
    let mut random = Random::new(seed);
    let mut lengths = [0usize; SEQUENCES];
    let mut acts = Vec::new();
    while acts.len() < count {
        let sequence = random.below(SEQUENCES);
        let length = lengths[sequence];
        match random.below(12) {
            0..=3 => {
                // A part of a prompt or a chunk, beside sequences that decode.
                let tokens = 1 + random.below(300);
                let run = if random.below(2) == 0 { TokenRun::prompt } else { TokenRun::chunk };
                let mut runs = vec![run(sequence, tokens)];
                lengths[sequence] += tokens;
                for (other, length) in lengths.iter_mut().enumerate() {
                    if other != sequence && *length > 0 {
                        runs.push(TokenRun::decode(other));
                        *length += 1;
                    }
                }
                acts.push(Act::Append(runs));
                acts.push(Act::PackWindows(sequence));
            }
            4..=6 => {
                let runs: Vec<TokenRun> = (0..SEQUENCES).map(TokenRun::decode).collect();
                for _ in 0..1 + random.below(8) {
                    acts.push(Act::Append(runs.clone()));
                    lengths.iter_mut().for_each(|length| *length += 1);
                }
            }
            7 if length > 0 => {
                let other = (sequence + 1) % SEQUENCES;
                acts.push(Act::Clear(other));
                acts.push(Act::Fork(sequence, other));
                lengths[other] = length;
            }
            8 if length > cuts => {
                let keeps = (length - random.below(length.min(200))) / cuts * cuts;
                acts.push(Act::Truncate(sequence, keeps));
                lengths[sequence] = keeps;
            }
            9 if length > 3 * TILE_TOKENS => acts.push(Act::Forget(sequence, 2 * TILE_TOKENS)),
            10 if length > 20 => {
                let queries = vec![QueryRun::causal(sequence, 5), QueryRun::decode((sequence + 1) % SEQUENCES)];
                acts.push(Act::Attend(queries));
            }
            11 if random.below(3) == 0 => {
                acts.push(Act::Clear(sequence));
                lengths[sequence] = 0;
            }
            _ => acts.push(Act::Abandon(vec![TokenRun::chunk(sequence, 70)])),
        }
    }
    acts
}

/// Every recipe whose codes do not depend on where its spans begin gives what one cache gives.
#[test]
fn ranks_attend_like_one_cache() {
    for (seed, (text, cuts)) in
        [("f16", 1), ("saw-int4+sink=40", 1), ("kivi:2+window=128", 128), ("int8+centre", 1)].into_iter().enumerate()
    {
        let layers = vec![(shape(), recipe(text)); 2];
        for ranks in [2, 3, 7] {
            let acts = random_acts(seed as u64 * 10 + ranks as u64, 14, cuts);
            let placement = Placement::new(ranks).unwrap();
            check(text, &layers, &acts, 5, placement);
        }
    }
}

/// Turns of several pages, and one rank alone.
#[test]
fn turns_may_be_longer() {
    let layers = [(shape(), recipe("saw-int4"))];
    for (ranks, pages) in [(2, 2), (3, 3), (1, 1)] {
        let placement = Placement::new(ranks).unwrap().with_turn(pages).unwrap();
        check("saw-int4", &layers, &random_acts(40 + pages as u64, 10, 1), 5, placement);
    }
}

/// Windows, sinks of the softmax, soft caps and images, in layers of several kinds.
#[test]
fn masks_are_positions_of_the_sequence() {
    let scored = Scoring::of(&shape()).with_sinks(&[0.5, -1.0, 2.0, f32::NEG_INFINITY]).unwrap();
    let capped = Scoring::of(&shape()).with_soft_cap(20.0).unwrap();
    let attention = LayerAttention::default;
    let kinds = [
        attention().with_window(200),
        attention().with_scoring(scored.clone()),
        attention().with_scoring(capped),
        attention().with_window(130).with_scoring(scored),
    ];
    let layers: Vec<(AttentionShape, Recipe)> =
        kinds.into_iter().map(|kind| (shape(), recipe("saw-int4").with_attention(kind))).collect();
    let decode = || (0..SEQUENCES).map(TokenRun::decode).collect::<Vec<_>>();
    let mut acts = vec![
        Act::Append(decode()), // of sequences that most ranks hold nothing of
        Act::Append(vec![TokenRun::prompt(0, 500), TokenRun::decode(2)]),
        Act::Append(vec![TokenRun::chunk(1, 129), TokenRun::prompt(0, 3)]),
    ];
    acts.extend((0..70).map(|_| Act::Append(vec![TokenRun::decode(0)])));
    acts.push(Act::Fork(0, 2));
    acts.insert(acts.len() - 1, Act::Clear(2));
    acts.push(Act::Append(decode()));
    acts.push(Act::Truncate(0, 520));
    acts.push(Act::Append(vec![TokenRun::prompt(0, 200), TokenRun::prompt(2, 130)]));
    for ranks in [2, 3] {
        check("masks", &layers, &acts, 6, Placement::new(ranks).unwrap());
    }
}

/// Queries that see images whole, and draft trees.
#[test]
fn images_and_trees_lie_on_several_ranks() {
    use kvpack::plan::TreeMask;
    let layers = [(shape(), recipe("f16"))];
    let tree = TreeMask::from_parents(&[None, Some(0), Some(0), Some(1), Some(2)]).unwrap();
    let acts = [
        Act::Append(vec![TokenRun::prompt(0, 400), TokenRun::prompt(1, 700)]),
        Act::Attend(vec![
            QueryRun::new(0, 300, Visible::spans(&[100..290, 300..310])),
            QueryRun::new(1, 5, Visible::Tree(tree)),
            QueryRun::new(2, 2, Visible::All), // a sequence without tokens
        ]),
        Act::Attend(vec![QueryRun { end: Some(333), ..QueryRun::causal(1, 200) }]),
    ];
    for ranks in [2, 3, 7] {
        check("images and trees", &layers, &acts, 7, Placement::new(ranks).unwrap());
    }
}

/// Every rank stores what its share says, and pages go with the tokens.
#[test]
fn every_rank_stores_its_share() {
    let layers = [(shape(), recipe("saw-int4+sink=40"))];
    let acts = [
        Act::Append(vec![TokenRun::prompt(0, 1000), TokenRun::chunk(1, 200)]),
        Act::Append((0..SEQUENCES).map(TokenRun::decode).collect()),
        Act::Fork(0, 2),
    ];
    let acts: Vec<Act> =
        acts.into_iter().take(2).chain([Act::Clear(2), Act::Fork(0, 2), Act::Truncate(2, 500)]).collect();
    let placement = Placement::new(3).unwrap();
    let stored = on_many(&layers, &acts, 1, placement);
    for (rank, (_, tokens)) in stored.iter().enumerate() {
        let share = placement.share(rank).unwrap();
        assert_eq!(*tokens, [1001, 201, 500].map(|length| share.tokens(length)), "rank {rank}");
    }
}

/// Formats whose ranges are those of a span have ranges for every turn, and each turn is read with its own.
#[test]
fn turns_have_ranges_of_their_own() {
    const TOKENS: usize = 900;
    let mut random = Random::new(21);
    let keys: Vec<f32> = (0..TOKENS * 2 * 64).map(|_| random.unit() * 0.1).collect();
    // Later turns hold larger values.
    let values: Vec<f32> = (0..TOKENS * 2 * 64).map(|i| random.unit() * (1 + i / (128 * TILE_TOKENS)) as f32).collect();
    let query: Vec<f32> = (0..4 * 64).map(|_| random.normal()).collect();
    let [keys, values, query] = [keys, values, query].map(CpuTensor::F32);
    let (layout, runs) = (RowLayout::token_major(TOKENS, &shape()), [TokenRun::prompt(0, TOKENS)]);

    let mut one = ModelCache::new(&Cpu::new(), &[(shape(), recipe("f16"))], 1).unwrap();
    block_on(one.reserve_for_append(&runs)).unwrap();
    one.begin_append(&runs).unwrap();
    block_on(one.store(0, layout, &keys, &values)).unwrap();
    one.commit().unwrap();
    one.begin_attend(&[QueryRun::decode(0)]).unwrap();
    let exact = block_on(one.attend(0, &query, ElementType::F32)).unwrap();
    let exact: Vec<f64> = exact.to_f32().into_iter().map(f64::from).collect();

    let layers = [(shape(), Recipe::calibquant(Bits::Eight))];
    let outputs = on_ranks(2, LONG, |transport| {
        let mut rank = rank(transport, &layers, Placement::new(2).unwrap());
        block_on(rank.reserve_for_append(&runs)).unwrap();
        rank.begin_append(&runs).unwrap();
        block_on(rank.store(0, layout, &keys, &values)).unwrap();
        rank.commit().unwrap();
        rank.begin_attend(&[QueryRun::decode(0)]).unwrap();
        let output = block_on(rank.attend(0, &query, ElementType::F32)).unwrap().to_f32();
        rank.commit().unwrap();
        output
    });
    let error = nmse(&outputs[0], &exact);
    assert!(error < 1e-4, "{error:.1e}");
}

/// Prefixes are kept and entered on every rank alike, and not where tokens of a rank are gone.
#[test]
fn prefixes_lie_on_several_ranks() {
    let layers = [(shape(), recipe("saw-int4"))];
    let found = on_ranks(3, LONG, |transport| {
        let mut rank = rank(transport, &layers, Placement::new(3).unwrap());
        let mut prefixes = PrefixCache::new(2..3);
        let tokens: Vec<u32> = (0..700).collect();
        let runs = [TokenRun::prompt(0, 700)];
        let rows = CpuTensor::F32(vec![0.5; 700 * 128]);
        block_on(rank.reserve_for_append(&runs)).unwrap();
        rank.begin_append(&runs).unwrap();
        block_on(rank.store(0, RowLayout::token_major(700, &shape()), &rows, &rows)).unwrap();
        rank.commit().unwrap();
        let kept = prefixes.keep(rank.cache_mut(), &tokens, 0).unwrap();
        let entered = prefixes.enter(rank.cache_mut(), &tokens[..600], 1).unwrap();
        let stored = rank.cache().tokens(0, 1).unwrap();
        prefixes.clear(rank.cache_mut()).unwrap();
        rank.forget(0, TokenRange::new(0, 384).unwrap()).unwrap();
        (kept, entered, stored, prefixes.keep(rank.cache_mut(), &tokens, 0).unwrap())
    });
    assert_eq!(found, [(640, 512, 256, 0), (640, 512, 128, 0), (640, 512, 128, 0)]);
}
