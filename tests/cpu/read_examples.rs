//! What queries see and how they are scored: small examples, and what is refused.

use std::sync::Arc;

use kvpack::cache::{KvCache, Recipe};
use kvpack::cpu::Cpu;
use kvpack::format::Calibration;
use kvpack::plan::{
    AttendPlan, Elements, IndexShape, LayerAttention, LayerWrites, Page, QueryLayout, QueryRun, Scoring, SpanView,
    StoreCapacity, StoreView, TokenWrite, TreeMask, Visible, WriteLayout, WriteTable,
};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};

use any_backend::random_rows::Random;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

/// Rows of 70 bits: more than a word, and no whole bytes; and of two words.
#[test]
fn a_tree_has_the_bits_that_it_was_given() {
    has_its_bits(5, 70);
    has_its_bits(3, 64);
}

fn has_its_bits(queries: usize, tokens: usize) {
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
    // Steps would refuse these once packed tokens lie behind the window or under the cap.
    let calibrated = || Recipe::calibquant(Bits::Two).with_calibration(Calibration::new(0.0, 3.0).unwrap());
    assert_eq!(cache(calibrated(), with_sinks(4)), Ok(()));
    assert!(matches!(cache(calibrated(), plain().with_soft_cap(30.0).unwrap()), Err(Error::Unsupported { .. })));
    let windowed = calibrated().with_attention(LayerAttention::default().with_window(511));
    let refused = KvCache::new(Cpu::new(), shape(), 1, windowed).map(drop);
    assert!(matches!(&refused, Err(Error::Unsupported { what, .. }) if what.contains("window of 511")), "{refused:?}");
}

/// Scores are calibrated by the extremes of the first tokens of a span: all queries see those.
#[test]
fn calibrated_spans_are_seen_from_their_beginning() {
    let pages = [0, 1].map(|index| Page { shard: 0, index });
    let calibration = Some(Calibration::new(1.0, 2.0).unwrap());
    let plan = |start: usize, run: QueryRun| {
        let spans = [(0, start), (start, 200)].into_iter().filter(|(from, to)| from < to);
        let span = |(start, to): (usize, usize)| {
            let (tokens, pages) = (to - start, &pages[..(to - start).div_ceil(128)]);
            SpanView { sequence: 0, start, tokens, gathered: None, pages, range_slot: 0 }
        };
        let (calibrated, plain): (Vec<_>, Vec<_>) = spans.map(span).partition(|span| span.start == 0);
        let store = |spans, calibration| StoreView { format: SegmentFormat::F16, calibration, spans };
        AttendPlan::new(shape(), &[run], &[store(plain, None), store(calibrated, calibration)]).map(drop)
    };
    let run = |queries, visible| QueryRun::new(0, queries, visible);
    let tree = || Visible::Tree(TreeMask::from_parents(&[None, Some(0), Some(0)]).unwrap());
    // The whole sequence is calibrated, or what a tree does not reach.
    assert_eq!(plan(200, run(3, Visible::Causal)), Ok(()));
    assert_eq!(plan(100, run(3, tree())), Ok(()));
    for left in [300, 30] {
        assert_eq!(plan(100, run(3, Visible::Window { left })), Ok(()), "all of it, or nothing");
    }
    for visible in [tree(), Visible::Window { left: 30 }] {
        let refused = plan(200, run(3, visible));
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    }
    let refused = plan(100, run(3, Visible::Window { left: 150 }));
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
}

/// A message names the head and the place of the index that does not exist.
#[test]
fn an_index_that_does_not_exist_is_named() {
    let refused = IndexShape::of(&[0, 1, 2, 3, 4, 9], 2, 6).unwrap_err().to_string();
    assert!(refused.contains("index 2 of KV head 1 is 9"), "{refused}");
}

/// A table needs the rows that it names, and one that was emptied names none.
#[test]
fn a_table_needs_the_rows_that_it_names() {
    let capacity = StoreCapacity {
        format: SegmentFormat::F16,
        shard_pages: vec![1],
        range_slots: 0,
        tokens: 4,
        copies: 1,
        centres: 0,
        centre_slots: 0,
    };
    let layout = Arc::new(WriteLayout::new(shape(), 8, vec![capacity], vec![]).unwrap());
    let (mut table, mut writes) = (WriteTable::new(&layout), LayerWrites::of(&layout));
    let page = |index| Page { shard: 0, index };
    assert!(writes.is_empty());
    writes.stores[0].tokens.push(TokenWrite { token: 6, page: page(0), slot: 3, centre: None });
    table.set(&writes).unwrap();
    assert_eq!(table.tokens_needed(), 7);
    writes.clear();
    table.set(&writes).unwrap();
    assert!(writes.is_empty() && table.tokens_needed() == 0);
}

/// Elements of any type are read as f32, and an error about fused rows says how they lie.
#[test]
fn elements_and_rows_tell_what_they_are() {
    let halves = [1.5f32, -2.0].map(half::f16::from_f32);
    let brains = [1.5f32, -2.0].map(half::bf16::from_f32);
    for elements in [Elements::F32(&[1.5, -2.0]), Elements::F16(&halves), Elements::Bf16(&brains)] {
        assert_eq!((elements.get(0), elements.get(1)), (1.5, -2.0));
    }
    let dense = QueryLayout::dense(&shape());
    let fused = QueryLayout { first: 64, stride: 512 };
    for (layout, given, told) in [(dense, 1023, false), (dense, 1025, false), (fused, 1087, true)] {
        let refused = layout.check("queries", given, 4, &shape()).unwrap_err().to_string();
        assert_eq!(refused.contains("from one to the next"), told, "{refused}");
    }
    assert_eq!(
        (dense.check("queries", 1024, 4, &shape()), fused.check("queries", 1856, 4, &shape())),
        (Ok(()), Ok(()))
    );
    assert!(dense.check_room("queries", 1023, 4, &shape()).is_err());
    assert_eq!(dense.check_room("queries", 1025, 4, &shape()), Ok(()));
}
