//! A decode loop from an empty cache stores what the prefill of the same tokens stores.

use kvpack::backend::{Backend, QueryPrecision, SpanRead};
use kvpack::cache::{KvCache, PromptSpan, Recipe};
use kvpack::cpu::{DenseSegment, exact_attention, nmse};
use kvpack::format::{AffineFormat, Grouping, Rotation, TensorFormat};
use kvpack::plan::{ElementType, Page, QueryRun, RowLayout, TokenRange};
use kvpack::{AttentionShape, Bits, SegmentFormat};
use pollster::block_on;

use crate::random_rows::Random;

/// Formats that take single tokens: SAW-INT4, and other widths, groups and rotations.
pub fn formats() -> Vec<SegmentFormat> {
    let affine = |bits, grouping| AffineFormat::new(bits, grouping);
    vec![
        SegmentFormat::saw_int4(),
        SegmentFormat::turboquant(Bits::Two, 64),
        SegmentFormat {
            key: TensorFormat::Affine(affine(Bits::Two, Grouping::TokenChannels(16))),
            value: TensorFormat::Affine(affine(Bits::One, Grouping::Token).rotated(Rotation::randomized(64, 5))),
        },
        SegmentFormat { key: TensorFormat::F16, value: TensorFormat::Affine(affine(Bits::Eight, Grouping::Token)) },
    ]
}

/// Two caches of the same tokens: one filled by a prefill, one by appending token by token to two sequences.
pub struct Filled<B: Backend> {
    pub prefilled: KvCache<B>,
    pub appended: KvCache<B>,
    pub tokens: usize,
}

impl<B: Backend> Filled<B> {
    /// Fills both.
    pub fn new(backend: impl Fn() -> B, format: SegmentFormat, tokens: usize) -> Self {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let recipe = Recipe::pack_all(format).with_query(QueryPrecision::Int16);
        let cache = || KvCache::new(backend(), shape, 2, recipe.clone()).unwrap();
        let (mut prefilled, mut appended) = (cache(), cache());
        let row = shape.kv_heads() * shape.head_dim();
        let mut random = Random::new(17);
        let mut rows = || -> Vec<f32> { (0..2 * tokens * row).map(|_| random.normal() * 3.0).collect() };
        let (keys, values) = (rows(), rows());
        let whole = RowLayout::token_major(tokens, &shape);
        for sequence in 0..2 {
            let part = |x: &[f32]| {
                let x = &x[sequence * tokens * row..][..tokens * row];
                block_on(prefilled.backend().upload(x.into())).unwrap()
            };
            let (keys, values) = (part(&keys), part(&values));
            let span = [PromptSpan::packed(TokenRange::new(0, tokens).unwrap())];
            block_on(prefilled.prefill(sequence, whole, &keys, &values, &span)).unwrap();
        }
        for token in 0..tokens {
            let part = |x: &[f32]| {
                let of = |sequence: usize| &x[(sequence * tokens + token) * row..][..row];
                block_on(appended.backend().upload([of(0), of(1)].concat().as_slice().into())).unwrap()
            };
            let (keys, values) = (part(&keys), part(&values));
            block_on(appended.append(RowLayout::token_major(2, &shape), &keys, &values)).unwrap();
        }
        Self { prefilled, appended, tokens }
    }

    /// The pages of a sequence, all in one span of the packed store.
    pub fn pages(cache: &KvCache<B>, sequence: usize) -> Vec<Page> {
        let plan = cache.plan(&[QueryRun::decode(sequence)]).unwrap();
        assert_eq!(plan.segments().len(), 1, "appended tokens lie in the packed store alone");
        let segment = &plan.segments()[0];
        assert_eq!((segment.store(), segment.spans().len()), (1, 1));
        segment.pages().to_vec()
    }

    /// What both decode to, bit for bit, and what they hold in bytes.
    pub fn compare_decoded(&self) {
        for sequence in 0..2 {
            let decoded = |cache: &KvCache<B>| {
                let pages = Self::pages(cache, sequence);
                let read = SpanRead { pages: &pages, tokens: self.tokens, range_slot: 0, centre: None };
                let (keys, values) = cache.backend().dequantize(cache.stores()[1], read).unwrap();
                let download = |tensor| block_on(cache.backend().download(tensor)).unwrap();
                [download(&keys), download(&values)]
            };
            assert!(decoded(&self.prefilled) == decoded(&self.appended), "sequence {sequence}");
        }
        let bytes = |cache: &KvCache<B>| (cache.memory().packed()[0].in_use_bytes, cache.memory().f16().in_use_bytes);
        assert_eq!(bytes(&self.prefilled), bytes(&self.appended));
    }
}

/// Pages that an earlier sequence filled with ranges a million times as large, taken up again by a few tokens: what is
/// left in them must not count.
pub fn reuse_pages<B: Backend>(backend: impl Fn() -> B) {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    for format in formats() {
        let mut cache =
            KvCache::new(backend(), shape, 1, Recipe::pack_all(format).with_query(QueryPrecision::Int16)).unwrap();
        let mut random = Random::new(3);
        for (tokens, size) in [(130, 4e3f32), (3, 4e-3)] {
            cache.clear(0).unwrap();
            for _ in 0..tokens {
                let row: Vec<f32> = (0..64).map(|_| random.unit() * size).collect();
                let tensor = block_on(cache.backend().upload(row.as_slice().into())).unwrap();
                block_on(cache.append(RowLayout::token_major(1, &shape), &tensor, &tensor)).unwrap();
            }
        }
        let query: Vec<f32> = (0..128).map(|_| random.normal()).collect();
        let tensor = block_on(cache.backend().upload(query.as_slice().into())).unwrap();
        let output = block_on(cache.attend(&tensor, ElementType::F32)).unwrap();
        let output = block_on(cache.backend().download(&output)).unwrap();
        let span = cache.dequantize(0).unwrap().pop().unwrap();
        let download = |tensor| block_on(cache.backend().download(tensor)).unwrap();
        let (keys, values) = (download(&span.keys), download(&span.values));
        let segment = DenseSegment { keys: &keys, values: &values, tokens: 3, calibration: None };
        let exact = exact_attention(&shape, &[segment], &query).unwrap();
        let error = nmse(&output, &exact.outputs);
        assert!(error < 1e-6, "{format}: NMSE {error}");
    }
}
