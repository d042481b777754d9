//! `attention_row_stats`, `attention_column_stats` and `sum_partials`.

use super::{exact_numbers, far};
use crate::backend::{QueriesAndKeys, RowStatistics, TensorRows};
use crate::conformance::attend::RowOrder;
use crate::conformance::pack::difference;
use crate::conformance::report::{Failure, Report};
use crate::cpu::{
    ColumnStats, CpuTensor, DenseRows, RowStats, StatsInput, attention_column_stats, attention_row_stats, sum_partials,
};
use crate::format::AttentionShape;
use crate::plan::{ElementType, RowLayout, Scoring, TokenRange};
use crate::policy::{ColumnRequest, HeadAggregation, QueryPositions, RowStatsSource, StatsRequest};
use crate::{Backend, Error, Result};

/// A case of attention statistics: query rows against all keys of a context.
#[derive(Clone, Debug, PartialEq)]
pub struct StatisticsCase {
    /// Unique name: lower case letters, digits and dashes.
    pub name: String,
    /// Heads of the layer.
    pub shape: AttentionShape,
    /// Factor on `q·k`, times `√head_dim`.
    pub scale_by: f32,
    /// Keys of the context.
    pub tokens: usize,
    /// Positions of the query rows, ascending.
    pub positions: Vec<u32>,
    /// Element types of queries and of keys.
    pub elements: [ElementType; 2],
    /// Order of their axes.
    pub order: RowOrder,
    /// How the query heads of a group are aggregated.
    pub aggregation: HeadAggregation,
    /// The threshold of counts.
    pub threshold: f32,
    /// True where all scores are equal; otherwise one token is a sink: the first, or in the order by heads one in the
    /// middle, which lies in a later part of the keys.
    pub equal_scores: bool,
    /// By how many nats the sink's score is above the others. With few of them every token counts.
    pub sink_nats: f32,
    /// Seed of the data.
    pub seed: u64,
    /// Whether the case belongs to the set that tests run on software drivers.
    pub quick: bool,
}

impl StatisticsCase {
    /// Factor on `q·k`.
    fn scale(&self) -> f32 {
        Scoring::of(&self.shape).scale() * self.scale_by
    }
}

/// All cases of statistics: group sizes, head dimensions, one row of one token, rows from the middle, a tile and one
/// token, thresholds that count nothing and everything, equal scores. Also keys in f16, which cooperative matrices
/// multiply where a device has them: rows that end within blocks of 16, more heads or rows than are multiplied at once,
/// tokens beyond tiles.
pub fn statistics_cases() -> Vec<StatisticsCase> {
    let mut cases = plain_cases();
    cases.extend(halves_cases());
    cases.iter_mut().zip(3000..).for_each(|(case, seed)| case.seed = seed);
    cases
}

/// A case with the settings that most cases share.
fn case(
    name: &str,
    (query_heads, kv_heads, head_dim): (usize, usize, usize),
    tokens: usize,
    positions: Vec<u32>,
    elements: [ElementType; 2],
) -> StatisticsCase {
    StatisticsCase {
        name: format!("stats-{name}"),
        shape: AttentionShape::new(query_heads, kv_heads, head_dim).expect("the registry's shapes have kernels"),
        scale_by: 1.0,
        tokens,
        positions,
        elements,
        order: RowOrder::TokenMajor,
        aggregation: HeadAggregation::Mean,
        threshold: 0.01,
        equal_scores: false,
        sink_nats: 14.0,
        seed: 0,
        quick: false,
    }
}

/// The same where the sink leaves the other tokens their weight, and the threshold is the median of theirs.
fn weak_sink(
    name: &str,
    heads: (usize, usize, usize),
    tokens: usize,
    positions: Vec<u32>,
    elements: [ElementType; 2],
) -> StatisticsCase {
    let sink_nats = 2.0f32;
    StatisticsCase { threshold: (-sink_nats).exp(), sink_nats, ..case(name, heads, tokens, positions, elements) }
}

/// The positions of the last rows.
fn last(rows: u32, tokens: u32) -> Vec<u32> {
    (tokens - rows..tokens).collect()
}

/// Cases of every layout, shape and way to join heads.
fn plain_cases() -> Vec<StatisticsCase> {
    use ElementType::{Bf16, F16, F32};
    let middle = (0..257).filter(|position| position % 16 == 1).collect();
    vec![
        StatisticsCase { quick: true, ..case("one-token", (1, 1, 64), 1, vec![0], [F32, F32]) },
        StatisticsCase {
            aggregation: HeadAggregation::Each,
            order: RowOrder::HeadMajor,
            quick: true,
            ..case("last-50", (8, 2, 64), 300, last(50, 300), [F16, F32])
        },
        StatisticsCase {
            aggregation: HeadAggregation::Max,
            ..case("all-rows", (3, 1, 80), 130, last(130, 130), [F16, F16])
        },
        StatisticsCase {
            scale_by: 0.6,
            aggregation: HeadAggregation::Sum,
            order: RowOrder::HeadMajor,
            ..case("beyond-tiles", (14, 2, 128), 513, last(9, 513), [F32, Bf16])
        },
        StatisticsCase { scale_by: 1.5, ..case("rows-of-the-middle", (4, 1, 96), 257, middle, [Bf16, F16]) },
        case("wide", (2, 2, 256), 128, last(1, 128), [F32, F16]),
        StatisticsCase {
            aggregation: HeadAggregation::Each,
            quick: true,
            ..weak_sink("weak-sink", (8, 2, 64), 300, last(50, 300), [F16, F32])
        },
        StatisticsCase {
            order: RowOrder::HeadMajor,
            ..weak_sink("weak-sink-of-many-rows", (6, 2, 128), 400, last(390, 400), [F32, Bf16])
        },
        StatisticsCase {
            threshold: 0.0,
            equal_scores: true,
            ..case("equal-scores-threshold-0", (2, 1, 64), 200, last(20, 200), [F32, F32])
        },
        StatisticsCase {
            threshold: 1.0,
            equal_scores: true,
            quick: true,
            ..case("equal-scores-threshold-100", (2, 1, 64), 200, last(20, 200), [F16, F16])
        },
    ]
}

/// Cases of f16 keys, which kernels with cooperative matrices multiply.
fn halves_cases() -> Vec<StatisticsCase> {
    use ElementType::{Bf16, F16, F32};
    vec![
        StatisticsCase {
            aggregation: HeadAggregation::Each,
            quick: true,
            ..case("halves-last-50", (8, 2, 128), 203, last(50, 203), [F16, F16])
        },
        StatisticsCase {
            aggregation: HeadAggregation::Each,
            quick: true,
            ..weak_sink("halves-weak-sink", (8, 2, 128), 203, last(50, 203), [F16, F16])
        },
        weak_sink("halves-weak-sink-of-many-heads", (40, 2, 64), 165, last(20, 165), [F16, F16]),
        StatisticsCase { quick: true, ..case("halves-one-token", (4, 2, 64), 1, vec![0], [F16, F16]) },
        StatisticsCase {
            scale_by: 1.5,
            aggregation: HeadAggregation::Sum,
            quick: true,
            ..case("halves-of-f32-rows", (4, 1, 128), 97, last(17, 97), [F32, F16])
        },
        StatisticsCase {
            aggregation: HeadAggregation::Max,
            order: RowOrder::HeadMajor,
            ..case("halves-of-some-heads", (6, 2, 96), 1100, last(90, 1100), [Bf16, F16])
        },
        StatisticsCase {
            aggregation: HeadAggregation::Sum,
            ..case("halves-of-many-rows", (2, 1, 64), 300, last(300, 300), [F16, F16])
        },
        StatisticsCase {
            aggregation: HeadAggregation::Each,
            ..case("halves-of-many-rows-each", (2, 1, 80), 260, last(250, 260), [F32, F16])
        },
        StatisticsCase {
            aggregation: HeadAggregation::Max,
            ..case("halves-maximum-of-many-rows", (2, 1, 64), 240, last(230, 240), [F16, F16])
        },
        case("halves-of-many-heads", (40, 2, 64), 65, last(1, 65), [F16, F16]),
        StatisticsCase {
            aggregation: HeadAggregation::Each,
            ..case("halves-of-short-heads", (14, 2, 128), 513, last(9, 513), [F16, F16])
        },
        StatisticsCase {
            aggregation: HeadAggregation::Each,
            threshold: 0.0,
            equal_scores: true,
            ..case("halves-equal-scores-threshold-0", (7, 1, 128), 70, last(40, 70), [F32, F16])
        },
    ]
}

/// The tensors of a case, with the layout of their rows.
struct Rows {
    positions: QueryPositions,
    queries: CpuTensor,
    keys: CpuTensor,
    query_layout: RowLayout,
    key_layout: RowLayout,
}

impl Rows {
    fn new(case: &StatisticsCase) -> Result<Self> {
        let positions = QueryPositions::new(case.positions.clone(), case.tokens)?;
        let (shape, head_dim) = (&case.shape, case.shape.head_dim());
        let query_shape = AttentionShape::new(shape.query_heads(), shape.query_heads(), head_dim)?;
        let layout = |tokens, shape: &AttentionShape| match case.order {
            RowOrder::TokenMajor => RowLayout::token_major(tokens, shape),
            RowOrder::HeadMajor => RowLayout::head_major(tokens, shape),
        };
        let (query_layout, key_layout) = (layout(positions.len(), &query_shape), layout(case.tokens, shape));
        let (of_queries, of_keys) = (query_layout.elements_needed(&query_shape), key_layout.elements_needed(shape));
        let (mut queries, mut keys) = (vec![0.5; of_queries], vec![0.25; of_keys]);
        if !case.equal_scores {
            queries = exact_numbers(of_queries, case.seed);
            keys = exact_numbers(of_keys, case.seed + 100);
            // All queries look for the sink in their first channel.
            queries.chunks_exact_mut(head_dim).for_each(|query| query[0] = 2.0);
            let sink = (case.sink_nats / 2.0 * (head_dim as f32).sqrt()).floor();
            let token = if case.order == RowOrder::HeadMajor { case.tokens / 2 } else { 0 };
            (0..shape.kv_heads()).for_each(|head| keys[key_layout.row(token, head)] = sink);
            // f32 elements have digits that halves lack.
            if case.elements[0] == ElementType::F32 {
                queries.iter_mut().for_each(|x| *x *= 1.0 + 1.0 / 4096.0);
            }
        }
        let [query_type, key_type] = case.elements;
        let (queries, keys) = (CpuTensor::from_f32(queries, query_type), CpuTensor::from_f32(keys, key_type));
        Ok(Self { positions, queries, keys, query_layout, key_layout })
    }

    fn input<'a>(&'a self, case: &StatisticsCase) -> StatsInput<'a> {
        let queries = DenseRows { elements: self.queries.elements(), layout: self.query_layout };
        let keys = DenseRows { elements: self.keys.elements(), layout: self.key_layout };
        StatsInput { shape: case.shape, scale: case.scale(), rows: &self.positions, queries, keys }
    }
}

/// Measures rows and columns, then twice the columns alone from the measured log-sum-exp. Both must have the same bits
/// and, except for rounding, equal the first ones: there a compiler may have fused other operations.
pub(in crate::conformance) async fn run<B: Backend>(backend: &B, case: &StatisticsCase) -> Result<Report> {
    let rows = Rows::new(case)?;
    let (input, all) = (rows.input(case), TokenRange::new(0, case.tokens)?);
    let columns = ColumnRequest { aggregation: case.aggregation, threshold: Some(case.threshold) };
    let row_stats = attention_row_stats(&input, all)?;
    let want = attention_column_stats(&input, all, columns, &row_stats.lse, &row_stats.max)?;

    let queries = backend.upload(rows.queries.elements()).await?;
    let keys = backend.upload(rows.keys.elements()).await?;
    let on_device = QueriesAndKeys {
        shape: case.shape,
        scale: case.scale(),
        rows: &rows.positions,
        queries: TensorRows { tensor: &queries, layout: rows.query_layout },
        keys: TensorRows { tensor: &keys, layout: rows.key_layout },
    };
    let request = StatsRequest { columns, rows: RowStatsSource::Measured };
    let measured = backend.measure_attention(on_device, request, None)?;
    let missing = |what| Error::Plan { what: "attention statistics", reason: format!("no {what} was measured") };
    let (max, lse) =
        (measured.row_max.ok_or_else(|| missing("maximum"))?, measured.row_lse.ok_or_else(|| missing("LSE"))?);
    let sums = backend.download(&measured.column_sums).await?;
    let mut failures = Vec::new();
    failures.extend(far("maxima of rows", &backend.download(&max).await?, &row_stats.max, 1e-5));
    failures.extend(far("log-sum-exps of rows", &backend.download(&lse).await?, &row_stats.lse, 1e-5));
    failures.extend(far_sums("column sums", &sums, &want.sums));
    let counts = measured.counts.ok_or_else(|| missing("count"))?;
    failures.extend(wrong_count(case, &input, &backend.download_words(&counts).await?, &row_stats)?);

    let columns = ColumnRequest { threshold: None, ..columns };
    let request = StatsRequest { columns, rows: RowStatsSource::KnownLse };
    let known = backend.measure_attention(on_device, request, Some(&lse))?;
    let again = backend.download(&known.column_sums).await?;
    failures.extend(far("column sums from the log-sum-exp alone", &again, &sums, 1e-6));
    let known = backend.measure_attention(on_device, request, Some(&lse))?;
    failures.extend(difference("column sums measured again", &backend.download(&known.column_sums).await?, &again));
    if backend.measure_attention(on_device, request, None).is_ok() {
        failures.push(Failure::Refusal { message: "column sums were measured without the log-sum-exp".into() });
    }
    failures.extend(in_parts(backend, case, on_device, &row_stats, &want).await?);
    Ok(Report { check: case.name.clone(), accuracy: None, failures })
}

/// The same statistics, of the keys in two parts: first those of rows, which are combined, then those of columns. Rows
/// behind the first part see the same keys of it, and rows before the second see none of that.
async fn in_parts<B: Backend>(
    backend: &B,
    case: &StatisticsCase,
    whole: QueriesAndKeys<'_, B::Tensor>,
    row_stats: &RowStats,
    want: &ColumnStats,
) -> Result<Vec<Failure>> {
    let (heads, rows) = (case.shape.query_heads(), whole.rows.len());
    let columns = ColumnRequest { aggregation: case.aggregation, threshold: Some(case.threshold) };
    let cut = case.tokens.div_ceil(2);
    let mut parts = Vec::new();
    for range in [0..cut, cut..case.tokens] {
        let keys_until = |end: usize| end.saturating_sub(range.start);
        let Some((unseeing, seeing)) = whole.rows.in_part(range.len(), keys_until)? else { continue };
        let keys = rows_of(backend, &case.shape, whole.keys, range.clone()).await?;
        let of_queries = AttentionShape::new(heads, heads, case.shape.head_dim())?;
        let queries = rows_of(backend, &of_queries, whole.queries, unseeing..rows).await?;
        parts.push((range, unseeing, seeing, keys, queries));
    }
    fn input<'a, T>(
        case: &StatisticsCase,
        rows: &'a QueryPositions,
        (queries, keys): (&'a T, &'a T),
    ) -> QueriesAndKeys<'a, T> {
        let layout = |tokens| RowLayout::head_major(tokens, &case.shape);
        let queries = TensorRows { tensor: queries, layout: layout(rows.len()) };
        QueriesAndKeys {
            shape: case.shape,
            scale: case.scale(),
            rows,
            queries,
            keys: TensorRows { tensor: keys, layout: layout(rows.tokens()) },
        }
    }
    let mut of_parts = Vec::new();
    for (_, unseeing, seeing, keys, queries) in &parts {
        let measured = backend.measure_rows(input(case, seeing, (queries, keys)))?;
        let padded = |measured: Vec<f32>| -> Vec<f32> {
            let none = || std::iter::repeat_n(f32::NEG_INFINITY, *unseeing);
            measured.chunks(seeing.len()).flat_map(|of_head| none().chain(of_head.iter().copied())).collect()
        };
        let (max, lse) = (backend.download(&measured.max).await?, backend.download(&measured.lse).await?);
        of_parts.push(RowStats { max: padded(max), lse: padded(lse) });
    }
    let combined = sum_partials(&of_parts)?;
    let mut failures = Vec::new();
    failures.extend(far("maxima of rows in parts", &combined.max, &row_stats.max, 1e-5));
    failures.extend(far("log-sum-exps of rows in parts", &combined.lse, &row_stats.lse, 1e-5));
    let mut counts = vec![0u32; heads * rows];
    for (range, unseeing, seeing, keys, queries) in &parts {
        let cut = |all: &[f32]| -> Vec<f32> {
            all.chunks(rows).flat_map(|of_head| of_head[*unseeing..].iter().copied()).collect()
        };
        let known = RowStatistics {
            max: backend.upload(cut(&row_stats.max).as_slice().into()).await?,
            lse: backend.upload(cut(&row_stats.lse).as_slice().into()).await?,
        };
        let measured = backend.measure_columns(input(case, seeing, (queries, keys)), columns, &known)?;
        let of_part = |of_head: &[f32]| of_head[range.clone()].to_vec();
        let expected: Vec<f32> = want.sums.chunks(case.tokens).flat_map(of_part).collect();
        failures.extend(far_sums("column sums of a part", &backend.download(&measured.column_sums).await?, &expected));
        let Some(of_rows) = measured.counts else {
            failures.push(Failure::Refusal { message: "no count of a part was measured".into() });
            continue;
        };
        let of_rows = backend.download_words(&of_rows).await?;
        for (all, of_head) in counts.chunks_mut(rows).zip(of_rows.chunks(seeing.len())) {
            all[*unseeing..].iter_mut().zip(of_head).for_each(|(all, count)| *all += count);
        }
    }
    let host = Rows::new(case)?;
    failures.extend(wrong_count(case, &host.input(case), &counts, row_stats)?);
    Ok(failures)
}

/// The column sum that deviates most, relative to itself: next to a sink those of other tokens are millionths.
fn far_sums(what: &str, got: &[f32], want: &[f32]) -> Option<Failure> {
    const TOLERANCE: f64 = 1e-3;
    let absolute = far(what, got, want, 1e-4);
    let error = |(got, want): (&f32, &f32)| f64::from((got - want).abs()) / f64::from(want.abs()).max(1e-30);
    let error = got.iter().zip(want).map(error).fold(0.0, f64::max);
    let relative = || (error > TOLERANCE).then(|| Failure::Inaccurate { what: what.into(), error, limit: TOLERANCE });
    absolute.or_else(relative)
}

/// Some rows of a tensor, `[heads, rows, head_dim]`.
async fn rows_of<B: Backend>(
    backend: &B,
    shape: &AttentionShape,
    rows: TensorRows<'_, B::Tensor>,
    range: std::ops::Range<usize>,
) -> Result<B::Tensor> {
    let of_head: Vec<u32> = range.map(|row| row as u32).collect();
    let indices = of_head.repeat(shape.kv_heads());
    let indices = backend.upload_indices(&indices, shape.kv_heads(), rows.layout.tokens as u32).await?;
    backend.gather(shape, rows, &indices)
}

/// A count that does not lie between the counts of a threshold just above and one just below: f32 and f64 may disagree
/// about a score on the threshold.
fn wrong_count(case: &StatisticsCase, input: &StatsInput<'_>, got: &[u32], rows: &RowStats) -> Result<Option<Failure>> {
    let counts = |threshold: f32| -> Result<Vec<u32>> {
        let request = ColumnRequest { aggregation: HeadAggregation::Each, threshold: Some(threshold.min(1.0)) };
        let all = TokenRange::new(0, case.tokens)?;
        let ColumnStats { counts, .. } = attention_column_stats(input, all, request, &rows.lse, &rows.max)?;
        Ok(counts)
    };
    let (few, many) = match case.equal_scores {
        true => (counts(case.threshold)?, counts(case.threshold)?),
        false => (counts(case.threshold * 1.0005)?, counts(case.threshold / 1.0005)?),
    };
    let differs = |elements, index: usize| Failure::Differs {
        what: "counts of rows".into(),
        elements,
        index,
        got: got[index].into(),
        want: few[index].into(),
    };
    if let Some(failure) = Failure::of_length("counts of rows", got.len(), few.len()) {
        return Ok(Some(failure));
    }
    let mut wrong = (0..got.len()).filter(|&i| !(few[i]..=many[i]).contains(&got[i]));
    Ok(wrong.next().map(|index| differs(1 + wrong.count(), index)))
}
