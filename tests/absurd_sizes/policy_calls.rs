//! Policies.

use kvpack::plan::TokenRange;
use kvpack::policy::{
    BudgetRule, ChunkSearch, HeadAggregation, KeepRule, LayerSelection, LayerStatistics, MeasuredRows, Merge, Merging,
    Nearest, Policy, Pool, Pooling, PyramidShape, QueryPositions, Recent, ScoreRule, Selection, Spans, TextRule,
    VlCacheLimits, Weighing, check_order, check_ratio, check_widths, chunk_search, evicted, keep, merge_plan,
    normalize_by_visibility, pyramid_budgets, recent_and_best, sink_and_recent, text_prior, top_k, uniform_budgets,
    vlcache_budgets,
};

use crate::{Call, calls, done, doubles, few_triples, floats, pairs, sizes, triples, words};

const SCORES: [f32; 6] = [0.5, f32::INFINITY, -0.0, f32::NEG_INFINITY, f32::MAX, 0.25];

fn spans() -> Spans {
    Spans::new(6, &[TokenRange::new(1, 3).unwrap()]).unwrap()
}

fn rows() -> QueryPositions {
    QueryPositions::last(2, 6).unwrap()
}

fn statistics() -> Vec<LayerStatistics> {
    vec![LayerStatistics { column_sums: SCORES.repeat(2), counts: vec![1; 8] }; 2]
}

/// Policies whose numbers nobody has checked.
pub fn policies() -> Vec<Policy> {
    let mut policies = vec![Policy::h2o(0.5).unwrap(), Policy::vlcache(0.5).unwrap(), Policy::lookm(0.5).unwrap()];
    let base = policies[0].clone();
    sizes_of(|size| {
        policies.push(Policy::streaming(size, size));
        policies.push(Policy { rows: MeasuredRows::Last(size), ..base.clone() });
        policies.push(Policy { rows: MeasuredRows::PostVision { most: size }, ..base.clone() });
        policies.push(Policy { budget: BudgetRule::Pyramid { beta: size }, ..base.clone() });
        let keep = KeepRule::Best { recent: Recent::Tokens(size), text: TextRule::Stays };
        policies.push(Policy { keep, ..base.clone() });
        let limits = VlCacheLimits { mandatory: size, ..VlCacheLimits::default() };
        policies.push(Policy { budget: BudgetRule::VlCache { threshold: 0.5, limits }, ..base.clone() });
        if let Ok(pooling) = Pooling::new(Pool::Average, size) {
            let scores = ScoreRule { pooling: Some(pooling), weighing: Weighing::MeanOfVisible, ..base.scores };
            policies.push(Policy { scores, ..base.clone() });
        }
    });
    for number in crate::FLOATS {
        let ratio = f64::from(number);
        policies.push(Policy { ratio, ..base.clone() });
        let keep = KeepRule::Best { recent: Recent::Share(ratio), text: TextRule::Raised };
        policies.push(Policy { keep, ..base.clone() });
        policies.push(Policy { keep: KeepRule::Random { seed: u64::MAX }, ratio, ..base.clone() });
        let limits = VlCacheLimits { min_ratio: ratio, max_ratio: ratio, mandatory: 0 };
        policies.push(Policy { budget: BudgetRule::VlCache { threshold: number, limits }, ..base.clone() });
    }
    policies
}

fn sizes_of(mut each: impl FnMut(usize)) {
    crate::SIZES.into_iter().for_each(&mut each);
}

pub fn calls() -> Vec<Call> {
    let mut all = numbers();
    all.extend(tokens());
    all.extend(whole_policies());
    all
}

fn numbers() -> Vec<Call> {
    calls! {
        "policy::check_ratio" => doubles(|x| done(check_ratio("share", x)));
        "policy::uniform_budgets" => pairs(|a, b| doubles(|x| done(uniform_budgets(a, b, x))));
        "policy::pyramid_budgets" => pairs(|a, b| few_triples(|capacity, recent, beta| {
            done(pyramid_budgets(a, b, PyramidShape { capacity, recent, beta }));
        }));
        "policy::vlcache_budgets" => pairs(|a, mandatory| doubles(|x| doubles(|y| {
            let limits = VlCacheLimits { min_ratio: y, max_ratio: 1.0, mandatory };
            done(vlcache_budgets(&[0.5, y], a, x, limits));
            done(vlcache_budgets(&[0.5, 1.0], a, x, VlCacheLimits { min_ratio: 0.0, max_ratio: y, mandatory }));
        })));
        "policy::ChunkSearch::chunks" => pairs(|a, b| done(ChunkSearch::chunks(a, b)));
        "policy::check_order" => pairs(|a, b| words(|w| {
            done(check_order(a, b, &[]));
            done(check_order(a, b, &[0, w]));
        }));
        "policy::check_widths" => pairs(|a, b| done(check_widths(a, b)));
        "policy::HeadAggregation::rows" => pairs(|a, b| {
            HeadAggregation::ALL.into_iter().for_each(|aggregation| done(aggregation.rows(a, b)));
        });
        "policy::HeadAggregation::of" => doubles(|x| {
            for aggregation in HeadAggregation::ALL {
                assert!(aggregation.of([0.0; 0].into_iter()).is_none());
                done(aggregation.of([x, 1.0].into_iter()));
            }
        });
        "policy::Merging::own_weight" => sizes(|a| {
            assert!([Merging::Averaged, Merging::Pivotal, Merging::Weighted].iter().all(|m| m.own_weight(a) > 0.0));
        });
        "policy::Merging::weight" => sizes(|a| floats(|x| done(Merging::Weighted.weight(x, a))));
        "policy::Pooling::new" => sizes(|a| {
            if let Ok(pooling) = Pooling::new(Pool::Average, a) {
                done(pooling.apply(&SCORES));
                done(Pooling::new(Pool::Max, a).map(|pooling| pooling.apply(&SCORES)));
            }
        });
    }
}

fn tokens() -> Vec<Call> {
    calls! {
        "policy::keep" => sizes(|a| words(|w| {
            done(keep(&SCORES, &[], a));
            done(keep(&SCORES, &[0, w], a));
        }));
        "policy::recent_and_best" => pairs(|a, b| done(recent_and_best(&SCORES, a, b)));
        "policy::sink_and_recent" => triples(|a, b, c| done(sink_and_recent(a, b, c)));
        "policy::text_prior" => pairs(|a, b| {
            for rule in [TextRule::Equal, TextRule::Raised, TextRule::Stays] {
                done(text_prior(&SCORES, &spans(), rule, a, b));
            }
        });
        "policy::QueryPositions::new" => sizes(|a| words(|w| {
            done(QueryPositions::new(vec![], a));
            if let Ok(rows) = QueryPositions::new(vec![0, w], a) {
                done(rows.visible());
                done(normalize_by_visibility(&SCORES, &rows));
            }
        }));
        "policy::QueryPositions::last" => pairs(|a, b| done(QueryPositions::last(a, b)));
        "policy::QueryPositions::of_range" => triples(|a, b, c| {
            if let Ok(range) = TokenRange::new(a, b) {
                done(QueryPositions::of_range(range, Some(c), b));
                done(QueryPositions::of_range(range, None, c));
            }
        });
        "policy::QueryPositions::check_tensors" => pairs(|a, b| done(rows().check_tensors(a, b)));
        "policy::LayerSelection::new" => sizes(|a| words(|w| {
            done(LayerSelection::new(a, vec![]));
            done(LayerSelection::new(a, vec![vec![0, w]; 2]));
        }));
        "policy::LayerSelection::with_merges" => words(|from| words(|into| floats(|weight| {
            done(LayerSelection::all(3, 2).unwrap().with_merges(vec![vec![Merge { from, into, weight }]; 2]));
        })));
        "policy::merge_plan" => words(|kept| floats(|similarity| {
            done(merge_plan(&[0, 2], &[1], &[Nearest { kept, similarity }], Merging::Weighted));
        }));
        "policy::chunk_search" => doubles(|alpha| doubles(|beta| for x in crate::FLOATS {
            done(chunk_search(&[0.5, x, -0.25], ChunkSearch { alpha, beta }));
            done(chunk_search(&[], ChunkSearch { alpha, beta }));
        }));
        "policy::LayerSelection::all" => pairs(|a, b| done(LayerSelection::all(a, b)));
        "policy::LayerSelection::kept" => sizes(|a| done(LayerSelection::all(3, 2).unwrap().kept(a)));
        "policy::LayerSelection::merges" => sizes(|a| done(LayerSelection::all(3, 2).unwrap().merges(a)));
        "policy::Spans::new" => triples(|a, b, c| {
            let images: Vec<TokenRange> = TokenRange::new(b, c).into_iter().collect();
            if let Ok(spans) = Spans::new(a, &images) {
                done(spans.text_mask());
                done(spans.post_vision());
            }
        });
        "policy::top_k" => sizes(|a| done(top_k(&SCORES, a)));
        "policy::evicted" => sizes(|a| words(|w| done(evicted(&[0, w], a))));
    }
}

fn whole_policies() -> Vec<Call> {
    calls! {
        "policy::Policy::vlcache" => doubles(|x| done(Policy::vlcache(x)));
        "policy::Policy::lookm" => doubles(|x| done(Policy::lookm(x)));
        "policy::Policy::h2o" => doubles(|x| done(Policy::h2o(x)));
        "policy::Policy::snapkv" => doubles(|x| done(Policy::snapkv(x)));
        "policy::Policy::pyramidkv" => doubles(|x| done(Policy::pyramidkv(x)));
        "policy::Policy::random" => doubles(|x| done(Policy::random(x, u64::MAX)));
        "policy::Policy::streaming" => pairs(|a, b| done(Policy::streaming(a, b).select(&spans(), 2, 2, &[])));
        "policy::Policy::rows_again" => sizes(|a| policies().iter().for_each(|policy| done(policy.rows_again(a))));
        "policy::Policy::budgets" => pairs(|layers, kv_heads| for policy in policies() {
            done(policy.budgets(&spans(), layers, kv_heads, &statistics()));
        });
        "policy::Policy::select" => {
            // As many heads as a model may have take a while with every policy.
            pairs(|layers, kv_heads| for policy in policies().iter().step_by(if layers.saturating_mul(kv_heads) > 1000 { 9 } else { 1 }) {
                done(policy.select(&spans(), layers, kv_heads, &statistics()));
            });
            // Of the longest prompts there are.
            for tokens in [1 << 18, (1 << 31) - 1] {
                let long = Spans::new(tokens, &[]).unwrap();
                for policy in policies().iter().step_by(5) {
                    done(policy.query_rows(&long));
                    done(policy.select(&long, 2, 2, &statistics()));
                }
            }
        };
        "policy::Policy::select_again" => sizes(|rows| for policy in policies() {
            let held = Selection::new(vec![LayerSelection::new(6, vec![vec![0, 3, 5]; 2]).unwrap(); 2]).unwrap();
            let layer = LayerStatistics { column_sums: SCORES.to_vec(), counts: vec![1; 8] };
            done(policy.select_again(&spans(), &held, rows, &[layer.clone(), layer]));
        });
        "policy::Policy::score_request" => sizes(|count| for policy in policies() {
            done(policy.score_request(&spans(), &rows(), count).map(|request| request.is_some()));
        });
        "policy::ScoreRequest::check" => pairs(|sums, kv_heads| {
            let (spans, rows, policy) = (spans(), rows(), Policy::h2o(0.5).unwrap());
            let request = policy.score_request(&spans, &rows, 3).unwrap().unwrap();
            done(request.check(sums, kv_heads));
        });
    }
}
