//! Prefixes that stay in a cache for requests that begin alike.

use kvpack::cache::{Budget, Growth, ModelCache, ModelRecipe, PinnedPrefix, PrefixCache, StoreRoom};
use kvpack::cpu::Cpu;
use kvpack::{Error, Result};
use pollster::block_on;

use any_backend::compressed::growing::append;
use any_backend::compressed::{Prompt, held};
use any_backend::kept_together::{TOKENS, dense, selection};
use any_backend::model_steps::{LAYERS, shape};

/// Two requests, and three prefixes.
const SEQUENCES: usize = 5;

fn cache(recipe: &str) -> ModelCache<Cpu> {
    let recipe: ModelRecipe = recipe.parse().unwrap();
    let layers = vec![(shape(), recipe.layer(0, &shape())); LAYERS];
    ModelCache::new(&Cpu::new(), &layers, SEQUENCES).unwrap()
}

/// Numbers of a request's tokens: `shared` of one that many have in common, then its own.
fn tokens(shared: usize, own: usize, id: u32) -> Vec<u32> {
    (0..shared as u32).chain((0..own as u32).map(|at| 1000 * id + at)).collect()
}

/// Rows for these tokens: the same for the same numbers.
fn rows(tokens: &[u32]) -> Prompt {
    let mut rows = Prompt::new(shape(), LAYERS, tokens.len(), 1);
    for (layer, (keys, values)) in rows.keys.iter_mut().zip(&mut rows.values).enumerate() {
        for (rows, seed) in [(keys, 0.3), (values, 0.7)] {
            for (at, element) in rows.iter_mut().enumerate() {
                *element = (tokens[at / 128] as f32 * seed + at as f32 % 128.0 + layer as f32).sin();
            }
        }
    }
    rows
}

/// Computes the rest of a request's tokens.
fn compute(cache: &mut ModelCache<Cpu>, tokens: &[u32], sequence: usize) {
    let known = cache.length(sequence).unwrap();
    append(cache, sequence, &rows(&tokens[known..]));
}

fn serve(prefixes: &mut PrefixCache, cache: &mut ModelCache<Cpu>, tokens: &[u32], sequence: usize) -> Result<usize> {
    assert_eq!(cache.length(sequence), Ok(0));
    let expected = prefixes.found(tokens);
    let found = prefixes.enter(cache, tokens, sequence)?;
    assert_eq!((found, cache.length(sequence)), (expected, Ok(expected)));
    compute(cache, tokens, sequence);
    Ok(found)
}

/// A request that finds its beginning holds what one holds that computes all of it, and shares the pages.
#[test]
fn found_prefixes_are_what_was_stored() {
    for recipe in ["f16", "saw-int4", "kivi:2+window=0+sink=128", "saw-int4+centre"] {
        let (mut cache, mut prefixes) = (cache(recipe), PrefixCache::new(2..SEQUENCES));
        let (first, second) = (tokens(300, 100, 1), tokens(300, 60, 2));
        assert_eq!(serve(&mut prefixes, &mut cache, &first, 0), Ok(0));
        assert_eq!(prefixes.keep(&mut cache, &first, 0), Ok(384), "{recipe}");
        let before = held(&cache, 1, 0);
        assert_eq!(serve(&mut prefixes, &mut cache, &second, 1), Ok(256), "{recipe}");
        assert!(held(&cache, 1, 0) == before, "{recipe}: a request changed another");
        // The same without a prefix, in as many calls.
        let mut alone = self::cache(recipe);
        compute(&mut alone, &first, 0);
        alone.truncate(0, 256).unwrap();
        compute(&mut alone, &second, 0);
        for layer in 0..LAYERS {
            assert!(held(&cache, layer, 1) == held(&alone, layer, 0), "{recipe}, layer {layer}");
        }
        let shared: usize = cache.pages_of(0, 1).unwrap().iter().map(|pages| pages.shared).sum();
        assert_eq!(shared, 2, "{recipe}");
        // A request that is done leaves its prefix, and all is free when that goes.
        [0, 1].into_iter().for_each(|sequence| cache.clear(sequence).unwrap());
        assert_eq!(prefixes.enter(&mut cache, &first, 0), Ok(384));
        cache.clear(0).unwrap();
        assert_eq!((prefixes.let_go(&mut cache), prefixes.let_go(&mut cache)), (Ok(true), Ok(false)));
        assert_eq!((prefixes.len(), cache.memory().in_use_bytes()), (0, 0));
        assert_eq!(prefixes.found(&first), 0);
    }
}

/// The newest token of a request is always computed, and tokens that differ in the middle are not found.
#[test]
fn only_equal_beginnings_are_found() {
    let (mut cache, mut prefixes) = (cache("f16"), PrefixCache::new(2..SEQUENCES));
    let whole = tokens(256, 0, 0);
    serve(&mut prefixes, &mut cache, &whole, 0).unwrap();
    assert_eq!(prefixes.keep(&mut cache, &whole[..127], 0), Ok(0));
    assert_eq!(prefixes.keep(&mut cache, &whole, 0), Ok(256));
    for (given, found) in [(&whole[..], 128), (&whole[..129], 128), (&whole[..128], 0), (&[], 0)] {
        assert_eq!(prefixes.found(given), found, "{} tokens", given.len());
    }
    assert_eq!(prefixes.found(&[whole.clone(), vec![7]].concat()), 256);
    for (changed, found) in [(0, 0), (127, 0), (128, 128), (255, 128)] {
        let mut other = [whole.clone(), vec![7]].concat();
        other[changed] += 1;
        assert_eq!(prefixes.found(&other), found, "token {changed} is another");
    }
}

/// The prefix that was not used for longest goes first, longer ones replace their beginnings, pinned ones stay.
#[test]
fn prefixes_go_in_the_order_of_their_use() {
    let (mut cache, mut prefixes) = (cache("saw-int4"), PrefixCache::new(2..SEQUENCES));
    let keep = |prefixes: &mut PrefixCache, cache: &mut ModelCache<Cpu>, tokens: &[u32]| {
        cache.clear(0).unwrap();
        serve(prefixes, cache, tokens, 0).unwrap();
        prefixes.keep(cache, tokens, 0).unwrap()
    };
    let all: Vec<Vec<u32>> = (1..6).map(|id| tokens(0, 200, id)).collect();
    let kept = |prefixes: &PrefixCache| all.iter().map(|of| prefixes.found(of) > 0).collect::<Vec<_>>();
    (0..3).for_each(|at| assert_eq!(keep(&mut prefixes, &mut cache, &all[at]), 128));
    keep(&mut prefixes, &mut cache, &all[0]); // used again
    keep(&mut prefixes, &mut cache, &all[3]);
    assert_eq!(kept(&prefixes), [true, false, true, true, false]);
    let third = prefixes.pin(&all[2]).unwrap();
    assert_eq!(third.tokens(), 128);
    keep(&mut prefixes, &mut cache, &all[4]);
    assert_eq!(kept(&prefixes), [false, false, true, true, true]);
    let longer = [all[3][..128].to_vec(), tokens(0, 140, 9)].concat();
    assert_eq!(keep(&mut prefixes, &mut cache, &longer), 256);
    assert_eq!((prefixes.len(), prefixes.found(&all[3])), (3, 128), "the longer one took the place of its beginning");
    let others = [&all[4], &longer].map(|of| prefixes.pin(of).unwrap());
    assert_eq!((others.each_ref().map(PinnedPrefix::tokens), prefixes.let_go(&mut cache)), ([128, 256], Ok(false)));
    assert_eq!(keep(&mut prefixes, &mut cache, &all[1]), 0, "all are pinned");
    prefixes.unpin(third);
    assert_eq!(keep(&mut prefixes, &mut cache, &all[1]), 128);
    assert_eq!(kept(&prefixes), [false, true, false, true, true]);
    prefixes.clear(&mut cache).unwrap();
    cache.clear(0).unwrap();
    assert_eq!((prefixes.is_empty(), cache.memory().in_use_bytes()), (true, 0));
}

/// A pin is taken back from the prefix that it holds, though a longer one of the same tokens came later.
#[test]
fn pins_are_taken_back_where_they_hold() {
    let (mut cache, mut prefixes) = (cache("saw-int4"), PrefixCache::new(2..SEQUENCES));
    let whole = tokens(328, 0, 1);
    let mut keep = |prefixes: &mut PrefixCache, tokens: &[u32]| {
        cache.clear(0).unwrap();
        serve(prefixes, &mut cache, tokens, 0).unwrap();
        prefixes.keep(&mut cache, tokens, 0).unwrap()
    };
    keep(&mut prefixes, &whole[..128]);
    let short = prefixes.pin(&whole).unwrap();
    assert_eq!((short.tokens(), keep(&mut prefixes, &whole), prefixes.len()), (128, 256, 2));
    let long = prefixes.pin(&whole).unwrap();
    assert_eq!(long.tokens(), 256);
    prefixes.unpin(short);
    assert_eq!((prefixes.let_go(&mut cache), prefixes.let_go(&mut cache)), (Ok(true), Ok(false)), "one is pinned");
    assert_eq!((prefixes.len(), prefixes.found(&[whole.as_slice(), &[9]].concat())), (1, 256));

    // Its place has another prefix since.
    prefixes.clear(&mut cache).unwrap();
    cache.clear(0).unwrap();
    serve(&mut prefixes, &mut cache, &whole, 0).unwrap();
    prefixes.keep(&mut cache, &whole, 0).unwrap();
    let again = prefixes.pin(&whole).unwrap();
    prefixes.unpin(long);
    assert_eq!((again.tokens(), prefixes.let_go(&mut cache)), (256, Ok(false)));
}

/// What cannot be kept or entered says so, and changes nothing.
#[test]
fn what_is_no_prefix_is_refused() {
    let (mut cache, mut prefixes) = (cache("saw-int4"), PrefixCache::new(2..SEQUENCES));
    let of = tokens(200, 0, 0);
    serve(&mut prefixes, &mut cache, &of, 0).unwrap();
    let refused = |of: Result<usize>| assert!(matches!(of, Err(Error::Plan { .. } | Error::Sequence { .. })), "{of:?}");
    refused(prefixes.keep(&mut cache, &tokens(201, 0, 0), 0));
    refused(prefixes.keep(&mut cache, &of, 3));
    refused(prefixes.keep(&mut cache, &of, 9));
    assert_eq!(prefixes.keep(&mut cache, &of, 0), Ok(128));
    refused(prefixes.enter(&mut cache, &of, 0));
    refused(prefixes.enter(&mut cache, &of, 2));
    // An empty sequence of the prefixes is theirs, too.
    refused(prefixes.enter(&mut cache, &of, 4));
    assert!(!prefixes.is_empty());
    refused(PrefixCache::new(9..12).keep(&mut cache, &of, 0));
    // Of a compressed prompt tokens are missing.
    let prompt = Prompt::new(shape(), LAYERS, TOKENS, 11);
    block_on(cache.keep(1, dense(&prompt, &Cpu::new()), &selection(|_| 130))).unwrap();
    assert_eq!(prefixes.keep(&mut cache, &tokens(TOKENS, 0, 0), 1), Ok(0));
    assert_eq!(prefixes.len(), 1);
}

/// A scheduler gets room by letting prefixes go, and those that share pages with a request cost nothing.
#[test]
fn prefixes_give_their_pages_back() {
    let budget = Budget::unlimited().growing(Growth::None);
    let (mut cache, mut prefixes) = (cache("f16").with_budget(budget), PrefixCache::new(2..SEQUENCES));
    block_on(cache.reserve(&[StoreRoom { pages: 4, spans: 0 }])).unwrap();
    let of = tokens(256, 44, 1);
    serve(&mut prefixes, &mut cache, &of, 0).unwrap();
    prefixes.keep(&mut cache, &of, 0).unwrap();
    let free = |cache: &ModelCache<Cpu>| cache.free_room(0).unwrap()[0].pages;
    assert_eq!(free(&cache), 1, "the prefix took no page");
    cache.clear(0).unwrap();
    assert_eq!(free(&cache), 2, "it holds its two");
    let runs = [kvpack::cache::TokenRun::chunk(1, 300)];
    while !cache.fits(&runs).unwrap() {
        assert_eq!(prefixes.let_go(&mut cache), Ok(true));
    }
    assert_eq!((free(&cache), prefixes.len()), (4, 0));
}

/// Two prefixes that begin alike: when one goes, the beginning is found in the other.
#[test]
fn a_beginning_outlives_one_of_its_prefixes() {
    let (mut cache, mut prefixes) = (cache("f16"), PrefixCache::new(2..SEQUENCES));
    let [one, other, asked] = [1, 2, 3].map(|id| tokens(128, 140, id));
    for of in [&one, &other] {
        serve(&mut prefixes, &mut cache, of, 0).unwrap();
        assert_eq!(prefixes.keep(&mut cache, of, 0), Ok(256));
        cache.clear(0).unwrap();
    }
    assert_eq!(prefixes.let_go(&mut cache), Ok(true));
    assert_eq!((prefixes.found(&one), prefixes.found(&other)), (128, 256));
    assert_eq!(serve(&mut prefixes, &mut cache, &asked, 0), Ok(128));
    let mut alone = self::cache("f16");
    compute(&mut alone, &asked, 0);
    (0..LAYERS).for_each(|layer| assert!(held(&cache, layer, 0) == held(&alone, layer, 0), "layer {layer}"));
}

/// A beginning of what is kept is kept already.
#[test]
fn what_a_longer_prefix_begins_with_is_kept_once() {
    let (mut cache, mut prefixes) = (cache("f16"), PrefixCache::new(2..SEQUENCES));
    let whole = tokens(400, 0, 0);
    serve(&mut prefixes, &mut cache, &whole, 0).unwrap();
    for (tokens, kept) in [(400, 384), (300, 256), (400, 384), (130, 128)] {
        assert_eq!(prefixes.keep(&mut cache, &whole[..tokens], 0), Ok(kept));
        assert_eq!(prefixes.len(), 1, "{tokens} tokens");
    }
}
