//! A naive model of a cache, and random operations that a cache and the model must agree on. For any backend.
#![allow(dead_code, reason = "every test takes what it needs")]

pub mod decode_loop;
pub mod recipes;

use std::collections::{BTreeMap, BTreeSet};

use half::f16;
use kvpack::backend::Backend;
use kvpack::cache::{KvCache, PromptSpan, RecentWindow, Recipe};
use kvpack::cpu::{DenseSegment, exact_attention, nmse};
use kvpack::format::codebook::{renormalized, stored_norm};
use kvpack::format::sketch::sketch_level;
use kvpack::format::{Codebook, CodebookFormat, Direction, Grouping, KeyOrValue, NormRule, TensorFormat};
use kvpack::plan::{ElementType, Elements, RowLayout, TokenRange};
use kvpack::{AttentionShape, Error, SegmentFormat, TILE_TOKENS};
use pollster::block_on;
use proptest::prelude::*;

use crate::random_rows::Random;

/// Sequences of the caches under test.
pub const SEQUENCES: usize = 3;

/// Something to do to a cache.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Prompt spans by length, packed or not.
    Prefill { sequence: usize, spans: Vec<(usize, bool)>, half: bool },
    /// So many tokens, one after another, to the sequences whose bit is set.
    Append { tokens: usize, sequences: u8, half: bool },
    /// So many tokens at once, attended to causally, then windows are packed.
    Extend { sequence: usize, tokens: usize, half: bool },
    /// Let a sequence, cleared first, hold what another holds.
    Fork { source: usize, target: usize },
    /// Keep so many hundredths of a sequence's tokens.
    Truncate { sequence: usize, hundredths: usize },
    /// Forget a sequence.
    Clear { sequence: usize },
    /// A call that must fail.
    Refused { call: Refused, at: usize },
}

/// Calls that must fail and change nothing.
#[derive(Clone, Copy, Debug)]
pub enum Refused {
    PrefillNonFinite,
    PrefillGap,
    PrefillSequence,
    PrefillShort,
    AppendNonFinite,
    AppendTwice,
    AppendSequence,
    AttendShort,
}

/// Operations to try.
pub fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let length = prop_oneof![1usize..20, 100usize..300, Just(128), Just(256)];
    let spans = prop::collection::vec((length, any::<bool>()), 1..4);
    let refused = prop::sample::select(vec![
        Refused::PrefillNonFinite,
        Refused::PrefillGap,
        Refused::PrefillSequence,
        Refused::PrefillShort,
        Refused::AppendNonFinite,
        Refused::AppendTwice,
        Refused::AppendSequence,
        Refused::AttendShort,
    ]);
    let operation = prop_oneof![
        4 => (0..SEQUENCES, spans, any::<bool>()).prop_map(|(sequence, spans, half)| {
            Operation::Prefill { sequence, spans, half }
        }),
        4 => (prop_oneof![1usize..4, 100usize..150], 1u8..8, any::<bool>()).prop_map(|(tokens, sequences, half)| {
            Operation::Append { tokens, sequences, half }
        }),
        2 => (0..SEQUENCES, prop_oneof![1usize..4, 100usize..300], any::<bool>()).prop_map(|(sequence, tokens, half)| {
            Operation::Extend { sequence, tokens, half }
        }),
        2 => (0..SEQUENCES, 1..SEQUENCES).prop_map(|(source, by)| {
            Operation::Fork { source, target: (source + by) % SEQUENCES }
        }),
        2 => (0..SEQUENCES, 0usize..101).prop_map(|(sequence, hundredths)| Operation::Truncate { sequence, hundredths }),
        1 => (0..SEQUENCES).prop_map(|sequence| Operation::Clear { sequence }),
        1 => (refused, 0usize..1000).prop_map(|(call, at)| Operation::Refused { call, at }),
    ];
    prop::collection::vec(operation, 1..16)
}

/// Runs operations on a cache and on the model and compares them after each.
///
/// # Panics
/// When they disagree.
pub fn check<B: Backend>(backend: B, shape: AttentionShape, recipe: Recipe, operations: &[Operation], seed: u64) {
    let mut cache = KvCache::new(backend, shape, SEQUENCES, recipe).unwrap();
    let mut model = Model { shape, recipe, sequences: vec![Vec::new(); SEQUENCES], next_page: 0 };
    let mut random = Random::new(seed);
    for operation in operations {
        apply(&mut cache, &mut model, operation, &mut random);
        compare(&cache, &model, &mut random);
    }
}

/// A span as the model keeps it: rows `[tokens][kv_heads · head_dim]` as they were handed in.
#[derive(Clone)]
struct ModelSpan {
    packed: bool,
    window: bool,
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Keys and values that were forgotten, and by which the ranges of a packed span were made.
    forgotten: [Vec<f32>; 2],
    /// A number for every page, the same where sequences share it.
    pages: Vec<usize>,
}

impl ModelSpan {
    /// A span without tokens.
    fn empty(packed: bool) -> Self {
        Self {
            packed,
            window: true,
            keys: Vec::new(),
            values: Vec::new(),
            forgotten: [Vec::new(), Vec::new()],
            pages: Vec::new(),
        }
    }

    fn truncate(&mut self, tokens: usize, row: usize) {
        for (rows, forgotten) in [&mut self.keys, &mut self.values].into_iter().zip(&mut self.forgotten) {
            let cut = rows.split_off(tokens * row);
            if self.packed {
                forgotten.splice(0..0, cut);
            }
        }
        self.pages.truncate(tokens.div_ceil(TILE_TOKENS));
    }
}

struct Model {
    shape: AttentionShape,
    recipe: Recipe,
    sequences: Vec<Vec<ModelSpan>>,
    /// The number of the next page.
    next_page: usize,
}

impl Model {
    fn row_elements(&self) -> usize {
        self.shape.kv_heads() * self.shape.head_dim()
    }

    fn new_page(&mut self) -> usize {
        self.next_page += 1;
        self.next_page
    }

    /// How many spans hold a page.
    fn holders(&self, page: usize) -> usize {
        self.sequences.iter().flatten().filter(|span| span.pages.contains(&page)).count()
    }

    /// Distinct pages of f16 spans and of packed spans.
    fn pages(&self) -> [usize; 2] {
        [false, true].map(|packed| {
            let spans = self.sequences.iter().flatten().filter(|span| span.packed == packed);
            spans.flat_map(|span| &span.pages).collect::<BTreeSet<_>>().len()
        })
    }

    fn packs(&self) -> bool {
        self.recipe.packed != SegmentFormat::F16
    }

    /// Newer tokens that a packed window needs, if windows are packed.
    fn window(&self) -> Option<usize> {
        match self.recipe.recent {
            RecentWindow::PackTiles { newer } if self.packs() => Some(newer),
            _ => None,
        }
    }

    fn packs_tokens(&self) -> bool {
        self.packs() && self.recipe.recent == RecentWindow::PackTokens
    }

    fn push_token(&mut self, sequence: usize, keys: &[f32], values: &[f32]) {
        let (packs_windows, row) = (self.window().is_some(), self.row_elements());
        let tokens: usize = self.sequences[sequence].iter().map(|span| span.keys.len() / row).sum();
        let packed = self.packs() && self.recipe.recent == RecentWindow::PackTokens && tokens >= self.recipe.sink;
        let spans = &mut self.sequences[sequence];
        let is_full = |span: &ModelSpan| span.packed || !span.window || span.keys.len() == TILE_TOKENS * row;
        let needs_span = |span: &ModelSpan| if packs_windows { is_full(span) } else { span.packed != packed };
        if spans.last().is_none_or(needs_span) {
            spans.push(ModelSpan::empty(packed));
        }
        let last = self.sequences[sequence].last().unwrap();
        let open = (!last.keys.len().is_multiple_of(TILE_TOKENS * row)).then(|| *last.pages.last().unwrap());
        if open.is_none_or(|open| self.holders(open) > 1) {
            // A new page, or a copy of a shared one.
            let page = self.new_page();
            let last = self.sequences[sequence].last_mut().unwrap();
            last.pages.truncate(last.keys.len() / (TILE_TOKENS * row));
            last.pages.push(page);
        }
        let last = self.sequences[sequence].last_mut().unwrap();
        last.keys.extend_from_slice(keys);
        last.values.extend_from_slice(values);
        // A span that takes single tokens has no ranges that depend on others.
        last.forgotten = [Vec::new(), Vec::new()];
    }

    /// Packs, oldest first, up to `most` full windows that have enough tokens after them.
    fn pack_windows(&mut self, sequence: usize, most: usize) {
        let (Some(newer), row, sink) = (self.window(), self.row_elements(), self.recipe.sink) else { return };
        let tokens: usize = self.sequences[sequence].iter().map(|span| span.keys.len() / row).sum();
        let mut start = 0;
        let mut packed = 0;
        for span in &mut self.sequences[sequence] {
            let length = span.keys.len() / row;
            let due = span.window
                && !span.packed
                && start >= sink
                && length == TILE_TOKENS
                && tokens - start - length >= newer;
            if due && packed < most {
                // A window is packed from what it holds: f16.
                span.keys.iter_mut().chain(&mut span.values).for_each(|x| *x = f16::from_f32(*x).to_f32());
                (span.packed, span.window) = (true, false);
                self.next_page += 1;
                span.pages = vec![self.next_page];
                packed += 1;
            }
            start += length;
        }
    }

    /// What a sequence must decode to, `[tokens][kv_heads · head_dim]`.
    fn decoded(&self, sequence: usize, which: KeyOrValue) -> Vec<f32> {
        let decode = |span: &ModelSpan| {
            let [keys, values] = &span.forgotten;
            let (rows, forgotten) = if which == KeyOrValue::Key { (&span.keys, keys) } else { (&span.values, values) };
            let format = if span.packed { *self.recipe.packed.tensor(which) } else { TensorFormat::F16 };
            let mut decoded = decoded(&format, &[rows.as_slice(), forgotten].concat(), &self.shape);
            decoded.truncate(rows.len());
            decoded
        };
        self.sequences[sequence].iter().flat_map(decode).collect()
    }
}

/// Groups elements naively and encodes and decodes each.
fn decoded(format: &TensorFormat, rows: &[f32], shape: &AttentionShape) -> Vec<f32> {
    let head_dim = shape.head_dim();
    let affine = match format {
        TensorFormat::F16 => return rows.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        TensorFormat::Codebook(codebook) => return decoded_by_codebook(codebook, rows, head_dim),
        TensorFormat::Affine(affine) => affine,
    };
    let turn = |direction, rows: &mut Vec<f32>| {
        let rotation = affine.rotation.into_iter();
        rotation.for_each(|rotation| kvpack::cpu::hadamard(rows, head_dim, rotation, direction).unwrap());
    };
    let mut rows = rows.to_vec();
    turn(Direction::Forth, &mut rows);
    let group_of = |i: usize| {
        let (token, head, channel) = (i / (shape.kv_heads() * head_dim), i / head_dim % shape.kv_heads(), i % head_dim);
        match affine.grouping {
            Grouping::Channel => (head, 0, channel),
            Grouping::ChannelTokens(n) => (head, token / n, channel),
            Grouping::Token => (head, token, 0),
            Grouping::TokenChannels(n) => (head, token, channel / n),
        }
    };
    let mut extremes = BTreeMap::new();
    for (i, &x) in rows.iter().enumerate() {
        let (min, max) = extremes.entry(group_of(i)).or_insert((x, x));
        (*min, *max) = (x.min(*min), x.max(*max));
    }
    let range = |i: usize| {
        let (min, max) = extremes[&group_of(i)];
        if affine.grouping == Grouping::Channel { affine.span_range(min, max) } else { affine.tile_range(min, max) }
    };
    let mut decoded: Vec<f32> =
        rows.iter().enumerate().map(|(i, &x)| range(i).decode(range(i).encode(x, affine.bits))).collect();
    turn(Direction::Back, &mut decoded);
    decoded
}

/// Encodes and decodes row by row: levels, and the signs of what they leave where there is a sketch.
fn decoded_by_codebook(format: &CodebookFormat, rows: &[f32], head_dim: usize) -> Vec<f32> {
    let codebook = format.level_bits().map(|bits| Codebook::of_format(bits, head_dim).unwrap());
    let mut rows = rows.to_vec();
    for row in rows.chunks_exact_mut(head_dim) {
        format.rotation.rotate(row).unwrap();
        let norm = stored_norm(row);
        let code = |x: &f32| codebook.as_ref().map_or(0, |codebook| codebook.encode(*x, norm.to_f32()));
        let level = |x: &f32, norm| codebook.as_ref().map_or(0.0, |codebook| codebook.decode(code(x), norm).unwrap());
        let scale = match format.norms {
            NormRule::Row => norm,
            NormRule::Renormalized => renormalized(norm, &row.iter().map(|x| level(x, 1.0)).collect::<Vec<_>>()),
        };
        let levels: Vec<f32> = row.iter().map(|x| level(x, scale.to_f32())).collect();
        let mut rest: Vec<f32> = row.iter().zip(&levels).map(|(x, level)| x - level).collect();
        format.sketch_rotations(head_dim).for_each(|rotation| rotation.rotate(&mut rest).unwrap());
        let share = if format.sketch.is_some() { sketch_level(head_dim) } else { 0.0 };
        let norm = stored_norm(&rest).to_f32();
        rest.iter_mut().for_each(|x| *x = norm * if *x < 0.0 { -share } else { share });
        format.sketch_rotations(head_dim).rev().for_each(|rotation| rotation.unrotate(&mut rest).unwrap());
        row.iter_mut().zip(levels.iter().zip(&rest)).for_each(|(x, (level, rest))| *x = level + rest);
        format.rotation.unrotate(row).unwrap();
    }
    rows
}

/// Random rows, rounded to f16 if `half`, and the tensor that holds them.
fn rows<B: Backend>(backend: &B, random: &mut Random, elements: usize, half: bool) -> (Vec<f32>, B::Tensor) {
    let offset = random.unit();
    let rows: Vec<f32> = (0..elements).map(|_| random.normal() + offset).collect();
    if half {
        let halves: Vec<f16> = rows.iter().map(|&x| f16::from_f32(x)).collect();
        let tensor = block_on(backend.upload(Elements::F16(&halves))).unwrap();
        return (halves.iter().map(|x| x.to_f32()).collect(), tensor);
    }
    let tensor = block_on(backend.upload(Elements::F32(&rows))).unwrap();
    (rows, tensor)
}

fn apply<B: Backend>(cache: &mut KvCache<B>, model: &mut Model, operation: &Operation, random: &mut Random) {
    let shape = model.shape;
    let row = model.row_elements();
    match operation {
        Operation::Prefill { sequence, spans, half } => {
            let tokens = spans.iter().map(|&(tokens, _)| tokens).sum();
            let (keys, key_tensor) = rows(cache.backend(), random, tokens * row, *half);
            let (values, value_tensor) = rows(cache.backend(), random, tokens * row, *half);
            let mut start = 0;
            let mut prompt = Vec::new();
            for &(tokens, packed) in spans {
                let range = TokenRange::new(start, start + tokens).unwrap();
                prompt.push(if packed { PromptSpan::packed(range) } else { PromptSpan::f16(range) });
                let packed = packed && model.packs();
                let pages = (0..tokens.div_ceil(TILE_TOKENS)).map(|_| model.new_page()).collect();
                model.sequences[*sequence].push(ModelSpan {
                    packed,
                    window: false,
                    keys: keys[start * row..(start + tokens) * row].to_vec(),
                    values: values[start * row..(start + tokens) * row].to_vec(),
                    pages,
                    ..ModelSpan::empty(packed)
                });
                start += tokens;
            }
            let layout = RowLayout::token_major(tokens, &shape);
            block_on(cache.prefill(*sequence, layout, &key_tensor, &value_tensor, &prompt)).unwrap();
        }
        Operation::Append { tokens, sequences, half } => {
            let sequences: Vec<usize> = (0..SEQUENCES).filter(|s| sequences >> s & 1 == 1).collect();
            for _ in 0..*tokens {
                let (keys, key_tensor) = rows(cache.backend(), random, sequences.len() * row, *half);
                let (values, value_tensor) = rows(cache.backend(), random, sequences.len() * row, *half);
                for (i, &sequence) in sequences.iter().enumerate() {
                    model.push_token(sequence, &keys[i * row..][..row], &values[i * row..][..row]);
                    model.pack_windows(sequence, 1);
                }
                let layout = RowLayout::token_major(sequences.len(), &shape);
                block_on(cache.append_to(&sequences, layout, &key_tensor, &value_tensor)).unwrap();
            }
        }
        Operation::Extend { sequence, tokens, half } => {
            let (keys, key_tensor) = rows(cache.backend(), random, tokens * row, *half);
            let (values, value_tensor) = rows(cache.backend(), random, tokens * row, *half);
            for (key, value) in keys.chunks(row).zip(values.chunks(row)) {
                model.push_token(*sequence, key, value);
            }
            let layout = RowLayout::token_major(*tokens, &shape);
            block_on(cache.extend(*sequence, layout, &key_tensor, &value_tensor)).unwrap();
            compare_causal(cache, *sequence, (*tokens).min(3), random);
            model.pack_windows(*sequence, usize::MAX);
            block_on(cache.pack_windows(*sequence)).unwrap();
        }
        Operation::Fork { source, target } => {
            if !model.sequences[*target].is_empty() {
                assert!(matches!(cache.fork(*source, *target), Err(Error::Plan { .. })));
            }
            cache.clear(*target).unwrap();
            cache.fork(*source, *target).unwrap();
            model.sequences[*target] = model.sequences[*source].clone();
        }
        Operation::Truncate { sequence, hundredths } => {
            let held = cache.tokens(*sequence).unwrap();
            assert!(matches!(cache.truncate(*sequence, held + 1), Err(Error::Plan { .. })));
            let mut kept = held * hundredths / 100;
            cache.truncate(*sequence, kept).unwrap();
            model.sequences[*sequence].retain_mut(|span| {
                let tokens = kept.min(span.keys.len() / row);
                kept -= tokens;
                span.truncate(tokens, row);
                tokens > 0
            });
        }
        Operation::Clear { sequence } => {
            model.sequences[*sequence].clear();
            cache.clear(*sequence).unwrap();
        }
        Operation::Refused { call, at } => refused(cache, model, *call, *at, random),
    }
}

fn refused<B: Backend>(cache: &mut KvCache<B>, model: &Model, call: Refused, at: usize, random: &mut Random) {
    let shape = model.shape;
    let row = model.row_elements();
    let (tokens, head_dim) = (130, shape.head_dim());
    let layout = RowLayout::token_major(tokens, &shape);
    let whole = [PromptSpan::packed(TokenRange::new(0, tokens).unwrap())];
    let (mut rows_with_hole, good) = rows(cache.backend(), random, tokens * row, false);
    let at = at % rows_with_hole.len();
    rows_with_hole[at] = [f32::NAN, f32::INFINITY, -70000.0][at % 3];
    let upload = |cache: &KvCache<B>, rows: &[f32]| block_on(cache.backend().upload(Elements::F32(rows))).unwrap();
    let bad = upload(cache, &rows_with_hole);
    let single = upload(cache, &vec![0.5; SEQUENCES * row]);
    match call {
        Refused::PrefillNonFinite => {
            let error = block_on(cache.prefill(0, layout, &good, &bad, &whole)).unwrap_err();
            let place = (at / row, at / head_dim % shape.kv_heads(), at % head_dim);
            assert!(
                matches!(error, Error::NotFinite { tensor: KeyOrValue::Value, token, kv_head, channel, .. }
                    if (token, kv_head, channel) == place),
                "{error}"
            );
        }
        Refused::PrefillGap => {
            let range = |start, end| PromptSpan::f16(TokenRange::new(start, end).unwrap());
            for spans in [vec![], vec![range(0, 129)], vec![range(0, 50), range(51, 130)], vec![range(0, 131)]] {
                let error = block_on(cache.prefill(1, layout, &good, &good, &spans)).unwrap_err();
                assert!(matches!(error, Error::PromptSpans { .. }), "{error}");
            }
        }
        Refused::PrefillSequence => {
            let error = block_on(cache.prefill(SEQUENCES, layout, &good, &good, &whole)).unwrap_err();
            assert!(matches!(error, Error::Sequence { .. }), "{error}");
        }
        Refused::PrefillShort => {
            let error = block_on(cache.prefill(0, layout, &good, &single, &whole)).unwrap_err();
            assert!(matches!(error, Error::Elements { what: "values", .. }), "{error}");
            let none = RowLayout::token_major(0, &shape);
            let error = block_on(cache.prefill(0, none, &good, &good, &whole)).unwrap_err();
            assert!(matches!(error, Error::NoTokens { .. }), "{error}");
        }
        Refused::AppendNonFinite => {
            let mut rows = vec![0.5; SEQUENCES * row];
            let at = at % rows.len();
            rows[at] = f32::NEG_INFINITY;
            let bad = upload(cache, &rows);
            let error = block_on(cache.append(RowLayout::token_major(SEQUENCES, &shape), &bad, &single)).unwrap_err();
            let found = at / row;
            assert!(matches!(error, Error::NotFinite { token, .. } if token == found), "{error}");
        }
        Refused::AppendTwice => {
            let layout = RowLayout::token_major(2, &shape);
            let error = block_on(cache.append_to(&[1, 1], layout, &single, &single)).unwrap_err();
            assert!(matches!(error, Error::Plan { .. }), "{error}");
            let error = block_on(cache.append(layout, &single, &single)).unwrap_err();
            assert!(matches!(error, Error::Plan { .. }), "{error}");
        }
        Refused::AppendSequence => {
            let layout = RowLayout::token_major(2, &shape);
            let error = block_on(cache.append_to(&[0, SEQUENCES], layout, &single, &single)).unwrap_err();
            assert!(matches!(error, Error::Sequence { .. }), "{error}");
            assert!(matches!(cache.clear(SEQUENCES), Err(Error::Sequence { .. })));
        }
        Refused::AttendShort => {
            let held: Vec<usize> = (0..SEQUENCES).filter(|&s| !model.sequences[s].is_empty()).collect();
            let short = upload(cache, &vec![0.5; SEQUENCES * shape.query_heads() * head_dim + 1]);
            let error = block_on(cache.attend_to(&held, &short, ElementType::F32)).err().unwrap();
            assert!(matches!(error, Error::Elements { .. } | Error::NoTokens { .. }), "{error}");
        }
    }
}

fn compare<B: Backend>(cache: &KvCache<B>, model: &Model, random: &mut Random) {
    let shape = model.shape;
    let mut dense = Vec::new();
    for sequence in 0..SEQUENCES {
        let spans = cache.dequantize(sequence).unwrap();
        let mut stored = [Vec::new(), Vec::new()];
        let mut segments = Vec::new();
        for span in &spans {
            let keys = block_on(cache.backend().download(&span.keys)).unwrap();
            let values = block_on(cache.backend().download(&span.values)).unwrap();
            stored[0].extend(token_major(&keys, span.tokens, &shape));
            stored[1].extend(token_major(&values, span.tokens, &shape));
            segments.push((keys, values, span.tokens, span.calibration));
        }
        assert!(stored[0] == model.decoded(sequence, KeyOrValue::Key), "keys of sequence {sequence}");
        assert!(stored[1] == model.decoded(sequence, KeyOrValue::Value), "values of sequence {sequence}");
        assert_eq!(cache.tokens(sequence).unwrap() * model.row_elements(), stored[0].len());
        dense.push(segments);
    }
    check_memory(cache, model.pages());

    let held: Vec<usize> = (0..SEQUENCES).rev().filter(|&s| !dense[s].is_empty()).collect();
    if held.len() < SEQUENCES {
        assert!(cache.plan(&[0, 1, 2]).is_err());
    }
    if held.is_empty() {
        return;
    }
    let per_query = shape.query_heads() * shape.head_dim();
    let (query, tensor) = rows(cache.backend(), random, held.len() * per_query, false);
    let output = block_on(cache.attend_to(&held, &tensor, ElementType::F32)).unwrap();
    let output = block_on(cache.backend().download(&output)).unwrap();
    for (i, &sequence) in held.iter().enumerate() {
        let segments: Vec<DenseSegment<'_>> = dense[sequence]
            .iter()
            .map(|(keys, values, tokens, calibration)| DenseSegment {
                keys,
                values,
                tokens: *tokens,
                calibration: *calibration,
            })
            .collect();
        let exact = exact_attention(&shape, &segments, &query[i * per_query..][..per_query]).unwrap();
        let error = nmse(&output[i * per_query..][..per_query], &exact.outputs);
        assert!(error < 1e-6, "sequence {sequence}: NMSE {error}");
    }
}

/// The newest tokens' queries against f64 attention over what each of them sees.
fn compare_causal<B: Backend>(cache: &KvCache<B>, sequence: usize, count: usize, random: &mut Random) {
    let shape = *cache.shape();
    let per_query = shape.query_heads() * shape.head_dim();
    let (queries, tensor) = rows(cache.backend(), random, count * per_query, false);
    let output = block_on(cache.attend_causal(sequence, &tensor, ElementType::F32)).unwrap();
    let output = block_on(cache.backend().download(&output)).unwrap();
    let spans = cache.dequantize(sequence).unwrap();
    let download = |tensor| block_on(cache.backend().download(tensor)).unwrap();
    let dense: Vec<_> = spans.iter().map(|span| (download(&span.keys), download(&span.values), span)).collect();
    let tokens = cache.tokens(sequence).unwrap();
    for (i, query) in queries.chunks(per_query).enumerate() {
        let mut unseen = tokens - count + 1 + i;
        let mut seen = Vec::new();
        for (keys, values, span) in &dense {
            let tokens = span.tokens.min(unseen);
            unseen -= tokens;
            let head = span.tokens * shape.head_dim();
            let first = |rows: &[f32]| -> Vec<f32> {
                rows.chunks(head).flat_map(|rows| rows[..tokens * shape.head_dim()].to_vec()).collect()
            };
            seen.push((first(keys), first(values), tokens, span.calibration));
        }
        let segments: Vec<DenseSegment<'_>> = seen
            .iter()
            .filter(|(_, _, tokens, _)| *tokens > 0)
            .map(|(keys, values, tokens, calibration)| DenseSegment {
                keys,
                values,
                tokens: *tokens,
                calibration: *calibration,
            })
            .collect();
        let exact = exact_attention(&shape, &segments, query).unwrap();
        let error = nmse(&output[i * per_query..][..per_query], &exact.outputs);
        assert!(error < 1e-6, "causal query {i} of {count}: NMSE {error}");
    }
}

/// Every page in use belongs to a span, and the bytes follow from the pages.
fn check_memory<B: Backend>(cache: &KvCache<B>, pages: [usize; 2]) {
    let memory = cache.memory();
    for (store, pages) in [memory.f16, memory.packed].iter().zip(pages) {
        assert_eq!(store.pages_in_use, pages, "{}", store.format);
        assert!(store.in_use_bytes >= (pages * store.format.page_bytes(cache.shape())) as u64);
        assert!(store.allocated_bytes >= store.in_use_bytes);
        assert_eq!(store.tokens == 0, store.in_use_bytes == 0);
    }
}

/// `[kv_heads, tokens, head_dim]` as `[tokens, kv_heads, head_dim]`.
fn token_major(rows: &[f32], tokens: usize, shape: &AttentionShape) -> Vec<f32> {
    let head_dim = shape.head_dim();
    let row = |i: usize| {
        let (token, head) = (i / shape.kv_heads(), i % shape.kv_heads());
        &rows[(head * tokens + token) * head_dim..][..head_dim]
    };
    (0..tokens * shape.kv_heads()).flat_map(row).copied().collect()
}
