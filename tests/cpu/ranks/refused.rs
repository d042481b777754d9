//! What a rank's cache cannot do, and says.

use kvpack::backend::TensorRows;
use kvpack::cache::{DenseLayer, MeasuredQueries, ModelCache, PromptSpan, Recipe, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, LayerAttention, QueryRun, RowLayout, Scoring, TokenRange};
use kvpack::policy::{LayerSelection, Policy, Selection, Spans};
use kvpack::ranks::{ContextParallel, HeadParallel, Placement, ThreadTransport};
use kvpack::{AttentionShape, Bits, Calibration, Error};
use pollster::block_on;

use super::script::shape;
use super::{LONG, failed, on_ranks};
use any_backend::model_steps::recipe;

fn cache() -> ModelCache<Cpu> {
    let share = Placement::new(2).unwrap().share(1).unwrap();
    ModelCache::new(&Cpu::new(), &[(shape(), recipe("saw-int4"))], 2).unwrap().with_share(share).unwrap()
}

/// What needs all tokens in one place is refused by name, and nothing has changed.
#[test]
fn calls_over_whole_sequences_are_refused() {
    let mut cache = cache();
    let refused = |error: Error| match error {
        Error::Unsupported { what, hint } => {
            assert!(what.contains("rank 1 of 2") && hint.contains("TokenRun::prompt"), "{what}: {hint}");
        }
        other => panic!("{other}"),
    };
    let spans = [PromptSpan::f16(TokenRange::new(0, 10).unwrap())];
    block_on(cache.reserve_for_prefill(&spans)).unwrap();
    refused(cache.begin_prefill(0, 10, &spans).unwrap_err());
    let rows = RowLayout::token_major(10, &shape());
    let dense = || DenseLayer { rows, keys: CpuTensor::F32(vec![0.1; 1280]), values: CpuTensor::F32(vec![0.1; 1280]) };
    let all = Selection::new(vec![LayerSelection::all(10, 2).unwrap()]).unwrap();
    refused(block_on(cache.keep(0, vec![dense()], &all)).unwrap_err());
    let policy = Policy::h2o(0.5).unwrap();
    let prompt = cache.observe(policy.clone(), Spans::new(10, &[]).unwrap()).unwrap();
    refused(block_on(cache.compress(0, &prompt)).unwrap_err());
    refused(block_on(cache.compress_again(0, &policy, &Spans::new(10, &[]).unwrap(), &[])).unwrap_err());
    assert_eq!((cache.length(0).unwrap(), cache.memory().in_use_bytes()), (0, 0));
}

#[test]
fn a_share_is_chosen_before_the_first_token() {
    let share = Placement::new(2).unwrap().share(0).unwrap();
    let new = |recipe: Recipe| ModelCache::new(&Cpu::new(), &[(shape(), recipe)], 2).unwrap();
    let calibrated = Recipe::calibquant(Bits::Two).with_calibration(Calibration::new(0.0, 3.0).unwrap());
    let refused = new(calibrated).with_share(share).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported { what, .. } if what.contains("calibrated")), "{refused}");

    let mut held = new(Recipe::f16());
    block_on(held.reserve_for_append(&[TokenRun::decode(1)])).unwrap();
    held.begin_append(&[TokenRun::decode(1)]).unwrap();
    let row = CpuTensor::F32(vec![0.5; 128]);
    block_on(held.store(0, RowLayout::token_major(1, &shape()), &row, &row)).unwrap();
    held.commit().unwrap();
    assert!(held.share().is_none());
    let refused = held.with_share(share).unwrap_err();
    assert!(matches!(&refused, Error::Plan { reason, .. } if reason.contains("sequence 1")), "{refused}");
}

/// A sequence that another rank swapped out is not swapped in.
#[test]
fn ranks_do_not_take_the_sequences_of_others() {
    let placement = Placement::new(2).unwrap();
    let swapped: Vec<_> = (0..2)
        .map(|rank| {
            let cache = ModelCache::new(&Cpu::new(), &[(shape(), recipe("f16"))], 2).unwrap();
            let mut cache = cache.with_share(placement.share(rank).unwrap()).unwrap();
            let runs = [TokenRun::chunk(0, 300)];
            block_on(cache.reserve_for_append(&runs)).unwrap();
            cache.begin_append(&runs).unwrap();
            let rows = CpuTensor::F32(vec![0.5; 300 * 128]);
            block_on(cache.store(0, RowLayout::token_major(300, &shape()), &rows, &rows)).unwrap();
            cache.commit().unwrap();
            let swapped = block_on(cache.swap_out(0)).unwrap();
            (cache, swapped)
        })
        .collect();
    let [(mut first, of_first), (_, of_second)] = <[_; 2]>::try_from(swapped).ok().unwrap();
    let refused = block_on(first.swap_in(0, &of_second)).unwrap_err();
    assert!(matches!(&refused, Error::Plan { reason, .. } if reason.contains("rank")), "{refused}");
    block_on(first.swap_in(0, &of_first)).unwrap();
    assert_eq!((first.length(0).unwrap(), first.tokens(0, 0).unwrap()), (300, 172));
}

#[test]
fn ranks_of_other_placements_do_not_begin() {
    let transport = ThreadTransport::connect(vec![Cpu::new()], LONG).unwrap().remove(0);
    let layers = [(shape(), Recipe::f16())];
    let refused = block_on(ContextParallel::new(transport, &layers, 1, Placement::new(2).unwrap())).unwrap_err();
    assert!(matches!(refused, Error::Plan { what: "ranks", .. }), "{refused}");

    // A cache that one rank cannot make is no cache on all.
    let refused = on_ranks(2, LONG, |transport| {
        use kvpack::ranks::Transport;
        let sequences = 1 - transport.rank();
        let placement = Placement::new(2).unwrap();
        block_on(ContextParallel::new(transport, &layers, sequences, placement)).map(drop)
    });
    assert!(matches!(&refused[0], Err(Error::Plan { reason, .. }) if reason.contains("[1]")), "{refused:?}");
    assert!(matches!(&refused[1], Err(Error::Plan { what: "cache", .. })), "{refused:?}");
}

/// Calls of the same sizes that differ between ranks: all learn of it, whatever the transport compares.
#[test]
fn ranks_that_call_something_else_are_named() {
    type Call = fn(&mut ContextParallel<ThreadTransport>) -> Result<(), Error>;
    let reserve: Call = |ranks| block_on(ranks.reserve_for_append(&[TokenRun::decode(0)]));
    let pack: Call = |ranks| block_on(ranks.pack_windows(0));
    let appended: Call = |ranks| block_on(ranks.appended(0)).map(drop);
    for (calls, named) in [
        ([reserve, pack], ["rank 0 calls reserve_for_append", "rank 1 pack_windows"]),
        ([appended, reserve], ["rank 0 calls appended", "rank 1 reserve_for_append"]),
    ] {
        let told = on_ranks(2, LONG, |transport| {
            let layers = [(shape(), recipe("saw-int4"))];
            let mut ranks = block_on(ContextParallel::new(transport, &layers, 1, Placement::new(2).unwrap())).unwrap();
            let call = calls[ranks.rank()];
            call(&mut ranks)
        });
        for told in told {
            assert_eq!(failed(&told), [1]);
            let text = told.unwrap_err().to_string();
            assert!(named.iter().all(|named| text.contains(named)), "{text}");
        }
    }
}

/// Where policies cannot measure a layer, every rank says so, and none waits for another.
#[test]
fn what_statistics_lack_is_refused_by_all_ranks() {
    let scoring = Scoring::of(&shape());
    let scorings = [scoring.clone().with_sinks(&[0.5; 4]).unwrap(), scoring.with_soft_cap(30.0).unwrap()];
    for scoring in scorings {
        let recipe = Recipe::f16().with_attention(LayerAttention::default().with_scoring(scoring));
        let told = on_ranks(2, LONG, |transport| {
            block_on(async {
                let placement = Placement::new(2)?;
                let mut ranks = ContextParallel::new(transport, &[(shape(), recipe.clone())], 1, placement).await?;
                let mut prompt = ranks.observe(Policy::h2o(0.5)?, Spans::new(10, &[])?)?;
                let tensor = |heads: usize| CpuTensor::F32(vec![0.1; 10 * heads * 64]);
                let dense =
                    DenseLayer { rows: RowLayout::token_major(10, &shape()), keys: tensor(2), values: tensor(2) };
                let of_queries = RowLayout::token_major(10, &AttentionShape::new(4, 4, 64)?);
                let queries = TensorRows { tensor: &tensor(4), layout: of_queries };
                let queries = MeasuredQueries { queries, known_lse: None };
                let refused = ranks.observe_layer(&mut prompt, 0, dense, Some(queries)).await;
                // The ranks are still in step.
                let runs = [TokenRun::decode(0)];
                ranks.reserve_for_append(&runs).await?;
                ranks.begin_append(&runs)?;
                let row = CpuTensor::F32(vec![0.5; 128]);
                ranks.store(0, RowLayout::token_major(1, &shape()), &row, &row).await?;
                ranks.attend(0, &CpuTensor::F32(vec![0.5; 256]), ElementType::F32).await?;
                ranks.commit().map(|()| refused)
            })
        });
        for told in told {
            assert!(matches!(told, Ok(Err(Error::Unsupported { .. }))), "{told:?}");
        }
    }
}

/// Ranks that hold none of the tokens that others gathered refuse what these refuse: cuts and queries among them.
#[test]
fn ranks_without_a_kept_token_stay_alike() {
    let told = on_ranks(2, LONG, |transport| {
        block_on(async {
            let layers = [(shape(), Recipe::f16())];
            let mut ranks = ContextParallel::new(transport, &layers, 2, Placement::new(2)?).await?;
            let tensor = || CpuTensor::F32((0..200 * 128).map(|i| (i as f32 * 0.3).sin()).collect());
            let dense = DenseLayer { rows: RowLayout::token_major(200, &shape()), keys: tensor(), values: tensor() };
            let kept = || (20..80).collect::<Vec<u32>>();
            let selection = Selection::new(vec![LayerSelection::new(200, vec![kept(), kept()])?])?;
            ranks.keep(0, vec![dense], &selection).await?;
            let held = ranks.cache().tokens(0, 0)?;
            ranks.fork(0, 1)?;
            let cut = [0, 1].map(|sequence| ranks.truncate(sequence, 150));
            let earlier = ranks.begin_attend(&[QueryRun { end: Some(150), ..QueryRun::causal(1, 1) }]);
            // All of it, on both.
            ranks.begin_attend(&[QueryRun::decode(1)])?;
            ranks.attend(0, &CpuTensor::F32(vec![0.5; 256]), ElementType::F32).await?;
            ranks.commit()?;
            ranks.truncate(1, 200)?;
            let begun = ranks.begin_attend(&[QueryRun { end: Some(200), ..QueryRun::causal(1, 1) }]);
            ranks.abandon();
            ranks.truncate(0, 0)?;
            Ok::<_, Error>((held, cut, earlier, begun, ranks.cache().length(0)?))
        })
    });
    for (rank, told) in told.into_iter().enumerate() {
        let (held, cut, earlier, begun, length) = told.unwrap();
        assert_eq!((held, length, begun), ([60, 0][rank], 0, Ok(())), "rank {rank}");
        assert!(cut.iter().all(|cut| matches!(cut, Err(Error::Plan { .. }))), "rank {rank}: {cut:?}");
        assert!(matches!(earlier, Err(Error::Unsupported { .. })), "rank {rank}: {earlier:?}");
    }
}

/// KV heads by rank: the outputs of all ranks together are those of the layer.
#[test]
fn heads_by_rank_need_no_exchange() {
    use any_backend::random_rows::Random;
    use kvpack::backend::Device;
    use kvpack::plan::QueryLayout;
    let whole = AttentionShape::new(8, 4, 64).unwrap();
    let mut random = Random::new(5);
    let mut rows = |n: usize| -> Vec<f32> { (0..n).map(|_| random.normal()).collect() };
    let (tokens, queries) = (300, rows(2 * 8 * 64));
    let (keys, values) = (rows(tokens * 4 * 64), rows(tokens * 4 * 64));
    let attend = |shape: AttentionShape, layout: RowLayout, keys: &[f32], values: &[f32], queries: &CpuTensor| {
        let mut cache = ModelCache::new(&Cpu::new(), &[(shape, recipe("saw-int4"))], 1).unwrap();
        let runs = [TokenRun::chunk(0, tokens)];
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        let [keys, values] = [keys, values].map(|x| block_on(Cpu::new().upload(x.into())).unwrap());
        block_on(cache.store(0, layout, &keys, &values)).unwrap();
        cache.commit().unwrap();
        cache.begin_attend(&[QueryRun::causal(0, 2)]).unwrap();
        block_on(cache.attend(0, queries, ElementType::F32)).unwrap()
    };
    let layout = RowLayout::token_major(tokens, &whole);
    let all = CpuTensor::F32(queries);
    let expected = attend(whole, layout, &keys, &values, &all);
    for ranks in [1, 2, 4] {
        let mut output = CpuTensor::F32(vec![f32::NAN; 2 * 8 * 64]);
        for rank in 0..ranks {
            let of = HeadParallel::new(whole, rank, ranks).unwrap();
            let (first, shape) = (of.first_row(&layout), of.shape());
            let place = of.queries(QueryLayout::dense(&whole));
            let queries = all.take_rows(place, 2, &shape).unwrap();
            let part = attend(shape, layout, &keys[first..], &values[first..], &queries);
            output.put_rows(place, &part, &shape).unwrap();
        }
        assert_eq!(output, expected, "{ranks} ranks");
    }
    for (rank, ranks) in [(0, 3), (2, 2), (0, 8), (0, 0)] {
        assert!(matches!(HeadParallel::new(whole, rank, ranks), Err(Error::Plan { .. })), "{rank} of {ranks}");
    }
}
