//! Policies: what holds for all inputs, and what is refused.

use kvpack::Error;
use kvpack::plan::TokenRange;
use kvpack::policy::{
    BudgetRule, ChunkPrecision, ChunkSearch, HeadAggregation, KeepRule, LayerSelection, LayerStatistics, MeasuredRows,
    Merge, Merging, Nearest, Policy, Pool, Pooling, PyramidShape, QueryPositions, Selection, Spans, TextRule,
    VlCacheLimits, check_order, chunk_search, evicted, keep, merge_plan, normalize_by_visibility, pyramid_budgets,
    recent_and_best, reorder_plan, sink_and_recent, sparsity, text_prior, top_k, uniform_budgets, vlcache_budgets,
};
use proptest::prelude::*;

fn range(start: usize, end: usize) -> TokenRange {
    TokenRange::new(start, end).unwrap()
}

/// Scores with many ties, zeros of both signs and infinities.
fn scores() -> impl Strategy<Value = Vec<f32>> {
    let score = prop_oneof![
        4 => (-3i32..4).prop_map(|x| x as f32),
        1 => Just(-0.0f32),
        1 => Just(f32::INFINITY),
        1 => Just(f32::NEG_INFINITY),
        2 => -1f32..1.0,
    ];
    proptest::collection::vec(score, 1..90)
}

proptest! {
    /// A full, stable sort says the same.
    #[test]
    fn the_best_are_those_of_a_stable_sort(scores in scores(), share in 0f64..=1.0) {
        let k = (scores.len() as f64 * share) as usize;
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        order.sort_by(|&a, &b| scores[b as usize].partial_cmp(&scores[a as usize]).unwrap());
        order.truncate(k);
        order.sort_unstable();
        prop_assert_eq!(top_k(&scores, k).unwrap(), order);
    }

    #[test]
    fn kept_and_evicted_are_all_tokens_once(scores in scores(), share in 0f64..=1.0, recent in 0f64..=1.0) {
        let count = (scores.len() as f64 * share) as usize;
        let recent = (count as f64 * recent) as usize;
        let kept = recent_and_best(&scores, recent, count - recent).unwrap();
        prop_assert_eq!(kept.len(), count);
        let tokens = scores.len() as u32;
        prop_assert!((tokens - recent as u32..tokens).all(|token| kept.binary_search(&token).is_ok()));
        let mut all = [kept.clone(), evicted(&kept, scores.len()).unwrap()].concat();
        all.sort_unstable();
        prop_assert_eq!(all, (0..tokens).collect::<Vec<u32>>());
    }

    /// No image token stays while a text token before the recent ones leaves.
    #[test]
    fn raised_text_leaves_last(
        scores in proptest::collection::vec(0f32..5.0, 20..60), start in 0usize..10, length in 1usize..10, best in 0usize..15,
    ) {
        let spans = Spans::new(scores.len(), &[range(start, start + length)]).unwrap();
        let kept = text_prior(&scores, &spans, TextRule::Raised, 3, best).unwrap();
        let text = spans.text_mask().unwrap();
        let before = |token: &u32| (*token as usize) < scores.len() - 3;
        let an_image_stays = kept.iter().filter(|token| before(token)).any(|&token| !text[token as usize]);
        let gone = evicted(&kept, scores.len()).unwrap();
        let text_leaves = gone.iter().any(|&token| text[token as usize] && scores[token as usize] > 0.0);
        prop_assert!(!(an_image_stays && text_leaves));
    }

    /// Without an image, text that goes first is text like any other.
    #[test]
    fn raised_text_keeps_its_order(scores in scores(), recent in 0f64..=1.0, best in 0f64..=1.0) {
        let recent = (scores.len() as f64 * recent) as usize;
        let best = ((scores.len() - recent) as f64 * best) as usize;
        let spans = Spans::new(scores.len(), &[]).unwrap();
        let of = |rule| text_prior(&scores, &spans, rule, recent, best).unwrap();
        prop_assert_eq!(of(TextRule::Raised), of(TextRule::Equal));
    }

    #[test]
    fn budgets_sum_to_the_total(sparsity in proptest::collection::vec(0f64..=1.0, 1..40), length in 1usize..3000, alpha in 0f64..=1.0) {
        let layers = sparsity.len();
        let target = ((layers * length) as f64 * alpha + 1e-12).floor() as usize;
        let uniform = uniform_budgets(layers, length, alpha).unwrap();
        prop_assert_eq!(uniform.iter().sum::<usize>(), target);
        let limits = VlCacheLimits::default();
        let budgets = vlcache_budgets(&sparsity, length, alpha, limits).unwrap().tokens;
        let lower = ((0.01 * length as f64 + 1e-12) as usize).max(1);
        prop_assert_eq!(budgets.iter().sum::<usize>(), target.max(lower * layers));
        prop_assert!(budgets.iter().all(|budget| (lower..=length).contains(budget)));
    }

    /// A denser layer never keeps less, but for the one token of a remainder.
    #[test]
    fn denser_layers_keep_more(sparsity in proptest::collection::vec(0.1f64..0.99, 2..20), alpha in 0.02f64..0.5) {
        let budgets = vlcache_budgets(&sparsity, 1000, alpha, VlCacheLimits { max_ratio: 1.0, ..Default::default() }).unwrap();
        for a in 0..sparsity.len() {
            for b in 0..sparsity.len() {
                if sparsity[a] < sparsity[b] {
                    prop_assert!(budgets.raw_ratios[a] >= budgets.raw_ratios[b]);
                }
            }
        }
    }

    #[test]
    fn merges_weigh_one_in_all(assigned in proptest::collection::vec(0u32..5, 0..40)) {
        let kept = [0, 10, 20, 30, 40];
        let gone: Vec<u32> = evicted(&kept, 100).unwrap()[..assigned.len()].to_vec();
        let nearest: Vec<Nearest> = assigned.iter().map(|&kept| Nearest { kept, similarity: 1.0 }).collect();
        for merging in [Merging::Averaged, Merging::Pivotal, Merging::Weighted] {
            let merges = merge_plan(&kept, &gone, &nearest, merging).unwrap();
            for into in kept {
                let weights: Vec<f64> =
                    merges.iter().filter(|merge| merge.into == into).map(|merge| f64::from(merge.weight)).collect();
                prop_assert!(weights.is_empty() || (weights.iter().sum::<f64>() - 1.0).abs() < 1e-5);
            }
            let selected = LayerSelection::new(100, vec![kept.to_vec()]).unwrap();
            prop_assert!(selected.with_merges(vec![merges]).is_ok());
        }
    }

    /// Every chunk comes once, in the order of its precision.
    #[test]
    fn chunks_are_sorted_by_precision(similarities in proptest::collection::vec(-1f32..=1.0, 1..60)) {
        let (thresholds, precision) = chunk_search(&similarities, ChunkSearch::default()).unwrap();
        for (&similarity, &precision) in similarities.iter().zip(&precision) {
            let similarity = f64::from(similarity);
            prop_assert_eq!(precision == ChunkPrecision::Int2, similarity < thresholds.low);
            prop_assert_eq!(precision == ChunkPrecision::F16, similarity > thresholds.high);
        }
        let order = reorder_plan(&precision).unwrap();
        let keys: Vec<_> = order.iter().map(|&chunk| (precision[chunk as usize], chunk)).collect();
        prop_assert!(keys.is_sorted());
        prop_assert_eq!(order.len(), similarities.len());
    }

    /// Every preset selects what it promised: as many tokens for each head of a layer, within the total.
    #[test]
    fn presets_select_within_their_budget(seed in 0u64..1000, ratio in 0f64..=1.0, tokens in 40usize..90) {
        let (layers, kv_heads, query_heads) = (3, 2, 4);
        let spans = Spans::new(tokens, &[range(3, 30)]).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let presets = [
            Policy::vlcache(ratio), Policy::lookm(ratio), Policy::h2o(ratio), Policy::snapkv(ratio),
            Policy::pyramidkv(ratio), Policy::random(ratio, seed), Ok(Policy::streaming(4, 16)),
        ];
        for policy in presets {
            let policy = policy.unwrap();
            let rows = policy.query_rows(&spans).unwrap();
            let mut of_layer = || LayerStatistics {
                column_sums: (0..kv_heads * tokens).map(|_| random.f32()).collect(),
                counts: rows.iter().flat_map(|rows| rows.positions().repeat(query_heads)).map(|p| random.u32(0..=p)).collect(),
            };
            let statistics: Vec<LayerStatistics> = (0..layers).map(|_| of_layer()).collect();
            let selection = policy.select(&spans, layers, kv_heads, &statistics).unwrap();
            prop_assert_eq!(&selection, &policy.select(&spans, layers, kv_heads, &statistics).unwrap());
            let budgets = policy.budgets(&spans, layers, kv_heads, &statistics).unwrap();
            let counts: Vec<usize> = selection.layers().iter().map(LayerSelection::count).collect();
            prop_assert_eq!(budgets, counts);
        }
    }
}

#[test]
fn zeros_of_both_signs_tie() {
    assert_eq!(top_k(&[-0.0, 0.0, -0.0], 2).unwrap(), [0, 1]);
    assert_eq!(top_k(&[1.0; 5], 3).unwrap(), [0, 1, 2]);
    assert_eq!(top_k(&[], 0).unwrap(), []);
}

#[test]
fn bad_inputs_are_typed_errors() {
    assert!(matches!(top_k(&[1.0], 2), Err(Error::TopK { k: 2, n: 1 })));
    assert!(matches!(top_k(&[1.0, f32::NAN], 1), Err(Error::NotANumber { index: 1, .. })));
    assert!(matches!(keep(&[1.0, f32::NAN], &[1], 1), Err(Error::NotANumber { index: 1, .. })));
    assert!(matches!(keep(&[1.0, 2.0], &[0, 1], 1), Err(Error::Budget { .. })));
    assert!(matches!(keep(&[1.0, 2.0], &[2], 1), Err(Error::Selection { .. })));
    assert!(matches!(recent_and_best(&[1.0; 4], 3, 2), Err(Error::TopK { k: 5, n: 4 })));
    assert!(matches!(recent_and_best(&[1.0; 4], usize::MAX, 1), Err(Error::TopK { k: usize::MAX, n: 4 })));
    assert!(matches!(uniform_budgets(2, 10, 1.1), Err(Error::Budget { .. })));
    assert!(matches!(uniform_budgets(0, 10, 0.1), Err(Error::Budget { .. })));
    assert!(matches!(
        vlcache_budgets(&[0.1, f64::NAN], 10, 0.1, VlCacheLimits::default()),
        Err(Error::NotANumber { .. })
    ));
    assert!(matches!(vlcache_budgets(&[0.1, 2.0], 10, 0.1, VlCacheLimits::default()), Err(Error::Budget { .. })));
    let crossed = VlCacheLimits { min_ratio: 0.5, max_ratio: 0.2, mandatory: 0 };
    assert!(matches!(vlcache_budgets(&[0.1], 10, 0.1, crossed), Err(Error::Budget { .. })));
    let pyramid = |capacity, recent, beta| pyramid_budgets(4, 100, PyramidShape { capacity, recent, beta });
    assert!(matches!(pyramid(8, 8, 20), Err(Error::Budget { .. })));
    assert!(matches!(pyramid(16, 8, 0), Err(Error::Budget { .. })));
    assert!(matches!(Pooling::new(Pool::Max, 4), Err(Error::Budget { .. })));
    assert!(matches!(Policy::h2o(f64::NAN), Err(Error::Budget { .. })));
    assert!(matches!(chunk_search(&[], ChunkSearch::default()), Err(Error::Chunks { .. })));
    assert!(matches!(chunk_search(&[0.1, f32::NAN], ChunkSearch::default()), Err(Error::NotANumber { index: 1, .. })));
    assert!(matches!(chunk_search(&[0.1], ChunkSearch { alpha: 1.5, beta: 0.1 }), Err(Error::Budget { .. })));
    assert!(matches!(ChunkSearch::chunks(100, 8), Err(Error::Chunks { .. })));
    assert!(matches!(QueryPositions::last(9, 8), Err(Error::Budget { .. })));
    assert!(matches!(QueryPositions::new(vec![3, 3], 8), Err(Error::Selection { .. })));
    assert!(matches!(QueryPositions::new(vec![8], 8), Err(Error::Selection { .. })));
    assert!(matches!(QueryPositions::new(vec![], 8), Err(Error::NoTokens { .. })));
    let rows = QueryPositions::last(2, 8).unwrap();
    assert!(matches!(sparsity(&[1, 2, 3], &rows), Err(Error::Elements { .. })));
    assert!(matches!(sparsity(&[10, 10], &rows), Err(Error::Budget { .. })));
    assert!(matches!(normalize_by_visibility(&[1.0; 7], &rows), Err(Error::Elements { .. })));
}

#[test]
fn images_must_be_ordered_disjoint_and_inside() {
    let spans = |images: &[TokenRange]| Spans::new(20, images);
    assert!(matches!(spans(&[range(5, 9), range(8, 12)]), Err(Error::ImageSpans { .. })));
    assert!(matches!(spans(&[range(10, 12), range(2, 4)]), Err(Error::ImageSpans { .. })));
    assert!(matches!(spans(&[range(10, 21)]), Err(Error::ImageSpans { .. })));
    assert!(matches!(Spans::new(0, &[]), Err(Error::NoTokens { .. })));
    let to_the_end = spans(&[range(2, 4), range(4, 20)]).unwrap();
    assert!(matches!(to_the_end.post_vision(), Err(Error::NoTextAfterImage { image_end: 20, tokens: 20 })));
    assert!(matches!(Policy::vlcache(0.1).unwrap().query_rows(&to_the_end), Err(Error::NoTextAfterImage { .. })));
    assert_eq!(spans(&[]).unwrap().post_vision().unwrap(), range(0, 20));
    assert_eq!(spans(&[range(2, 4), range(6, 15)]).unwrap().post_vision().unwrap(), range(15, 20));
}

#[test]
fn selections_are_checked() {
    let layer = |tokens, kept: &[&[u32]]| LayerSelection::new(tokens, kept.iter().map(|k| k.to_vec()).collect());
    assert!(matches!(layer(5, &[]), Err(Error::Selection { .. })));
    assert!(matches!(layer(5, &[&[0], &[0, 1]]), Err(Error::Selection { .. })));
    assert!(matches!(layer(5, &[&[1, 0]]), Err(Error::Selection { .. })));
    assert!(matches!(layer(5, &[&[5]]), Err(Error::Selection { .. })));
    let good = layer(5, &[&[0, 3], &[1, 2]]).unwrap();
    assert_eq!((good.count(), good.kv_heads(), good.indices()), (2, 2, vec![0, 3, 1, 2]));
    let merge = |from, into, weight| vec![vec![Merge { from, into, weight }], vec![]];
    assert!(good.clone().with_merges(merge(1, 3, 0.5)).is_ok());
    assert!(good.clone().with_merges(merge(0, 3, 0.5)).is_err());
    assert!(good.clone().with_merges(merge(1, 2, 0.5)).is_err());
    assert!(good.clone().with_merges(merge(5, 3, 0.5)).is_err());
    assert!(good.clone().with_merges(merge(1, 3, f32::NAN)).is_err());
    assert!(good.clone().with_merges(vec![]).is_err());
    assert!(Selection::new(vec![good.clone(), layer(6, &[&[0], &[1]]).unwrap()]).is_err());
    let both = Selection::new(vec![good, layer(5, &[&[], &[]]).unwrap()]).unwrap();
    assert!((both.ratio() - 0.2).abs() < 1e-12);
}

#[test]
fn text_that_always_stays_may_be_too_much() {
    let spans = Spans::new(10, &[range(2, 6)]).unwrap();
    let scores = [0.0, 0.0, 9.0, 8.0, 7.0, 6.0, 0.0, 0.0, 0.0, 0.0];
    let stays = |recent, best| text_prior(&scores, &spans, TextRule::Stays, recent, best);
    assert_eq!(stays(2, 6).unwrap(), [0, 1, 2, 3, 6, 7, 8, 9]);
    assert!(matches!(stays(2, 3), Err(Error::Budget { .. })));
    // Raised text of score 0 ties with the best image, and the earlier of them stays.
    let raised = text_prior(&scores, &spans, TextRule::Raised, 2, 3).unwrap();
    assert_eq!(raised, [0, 1, 2, 8, 9]);
}

/// Tokens that arrived last stay under every rule, images too.
#[test]
fn recent_images_stay() {
    let spans = Spans::new(10, &[range(6, 10)]).unwrap();
    let scores = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 8.0, 0.0, 0.0];
    let kept = |rule, recent, best| text_prior(&scores, &spans, rule, recent, best).unwrap();
    assert_eq!(kept(TextRule::Stays, 2, 6), [0, 1, 2, 3, 4, 5, 8, 9]);
    assert_eq!(kept(TextRule::Stays, 2, 7), [0, 1, 2, 3, 4, 5, 6, 8, 9]);
    assert_eq!(kept(TextRule::Equal, 2, 2), [6, 7, 8, 9]);
}

/// Equal fractions of a token go to the lower layer; where bounds ask for too much, the smallest fractions give first.
#[test]
fn remainders_of_budgets() {
    let limits = |min_ratio| VlCacheLimits { min_ratio, max_ratio: 1.0, mandatory: 0 };
    let tokens =
        |sparsity: &[f64], length, alpha, min| vlcache_budgets(sparsity, length, alpha, limits(min)).unwrap().tokens;
    assert_eq!(tokens(&[0.5; 3], 10, 0.55, 0.01), [6, 5, 5]);
    assert_eq!(tokens(&[0.5; 4], 10, 0.55, 0.01), [6, 6, 5, 5]);
    // 46.965, 45.942 and 0.093, of which the last is raised to 5: three too many.
    assert_eq!(tokens(&[0.495, 0.506, 0.999], 100, 0.31, 0.05), [46, 42, 5]);
}

/// A prompt between the capacity and twice the past keeps the capacity everywhere; where the lowest layer cannot take
/// its share, the highest gets it.
#[test]
fn pyramids_of_short_prompts() {
    let shape = PyramidShape { capacity: 100, recent: 20, beta: 20 };
    let budgets = |length| pyramid_budgets(3, length, shape).unwrap();
    assert_eq!([99, 100, 159].map(budgets), [[99; 3], [100; 3], [100; 3]]);
    assert_eq!(budgets(170), [170, 100, 30]);
    assert_eq!(budgets(1000), [176, 100, 24]);
}

/// Merges come in the order of the kept tokens, and of the rows that enter within each.
#[test]
fn merges_are_in_order() {
    let near = |kept| Nearest { kept, similarity: 1.0 };
    let merges = merge_plan(&[3, 5], &[1, 4, 9], &[near(1), near(1), near(0)], Merging::Averaged).unwrap();
    let order: Vec<[u32; 2]> = merges.iter().map(|merge| [merge.into, merge.from]).collect();
    assert_eq!(order, [[3, 3], [3, 9], [5, 1], [5, 4], [5, 5]]);
}

#[test]
fn orders_name_every_chunk_once() {
    assert_eq!(check_order(70, 32, &[1, 0]), Ok(()));
    for order in [[0].as_slice(), &[0, 0], &[0, 1, 1], &[0, 2], &[]] {
        assert!(matches!(check_order(70, 32, order), Err(Error::Chunks { .. })), "{order:?}");
    }
}

#[test]
fn the_boundaries_of_the_chunk_search() {
    use ChunkPrecision::{F16, Int2, Int4};
    let search = |similarities: &[f32], alpha, beta| chunk_search(similarities, ChunkSearch { alpha, beta }).unwrap().1;
    // On a threshold, alone, all equal.
    assert_eq!(search(&[0.0, 0.5, 0.75, 1.0], 0.5, 0.25), [Int2, Int4, Int4, F16]);
    assert_eq!(search(&[0.3], 0.6, 0.1), [Int4]);
    assert_eq!(search(&[0.3; 4], 0.6, 0.1), [Int4; 4]);
    // Nothing above, nothing below.
    assert_eq!(search(&[-1.0, 0.0, 1.0], 0.0, 0.0), [Int4; 3]);
    assert_eq!(search(&[-1.0, 0.0, 1.0], 1.0, 0.0), [Int2, Int2, Int4]);
    // Crossed thresholds.
    assert_eq!(search(&[0.0, 0.5, 0.75, 1.0], 0.75, 0.75), [Int2, Int2, F16, F16]);
    assert_eq!(ChunkSearch::chunks(100, 32).unwrap(), 3);
}

#[test]
fn scores_are_normalised_by_the_rows_that_see() {
    let rows = QueryPositions::new(vec![1, 2, 4], 6).unwrap();
    let normalized = normalize_by_visibility(&[3.0, 3.0, 3.0, 3.0, 3.0, 3.0], &rows).unwrap();
    assert_eq!(normalized, [1.0, 1.0, 1.5, 3.0, 3.0, 0.0]);
}

#[test]
fn pooling_divides_by_its_full_width() {
    let average = Pooling::new(Pool::Average, 3).unwrap();
    assert_eq!(average.apply(&[3.0, 0.0, 6.0]), [1.0, 3.0, 2.0]);
    assert_eq!(Pooling::new(Pool::Max, 3).unwrap().apply(&[3.0, 0.0, 6.0, 1.0]), [3.0, 6.0, 6.0, 6.0]);
    assert_eq!(Pooling::new(Pool::Average, 1).unwrap().apply(&[3.0, 1.0]), [3.0, 1.0]);
}

#[test]
fn aggregation_is_what_it_says() {
    let of = |aggregation: HeadAggregation| aggregation.of([1.0, 2.0, 6.0].into_iter());
    assert_eq!(of(HeadAggregation::Each), None);
    assert_eq!(of(HeadAggregation::Sum), Some(9.0));
    assert_eq!(of(HeadAggregation::Mean), Some(3.0));
    assert_eq!(of(HeadAggregation::Max), Some(6.0));
    // Nor is there a mean of nothing.
    assert!(HeadAggregation::ALL.iter().all(|aggregation| aggregation.of([].into_iter()).is_none()));
}

#[test]
fn sinks_and_recent_tokens() {
    assert_eq!(sink_and_recent(10, 2, 3).unwrap(), [0, 1, 7, 8, 9]);
    assert_eq!(sink_and_recent(4, 2, 3).unwrap(), [0, 1, 2, 3]);
    assert_eq!(sink_and_recent(4, 0, 0).unwrap(), [0u32; 0]);
}

/// Statistics that are missing are named, not guessed.
#[test]
fn policies_need_what_they_measure() {
    let spans = Spans::new(50, &[]).unwrap();
    assert!(matches!(Policy::h2o(0.5).unwrap().select(&spans, 2, 1, &[]), Err(Error::Selection { .. })));
    let short = LayerStatistics { column_sums: vec![0.0; 49], counts: vec![] };
    assert!(matches!(Policy::h2o(0.5).unwrap().select(&spans, 1, 1, &[short]), Err(Error::Elements { .. })));
    let blind = Policy { rows: MeasuredRows::None, ..Policy::h2o(0.5).unwrap() };
    let full = LayerStatistics { column_sums: vec![0.0; 50], counts: vec![] };
    assert!(matches!(blind.select(&spans, 1, 1, &[full]), Err(Error::Selection { .. })));
    let random = Policy { budget: BudgetRule::Uniform, ..Policy::random(0.5, 3).unwrap() };
    assert!(matches!(random.keep, KeepRule::Random { seed: 3 }));
    assert_eq!(random.select(&spans, 2, 1, &[]).unwrap().layers()[1].count(), 25);
}

/// Sizes that no memory holds, or that 32 bits do not: an error each, and no memory.
#[test]
fn absurd_sizes_are_refused() {
    let refused = |what: &str, error: Option<Error>| {
        let refused = matches!(error, Some(Error::Limit { .. } | Error::Budget { .. } | Error::OutOfMemory { .. }));
        assert!(refused || matches!(error, Some(Error::Selection { .. })), "{what}: {error:?}");
    };
    let shape = PyramidShape { capacity: 1 << 40, recent: 3, beta: 20 };
    for size in [1 << 31, 1 << 32, (1 << 32) + 7, 1 << 33, usize::MAX / 2, usize::MAX] {
        refused("uniform_budgets", uniform_budgets(size, 9, 0.5).err());
        refused("uniform_budgets", uniform_budgets(3, size, 0.5).err());
        refused("pyramid_budgets", pyramid_budgets(size, 9, shape).err());
        refused("pyramid_budgets", pyramid_budgets(3, size, shape).err());
        refused("vlcache_budgets", vlcache_budgets(&[0.5], size, 0.5, VlCacheLimits::default()).err());
        refused("Spans", Spans::new(size, &[]).err());
        refused("TokenRange", TokenRange::new(3, size).err());
        refused("QueryPositions::last", QueryPositions::last(size, size).err());
        refused("QueryPositions::of_range", QueryPositions::of_range(range(3, 9), None, 8).err());
        refused("LayerSelection::new", LayerSelection::new(size, vec![vec![3]]).err());
        refused("LayerSelection::all", LayerSelection::all(size, 2).err());
        refused("LayerSelection::all", LayerSelection::all(3, size).err());
        refused("sink_and_recent", sink_and_recent(size, 4, 4).err());
        refused("evicted", evicted(&[1, 2], size).err());
        refused("check_order", check_order(size, 16, &[]).err());
        let spans = Spans::new(40, &[]).unwrap();
        for policy in [Policy::streaming(3, 4), Policy::random(0.5, 1).unwrap()] {
            refused("Policy::select", policy.select(&spans, size, 2, &[]).err());
            refused("Policy::select", policy.select(&spans, 2, size, &[]).err());
        }
    }
    assert_eq!(sink_and_recent(9, usize::MAX, 1 << 32).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
}

/// Numbers that would make every weight NaN, or rank at random.
#[test]
fn numbers_that_are_none_are_refused() {
    for similarity in [f32::INFINITY, f32::NEG_INFINITY] {
        let nearest = [Nearest { kept: 0, similarity }];
        for merging in [Merging::Averaged, Merging::Pivotal, Merging::Weighted] {
            assert!(matches!(merge_plan(&[0], &[1], &nearest, merging), Err(Error::Selection { .. })));
        }
    }
    assert!(HeadAggregation::ALL.iter().all(|aggregation| aggregation.of([0.0; 0].into_iter()).is_none()));
    assert!(matches!(evicted(&[3, 3], 9), Err(Error::Selection { .. })));
    assert!(matches!(evicted(&[3, 9], 9), Err(Error::Selection { .. })));
    let spans = Spans::new(4, &[]).unwrap();
    for share in [f64::NAN, -0.5, 1.5, f64::INFINITY] {
        let keep = KeepRule::Best { recent: kvpack::policy::Recent::Share(share), text: TextRule::Equal };
        let policy = Policy { keep, ..Policy::h2o(0.5).unwrap() };
        let layer = LayerStatistics { column_sums: vec![0.1; 4], counts: Vec::new() };
        assert!(matches!(policy.select(&spans, 1, 1, &[layer]), Err(Error::Budget { .. })), "{share}");
    }
}

/// A merge weighted by a similarity keeps its sign: a row that points the other way is subtracted.
#[test]
fn weights_have_the_sign_of_the_similarity() {
    let nearest = [Nearest { kept: 0, similarity: -0.5 }, Nearest { kept: 0, similarity: 0.25 }];
    let merges = merge_plan(&[0], &[1, 2], &nearest, Merging::Weighted).unwrap();
    let weights: Vec<f32> = merges.iter().map(|merge| merge.weight).collect();
    let expected = [1.0, -0.5, 0.25].map(|weight: f32| weight / 3.0);
    assert!(weights.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-7), "{weights:?}");
}
