//! The ops of CalibQuant.

use anyhow::{Context, Result};
use kvpack::backend::{SpanRead, SpanWrite};
use kvpack::cpu::{
    CpuStore, States, dequantize, merge_pair, merge_states, plain_attention, quantize as quantize_span, scores,
    weighted_values,
};
use kvpack::format::interchange::msb_bytes;
use kvpack::format::{AffineFormat, CodeRange, Grouping, HEAD_DIMS, KeyOrValue, ScoreMap, TensorFormat};
use kvpack::plan::{AttendPlan, Elements, Page, QueryRun, RowLayout, SpanView, Split, StoreView, TokenRange, Work};
use kvpack::{AttentionShape, Bits, Calibration, SegmentFormat, TILE_TOKENS};

use super::file::{GoldenFile, part};
use super::stored::check_size;
use super::{Outputs, named};

/// `calibquant.calibrate`: eq. 7 on given scores, its slope clamped at 0 as [`Calibration::map`] says. Files that tell
/// the clamped from the unclamped have both, see `guarded` in [`super::run_op`].
pub fn calibrate(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    let calibration = calibration(file)?;
    let scores = file.input("scores")?;
    let [_, _, tokens] = scores.axes()?;
    let mut calibrated = Vec::new();
    for scores in scores.f32()?.chunks(tokens) {
        let smallest = scores.iter().copied().fold(f32::INFINITY, f32::min);
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let map = calibration.map(smallest, largest);
        calibrated.extend(scores.iter().map(|&score| f64::from(map.apply(score))));
    }
    let outputs = named([("calibrated", calibrated.clone()), ("calibrated_guarded", calibrated)]);
    Ok(vec![("calibrate", outputs)])
}

/// `calibquant.pack`: codes to bytes, the first in the highest bits.
pub fn pack(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    let packed: Vec<u8> = msb_bytes::pack(file.input("codes")?.u8()?, bits(file)?)?;
    let packed = packed.into_iter().map(f64::from).collect();
    Ok(vec![("msb_bytes::pack", named([("packed", packed)]))])
}

/// `calibquant.quantize`: ranges and codes as the kernel stores them, once as keys and once as values.
pub fn quantize(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    [("quantize keys", KeyOrValue::Key), ("quantize values", KeyOrValue::Value)]
        .into_iter()
        .map(|(name, which)| Ok((name, quantized(file, which)?)))
        .collect()
}

/// `calibquant.decode`: algorithms 1 and 2 over given codes, merged with the dense text around them.
pub fn decode(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    let [batch, query_heads, head_dim] = file.input("q")?.axes()?;
    let [_, kv_heads, tokens, _] = file.input("k_codes")?.axes()?;
    let shape = AttentionShape::new(query_heads, kv_heads, head_dim)?;
    check_size(query_heads.saturating_mul(batch), tokens, head_dim)?;
    let (mut outputs, mut lse, mut visual_scores) = (Vec::new(), Vec::new(), Vec::new());
    for sequence in 0..batch {
        let decoded = decode_sequence(file, shape, tokens, sequence)?;
        outputs.extend(decoded.merged.outputs().iter().map(|&x| f64::from(x)));
        lse.extend(decoded.merged.lse().iter().map(|&x| f64::from(x)));
        visual_scores.extend(decoded.scores);
    }
    let outputs = named([("output", outputs), ("lse", lse), ("visual_scores", visual_scores)]);
    Ok(vec![("scores, weighted_values, merge_states", outputs)])
}

/// Ranges, codes and decoded values of the input, quantised by the kernel.
fn quantized(file: &GoldenFile, which: KeyOrValue) -> Result<Outputs> {
    let [batch, heads, tokens, channels] = file.input("x")?.axes()?;
    // A head that no kernel serves is padded with zeros.
    let head_dim = HEAD_DIMS.into_iter().find(|&served| served >= channels).context("no head_dim is that large")?;
    let shape = AttentionShape::new(heads, heads, head_dim)?;
    let shrink = file.number("shrink")? as f32;
    check_size(batch.saturating_mul(heads), tokens, head_dim)?;
    let format = TensorFormat::Affine(AffineFormat { shrink, ..AffineFormat::new(bits(file)?, Grouping::Channel) });
    let x = file.input("x")?.f32()?;
    let padded: Vec<f32> = x.chunks(channels).flat_map(|row| pad(row, head_dim)).collect();

    let mut store = CpuStore::new(shape, SegmentFormat { key: format, value: format })?;
    store.reserve_ranges(batch)?;
    let (mut codes, mut scale, mut zero, mut decoded) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (sequence, rows) in padded.chunks(heads * tokens * head_dim).enumerate() {
        let pages = new_pages(&mut store, tokens)?;
        let write = SpanWrite {
            rows: RowLayout::head_major(tokens, &shape),
            tokens: TokenRange::new(0, tokens)?.into(),
            pages: &pages,
            range_slot: sequence,
            centre: None,
        };
        quantize_span(&mut store, Elements::F32(rows), Elements::F32(rows), write)?;
        let read = SpanRead { pages: &pages, tokens, range_slot: sequence, centre: None };
        let dense = dequantize(&store, which, read)?;
        decoded.extend(dense.chunks(head_dim).flat_map(|row| &row[..channels]).map(|&x| f64::from(x)));
        for ranges in store.span_ranges(which, sequence)?.chunks(head_dim) {
            scale.extend(ranges[..channels].iter().map(|range| f64::from(range.scale)));
            zero.extend(ranges[..channels].iter().map(|range| f64::from(-range.min / range.scale)));
        }
        for head in 0..heads {
            for (tile, &page) in pages.iter().enumerate() {
                let in_tile = TILE_TOKENS.min(tokens - tile * TILE_TOKENS);
                let (words, _) = store.tile_words(which, page, head)?;
                let tile = msb_bytes::codes_from_tile(which, &format, head_dim, words, in_tile)?;
                codes.extend(tile.chunks(head_dim).flat_map(|row| &row[..channels]).map(|&code| f64::from(code)));
            }
        }
    }
    Ok(named([("codes", codes), ("scale", scale), ("zero", zero), ("dequant", decoded)]))
}

struct Decoded {
    merged: States,
    /// Calibrated scores of the packed tokens, `[query_heads, tokens]`.
    scores: Vec<f64>,
}

fn decode_sequence(file: &GoldenFile, shape: AttentionShape, tokens: usize, sequence: usize) -> Result<Decoded> {
    let queries = file.input("q")?.f32()?;
    let query = part(&queries, sequence, shape.query_heads() * shape.head_dim())?;
    let (store, pages) = packed_store(file, shape, tokens, sequence)?;
    let span = SpanView { sequence: 0, start: 0, tokens, gathered: None, pages: &pages, range_slot: 0 };
    // Only calibrated segments keep scores.
    let view = StoreView { format: *store.format(), calibration: Some(Calibration::IDENTITY), spans: vec![span] };
    // One tile to an item, so that merging has something to do.
    let plan = AttendPlan::new(shape, &[QueryRun::decode(0)], &[view])?;
    let split = Split { target_items: usize::MAX, tile_step: 1, max_tiles: 1 };
    let work = Work::new(&plan, split, 1)?;
    let segment = &work.segments()[0];

    let raw = scores(segment, &store, Elements::F32(query))?;
    let maps = if file.flag("calibrate") {
        raw.maps(&calibration(file)?)
    } else {
        vec![ScoreMap::IDENTITY; shape.query_heads()]
    };
    let mut states = States::for_work(&work)?;
    weighted_values(segment, &store, &raw, &maps, &mut states)?;
    let mut merged = merge_states(&work, &states)?;
    let mut calibrated = Vec::new();
    for (head, map) in maps.iter().enumerate() {
        let scores = raw.of_query(segment, 0, head)?;
        calibrated.extend(scores.into_iter().map(|score| f64::from(map.apply(score))));
    }

    for (keys, values) in [("k_sys", "v_sys"), ("k_text", "v_text")] {
        if file.has_input(keys) {
            let [_, _, tokens, _] = file.input(keys)?.axes()?;
            let rows = shape.kv_heads() * tokens * shape.head_dim();
            let dense = |name| Ok::<_, anyhow::Error>(part(&file.input(name)?.f32()?, sequence, rows)?.to_vec());
            let text = plain_attention(&shape, &dense(keys)?, &dense(values)?, tokens, query)?;
            merged = merge_pair(&merged, &text)?;
        }
    }
    Ok(Decoded { merged, scores: calibrated })
}

/// A store that holds the codes and ranges of one sequence of the file.
fn packed_store(
    file: &GoldenFile,
    shape: AttentionShape,
    tokens: usize,
    sequence: usize,
) -> Result<(CpuStore, Vec<Page>)> {
    let format = SegmentFormat::per_channel(bits(file)?);
    let mut store = CpuStore::new(shape, format)?;
    store.reserve_ranges(1)?;
    let pages = new_pages(&mut store, tokens)?;
    let head_dim = shape.head_dim();
    for (which, name) in [(KeyOrValue::Key, 'k'), (KeyOrValue::Value, 'v')] {
        let (scale, zero) = (file.input(&format!("{name}_scale"))?.f32()?, file.input(&format!("{name}_zero"))?.f32()?);
        // scale · (code − zero) = scale · code + min
        let range = |(&scale, &zero): (&f32, &f32)| CodeRange { scale, min: -scale * zero };
        let ranges: Vec<CodeRange> = scale.iter().zip(&zero).map(range).collect();
        let per_sequence = shape.kv_heads() * head_dim;
        store.write_span_ranges(which, 0, part(&ranges, sequence, per_sequence)?)?;
        let codes = file.input(&format!("{name}_codes"))?.u8()?;
        for head in 0..shape.kv_heads() {
            let rows = part(codes, sequence * shape.kv_heads() + head, tokens * head_dim)?;
            for (&page, rows) in pages.iter().zip(rows.chunks(TILE_TOKENS * head_dim)) {
                let words = msb_bytes::tile_from_codes(which, format.tensor(which), head_dim, rows)?;
                store.write_tile(which, page, head, &words, &[])?;
            }
        }
    }
    Ok((store, pages))
}

/// Pages for a span, in a shard of their own.
fn new_pages(store: &mut CpuStore, tokens: usize) -> Result<Vec<Page>> {
    let shard = store.shards() as u32;
    let pages = tokens.div_ceil(TILE_TOKENS) as u32;
    store.add_shard(pages)?;
    Ok((0..pages).map(|index| Page { shard, index }).collect())
}

fn bits(file: &GoldenFile) -> Result<Bits> {
    Bits::from_count(file.number("bits")? as u32).context("codes of a width that kvpack does not have")
}

fn calibration(file: &GoldenFile) -> Result<Calibration> {
    Ok(Calibration::new(file.number("tau1")? as f32, file.number("tau2")? as f32)?)
}

fn pad(row: &[f32], head_dim: usize) -> impl Iterator<Item = f32> {
    row.iter().copied().chain(std::iter::repeat(0.0)).take(head_dim)
}
