//! The CPU kernels against naive arithmetic and the f64 oracle.

use kvpack::backend::{SpanRead, SpanWrite, TokenWrite};
use kvpack::cpu::{
    CpuIndices, CpuStore, DenseSegment, append, attend_plan, dequantize, exact_attention, nmse, quantize,
};
use kvpack::format::{AffineFormat, CodebookFormat, Grouping, HEAD_DIMS, KeyOrValue, Rotation, TensorFormat};
use kvpack::plan::{self, AttendPlan, Elements, Page, QueryRun, RowLayout, SpanView, Split, StoreView, TokenRange};
use kvpack::{AttentionShape, Bits, Calibration, Error, SegmentFormat};

use any_backend::random_rows::Rows;

fn groupings(head_dim: usize) -> Vec<Grouping> {
    let tokens = [32, 64, 128].map(Grouping::ChannelTokens);
    let channels =
        [4, head_dim / 4, head_dim / 2, head_dim].into_iter().filter(|n| n % 4 == 0).map(Grouping::TokenChannels);
    [Grouping::Channel, Grouping::Token].into_iter().chain(tokens).chain(channels).collect()
}

fn tensor_formats(head_dim: usize) -> Vec<TensorFormat> {
    let affine = |bits| groupings(head_dim).into_iter().map(move |g| TensorFormat::Affine(AffineFormat::new(bits, g)));
    std::iter::once(TensorFormat::F16).chain(Bits::ALL.into_iter().flat_map(affine)).collect()
}

/// A span in pages 3, 2, 1, ... of two shards.
struct Span {
    store: CpuStore,
    pages: Vec<Page>,
    rows: Rows,
}

impl Span {
    fn new(format: SegmentFormat, rows: Rows) -> Self {
        let pages = rows.tokens.div_ceil(128);
        let mut store = CpuStore::new(rows.shape, format).unwrap();
        store.add_shard(2).unwrap();
        store.add_shard(pages as u32).unwrap();
        store.reserve_ranges(3).unwrap();
        let pages: Vec<Page> = (0..pages as u32)
            .rev()
            .map(|i| if i < 2 { Page { shard: 0, index: i } } else { Page { shard: 1, index: i - 2 } })
            .collect();
        let tokens = TokenRange::new(0, rows.tokens).unwrap();
        let write =
            SpanWrite { rows: rows.layout(), tokens: tokens.into(), pages: &pages, range_slot: 2, centre: None };
        quantize(&mut store, Elements::F32(&rows.keys), Elements::F32(&rows.values), write).unwrap();
        Self { store, pages, rows }
    }

    fn dequantize(&self, which: KeyOrValue) -> Vec<f32> {
        let read = SpanRead { pages: &self.pages, tokens: self.rows.tokens, range_slot: 2, centre: None };
        dequantize(&self.store, which, read).unwrap()
    }

    /// NMSE of one decode step against the oracle over the dequantised rows.
    fn attend_error(&self, calibration: Option<Calibration>, split: Split) -> f64 {
        let span = SpanView {
            sequence: 0,
            start: 0,
            tokens: self.rows.tokens,
            gathered: None,
            pages: &self.pages,
            range_slot: 2,
        };
        let view = StoreView { format: *self.store.format(), calibration, spans: vec![span] };
        let plan = AttendPlan::new(self.rows.shape, &QueryRun::decode_batch(1), &[view]).unwrap();
        let got = attend_plan(&plan, &[&self.store], Elements::F32(&self.rows.query), split).unwrap();
        let (keys, values) = (self.dequantize(KeyOrValue::Key), self.dequantize(KeyOrValue::Value));
        let segment = DenseSegment { keys: &keys, values: &values, tokens: self.rows.tokens, calibration };
        let exact = exact_attention(&self.rows.shape, &[segment], &self.rows.query).unwrap();
        for (got, want) in got.lse().iter().zip(&exact.lse) {
            assert!((f64::from(*got) - want).abs() < 1e-4 * (1.0 + want.abs()), "lse {got} {want}");
        }
        nmse(got.outputs(), &exact.outputs)
    }
}

/// The range of every element, found by grouping elements naively.
fn naive_decoded(format: &TensorFormat, rows: &[f32], tokens: usize, head_dim: usize) -> Vec<f32> {
    let TensorFormat::Affine(affine) = format else {
        return rows.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect();
    };
    let group_of = |i: usize| {
        let (head, token, channel) = (i / (tokens * head_dim), i / head_dim % tokens, i % head_dim);
        match affine.grouping {
            Grouping::Channel => (head, 0, channel),
            Grouping::ChannelTokens(n) => (head, token / n, channel),
            Grouping::Token => (head, token, 0),
            Grouping::TokenChannels(n) => (head, token, channel / n),
        }
    };
    let mut extremes = std::collections::BTreeMap::new();
    for (i, &x) in rows.iter().enumerate() {
        let (min, max) = extremes.entry(group_of(i)).or_insert((x, x));
        (*min, *max) = (x.min(*min), x.max(*max));
    }
    let range = |i: usize| {
        let (min, max) = extremes[&group_of(i)];
        if affine.grouping == Grouping::Channel { affine.span_range(min, max) } else { affine.tile_range(min, max) }
    };
    rows.iter().enumerate().map(|(i, &x)| range(i).decode(range(i).encode(x, affine.bits))).collect()
}

#[test]
fn every_format_decodes_to_what_its_definition_says() {
    for head_dim in [64, 80] {
        for format in tensor_formats(head_dim) {
            let shape = AttentionShape::new(2, 2, head_dim).unwrap();
            let span = Span::new(SegmentFormat { key: format, value: format }, Rows::new(shape, 150, 1));
            for (which, rows) in [(KeyOrValue::Key, &span.rows.keys), (KeyOrValue::Value, &span.rows.values)] {
                assert_eq!(span.dequantize(which), naive_decoded(&format, rows, 150, head_dim), "{which} {format}");
            }
        }
    }
}

#[test]
fn every_format_attends_like_the_oracle() {
    for head_dim in [64, 80] {
        let shape = AttentionShape::new(3, 1, head_dim).unwrap();
        for format in tensor_formats(head_dim) {
            let span = Span::new(SegmentFormat { key: format, value: format }, Rows::new(shape, 300, 2));
            let split = Split { target_items: 1, tile_step: 1, max_tiles: 2 };
            let error = span.attend_error(None, split);
            assert!(error < 1e-6, "{format}, head_dim {head_dim}: NMSE {error}");
        }
    }
}

#[test]
fn every_shape_attends_like_the_oracle() {
    for head_dim in HEAD_DIMS {
        for group in [1, 3, 4, 7, 8] {
            for tokens in [1, 31, 129] {
                let shape = AttentionShape::new(2 * group, 2, head_dim).unwrap();
                let formats = [SegmentFormat::F16, SegmentFormat::calibquant(Bits::One)];
                for format in formats.into_iter().chain([SegmentFormat::per_channel(Bits::Four)]) {
                    let span = Span::new(format, Rows::new(shape, tokens, 3));
                    let error = span.attend_error(None, Split::default());
                    assert!(error < 1e-6, "{format}, {shape:?}, {tokens} tokens: NMSE {error}");
                }
            }
        }
    }
}

#[test]
fn calibrated_scores_attend_like_the_oracle() {
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    for (tau1, tau2) in [(0.0, 0.0), (0.0, 3.0), (3.0, 0.0), (2.0, 40.0)] {
        for tokens in [1, 2, 300] {
            let calibration = Calibration::new(tau1, tau2).unwrap();
            let span = Span::new(SegmentFormat::calibquant(Bits::Two), Rows::new(shape, tokens, 4));
            let error = span.attend_error(Some(calibration), Split { target_items: 4, tile_step: 1, max_tiles: 1 });
            assert!(error < 1e-6, "({tau1}, {tau2}), {tokens} tokens: NMSE {error}");
        }
    }
}

#[test]
fn appended_tokens_are_where_quantize_puts_them() {
    let shape = AttentionShape::new(2, 2, 80).unwrap();
    let span = Span::new(SegmentFormat::F16, Rows::new(shape, 128, 5));
    let mut store = CpuStore::new(shape, SegmentFormat::F16).unwrap();
    store.add_shard(1).unwrap();
    let page = Page { shard: 0, index: 0 };
    let writes: Vec<TokenWrite> = (0..128).map(|slot| TokenWrite { token: slot, page, slot, centre: None }).collect();
    let (keys, values) = (Elements::F32(&span.rows.keys), Elements::F32(&span.rows.values));
    append(&mut store, keys, values, span.rows.layout(), &writes).unwrap();
    for which in [KeyOrValue::Key, KeyOrValue::Value] {
        for head in 0..2 {
            let written = span.store.tile_words(which, span.pages[0], head).unwrap();
            assert_eq!(store.tile_words(which, page, head).unwrap(), written);
        }
    }
}

#[test]
fn unused_fields_are_zero() {
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let span = Span::new(SegmentFormat::per_channel(Bits::Eight), Rows::new(shape, 1, 6));
    for which in [KeyOrValue::Key, KeyOrValue::Value] {
        let (codes, _) = span.store.tile_words(which, span.pages[0], 0).unwrap();
        assert!(codes.iter().map(|word| word.count_ones()).sum::<u32>() <= 64 * 8);
        assert!(codes.iter().filter(|&&word| word != 0).count() <= 64);
    }
}

/// A gather stores the bits that the rows store which it names, copied together.
#[test]
fn gathered_tokens_are_stored_like_copied_ones() {
    let shape = AttentionShape::new(3, 3, 64).unwrap();
    let rows = Rows::new(shape, 300, 11);
    let (count, kv_heads) = (200, 3);
    let tokens: Vec<u32> = (0..count * kv_heads).map(|i| (i * 7919 % 300) as u32).collect();
    let indices = CpuIndices::new(&tokens, kv_heads, 300).unwrap();
    let copied = |elements: &[f32]| -> Vec<f32> {
        let row = |(i, &token): (usize, &u32)| &elements[rows.layout().row(token as usize, i / count)..][..64];
        tokens.iter().enumerate().flat_map(row).copied().collect()
    };
    let rotated = TensorFormat::Affine(AffineFormat::new(Bits::Two, Grouping::Channel).rotated(Rotation::hadamard(64)));
    let codebook = TensorFormat::Codebook(CodebookFormat::turboquant(Bits::Three, 64).renormalized());
    let sketched = TensorFormat::Codebook(CodebookFormat::turboquant_prod(Bits::Four, 64));
    for key in tensor_formats(64).into_iter().chain([rotated, codebook, sketched]) {
        let value = if key == sketched { codebook } else { key };
        let pages = [Page { shard: 0, index: 1 }, Page { shard: 0, index: 0 }];
        let stored = |keys: &[f32], values: &[f32], write: SpanWrite<'_, CpuIndices>| {
            let mut store = CpuStore::new(shape, SegmentFormat { key, value }).unwrap();
            store.add_shard(2).unwrap();
            store.reserve_ranges(1).unwrap();
            quantize(&mut store, Elements::F32(keys), Elements::F32(values), write).unwrap();
            let mut words: Vec<u32> = Vec::new();
            for which in [KeyOrValue::Key, KeyOrValue::Value] {
                for (page, head) in pages.iter().flat_map(|&page| (0..kv_heads).map(move |head| (page, head))) {
                    let (codes, ranges) = store.tile_words(which, page, head).unwrap();
                    words.extend(codes.iter().chain(ranges));
                }
                let ranges = store.span_ranges(which, 0).unwrap();
                words.extend(ranges.iter().flat_map(|range| [range.scale.to_bits(), range.min.to_bits()]));
            }
            words
        };
        let gather = SpanWrite {
            rows: rows.layout(),
            tokens: plan::Rows::Gather(&indices),
            pages: &pages,
            range_slot: 0,
            centre: None,
        };
        let run = SpanWrite {
            rows: RowLayout::head_major(count, &shape),
            tokens: TokenRange::new(0, count).unwrap().into(),
            ..gather
        };
        let expected = stored(&copied(&rows.keys), &copied(&rows.values), run);
        assert!(stored(&rows.keys, &rows.values, gather) == expected, "{key}");
    }
    let mut store = CpuStore::new(shape, SegmentFormat::F16).unwrap();
    store.add_shard(2).unwrap();
    let beyond = CpuIndices::new(&tokens, kv_heads, 301).unwrap();
    let pages = [0, 1].map(|index| Page { shard: 0, index });
    let write = SpanWrite {
        rows: rows.layout(),
        tokens: plan::Rows::Gather(&beyond),
        pages: &pages,
        range_slot: 0,
        centre: None,
    };
    let refused = quantize(&mut store, Elements::F32(&rows.keys), Elements::F32(&rows.values), write);
    assert!(matches!(refused, Err(Error::Plan { .. })), "{refused:?}");
}

#[test]
fn wrong_calls_are_typed_errors() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let Span { mut store, pages, rows } = Span::new(SegmentFormat::per_channel(Bits::Two), Rows::new(shape, 200, 7));
    let (keys, values) = (Elements::F32(&rows.keys), Elements::F32(&rows.values));
    let write = SpanWrite {
        rows: rows.layout(),
        tokens: TokenRange::new(0, 200).unwrap().into(),
        pages: &pages,
        range_slot: 0,
        centre: None,
    };
    let short = Elements::F32(&rows.keys[1..]);
    assert!(matches!(quantize(&mut store, short, values, write), Err(Error::Elements { what: "keys", .. })));
    assert!(matches!(quantize(&mut store, keys, short, write), Err(Error::Elements { what: "values", .. })));
    let plan_errors = [
        SpanWrite { pages: &pages[1..], ..write },
        SpanWrite { range_slot: 3, ..write },
        SpanWrite { pages: &[pages[0], Page { shard: 2, index: 0 }], ..write },
        SpanWrite { pages: &[pages[0], Page { shard: 0, index: 2 }], ..write },
        SpanWrite { tokens: TokenRange::new(10, 210).unwrap().into(), ..write },
    ];
    for write in plan_errors {
        assert!(matches!(quantize(&mut store, keys, values, write), Err(Error::Plan { .. })), "{write:?}");
    }
    let none = SpanWrite { rows: RowLayout { tokens: 0, ..write.rows }, ..write };
    assert!(matches!(quantize(&mut store, keys, values, none), Err(Error::NoTokens { .. })));
    let single = TokenWrite { token: 0, page: pages[0], slot: 0, centre: None };
    assert!(matches!(append(&mut store, keys, values, write.rows, &[single]), Err(Error::Plan { .. })));

    let span = SpanView { sequence: 0, start: 0, tokens: 200, gathered: None, pages: &pages, range_slot: 2 };
    let view = StoreView { format: *store.format(), calibration: None, spans: vec![span] };
    let plan = AttendPlan::new(shape, &QueryRun::decode_batch(1), &[view]).unwrap();
    let query = Elements::F32(&rows.query);
    let attend = |stores: &[&CpuStore], query| attend_plan(&plan, stores, query, Split::default());
    assert!(matches!(attend(&[], query), Err(Error::Plan { .. })));
    assert!(matches!(attend(&[&store], Elements::F32(&[0.0; 64])), Err(Error::Elements { .. })));
    let other = CpuStore::new(shape, SegmentFormat::F16).unwrap();
    assert!(matches!(attend(&[&other], query), Err(Error::Plan { .. })));
}

/// What the codec of TurboQuant loses is what the paper states for 1 to 4 bits, and within its bound of
/// √3 · π/2 · 4^−bits (the figures are those of Max 1960 for the normal density, of which the paper gives one or two
/// digits). Rows with one large channel lose less: a Hadamard transform spreads it evenly, not randomly.
#[test]
fn codebooks_lose_what_the_paper_states() {
    for (bits, published) in [(Bits::One, 0.363), (Bits::Two, 0.117), (Bits::Three, 0.0345), (Bits::Four, 0.0095)] {
        for head_dim in [64, 128, 256] {
            let shape = AttentionShape::new(2, 2, head_dim).unwrap();
            let span = Span::new(SegmentFormat::turboquant(bits, head_dim), Rows::new(shape, 300, 3));
            // The keys have a large channel, and one token that is far from the others.
            for (which, rows) in [(KeyOrValue::Key, &span.rows.keys), (KeyOrValue::Value, &span.rows.values)] {
                let relative = |(row, near): (&[f32], &[f32])| {
                    let error: f64 = row.iter().zip(near).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                    error / row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>()
                };
                let decoded = span.dequantize(which);
                let losses = rows.chunks_exact(head_dim).zip(decoded.chunks_exact(head_dim)).map(relative);
                let mean = losses.sum::<f64>() / (rows.len() / head_dim) as f64;
                assert!(mean < 1.1 * published, "{bits} bits of {head_dim}, {which}: {mean}");
                assert!(which == KeyOrValue::Key || mean > 0.9 * published, "{bits} bits of {head_dim}: {mean}");
                assert!(mean < 3f64.sqrt() * std::f64::consts::FRAC_PI_2 * 0.25f64.powi(bits.count() as i32));
            }
        }
    }
}
