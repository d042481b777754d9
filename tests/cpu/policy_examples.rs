//! Policies: small examples with what follows by hand.

use kvpack::Error;
use kvpack::format::MOST_HEADS;
use kvpack::plan::TokenRange;
use kvpack::policy::{
    BudgetRule, ColumnRequest, HeadAggregation, KeepRule, LayerSelection, LayerStatistics, MeasuredRows, Merging,
    Policy, Pool, Pooling, PyramidShape, QueryPositions, Recent, ScoreRequest, ScoreRule, Selection, Spans, TextRule,
    VlCacheLimits, Weighing, check_order, check_widths, chunk_shares, layer_sparsity, pyramid_budgets, uniform_budgets,
    vlcache_budgets,
};

fn spans(tokens: usize, image: (usize, usize)) -> Spans {
    Spans::new(tokens, &[TokenRange::new(image.0, image.1).unwrap()]).unwrap()
}

/// A policy that keeps half of the tokens.
fn policy(recent: usize, text: TextRule, pooling: Option<Pooling>) -> Policy {
    let scores = ScoreRule { aggregation: HeadAggregation::Mean, weighing: Weighing::Sum, pooling };
    let keep = KeepRule::Best { recent: Recent::Tokens(recent), text };
    Policy { ratio: 0.5, rows: MeasuredRows::All, scores, budget: BudgetRule::Uniform, keep, merging: None }
}

fn sums(column_sums: &[f32]) -> Vec<LayerStatistics> {
    vec![LayerStatistics { column_sums: column_sums.to_vec(), counts: Vec::new() }]
}

/// One layer of one KV head.
fn held(tokens: usize, kept: Vec<u32>) -> Selection {
    Selection::new(vec![LayerSelection::new(tokens, vec![kept]).unwrap()]).unwrap()
}

#[test]
fn the_first_layers_get_what_remains() {
    assert_eq!(uniform_budgets(3, 10, 0.55).unwrap(), [6, 5, 5]);
}

/// The pyramid begins where the prompt is twice the capacity without the recent tokens.
#[test]
fn the_shortest_prompt_of_a_pyramid() {
    let shape = PyramidShape { capacity: 20, recent: 4, beta: 20 };
    assert_eq!(pyramid_budgets(4, 31, shape).unwrap(), [20; 4]);
    assert_eq!(pyramid_budgets(4, 32, shape).unwrap(), [32, 24, 16, 8]);
    assert_eq!(pyramid_budgets(1, 100, shape).unwrap(), [20], "a single layer is the mean of all");
}

#[test]
fn the_sparsity_of_a_layer_is_the_mean() {
    assert_eq!(layer_sparsity(&[0.25, 0.75, 0.5]), 0.5);
    assert_eq!(layer_sparsity(&[]), 0.0);
}

#[test]
fn the_first_of_equal_chunks_get_the_first_share() {
    assert_eq!(chunk_shares(&[0.5; 4], &[0.5]).unwrap(), [0, 0, 1, 1]);
    assert_eq!(chunk_shares(&[0.5, 0.5, 0.75, 0.5], &[0.25, 0.25]).unwrap(), [1, 2, 0, 2]);
}

/// The large sums of recent tokens do not spill into their neighbours.
#[test]
fn recent_tokens_are_not_pooled() {
    let pooled = |pool| Some(Pooling::new(pool, 3).unwrap());
    let sums = sums(&[0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 90.0, 90.0]);
    for pool in [Pool::Average, Pool::Max] {
        let policy = Policy { ratio: 0.375, ..policy(2, TextRule::Equal, pooled(pool)) };
        let selection = policy.select(&Spans::new(8, &[]).unwrap(), 1, 1, &sums).unwrap();
        assert_eq!(selection.layers()[0].kept(0), [0, 6, 7], "{pool:?}");
    }
}

/// Pooling hides no score that is not a number, wherever text goes; a width of 1 changes nothing.
#[test]
fn pooling_keeps_what_is_not_a_number() {
    let scores = [0.5, f32::NEG_INFINITY, 2.0, -0.0, f32::INFINITY, 0.0, 1.0, 3.0];
    for pool in [Pool::Average, Pool::Max] {
        let same = Pooling::new(pool, 1).unwrap().apply(&scores);
        assert!(same.iter().zip(&scores).all(|(got, given)| got.to_bits() == given.to_bits()), "{pool:?}: {same:?}");
        for width in [1, 3, 7] {
            let pooling = Pooling::new(pool, width).unwrap();
            let mut spoilt = [1.0; 12];
            spoilt[5] = f32::NAN;
            let pooled = pooling.apply(&spoilt);
            let reached: Vec<bool> = (0..12usize).map(|token| token.abs_diff(5) <= width / 2).collect();
            assert_eq!(pooled.iter().map(|x| x.is_nan()).collect::<Vec<_>>(), reached, "{pool:?} of {width}");
            for rule in [TextRule::Equal, TextRule::Raised, TextRule::Stays] {
                let policy = Policy { ratio: 0.75, ..policy(2, rule, Some(pooling)) };
                let (spans, held) = (spans(12, (3, 8)), held(12, (0..12).collect()));
                let selected = policy.select(&spans, 1, 1, &sums(&spoilt)).map(drop);
                let again = policy.select_again(&spans, &held, 12, &sums(&spoilt)).map(drop);
                for refused in [selected, again] {
                    let told = matches!(refused, Err(Error::NotANumber { .. }));
                    assert!(told, "{pool:?} of {width}, {rule:?}: {refused:?}");
                }
            }
        }
    }
}

/// Text is what was text in the prompt, wherever a token is held now.
#[test]
fn text_stays_text_when_tokens_left() {
    let sums = sums(&[9.0, 0.0, 5.0, 4.0, 0.0, 0.0]);
    let again = |policy: Policy| {
        let spans = spans(8, (0, 4));
        let held = held(8, vec![2, 3, 4, 5, 6, 7]);
        policy.select_again(&spans, &held, 1, &sums).unwrap().layers()[0].kept(0).to_vec()
    };
    assert_eq!(again(policy(2, TextRule::Raised, None)), [4, 5, 6, 7]);
    assert_eq!(again(policy(2, TextRule::Equal, None)), [2, 4, 6, 7]);
}

/// A budget of more tokens than are held keeps all of them.
#[test]
fn no_more_is_kept_than_is_held() {
    let again = policy(1, TextRule::Equal, None).select_again(
        &Spans::new(8, &[]).unwrap(),
        &held(8, vec![1, 4, 7]),
        1,
        &sums(&[1.0, 2.0, 3.0]),
    );
    assert_eq!(again.unwrap().layers()[0].kept(0), [1, 4, 7]);
}

#[test]
fn every_layer_and_head_draws_its_own_tokens() {
    let spans = Spans::new(40, &[]).unwrap();
    let selection = Policy::random(0.5, 1).unwrap().select(&spans, 2, 2, &[]).unwrap();
    let mut drawn: Vec<&[u32]> =
        selection.layers().iter().flat_map(|layer| (0..2).map(|head| layer.kept(head))).collect();
    assert!(drawn.iter().all(|kept| kept.len() == 20));
    drawn.sort_unstable();
    drawn.dedup();
    assert_eq!(drawn.len(), 4);
}

/// 0.29 · 100 is 28.999999999999996 in floats.
#[test]
fn recent_tokens_are_the_whole_share() {
    let (spans, rows) = (Spans::new(200, &[]).unwrap(), QueryPositions::last(1, 200).unwrap());
    for (share, recent) in [(0.29, 29), (0.0, 0), (0.295, 29), (1.0, 100)] {
        let keep = KeepRule::Best { recent: Recent::Share(share), text: TextRule::Equal };
        let policy = Policy { keep, ..policy(0, TextRule::Equal, None) };
        let request = policy.score_request(&spans, &rows, 100).unwrap();
        assert_eq!(request.map(|request| request.recent), Some(recent), "{share}");
    }
}

/// Of an image that ends among the recent tokens, only the part before them may leave.
#[test]
fn what_stays_anyway_fits_the_budget() {
    let (spans, rows) = (spans(10, (4, 8)), QueryPositions::last(1, 10).unwrap());
    let policy = policy(4, TextRule::Stays, None);
    assert!(policy.score_request(&spans, &rows, 8).unwrap().is_some());
    assert!(policy.score_request(&spans, &rows, 7).is_err());
}

#[test]
fn rows_that_are_measured() {
    let measured = |policy: Policy| policy.rows_again(100);
    assert_eq!(measured(Policy::vlcache(0.1).unwrap()), 50);
    assert_eq!(measured(Policy::snapkv(0.1).unwrap()), 32);
    assert_eq!(measured(Policy::h2o(0.1).unwrap()), 100);
    assert_eq!(measured(Policy::streaming(4, 10)), 0);
    let spans = spans(100, (0, 40));
    let rows = |policy: Policy| policy.query_rows(&spans).unwrap().map(|rows| (rows.positions()[0], rows.len()));
    assert_eq!(rows(Policy::vlcache(0.1).unwrap()), Some((50, 50)));
    assert_eq!(rows(Policy::snapkv(0.1).unwrap()), Some((68, 32)));
    assert_eq!(rows(Policy::h2o(0.1).unwrap()), Some((0, 100)));
    assert_eq!(rows(Policy::streaming(4, 10)), None);
}

/// Shaders add it to scores, so it is finite.
#[test]
fn the_threshold_of_nothing_is_finite() {
    let of = |threshold| ColumnRequest { aggregation: HeadAggregation::Each, threshold }.log_threshold().unwrap();
    assert_eq!(of(Some(0.0)), Some(f32::MIN));
    assert_eq!(of(Some(1.0)), Some(0.0));
    assert_eq!(of(None), None);
}

/// Wanted are 2.9, 5.1 and 2 tokens of ten: the largest fraction gets the token that is left, not the largest layer.
#[test]
fn the_largest_fraction_gets_the_token_that_is_left() {
    let budgets = vlcache_budgets(&[0.71, 0.49, 0.8], 10, 1.0 / 3.0, VlCacheLimits::default()).unwrap();
    assert_eq!(budgets.tokens, [3, 5, 2]);
}

#[test]
fn heads_of_a_selection_are_counted() {
    let policy = policy(1, TextRule::Equal, None);
    let select = |layers: usize, kv_heads: usize| {
        let sums = vec![LayerStatistics { column_sums: vec![0.5; 4 * kv_heads], counts: Vec::new() }; layers];
        policy.select(&spans(4, (1, 2)), layers, kv_heads, &sums).map(|selection| selection.layers().len())
    };
    assert_eq!(select(2, 3), Ok(2));
    for (layers, kv_heads) in [(1, 0), (1, MOST_HEADS + 1), (65, 1024)] {
        let refused = select(layers, kv_heads);
        assert!(matches!(refused, Err(Error::Budget { .. })), "{layers} layers of {kv_heads} heads: {refused:?}");
    }
    let all = |kv_heads| LayerSelection::all(1, kv_heads);
    assert!(all(MOST_HEADS).is_ok() && matches!(all(MOST_HEADS + 1), Err(Error::Selection { .. })));
}

#[test]
fn tables_of_scores_fit_their_prompt() {
    let policy = policy(1, TextRule::Equal, None);
    let (four, five) = (spans(4, (1, 2)), spans(5, (1, 2)));
    let rows = QueryPositions::last(2, 4).unwrap();
    let check = |spans: &Spans, recent: usize, sums: usize, kv_heads: usize| {
        let text = TextRule::Equal;
        ScoreRequest { spans, rows: &rows, scores: policy.scores, group: 1, recent, text }.check(sums, kv_heads)
    };
    assert_eq!(check(&four, 1, 8, 2), Ok(()));
    for (sums, kv_heads) in [(0, 0), (7, 2), (9, 2)] {
        assert!(
            matches!(check(&four, 1, sums, kv_heads), Err(Error::Elements { .. })),
            "{sums} sums, {kv_heads} heads"
        );
    }
    assert!(matches!(check(&five, 1, 10, 2), Err(Error::Selection { .. })));
    assert!(matches!(check(&four, 5, 8, 2), Err(Error::TopK { .. })));
}

#[test]
fn chunks_are_whole_and_in_an_order() {
    assert!(check_order(33, 16, &[1, 0]).is_ok());
    for order in [&[0][..], &[0, 0], &[0, 2], &[0, 1, 1]] {
        assert!(matches!(check_order(33, 16, order), Err(Error::Chunks { .. })), "{order:?}");
    }
    let short = check_order(33, 16, &[0]).unwrap_err().to_string();
    assert!(short.contains("names 1 chunks; there are 2"), "{short}");
    assert_eq!(check_widths(64, 192), Ok(3));
    assert!(check_widths(64, 100).is_err() && check_widths(0, 64).is_err());
}

#[test]
fn measured_rows_lie_in_the_context() {
    let of = |start, end, tokens| QueryPositions::of_range(TokenRange::new(start, end).unwrap(), None, tokens);
    assert_eq!(of(2, 4, 4).unwrap().positions(), [2, 3]);
    assert_eq!(of(1, 3, 4).unwrap().positions(), [1, 2]);
    assert!(matches!(of(2, 5, 4), Err(Error::Selection { .. })));
}

/// The same when it is chosen again.
#[test]
fn every_layer_and_head_draws_its_own_tokens_again() {
    let layer = || LayerSelection::new(40, vec![(0..40).collect(), (0..40).collect()]).unwrap();
    let held = Selection::new(vec![layer(), layer()]).unwrap();
    let policy = Policy::random(0.5, 1).unwrap();
    let selection = policy.select_again(&Spans::new(40, &[]).unwrap(), &held, 0, &[]).unwrap();
    let mut drawn: Vec<&[u32]> =
        selection.layers().iter().flat_map(|layer| (0..2).map(|head| layer.kept(head))).collect();
    assert!(drawn.iter().all(|kept| kept.len() == 20));
    drawn.sort_unstable();
    drawn.dedup();
    assert_eq!(drawn.len(), 4);
}

/// The recent tokens of a pyramid stay in every layer, and only the others are shared out.
#[test]
fn a_pyramid_stands_on_its_recent_tokens() {
    let policy = Policy { budget: BudgetRule::Pyramid { beta: 20 }, ..policy(4, TextRule::Equal, None) };
    let sums = vec![LayerStatistics { column_sums: vec![0.5; 40], counts: Vec::new() }; 4];
    let selection = policy.select(&Spans::new(40, &[]).unwrap(), 4, 1, &sums).unwrap();
    let kept: Vec<usize> = selection.layers().iter().map(LayerSelection::count).collect();
    let pyramid = |recent| pyramid_budgets(4, 40, PyramidShape { capacity: 20, recent, beta: 20 }).unwrap();
    assert_eq!(kept, pyramid(4));
    assert_ne!(kept, pyramid(0));
}

/// Layers that need nothing share alike, limits may be equal, and all tokens may be mandatory.
#[test]
fn budgets_at_their_limits() {
    let limits = |min_ratio, max_ratio, mandatory| VlCacheLimits { min_ratio, max_ratio, mandatory };
    let of = |sparsity: &[f64], limits| vlcache_budgets(sparsity, 10, 0.5, limits);
    let equal = of(&[1.0; 2], VlCacheLimits::default()).unwrap();
    assert_eq!((equal.raw_ratios, equal.tokens), (vec![0.5; 2], vec![5; 2]));
    assert_eq!(of(&[0.2, 0.8], limits(0.5, 0.5, 0)).unwrap().tokens, [5, 5]);
    assert_eq!(of(&[0.2, 0.8], limits(0.0, 1.0, 10)).unwrap().tokens, [10, 10]);
    for refused in [limits(0.6, 0.5, 0), limits(0.0, 1.0, 11)] {
        assert!(matches!(of(&[0.2, 0.8], refused), Err(Error::Budget { .. })), "{refused:?}");
    }
}

/// Wanted are 5.8 and 1.6 tokens of ten, and 2.6: the fraction decides, not its share of the number.
#[test]
fn a_fraction_is_what_is_left_of_a_number() {
    let budgets = vlcache_budgets(&[0.42, 0.84, 0.74], 10, 1.0 / 3.0, VlCacheLimits::default()).unwrap();
    assert_eq!(budgets.tokens, [6, 2, 2]);
}

/// What each method's documentation says of it.
#[test]
fn methods_are_what_their_papers_say() {
    let best = |recent, text| KeepRule::Best { recent, text };
    let h2o = Policy::h2o(0.25).unwrap();
    let scores = ScoreRule { aggregation: HeadAggregation::Mean, weighing: Weighing::Sum, pooling: None };
    let (rows, keep) = (MeasuredRows::All, best(Recent::Share(0.5), TextRule::Equal));
    assert_eq!(h2o, Policy { ratio: 0.25, rows, scores, budget: BudgetRule::Uniform, keep, merging: None });

    let (keep, merging) = (best(Recent::Share(0.5), TextRule::Raised), Some(Merging::default()));
    assert_eq!(Policy::lookm(0.25).unwrap(), Policy { keep, merging, ..h2o.clone() });

    let pooled = ScoreRule { pooling: Some(Pooling::new(Pool::Average, 7).unwrap()), ..scores };
    let (rows, keep) = (MeasuredRows::Last(32), best(Recent::Tokens(32), TextRule::Equal));
    assert_eq!(Policy::snapkv(0.25).unwrap(), Policy { rows, scores: pooled, keep, ..h2o.clone() });

    let (rows, keep) = (MeasuredRows::Last(8), best(Recent::Tokens(8), TextRule::Equal));
    let budget = BudgetRule::Pyramid { beta: 20 };
    assert_eq!(Policy::pyramidkv(0.25).unwrap(), Policy { rows, scores: pooled, budget, keep, ..h2o.clone() });

    let (rows, keep) = (MeasuredRows::None, KeepRule::Random { seed: 9 });
    assert_eq!(Policy::random(0.25, 9).unwrap(), Policy { rows, keep, ..h2o });
}
