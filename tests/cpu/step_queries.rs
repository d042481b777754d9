//! What the queries of a step see, where that is not the tokens up to their own.

use kvpack::cache::{KvCache, ModelCache, Recipe, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, QueryRun, RowLayout, Visible};
use kvpack::{AttentionShape, Error};
use pollster::block_on;

use any_backend::random_rows::Random;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

fn rows(random: &mut Random, rows: usize, heads: usize) -> CpuTensor {
    CpuTensor::F32((0..rows * heads * 64).map(|_| random.normal()).collect())
}

/// A step sees what the same runs of queries see in a cache of one layer that stored the same tokens before.
#[test]
fn steps_see_what_they_are_told() {
    let mut random = Random::new(2);
    let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), Recipe::f16())], 2).unwrap();
    let mut single = KvCache::new(Cpu::new(), shape(), 2, Recipe::f16()).unwrap();
    let spans = |start: usize| Visible::spans(std::slice::from_ref(&(start + 2..start + 6)));
    let image = |start: usize| QueryRun::new(0, 9, spans(start));
    for (runs, queries) in [
        (vec![TokenRun::chunk(0, 150)], vec![QueryRun::new(0, 150, Visible::All)]),
        (vec![TokenRun::chunk(0, 9), TokenRun::chunk(1, 4)], vec![image(150), QueryRun::causal(1, 4)]),
    ] {
        let tokens = runs.iter().map(TokenRun::tokens).sum();
        let (keys, values, asked) =
            (rows(&mut random, tokens, 2), rows(&mut random, tokens, 2), rows(&mut random, tokens, 4));
        let layout = RowLayout::token_major(tokens, &shape());
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append_seeing(&runs, &queries).unwrap();
        block_on(cache.store(0, layout, &keys, &values)).unwrap();
        let output = block_on(cache.attend(0, &asked, ElementType::F32)).unwrap();
        cache.commit().unwrap();

        let mut first = 0;
        for run in &runs {
            let part = |of: &CpuTensor| CpuTensor::F32(of.to_f32()[first * 128..][..run.tokens() * 128].to_vec());
            let layout = RowLayout::token_major(run.tokens(), &shape());
            block_on(single.extend(run.sequence(), layout, &part(&keys), &part(&values))).unwrap();
            first += run.tokens();
        }
        let expected = block_on(single.attend_runs(&queries, &asked, ElementType::F32)).unwrap();
        assert_eq!(output.to_f32(), expected.to_f32());

        // The same queries once more, in a step that stores nothing.
        cache.begin_attend(&queries).unwrap();
        assert_eq!(block_on(cache.attend(0, &asked, ElementType::F32)).unwrap().to_f32(), expected.to_f32());
        cache.abandon();
        assert_eq!(cache.length(0), single.length(0));
    }
}

#[test]
fn queries_that_do_not_fit_are_refused() {
    let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), Recipe::f16())], 2).unwrap();
    let run = TokenRun::chunk(0, 3);
    block_on(cache.reserve_for_append(&[run])).unwrap();
    let before = cache.memory();
    let of = |queries: Vec<QueryRun>| queries;
    for queries in [of(vec![]), of(vec![QueryRun::causal(0, 2)]), of(vec![QueryRun::causal(1, 3)])] {
        assert!(matches!(cache.begin_append_seeing(&[run], &queries), Err(Error::Plan { .. })), "{queries:?}");
        assert_eq!(cache.memory(), before);
    }
    assert!(matches!(cache.begin_attend(&[QueryRun::decode(7)]), Err(Error::Sequence { .. })));
    // A step that attends stores nothing, and no other begins beside it.
    cache.begin_append(&[run]).unwrap();
    assert!(matches!(cache.begin_attend(&[QueryRun::decode(0)]), Err(Error::Plan { .. })), "a step is open");
    let zeros = CpuTensor::F32(vec![0.0; 3 * 128]);
    block_on(cache.store(0, RowLayout::token_major(3, &shape()), &zeros, &zeros)).unwrap();
    cache.commit().unwrap();
    cache.begin_attend(&[QueryRun::causal(0, 3)]).unwrap();
    let stored = block_on(cache.store(0, RowLayout::token_major(3, &shape()), &zeros, &zeros));
    assert!(matches!(stored, Err(Error::Plan { .. })), "{stored:?}");
    cache.commit().unwrap();
    assert!(cache.commit().is_err(), "it is closed");
    assert_eq!(cache.length(0), Ok(3));
}
