//! Sequences that leave a cache while steps of others go on.

use kvpack::Error;
use kvpack::backend::Backend;
use kvpack::cache::{ModelCache, SwapOut, TokenRun};
use kvpack::plan::TokenRange;
use pollster::block_on;

use crate::compressed::Prompt;
use crate::compressed::growing::append;
use crate::kept_together::{TOKENS, dense, selection};
use crate::model_steps::{LAYERS, shape};
use crate::swapped_bytes::{RECIPES, all_held, filled};

/// What the blocking call takes out, the call in two halves does, too, though another sequence grows and others part
/// and join in between; the pages are free afterwards.
///
/// # Panics
/// When it does not.
pub fn check<B: Backend + Clone>(backend: &B) {
    for recipe in RECIPES {
        for count in [|_| 64, |layer| 50 + 9 * layer] {
            let mut cache = filled(backend, recipe, count);
            let held = all_held(&cache, 0);
            let at_once = block_on(cache.swap_out(0)).unwrap();
            block_on(cache.swap_in(0, &at_once)).unwrap();
            let before = cache.memory().in_use_bytes();

            let leaving = cache.begin_swap_out(0).unwrap();
            assert_eq!(leaving.sequence(), 0);
            assert_eq!(cache.memory().in_use_bytes(), before, "{recipe}: pages stay until the bytes are there");
            append(&mut cache, 1, &Prompt::new(shape(), LAYERS, 40, 3));
            let others = all_held(&cache, 1);
            assert!(all_held(&cache, 0) == held, "{recipe}: it is there until it is gone");
            while !leaving.has_arrived().unwrap() {
                std::thread::yield_now();
            }
            let swapped = block_on(cache.finish_swap_out(leaving)).unwrap();
            assert_eq!((swapped.bytes(), swapped.length()), (at_once.bytes(), at_once.length()), "{recipe}");
            assert_eq!(cache.length(0), Ok(0));
            let [one, other] = [&swapped, &at_once].map(|swapped| block_on(cache.swapped_to_bytes(swapped)).unwrap());
            assert!(one == other, "{recipe}: other bytes");
            // It comes back where other sequences lie now.
            block_on(cache.swap_in(0, &swapped)).unwrap();
            assert!(all_held(&cache, 0) == held && all_held(&cache, 1) == others, "{recipe}");
            [0, 1].into_iter().for_each(|sequence| cache.clear(sequence).unwrap());
            assert_eq!(cache.memory().in_use_bytes(), 0, "{recipe}");
        }
    }
}

/// Whatever changes the sequence meanwhile, even if it is as long again, is not lost: the call is refused, and the
/// sequence stays.
///
/// # Panics
/// When it does not.
pub fn check_misuse<B: Backend + Clone>(backend: &B) {
    type Change<B> = fn(&mut ModelCache<B>);
    let changes: [(&str, Change<B>); 8] = [
        ("append", |cache| append(cache, 0, &Prompt::new(shape(), LAYERS, 1, 9))),
        ("truncate and append", |cache| {
            let length = cache.length(0).unwrap();
            cache.truncate(0, length - 1).unwrap();
            append(cache, 0, &Prompt::new(shape(), LAYERS, 1, 9));
        }),
        ("abandon", |cache| {
            let runs = [TokenRun::decode(0)];
            block_on(cache.reserve_for_append(&runs)).unwrap();
            cache.begin_append(&runs).unwrap();
            cache.abandon();
        }),
        ("clear", |cache| cache.clear(0).unwrap()),
        ("forget", |cache| cache.forget(0, TokenRange::new(TOKENS, TOKENS + 128).unwrap()).unwrap()),
        ("clear and fork", |cache| {
            append(cache, 1, &Prompt::new(shape(), LAYERS, 3, 9));
            cache.clear(0).unwrap();
            cache.fork(1, 0).unwrap();
        }),
        ("swap out and in", |cache| {
            let swapped = block_on(cache.swap_out(0)).unwrap();
            block_on(cache.swap_in(0, &swapped)).unwrap();
        }),
        ("clear and keep", |cache| {
            cache.clear(0).unwrap();
            let prompt = Prompt::new(shape(), LAYERS, TOKENS, 12);
            let dense = dense(&prompt, cache.backend());
            block_on(cache.keep(0, dense, &selection(|_| 64))).unwrap();
        }),
    ];
    let refusal =
        |cache: &mut ModelCache<B>, leaving: SwapOut<B>, what: &str| match block_on(cache.finish_swap_out(leaving))
            .map(drop)
        {
            Err(Error::Plan { reason, .. }) => reason,
            other => panic!("{what}: {other:?}"),
        };
    for (what, change) in changes {
        let mut cache = filled(backend, "saw-int4", |_| 64);
        let leaving = cache.begin_swap_out(0).unwrap();
        change(&mut cache);
        let (length, held) = (cache.length(0), all_held(&cache, 0));
        let told = refusal(&mut cache, leaving, what);
        assert!(told.contains("sequence 0 was changed"), "{what}: {told}");
        assert!(cache.length(0) == length && all_held(&cache, 0) == held, "{what}: it is not as it was");
        let again = cache.begin_swap_out(0).unwrap();
        assert_eq!(Ok(block_on(cache.finish_swap_out(again)).unwrap().length()), length, "{what}");
    }

    let mut cache = filled(backend, "saw-int4", |_| 64);
    let held = all_held(&cache, 0);
    drop(cache.begin_swap_out(0).unwrap()); // nobody wants it any more
    let mut other = filled(backend, "saw-int4", |_| 64);
    let leaving = cache.begin_swap_out(0).unwrap();
    assert!(refusal(&mut other, leaving, "another cache").contains("another cache"));
    let leaving = cache.begin_swap_out(0).unwrap();
    block_on(cache.reserve_for_append(&[TokenRun::decode(1)])).unwrap();
    cache.begin_append(&[TokenRun::decode(1)]).unwrap();
    assert!(matches!(cache.begin_swap_out(0), Err(Error::Plan { .. })), "a step is open");
    assert!(refusal(&mut cache, leaving, "a step is open").contains("a step is open"));
    cache.abandon();
    assert!(matches!(cache.begin_swap_out(2), Err(Error::Sequence { given: 2, sequences: 2 })));
    assert!(all_held(&cache, 0) == held);
    // One that holds nothing has nothing to wait for.
    let nothing = cache.begin_swap_out(1).unwrap();
    assert!(nothing.has_arrived().unwrap());
    assert_eq!(block_on(cache.finish_swap_out(nothing)).unwrap().bytes(), 0);
}
