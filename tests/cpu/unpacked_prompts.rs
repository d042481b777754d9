//! Prompts of policies and mixtures in parts, on the CPU.

use kvpack::Error;
use kvpack::SegmentFormat;
use kvpack::backend::TensorRows;
use kvpack::cache::{ModelCache, PartQueries, PromptSpan, Recipe, StoreId, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, LayerAttention, QueryRun, RowLayout, TokenRange, TreeMask, Visible};
use kvpack::policy::{MeasuredRows, Policy, Spans};
use pollster::block_on;

use any_backend::unpacked_prompts::{Calls, check_mixture, check_policy, of_queries, pairs, shape};

#[test]
fn policies_keep_of_parts_what_they_keep_of_the_whole() {
    for (number, (name, policy, recipe)) in pairs(true).iter().enumerate() {
        let knows = number % 2 == 0;
        check_policy(&Cpu::new(), &mut Calls { knows }, (name, policy, recipe), 1e-6);
    }
}

#[test]
fn mixtures_pack_parts_as_the_whole() {
    for recipe in ["cocktail", "mix=f16:0.2,calibquant:4:0.3,saw-int4"] {
        check_mixture(&Cpu::new(), &mut Calls { knows: false }, recipe, 1e-6);
    }
}

/// A step of one layer that appends a part of a prompt.
fn append(cache: &mut ModelCache<Cpu>, sequence: usize, tokens: usize) {
    let runs = [TokenRun::unpacked(sequence, tokens)];
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    let keys = CpuTensor::F32((0..tokens * 128).map(|i| (i as f32 * 0.3).sin()).collect());
    block_on(cache.store(0, RowLayout::token_major(tokens, &shape()), &keys, &keys)).unwrap();
}

fn observe(
    prompt: &mut kvpack::cache::ObservedParts<Cpu>,
    cache: &ModelCache<Cpu>,
    tokens: usize,
) -> kvpack::Result<()> {
    let queries = CpuTensor::F32((0..tokens * 256).map(|i| (i as f32 * 0.7).cos()).collect());
    let queries = TensorRows { tensor: &queries, layout: of_queries(tokens) };
    prompt.observe(cache, 0, PartQueries { queries, log_sum_exps: None })
}

/// What is missing, measured twice, too long or of another prompt is refused, and changes nothing.
#[test]
fn parts_that_do_not_fit_are_refused() {
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), recipe)], 3).unwrap();
    let begin = |cache: &ModelCache<Cpu>, tokens| {
        block_on(cache.observe_parts(0, Policy::h2o(0.5).unwrap(), Spans::new(tokens, &[]).unwrap())).unwrap()
    };
    let mut prompt = begin(&cache, 90);
    assert!(matches!(cache.compress_parts(&mut prompt), Err(Error::Plan { .. })), "nothing is appended");
    assert!(matches!(cache.pack_parts(0, &[]), Err(Error::Plan { .. })), "nothing is appended");
    append(&mut cache, 0, 60);
    assert!(matches!(cache.compress_parts(&mut prompt), Err(Error::Plan { .. })), "a step is open");
    observe(&mut prompt, &cache, 60).unwrap();
    assert!(matches!(observe(&mut prompt, &cache, 60), Err(Error::Selection { .. })), "measured twice");
    assert!(matches!(observe(&mut begin(&cache, 50), &cache, 60), Err(Error::Plan { .. })), "begins elsewhere");
    cache.commit().unwrap();
    assert!(matches!(cache.compress_parts(&mut prompt), Err(Error::Plan { .. })), "a part is missing");
    let before = cache.memory().in_use_bytes();
    append(&mut cache, 0, 31);
    assert!(matches!(observe(&mut prompt, &cache, 31), Err(Error::Selection { .. })), "the prompt has 90 tokens");
    cache.abandon();
    assert_eq!(cache.memory().in_use_bytes(), before);
    append(&mut cache, 0, 30);
    cache.commit().unwrap();
    assert!(matches!(cache.compress_parts(&mut prompt), Err(Error::Selection { .. })), "30 rows are not measured");
    // Forked, truncated and swapped, a prompt stays what it is.
    cache.fork(0, 1).unwrap();
    let swapped = block_on(cache.swap_out(1)).unwrap();
    block_on(cache.swap_in(2, &swapped)).unwrap();
    cache.truncate(0, 60).unwrap();
    append(&mut cache, 0, 30);
    observe(&mut prompt, &cache, 30).unwrap();
    cache.commit().unwrap();
    block_on(cache.reserve_for_parts(&prompt)).unwrap();
    cache.compress_parts(&mut prompt).unwrap();
    assert_eq!((cache.tokens(0, 0), cache.tokens(0, 2), cache.length(0)), (Ok(45), Ok(90), Ok(90)));
    (0..3).for_each(|sequence| cache.clear(sequence).unwrap());
    assert_eq!(cache.memory().in_use_bytes(), 0);
}

/// Statistics are causal. A measured query that sees anything else in its step is refused, and nothing is measured.
#[test]
fn measured_queries_are_causal() {
    let image = TokenRange::new(10, 50).unwrap();
    let seen_by = |policy: Policy, visible: &Visible| {
        let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), Recipe::f16())], 1).unwrap();
        let spans = Spans::new(60, &[image]).unwrap();
        let mut prompt = block_on(cache.observe_parts(0, policy, spans)).unwrap();
        let run = [TokenRun::unpacked(0, 60)];
        let begin = |cache: &mut ModelCache<Cpu>, visible: Visible| {
            block_on(cache.reserve_for_append(&run)).unwrap();
            cache.begin_append_seeing(&run, &[QueryRun::new(0, 60, visible)]).unwrap();
            let keys = CpuTensor::F32((0..60 * 128).map(|i| (i as f32 * 0.3).sin()).collect());
            block_on(cache.store(0, RowLayout::token_major(60, &shape()), &keys, &keys)).unwrap();
        };
        begin(&mut cache, visible.clone());
        let observed = observe(&mut prompt, &cache, 60);
        if observed.is_err() {
            // The same prompt is measured once its step is causal.
            cache.abandon();
            begin(&mut cache, Visible::Causal);
            observe(&mut prompt, &cache, 60).unwrap();
        }
        cache.commit().unwrap();
        observed
    };
    let seeing = |span: std::ops::Range<usize>| Visible::spans(std::slice::from_ref(&span));
    let tree = |parent: fn(usize) -> usize| {
        let parents: Vec<Option<usize>> = (0..60).map(|node: usize| (node > 0).then(|| parent(node))).collect();
        Visible::Tree(TreeMask::from_parents(&parents).unwrap())
    };
    let (h2o, vlcache) = (|| Policy::h2o(0.5).unwrap(), || Policy::vlcache(0.5).unwrap());
    let refused = [
        (h2o(), seeing(10..50), "position 10"),
        (h2o(), seeing(10..12), "position 10"),
        (h2o(), Visible::All, "position 0"),
        (h2o(), tree(|node| node / 2), "position 3"),
        (h2o(), Visible::Window { left: 55 }, "position 56"),
        (vlcache(), seeing(10..52), "position 50"),
        (vlcache(), Visible::All, "position 50"),
    ];
    for (policy, visible, place) in refused {
        match seen_by(policy, &visible) {
            Err(Error::Unsupported { what, .. }) => assert!(what.contains(place), "{visible:?}: {what}"),
            other => panic!("{visible:?}: {other:?}"),
        }
    }
    let allowed = [
        (vlcache(), seeing(10..50)),
        (h2o(), Visible::Causal),
        (h2o(), seeing(10..11)),
        (h2o(), tree(|node| node - 1)),
        (Policy::streaming(4, 8), seeing(10..50)),
        (Policy { rows: MeasuredRows::Last(1), ..h2o() }, Visible::All),
    ];
    for (policy, visible) in allowed {
        seen_by(policy, &visible).unwrap_or_else(|error| panic!("{visible:?}: {error}"));
    }
}

/// Without room for what is kept nothing has changed.
#[test]
fn parts_without_room_stay() {
    use kvpack::cache::{Budget, Growth, StoreRoom};
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    let cache = ModelCache::new(&Cpu::new(), &[(shape(), recipe)], 1).unwrap();
    let mut cache = cache.with_budget(Budget::unlimited().growing(Growth::None));
    let room = |pages| StoreRoom { pages, spans: 1 };
    block_on(cache.reserve(&[room(2), room(0)])).unwrap();
    let mut prompt =
        block_on(cache.observe_parts(0, Policy::snapkv(0.5).unwrap(), Spans::new(200, &[]).unwrap())).unwrap();
    append(&mut cache, 0, 200);
    observe(&mut prompt, &cache, 200).unwrap();
    cache.commit().unwrap();
    assert!(matches!(cache.compress_parts(&mut prompt), Err(Error::NoRoom { .. })));
    assert_eq!((cache.tokens(0, 0), cache.free_room(0).unwrap()[0].pages), (Ok(200), 0));
    block_on(cache.reserve(&[room(0), room(1)])).unwrap();
    cache.compress_parts(&mut prompt).unwrap();
    assert_eq!((cache.tokens(0, 0), cache.free_room(0).unwrap()[0].pages), (Ok(100), 2));
}

/// An element that is not finite is stored as zero, and flagged.
#[test]
fn parts_flag_what_is_not_finite() {
    let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), Recipe::pack_all(SegmentFormat::saw_int4()))], 1).unwrap();
    let runs = [TokenRun::unpacked(0, 40)];
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    let mut keys = vec![0.5; 40 * 128];
    // Infinite, and larger than rotated rows may be.
    (keys[7 * 128], keys[9 * 128 + 1]) = (f32::INFINITY, 9000.0);
    let keys = CpuTensor::F32(keys);
    block_on(cache.store(0, RowLayout::token_major(40, &shape()), &keys, &keys)).unwrap();
    cache.commit().unwrap();
    let flagged = block_on(cache.non_finite()).unwrap();
    assert_eq!(flagged.iter().map(|of| of.token).collect::<Vec<_>>(), [7, 7]);
    let rows = cache.dequantize(0, 0).unwrap().remove(0).keys.to_f32();
    assert_eq!((rows[7 * 64], rows[9 * 64 + 1]), (0.0, 0.0));
}

/// Opens a step of one layer, stores rows of it, attends and commits: the output.
fn attended(cache: &mut ModelCache<Cpu>, run: TokenRun, seed: usize) -> Vec<f32> {
    let (tokens, runs) = (run.tokens(), [run]);
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    let rows = |heads: usize, step: f32| {
        CpuTensor::F32(
            (0..tokens * heads * 64).map(|i| half::f16::from_f32(((i + seed) as f32 * step).sin()).into()).collect(),
        )
    };
    let (keys, values, queries) = (rows(2, 0.31), rows(2, 0.17), rows(4, 0.7));
    block_on(cache.store(0, RowLayout::token_major(tokens, &shape()), &keys, &values)).unwrap();
    let output = block_on(cache.attend(0, &queries, ElementType::F32)).unwrap().to_f32();
    cache.commit().unwrap();
    output
}

/// In a layer with a sliding window the parts of a prompt are seen within the window, all of their pages stay until it is
/// said what is stored of them, and then those behind the window go: bit for bit what chunks in f16 give before, and a
/// prompt that is brought whole after that.
#[test]
fn windows_see_parts_until_they_are_packed() {
    let sliding = |recipe: Recipe| recipe.with_attention(LayerAttention::default().with_window(40));
    let new = |recipe: Recipe| ModelCache::new(&Cpu::new(), &[(shape(), sliding(recipe))], 1).unwrap();
    let recipe = || Recipe::pack_all(SegmentFormat::saw_int4());
    let (mut cache, mut f16) = (new(recipe()), new(Recipe::f16()));
    let parts = [130, 128, 60, 100, 82];
    for (part, &tokens) in parts.iter().enumerate() {
        let output = attended(&mut cache, TokenRun::unpacked(0, tokens), part);
        assert_eq!(output, attended(&mut f16, TokenRun::chunk(0, tokens), part), "part {part}");
    }
    let all: usize = parts.iter().sum();
    assert_eq!((cache.tokens(0, 0).unwrap(), cache.length(0).unwrap()), (all, all), "all parts are there");
    assert!(f16.tokens(0, 0).unwrap() < all, "pages behind the window go");
    let refused = block_on(cache.observe_parts(0, Policy::h2o(0.5).unwrap(), Spans::new(all, &[]).unwrap())).map(drop);
    let told = refused.unwrap_err().to_string();
    assert!(told.contains("prompt in parts") && told.contains("sliding window of 40"), "{told}");

    let run = |start, end| PromptSpan::run(TokenRange::new(start, end).unwrap(), StoreId(1));
    let spans = [run(0, 384), run(384, all)];
    let mut whole = new(recipe());
    for cache in [&mut cache, &mut whole] {
        block_on(cache.reserve_for_prefill(&spans)).unwrap();
    }
    whole.begin_prefill(0, all, &spans).unwrap();
    let rows = |step: f32| {
        let part = |(part, &tokens): (usize, &usize)| {
            (0..tokens * 128).map(move |i| half::f16::from_f32(((i + part) as f32 * step).sin()).to_f32())
        };
        CpuTensor::F32(parts.iter().enumerate().flat_map(part).collect())
    };
    let layout = RowLayout::token_major(all, &shape());
    block_on(whole.store_prompt(0, layout, &rows(0.31), &rows(0.17), &spans)).unwrap();
    whole.commit().unwrap();
    cache.pack_parts(0, &spans).unwrap();
    for step in 0..300 {
        let [of_parts, of_whole] =
            [&mut cache, &mut whole].map(|cache| attended(cache, TokenRun::decode(0), 1000 + step));
        assert_eq!(of_parts, of_whole, "step {step}");
        assert_eq!(cache.tokens(0, 0), whole.tokens(0, 0), "step {step}: pages behind the window");
    }
    assert_eq!(cache.memory().in_use_bytes(), whole.memory().in_use_bytes());
    cache.clear(0).unwrap();
    assert_eq!(cache.memory().in_use_bytes(), 0);
}
