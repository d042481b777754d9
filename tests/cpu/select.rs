//! The CPU kernels that measure and select, against plain formulas in f64.

use kvpack::cpu::{
    self, CpuTensor, DenseRows, KeptTokens, RowStats, StatsInput, attention_column_stats, attention_row_stats,
    sum_counts, sum_partials,
};
use kvpack::plan::{Elements, RowLayout, TokenRange};
use kvpack::policy::{ColumnRequest, HeadAggregation, Merging, Nearest, QueryPositions, evicted};
use kvpack::{AttentionShape, Error};

use any_backend::exact::dot;
use any_backend::select_cases::{Case, cases, check_text_first, every_third};

fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= tolerance * (1.0 + want.abs()), "{i}: {got} against {want}");
    }
}

/// Weights `[query_heads][rows][tokens]` by the formula, and the scores they come from.
fn attention(case: &Case) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let (mut scores, mut weights) = (Vec::new(), Vec::new());
    for head in 0..case.shape.query_heads() {
        for (row, &position) in case.rows.positions().iter().enumerate() {
            let query = case.query(row, head);
            let score = |token: usize| -> f64 {
                let key = case.key(token, head / case.shape.group());
                dot(query, key) * f64::from(case.scale)
            };
            let seen: Vec<f64> = (0..=position as usize).map(score).collect();
            let max = seen.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = seen.iter().map(|score| (score - max).exp()).sum();
            weights.push(seen.iter().map(|score| (score - max).exp() / sum).collect());
            scores.push(seen);
        }
    }
    (scores, weights)
}

#[test]
fn statistics_are_those_of_the_attention_matrix() {
    for case in cases() {
        let input = case.input();
        let tokens = case.rows.tokens();
        let (scores, weights) = attention(&case);
        let all = TokenRange::new(0, tokens).unwrap();
        let row_stats = attention_row_stats(&input, all).unwrap();
        let max: Vec<f64> = scores.iter().map(|row| row.iter().copied().fold(f64::MIN, f64::max)).collect();
        let lse: Vec<f64> = scores
            .iter()
            .zip(&max)
            .map(|(row, max)| max + row.iter().map(|score| (score - max).exp()).sum::<f64>().ln())
            .collect();
        close(&row_stats.max, &max, 1e-6);
        close(&row_stats.lse, &lse, 1e-6);

        let rows = case.rows.len();
        let column = |head: usize, token: usize| -> f64 {
            weights[head * rows..][..rows].iter().filter_map(|row| row.get(token)).sum()
        };
        let group = case.shape.group();
        for aggregation in HeadAggregation::ALL {
            let want: Vec<f64> = match aggregation {
                HeadAggregation::Each => (0..case.shape.query_heads())
                    .flat_map(|head| (0..tokens).map(move |token| (head, token)))
                    .map(|(head, token)| column(head, token))
                    .collect(),
                _ => (0..case.shape.kv_heads())
                    .flat_map(|head| (0..tokens).map(move |token| (head, token)))
                    .filter_map(|(head, token)| aggregation.of((0..group).map(|g| column(head * group + g, token))))
                    .collect(),
            };
            let request = ColumnRequest { aggregation, threshold: Some(0.01) };
            let stats = attention_column_stats(&input, all, request, &row_stats.lse, &row_stats.max).unwrap();
            close(&stats.sums, &want, 1e-5);
            for (row, weights) in weights.iter().enumerate() {
                let largest = weights.iter().copied().fold(0.0, f64::max);
                let count = |slack: f64| weights.iter().filter(|&&w| w >= 0.01 * largest * slack).count() as u32;
                assert!((count(1.0001)..=count(0.9999)).contains(&stats.counts[row]), "row {row}");
            }
        }
    }
}

/// Keys in parts, put together, measure the same.
#[test]
fn parts_sum_to_the_whole() {
    for case in cases() {
        let (input, tokens) = (case.input(), case.rows.tokens());
        let cut = (tokens / 3).max(1);
        let ranges: Vec<TokenRange> =
            (0..tokens).step_by(cut).map(|start| TokenRange::new(start, tokens.min(start + cut)).unwrap()).collect();
        let whole = attention_row_stats(&input, TokenRange::new(0, tokens).unwrap()).unwrap();
        let parts: Vec<RowStats> = ranges.iter().map(|&range| attention_row_stats(&input, range).unwrap()).collect();
        let summed = sum_partials(&parts).unwrap();
        assert_eq!(summed.max, whole.max);
        close(&summed.lse, &whole.lse.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), 1e-6);
        let request = ColumnRequest { aggregation: HeadAggregation::Each, threshold: Some(0.05) };
        let columns = |range| attention_column_stats(&input, range, request, &whole.lse, &whole.max).unwrap();
        let counts: Vec<Vec<u32>> = ranges.iter().map(|&range| columns(range).counts).collect();
        assert_eq!(sum_counts(&counts).unwrap(), columns(TokenRange::new(0, tokens).unwrap()).counts);
    }
    assert!(sum_partials(&[]).is_err());
    assert!(sum_counts(&[vec![1], vec![1, 2]]).is_err());
}

#[test]
fn the_best_scores() {
    let inf = f32::INFINITY;
    assert_eq!(cpu::top_k(&[1.0, 3.0, 3.0, 2.0, /**/ 0.0, -0.0, 0.0, -1.0], 2, 2).unwrap(), [1, 2, 0, 1]);
    assert_eq!(cpu::top_k(&[f32::NAN, -inf, inf], 1, 2).unwrap(), [1, 2]);
    assert_eq!(cpu::top_k(&[5.0; 6], 2, 0).unwrap(), [0u32; 0]);
    assert_eq!(cpu::top_k(&[5.0; 6], 2, 3).unwrap(), [0, 1, 2, 0, 1, 2]);
    assert_eq!(cpu::top_k(&[5.0], 1, 1).unwrap(), [0]);
    assert!(matches!(cpu::top_k(&[5.0; 6], 2, 4), Err(Error::TopK { k: 4, n: 3 })));
    assert!(matches!(cpu::top_k(&[5.0; 5], 2, 1), Err(Error::Elements { .. })));
}

#[test]
fn text_goes_first_by_exact_scores() {
    check_text_first(&cpu::Cpu::new());
}

#[test]
fn kept_tokens_are_gathered_in_order() {
    for case in cases() {
        let (tokens, heads) = (case.rows.tokens(), case.shape.kv_heads());
        let kept = every_third(tokens, heads);
        let CpuTensor::F32(got) = cpu::gather(&case.shape, case.keys(), &kept).unwrap() else { panic!() };
        let count = kept.len() / heads;
        let want: Vec<f32> =
            kept.iter().enumerate().flat_map(|(i, &token)| case.key(token as usize, i / count).to_vec()).collect();
        assert_eq!(got, want);
        assert!(matches!(cpu::gather(&case.shape, case.keys(), &[tokens as u32; 2]), Err(Error::Selection { .. })));
    }
}

#[test]
fn merging_is_the_formula() {
    for case in cases().into_iter().filter(|case| case.rows.tokens() > 3) {
        let (tokens, heads) = (case.rows.tokens(), case.shape.kv_heads());
        let kept = every_third(tokens, heads);
        let k = kept.len() / heads;
        let gone: Vec<u32> = kept.chunks(k).flat_map(|kept| evicted(kept, tokens).unwrap()).collect();
        let e = gone.len() / heads;
        let indices = KeptTokens { kept: &kept, evicted: &gone };
        let nearest = cpu::nearest_kept(&case.shape, case.keys(), indices).unwrap();
        let cosine = |a: &[f32], b: &[f32]| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
        for (i, found) in nearest.iter().enumerate() {
            let head = i / e;
            let row = case.key(gone[i] as usize, head);
            let similarity = |j: usize| cosine(row, case.key(kept[head * k + j] as usize, head));
            let best = (0..k).map(similarity).fold(f64::MIN, f64::max);
            assert!((similarity(found.kept as usize) - best).abs() < 1e-6);
            assert!((f64::from(found.similarity) - best).abs() < 1e-6);
        }
        for merging in [Merging::Averaged, Merging::Pivotal, Merging::Weighted] {
            let merged = cpu::merge_tokens(&case.shape, case.keys(), indices, &nearest, merging).unwrap();
            let mut want = Vec::new();
            for (i, &token) in kept.iter().enumerate() {
                let (head, own) = (i / k, case.key(token as usize, i / k));
                let members: Vec<usize> =
                    (head * e..(head + 1) * e).filter(|&j| nearest[j].kept as usize == i % k).collect();
                let of_channel = |c: usize| {
                    let p = f64::from(own[c]);
                    let other = |&j: &usize| {
                        let x = f64::from(case.key(gone[j] as usize, head)[c]);
                        match merging {
                            Merging::Averaged => x,
                            Merging::Pivotal => (x + p) / 2.0,
                            Merging::Weighted => f64::from(nearest[j].similarity) * x,
                        }
                    };
                    (p + members.iter().map(other).sum::<f64>()) / (members.len() as f64 + 1.0)
                };
                want.extend((0..own.len()).map(of_channel));
            }
            close(&merged, &want, 1e-5);
        }
    }
}

/// Equal keys tie, and the first is taken; a key of zeros is near nothing.
#[test]
fn the_first_of_equal_keys_is_nearest() {
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let mut keys = vec![1.0f32; 5 * 64];
    keys[4 * 64..].fill(0.0);
    let rows = DenseRows { elements: Elements::F32(&keys), layout: RowLayout::token_major(5, &shape) };
    let found = cpu::nearest_kept(&shape, rows, KeptTokens { kept: &[1, 2], evicted: &[0, 3, 4] }).unwrap();
    assert_eq!(found.iter().map(|nearest| nearest.kept).collect::<Vec<_>>(), [0, 0, 0]);
    assert_eq!(found[2], Nearest { kept: 0, similarity: 0.0 });
    let nothing_kept = KeptTokens { kept: &[], evicted: &[0] };
    assert!(matches!(cpu::nearest_kept(&shape, rows, nothing_kept), Err(Error::Selection { .. })));
    let all_kept = KeptTokens { kept: &[0, 1], evicted: &[] };
    assert_eq!(cpu::nearest_kept(&shape, rows, all_kept).unwrap(), []);
    assert_eq!(cpu::merge_tokens(&shape, rows, all_kept, &[], Merging::Pivotal).unwrap(), &keys[..128]);
}

#[test]
fn chunks_are_compared_and_reordered() {
    let similarities = cpu::chunk_similarity(&[3.0, 4.0], &[3.0, 4.0, -6.0, -8.0, 4.0, -3.0, 0.0, 0.0]).unwrap();
    assert_eq!(similarities, [1.0, -1.0, 0.0, 0.0]);
    assert!(matches!(cpu::chunk_similarity(&[1.0, 2.0], &[1.0; 3]), Err(Error::Chunks { .. })));
    assert!(matches!(cpu::chunk_similarity(&[], &[1.0; 3]), Err(Error::Chunks { .. })));
    assert!(matches!(cpu::chunk_similarity(&[1.0], &[f32::NAN]), Err(Error::NotANumber { .. })));

    let shape = AttentionShape::new(2, 2, 64).unwrap();
    let rows: Vec<f32> = (0..70 * 2 * 64).map(|i| i as f32).collect();
    let layout = RowLayout::token_major(70, &shape);
    let dense = DenseRows { elements: Elements::F32(&rows), layout };
    let order = [3, 0, 2, 1];
    let CpuTensor::F32(got) = cpu::reorder_chunks(&shape, dense, 16, &order).unwrap() else { panic!() };
    for head in 0..2 {
        for token in 0..70 {
            let source = if token < 64 { order[token / 16] as usize * 16 + token % 16 } else { token };
            assert_eq!(got[(head * 70 + token) * 64..][..64], rows[layout.row(source, head)..][..64]);
        }
    }
    for (chunk, order) in [(16, vec![0, 1, 2]), (16, vec![0, 1, 2, 2]), (16, vec![0, 1, 2, 4]), (8, vec![0; 8])] {
        assert!(matches!(cpu::reorder_chunks(&shape, dense, chunk, &order), Err(Error::Chunks { .. })));
    }
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let rows = QueryPositions::last(2, 4).unwrap();
    let (queries, keys) = (vec![0.0f32; 2 * 2 * 64], vec![0.0f32; 4 * 64]);
    let query_shape = AttentionShape::new(2, 2, 64).unwrap();
    let dense = |elements, layout| DenseRows { elements: Elements::F32(elements), layout };
    let good = StatsInput {
        shape,
        scale: 0.125,
        rows: &rows,
        queries: dense(&queries, RowLayout::token_major(2, &query_shape)),
        keys: dense(&keys, RowLayout::token_major(4, &shape)),
    };
    let all = TokenRange::new(0, 4).unwrap();
    let stats = attention_row_stats(&good, all).unwrap();
    assert!(attention_row_stats(&good, TokenRange::new(0, 5).unwrap()).is_err());
    let fewer = QueryPositions::last(1, 4).unwrap();
    assert!(matches!(attention_row_stats(&StatsInput { rows: &fewer, ..good }, all), Err(Error::Selection { .. })));
    let short = StatsInput { keys: dense(&keys[..100], RowLayout::token_major(4, &shape)), ..good };
    assert!(matches!(attention_row_stats(&short, all), Err(Error::Elements { .. })));
    let request = |threshold| ColumnRequest { aggregation: HeadAggregation::Sum, threshold };
    let columns = |threshold, max: &[f32]| attention_column_stats(&good, all, request(threshold), &stats.lse, max);
    assert!(columns(None, &[]).is_ok());
    assert!(matches!(columns(Some(0.1), &[]), Err(Error::Elements { .. })));
    assert!(matches!(columns(Some(1.1), &stats.max), Err(Error::Budget { .. })));
    // A share of 0 counts everything that is visible, all-equal scores count at 100 %.
    assert_eq!(columns(Some(0.0), &stats.max).unwrap().counts, [3, 4, 3, 4]);
    assert_eq!(columns(Some(1.0), &stats.max).unwrap().counts, [3, 4, 3, 4]);
}

#[test]
fn partial_statistics_that_are_no_numbers_are_refused() {
    let part = |max: f32, lse: f32| RowStats { max: vec![0.5, max], lse: vec![0.5, lse] };
    for (max, lse) in [(f32::NAN, 0.0), (0.0, f32::NAN)] {
        let refused = sum_partials(&[part(0.0, 0.0), part(max, lse)]);
        assert!(matches!(refused, Err(Error::NotANumber { index: 1, .. })), "{refused:?}");
    }
    for (max, lse) in [(f32::INFINITY, 0.0), (0.0, f32::INFINITY)] {
        let refused = sum_partials(&[part(0.0, 0.0), part(max, lse)]);
        assert!(matches!(&refused, Err(Error::Plan { reason, .. }) if reason.contains("row 1")), "{refused:?}");
    }
    let nothing = sum_partials(&[part(f32::NEG_INFINITY, f32::NEG_INFINITY)]).unwrap();
    assert_eq!(nothing.lse, [0.5, f32::NEG_INFINITY]);
}

/// A sum that 32 bits do not hold is an error, not what is left of it.
#[test]
fn counts_that_do_not_fit_are_refused() {
    assert_eq!(sum_counts(&[vec![u32::MAX - 1], vec![1]]).unwrap(), [u32::MAX]);
    assert!(matches!(sum_counts(&[vec![u32::MAX], vec![1]]), Err(Error::Limit { needed: 4_294_967_296, .. })));
}
