//! What queries see and how they are scored: small examples, and what is refused.

use kvpack::cache::{KvCache, Recipe};
use kvpack::cpu::Cpu;
use kvpack::plan::{LayerAttention, QueryRun, Scoring, TreeMask, Visible};
use kvpack::{AttentionShape, Error, SegmentFormat};

use crate::any_backend::random_rows::Random;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

/// Rows of 70 bits: more than a word, and no whole bytes.
#[test]
fn a_tree_has_the_bits_that_it_was_given() {
    let (queries, tokens) = (5, 70);
    let mut random = Random::new(1);
    let sees: Vec<bool> = (0..queries * tokens).map(|_| random.below(2) == 1).collect();
    let mut bytes = vec![0u8; sees.len().div_ceil(8)];
    for (bit, _) in sees.iter().enumerate().filter(|(_, sees)| **sees) {
        bytes[bit / 8] |= 1 << (bit % 8);
    }
    let mask = TreeMask::from_bits(queries, tokens, &bytes).unwrap();
    for query in 0..queries + 2 {
        for token in 0..tokens + 2 {
            let expected = query < queries && token < tokens && sees[query * tokens + token];
            assert_eq!(mask.sees(query, token), expected, "query {query}, token {token}");
        }
    }
}

#[test]
fn a_query_of_a_tree_sees_its_ancestors() {
    let mask = TreeMask::from_parents(&[None, Some(0), Some(0), Some(2), None]).unwrap();
    let seen = |query: usize| (0..5).filter(|&token| mask.sees(query, token)).collect::<Vec<_>>();
    assert_eq!((0..5).map(seen).collect::<Vec<_>>(), [vec![0], vec![0, 1], vec![0, 2], vec![0, 2, 3], vec![4]]);
    for parents in [&[][..], &[Some(0)], &[None, Some(2), None]] {
        assert!(matches!(TreeMask::from_parents(parents), Err(Error::Plan { .. })), "{parents:?}");
    }
}

/// A window is causal: what it cannot say is refused.
#[test]
fn windows_of_layers_take_causal_queries() {
    let local = LayerAttention::default().with_window(10);
    let visible = |queries, visible| local.visible(&QueryRun::new(0, queries, visible));
    assert_eq!(visible(3, Visible::Causal).unwrap(), Visible::Window { left: 10 });
    assert_eq!(visible(1, Visible::All).unwrap(), Visible::Window { left: 10 });
    assert_eq!(visible(3, Visible::Window { left: 4 }).unwrap(), Visible::Window { left: 4 });
    let tree = TreeMask::from_parents(&[None, Some(0)]).unwrap();
    for (queries, of) in [(2, Visible::All), (2, Visible::Tree(tree))] {
        assert!(matches!(visible(queries, of), Err(Error::Unsupported { .. })));
    }
}

/// Sinks are one for each query head, and scores of centred keys take neither sinks nor a cap.
#[test]
fn scoring_that_a_layer_cannot_have_is_refused() {
    let cache = |recipe: Recipe, scoring: Scoring| {
        let recipe = recipe.with_attention(LayerAttention::default().with_scoring(scoring));
        KvCache::new(Cpu::new(), shape(), 1, recipe).map(drop)
    };
    let plain = || Scoring::of(&shape());
    let with_sinks = |sinks: usize| plain().with_sinks(&vec![0.5; sinks]).unwrap();
    assert_eq!(cache(Recipe::f16(), with_sinks(4)), Ok(()));
    for sinks in [1, 3, 5] {
        assert!(matches!(cache(Recipe::f16(), with_sinks(sinks)), Err(Error::Elements { .. })), "{sinks} sinks");
    }
    let centred = || Recipe::pack_all(SegmentFormat::saw_int4()).with_centre();
    assert_eq!(cache(centred(), plain()), Ok(()));
    for scoring in [with_sinks(4), plain().with_soft_cap(30.0).unwrap()] {
        assert!(matches!(cache(centred(), scoring), Err(Error::Unsupported { .. })));
    }
}
