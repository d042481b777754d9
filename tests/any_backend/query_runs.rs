//! Runs of queries over stores of several formats, against an f64 attention over what is stored; for any backend.

use kvpack::backend::{AttendOptions, AttentionStates, Backend, SpanRead, SpanWrite};
use kvpack::cpu::{DenseSegment, ExactState, exact_attention, nmse};
use kvpack::format::TILE_TOKENS;
use kvpack::plan::{AttendPlan, Page, QueryRun, RowLayout, SpanView, StoreView, TokenRange, Visible};
use kvpack::{AttentionShape, Calibration, SegmentFormat};
use pollster::block_on;

use crate::random_rows::{Random, Rows};

/// A span of a sequence: the store, and its tokens.
pub type Span = (usize, usize);

/// Sequences in stores, and runs of queries over them.
pub struct Runs {
    pub shape: AttentionShape,
    /// Formats of the stores.
    pub stores: Vec<(SegmentFormat, Option<Calibration>)>,
    /// The spans of every sequence, in token order.
    pub sequences: Vec<Vec<Span>>,
    pub runs: Vec<QueryRun>,
    /// Pages of a shard, so that spans lie in several.
    pub shard_pages: u32,
    /// The rows of a sequence, by its tokens and a seed.
    pub rows: fn(AttentionShape, usize, u64) -> Rows,
}

/// A stored span.
struct Stored {
    sequence: usize,
    store: usize,
    start: usize,
    tokens: usize,
    pages: Vec<Page>,
    range_slot: usize,
}

struct Filled<B: Backend> {
    stores: Vec<B::Store>,
    spans: Vec<Stored>,
    /// What they decode to.
    dense: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Runs {
    /// Attends on the backend and holds outputs and log-sum-exps against f64, each query by what it sees.
    ///
    /// # Panics
    /// When they differ by more than `limit` (NMSE).
    pub fn check<B: Backend>(&self, backend: &B, options: AttendOptions, limit: f64) {
        let filled = self.fill(backend);
        let plan = self.plan(&filled, &self.runs, |_| true);
        let queries = self.queries(plan.rows());
        let exact = self.exact(&filled, &plan, &queries);
        let stores: Vec<&B::Store> = filled.stores.iter().collect();
        let tensor = block_on(backend.upload(queries.as_slice().into())).unwrap();

        let outputs = block_on(backend.attend(&plan, &stores, &tensor, options)).unwrap();
        let outputs = block_on(backend.download(&outputs)).unwrap();
        self.compare("attend", &outputs, &exact, limit);

        let states = block_on(backend.attend_states(&plan, &stores, &tensor, options)).unwrap();
        self.compare_states("attend_states", backend, &states, &exact, limit);

        // Attention over all is the merge of attention over the spans of each store alone.
        if self.runs.iter().all(|run| run.visible == Visible::All) && self.every_sequence_is_in_two_stores() {
            let parts = [0, 1].map(|store| {
                let plan = self.plan(&filled, &self.runs, |span: &Stored| (span.store == 0) == (store == 0));
                block_on(backend.attend_states(&plan, &stores, &tensor, options)).unwrap()
            });
            let merged = block_on(backend.merge(&self.shape, &parts[0], &parts[1])).unwrap();
            self.compare_states("merge", backend, &merged, &exact, limit);
        }
    }

    fn every_sequence_is_in_two_stores(&self) -> bool {
        let both = |spans: &Vec<Span>| spans.iter().any(|span| span.0 == 0) && spans.iter().any(|span| span.0 > 0);
        self.sequences.iter().all(both)
    }

    fn fill<B: Backend>(&self, backend: &B) -> Filled<B> {
        let mut spans = Vec::new();
        for (sequence, of_sequence) in self.sequences.iter().enumerate() {
            let mut start = 0;
            for &(store, tokens) in of_sequence {
                spans.push(Stored { sequence, store, start, tokens, pages: Vec::new(), range_slot: spans.len() });
                start += tokens;
            }
        }
        let rows: Vec<Rows> = self
            .sequences
            .iter()
            .enumerate()
            .map(|(i, spans)| (self.rows)(self.shape, spans.iter().map(|span| span.1).sum(), i as u64 + 1))
            .collect();
        let tensors: Vec<_> = rows
            .iter()
            .map(|rows| [&rows.keys, &rows.values].map(|x| block_on(backend.upload(x.as_slice().into())).unwrap()))
            .collect();
        let mut stores = Vec::new();
        for (index, (format, _)) in self.stores.iter().enumerate() {
            let mut store = backend.create_store(self.shape, *format).unwrap();
            block_on(backend.reserve_ranges(&mut store, spans.len())).unwrap();
            let mut next = 0;
            for span in spans.iter_mut().filter(|span| span.store == index) {
                for _ in 0..span.tokens.div_ceil(TILE_TOKENS) {
                    if next % self.shard_pages == 0 {
                        block_on(backend.add_shard(&mut store, self.shard_pages)).unwrap();
                    }
                    span.pages.push(Page { shard: next / self.shard_pages, index: next % self.shard_pages });
                    next += 1;
                }
                let tokens = TokenRange::new(span.start, span.start + span.tokens).unwrap();
                let layout = RowLayout::head_major(rows[span.sequence].tokens, &self.shape);
                let write = SpanWrite {
                    rows: layout,
                    tokens: tokens.into(),
                    pages: &span.pages,
                    range_slot: span.range_slot,
                    centre: None,
                };
                let [keys, values] = &tensors[span.sequence];
                backend.quantize(&mut store, keys, values, write).unwrap();
            }
            stores.push(store);
        }
        let decode = |span: &Stored| {
            let read = SpanRead { pages: &span.pages, tokens: span.tokens, range_slot: span.range_slot, centre: None };
            let (keys, values) = backend.dequantize(&stores[span.store], read).unwrap();
            [keys, values].map(|tensor| block_on(backend.download(&tensor)).unwrap()).into()
        };
        let dense = spans.iter().map(decode).collect();
        Filled { stores, spans, dense }
    }

    fn plan<B: Backend>(&self, filled: &Filled<B>, runs: &[QueryRun], with: impl Fn(&Stored) -> bool) -> AttendPlan {
        let view = |(index, (format, calibration)): (usize, &(SegmentFormat, Option<Calibration>))| {
            let of_store = filled.spans.iter().filter(|span| span.store == index && with(span));
            let spans = of_store.map(|span| SpanView {
                sequence: span.sequence,
                start: span.start,
                tokens: span.tokens,
                gathered: None,
                pages: &span.pages,
                range_slot: span.range_slot,
            });
            StoreView { format: *format, calibration: *calibration, spans: spans.collect() }
        };
        let views: Vec<StoreView<'_>> = self.stores.iter().enumerate().map(view).collect();
        AttendPlan::new(self.shape, runs, &views).unwrap()
    }

    fn queries(&self, rows: usize) -> Vec<f32> {
        let mut random = Random::new(77);
        let head_dim = self.shape.head_dim();
        let mut queries: Vec<f32> = (0..rows * self.shape.query_heads() * head_dim).map(|_| random.normal()).collect();
        // The channel in which queries look for the sink. The next query does not: the sink would hide whether it sees
        // a token more or less.
        let heads = queries.chunks_exact_mut(head_dim).enumerate();
        heads.for_each(|(head, query)| query[0] = [2.0, 0.0][head / self.shape.query_heads() % 2]);
        queries
    }

    fn exact<B: Backend>(&self, filled: &Filled<B>, plan: &AttendPlan, queries: &[f32]) -> Vec<ExactState> {
        let elements = self.shape.query_heads() * self.shape.head_dim();
        let mut exact = Vec::new();
        for run in plan.runs() {
            for query in 0..run.run.queries {
                let parts =
                    filled.spans.iter().zip(&filled.dense).filter(|(span, _)| span.sequence == run.run.sequence);
                let seen: Vec<_> = parts
                    .map(|(span, (keys, values))| {
                        let limits = run.limits(query);
                        let [from, to] = [limits.from, limits.to]
                            .map(|position| (position as usize).saturating_sub(span.start).min(span.tokens));
                        let seen = from..to.max(from);
                        let cut = |rows: &Vec<f32>| self.some_tokens(rows, span.tokens, seen.clone());
                        (cut(keys), cut(values), seen.len(), self.stores[span.store].1)
                    })
                    .collect();
                let segments: Vec<DenseSegment<'_>> = seen
                    .iter()
                    .map(|(keys, values, tokens, calibration)| DenseSegment {
                        keys,
                        values,
                        tokens: *tokens,
                        calibration: *calibration,
                    })
                    .collect();
                let row = run.first_row + query;
                exact.push(exact_attention(&self.shape, &segments, &queries[row * elements..][..elements]).unwrap());
            }
        }
        exact
    }

    /// Some tokens of `[kv_heads, tokens, head_dim]` rows.
    fn some_tokens(&self, rows: &[f32], tokens: usize, some: std::ops::Range<usize>) -> Vec<f32> {
        let (head_dim, heads) = (self.shape.head_dim(), rows.chunks_exact((tokens * self.shape.head_dim()).max(1)));
        heads.flat_map(|head| &head[some.start * head_dim..some.end * head_dim]).copied().collect()
    }

    fn compare(&self, what: &str, outputs: &[f32], exact: &[ExactState], limit: f64) {
        let elements = self.shape.query_heads() * self.shape.head_dim();
        assert_eq!(outputs.len(), exact.len() * elements, "{what}");
        for (row, (outputs, exact)) in outputs.chunks_exact(elements).zip(exact).enumerate() {
            let error = nmse(outputs, &exact.outputs);
            assert!(error <= limit, "{what}, query {row}: NMSE {error:e} in {:?}, {:?}", self.stores, self.sequences);
        }
    }

    fn compare_states<B: Backend>(
        &self,
        what: &str,
        backend: &B,
        states: &AttentionStates<B::Tensor>,
        exact: &[ExactState],
        limit: f64,
    ) {
        self.compare(what, &block_on(backend.download(&states.outputs)).unwrap(), exact, limit);
        let lse = block_on(backend.download(&states.lse)).unwrap();
        let wanted = exact.iter().flat_map(|exact| &exact.lse);
        assert_eq!(lse.len(), exact.len() * self.shape.query_heads());
        for (index, (lse, wanted)) in lse.iter().zip(wanted).enumerate() {
            let error = (f64::from(*lse) - wanted).abs();
            assert!(error <= 2e-3 * (1.0 + wanted.abs()), "{what}, log-sum-exp {index}: {lse} for {wanted}");
        }
    }
}

/// Cases: ragged batches of causal runs, decoding beside chunks, queries that see all, group sizes and head
/// dimensions, several stores, spans that end within a tile, shards that end within a span. The longest run has
/// `longest` queries, of at most 439 tokens.
pub fn cases(longest: usize) -> Vec<Runs> {
    use kvpack::Bits;
    use kvpack::format::{AffineFormat, Grouping, TensorFormat};
    let affine = |bits, grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
    let kivi = SegmentFormat {
        key: affine(Bits::Two, Grouping::ChannelTokens(32)),
        value: affine(Bits::Two, Grouping::TokenChannels(32)),
    };
    let all = |sequence, queries| QueryRun::new(sequence, queries, Visible::All);
    let shape = |query_heads, kv_heads, head_dim| AttentionShape::new(query_heads, kv_heads, head_dim).unwrap();
    let plain = |formats: &[SegmentFormat]| formats.iter().map(|&format| (format, None)).collect::<Vec<_>>();
    let f16 = SegmentFormat::F16;
    let ragged = vec![vec![(0, 130), (1, 300), (0, 9)], vec![(0, 1)], vec![(0, 3), (1, 128), (1, 77), (0, 200)]];
    let runs = vec![QueryRun::causal(0, longest), QueryRun::decode(1), QueryRun::causal(2, 7)];
    let mut cases = Vec::new();
    for (query_heads, kv_heads, head_dim) in [(2, 2, 64), (4, 2, 128), (6, 2, 64), (8, 2, 128), (8, 1, 80)] {
        cases.push(Runs {
            shape: shape(query_heads, kv_heads, head_dim),
            stores: plain(&[f16, SegmentFormat::per_channel(Bits::Four)]),
            sequences: ragged.clone(),
            runs: runs.clone(),
            shard_pages: 2,
            rows: Rows::new,
        });
    }
    for format in [kivi, SegmentFormat::saw_int4(), SegmentFormat::turboquant(Bits::Three, 64)] {
        cases.push(Runs {
            shape: shape(2, 1, 64),
            stores: plain(&[f16, format]),
            sequences: ragged.clone(),
            runs: vec![QueryRun::causal(2, longest.min(128)), QueryRun::causal(0, 2), all(1, 5)],
            shard_pages: 9,
            rows: Rows::new,
        });
    }
    for (bits, head_dim) in [(Bits::Four, 128), (Bits::Two, 64), (Bits::One, 128)] {
        cases.push(Runs {
            shape: shape(4, 1, head_dim),
            stores: plain(&[f16, SegmentFormat::turboquant(bits, head_dim)]),
            sequences: ragged.clone(),
            runs: vec![QueryRun::causal(2, longest.min(60)), QueryRun::causal(0, 9), all(1, 3)],
            shard_pages: 5,
            rows: Rows::new,
        });
    }
    // Three and four stores, a query of each sequence; and many queries that see all.
    let stores = [f16, SegmentFormat::per_channel(Bits::Two), kivi, SegmentFormat::saw_int4()];
    for count in [3, 4] {
        let spans = |first: usize| (0..2 * count).map(|i| ((first + i) % count, 40 + 61 * i)).collect::<Vec<_>>();
        cases.push(Runs {
            shape: shape(4, 2, 64),
            stores: plain(&stores[..count]),
            sequences: vec![spans(0), spans(1)],
            runs: vec![QueryRun::decode(0), all(1, 6)],
            shard_pages: 3,
            rows: Rows::new,
        });
    }
    // Calibrated scores: every query has extremes of its own, over what it sees.
    let calibrated = (SegmentFormat::per_channel(Bits::Two), Calibration::new(0.0, 1.0).ok());
    cases.push(Runs {
        shape: shape(4, 2, 64),
        stores: vec![(f16, None), calibrated],
        sequences: vec![vec![(0, 20), (1, 300), (1, 140), (0, 5)]],
        runs: vec![QueryRun::causal(0, longest.min(130))],
        shard_pages: 4,
        rows: Rows::new,
    });
    // Windows that begin within a tile, with several queries of one query head and one of four.
    for (query_heads, left) in [(2, 200), (8, 70)] {
        let window = |sequence, queries, left| QueryRun::new(sequence, queries, Visible::Window { left });
        cases.push(Runs {
            shape: shape(query_heads, 2, 64),
            stores: plain(&[f16, SegmentFormat::per_channel(Bits::Four)]),
            sequences: ragged.clone(),
            runs: vec![window(0, longest, left), QueryRun::decode(1), window(2, 7, 9)],
            shard_pages: 2,
            rows: Rows::new,
        });
    }
    cases
}

/// Causal runs over packed tokens, one of whose values are far above all others ([`Rows::with_outliers`]). Several
/// query heads have one KV head.
pub fn outliers(format: SegmentFormat, queries: usize, tokens: usize) -> Runs {
    with_rows(format, queries, (tokens, Rows::with_outliers))
}

/// The same beside a sink without values ([`Rows::with_empty_sink`]), in one item.
pub fn empty_sink(format: SegmentFormat, queries: usize) -> Runs {
    with_rows(format, queries, (500, Rows::with_empty_sink))
}

fn with_rows(
    format: SegmentFormat,
    queries: usize,
    (tokens, rows): (usize, fn(AttentionShape, usize, u64) -> Rows),
) -> Runs {
    Runs {
        shape: AttentionShape::new(4, 1, 128).unwrap(),
        stores: vec![(format, None)],
        sequences: vec![vec![(0, tokens)]],
        runs: vec![QueryRun::causal(0, queries)],
        shard_pages: 200,
        rows,
    }
}
