//! Layers with a sliding window give back the pages behind it, and attend as if they held all.

use kvpack::Error;
use kvpack::backend::Device;
use kvpack::cache::{ModelCache, Recipe, TokenRun};
use kvpack::cpu::{Cpu, nmse};
use kvpack::plan::{ElementType, LayerAttention, QueryRun, RowLayout, Visible};
use pollster::block_on;

use any_backend::model_steps;
use any_backend::random_rows::Random;

const LEFT: usize = 200;

/// A cache of a layer with a window, and one that holds everything and is asked for the same window.
struct Pair {
    windowed: ModelCache<Cpu>,
    whole: ModelCache<Cpu>,
    random: Random,
}

impl Pair {
    fn new(recipe: &Recipe) -> Self {
        let local = recipe.clone().with_attention(LayerAttention::default().with_window(LEFT));
        let cache =
            |recipe: &Recipe| ModelCache::new(&Cpu::new(), &[(model_steps::shape(), recipe.clone())], 2).unwrap();
        Self { windowed: cache(&local), whole: cache(recipe), random: Random::new(3) }
    }

    /// Appends to both. The outputs are the same.
    fn step(&mut self, runs: &[TokenRun]) {
        let shape = model_steps::shape();
        let tokens: usize = runs.iter().map(TokenRun::tokens).sum();
        let mut rows = |heads: usize| -> Vec<f32> { (0..tokens * heads * 64).map(|_| self.random.normal()).collect() };
        let [keys, values, queries] =
            [2, 2, 4].map(|heads| block_on(Cpu::new().upload(rows(heads)[..].into())).unwrap());
        let asked = |run: &TokenRun| QueryRun::new(run.sequence(), run.tokens(), Visible::Window { left: LEFT });
        let asked: Vec<QueryRun> = runs.iter().map(asked).collect();
        let mut outputs = Vec::new();
        for cache in [&mut self.windowed, &mut self.whole] {
            block_on(cache.reserve_for_append(runs)).unwrap();
            cache.begin_append_seeing(runs, &asked).unwrap();
            block_on(cache.store(0, RowLayout::token_major(tokens, &shape), &keys, &values)).unwrap();
            outputs.push(block_on(cache.attend(0, &queries, ElementType::F32)).unwrap().to_f32());
            cache.commit().unwrap();
        }
        let whole: Vec<f64> = outputs[1].iter().map(|&x| x.into()).collect();
        let error = nmse(&outputs[0], &whole);
        assert!(error < 1e-11, "{runs:?} at {:?}: {error:.1e}", self.windowed.length(0));
    }

    fn pages(&self) -> usize {
        self.windowed.pages_of(0, 0).unwrap().iter().map(|pages| pages.own + pages.shared).sum()
    }
}

/// Whatever the format, a sequence that grows holds the pages of its window and two more, and those of its newest run.
#[test]
fn pages_behind_the_window_are_given_back() {
    for recipe in ["f16", "int8", "kivi:2", "calibquant:2", "saw-int4+sink=40+centre"] {
        let mut pair = Pair::new(&model_steps::recipe(recipe));
        pair.step(&[TokenRun::prompt(0, 300), TokenRun::decode(1)]);
        for part in 0..8 {
            pair.step(&[TokenRun::decode(1), TokenRun::prompt(0, 64 + part)]);
            (0..20).for_each(|_| pair.step(&[TokenRun::decode(0)]));
            let (pages, most) = (pair.pages(), (LEFT + 128usize).div_ceil(128) + 4);
            assert!(pages <= most, "{recipe}: {pages} pages at {}", pair.windowed.length(0).unwrap());
        }
        assert!(pair.whole.tokens(0, 0).unwrap() > 700 && pair.windowed.tokens(0, 0).unwrap() < 500, "{recipe}");
        pair.windowed.clear(0).unwrap();
        pair.windowed.clear(1).unwrap();
        assert_eq!(pair.windowed.memory().in_use_bytes(), 0, "{recipe}");
    }
}

/// An abandoned step gives nothing back, a fork keeps what it shares, and up to 128 tokens can be taken back.
#[test]
fn what_is_given_back_is_never_asked_for() {
    let mut pair = Pair::new(&Recipe::f16());
    pair.step(&[TokenRun::prompt(0, 640)]);
    let held = pair.pages();
    pair.windowed.begin_append(&[TokenRun::decode(0)]).unwrap();
    pair.windowed.abandon();
    assert_eq!(pair.pages(), held, "an abandoned step");
    pair.windowed.fork(0, 1).unwrap();
    pair.whole.fork(0, 1).unwrap();
    (0..128).for_each(|_| pair.step(&[TokenRun::decode(0)]));
    assert!(pair.pages() < held);
    pair.step(&[TokenRun::decode(1)]);
    for cache in [&mut pair.windowed, &mut pair.whole] {
        cache.truncate(0, 640).unwrap();
    }
    pair.step(&[TokenRun::decode(0), TokenRun::decode(1)]);
    let refused = pair.windowed.truncate(0, 300);
    assert!(matches!(&refused, Err(Error::Plan { reason, .. }) if reason.contains("sliding window")), "{refused:?}");
    assert_eq!(pair.windowed.check_truncate(0, 300), refused);
    assert_eq!((pair.windowed.check_truncate(0, 0), pair.windowed.length(0)), (Ok(()), Ok(641)));
    let earlier = QueryRun { end: Some(350), ..QueryRun::causal(0, 1) };
    let refused = pair.windowed.begin_attend(&[earlier]);
    assert!(matches!(&refused, Err(Error::Plan { reason, .. }) if reason.contains("sliding window")), "{refused:?}");
    pair.step(&[TokenRun::decode(0)]);
    pair.windowed.truncate(0, 0).unwrap();
    pair.whole.truncate(0, 0).unwrap();
    pair.step(&[TokenRun::prompt(0, 30)]);
}

/// What the window of the newest query begins with is the first that is held: it is seen, and a sequence can be cut down
/// to it.
#[test]
fn the_first_held_position_can_be_asked_for() {
    let local = Recipe::f16().with_attention(LayerAttention::default().with_window(10));
    let mut cache = ModelCache::new(&Cpu::new(), &[(model_steps::shape(), local)], 1).unwrap();
    let append = |cache: &mut ModelCache<Cpu>, tokens: usize| {
        let runs = [TokenRun::chunk(0, tokens)];
        let rows = block_on(Cpu::new().upload(vec![0.5f32; tokens * 2 * 64][..].into())).unwrap();
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        let layout = RowLayout::token_major(tokens, &model_steps::shape());
        block_on(cache.store(0, layout, &rows, &rows)).unwrap();
        cache.commit().unwrap();
    };
    append(&mut cache, 300);
    append(&mut cache, 1);
    assert_eq!(cache.tokens(0, 0), Ok(301 - 128), "a page is released");
    let asked = |cache: &mut ModelCache<Cpu>, end: usize| {
        let asked = cache.begin_attend(&[QueryRun { end: Some(end), ..QueryRun::causal(0, 1) }]);
        cache.abandon();
        asked.is_ok()
    };
    // The query at position 138 sees those from 128 on.
    assert_eq!((asked(&mut cache, 139), asked(&mut cache, 138)), (true, false));
    assert!(cache.truncate(0, 137).is_err());
    cache.truncate(0, 138).unwrap();
}
