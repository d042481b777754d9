//! Tokens that a caller or a policy keeps of a prompt, in layers that stay together and in layers that part.

use kvpack::Error;
use kvpack::cpu::Cpu;
use kvpack::policy::{LayerSelection, Merge, Selection};
use pollster::block_on;

use any_backend::compressed::{Prompt, state};
use any_backend::{kept_together, model_steps};

#[test]
fn layers_that_keep_as_many_tokens_stay_together() {
    kept_together::check(&Cpu::new());
}

#[test]
fn layers_join_when_nothing_holds_them_apart() {
    kept_together::check_joining(&Cpu::new());
}

#[test]
fn layers_stay_together_where_a_sequence_does_not_fit() {
    kept_together::check_refused_parting(&Cpu::new());
}

/// A choice that is not one for these layers, or while a step is open, changes nothing.
#[test]
fn choices_that_do_not_fit_are_refused() {
    let prompt = Prompt::new(model_steps::shape(), model_steps::LAYERS, kept_together::TOKENS, 3);
    let mut cache = prompt.cache(&Cpu::new(), &model_steps::recipe("saw-int4"));
    let dense = || kept_together::dense(&prompt, &Cpu::new());
    let fits = kept_together::selection(|_| 40);
    let before = state(&cache);
    let one = Selection::new(fits.layers()[..1].to_vec()).unwrap();
    let merge = Merge { from: 299, into: 0, weight: 1.0 };
    let merging = fits.layers()[0].clone().with_merges(vec![vec![merge], vec![]]).unwrap();
    let merging = Selection::new(vec![merging, fits.layers()[1].clone(), fits.layers()[2].clone()]).unwrap();
    let short = LayerSelection::new(299, vec![vec![1], vec![2]]).unwrap();
    let short = Selection::new(vec![short; 3]).unwrap();
    for refused in [&one, &merging, &short] {
        let kept = block_on(cache.keep(0, dense(), refused));
        assert!(matches!(kept, Err(Error::Selection { .. })), "{kept:?}");
    }
    assert!(matches!(block_on(cache.keep(0, dense()[..2].to_vec(), &fits)), Err(Error::Selection { .. })));
    assert!(matches!(block_on(cache.keep(5, dense(), &fits)), Err(Error::Sequence { .. })));
    assert!(state(&cache) == before);
    block_on(cache.keep(0, dense(), &fits)).unwrap();
    assert_eq!((cache.length(0), cache.tokens(2, 0)), (Ok(300), Ok(40)));
}
