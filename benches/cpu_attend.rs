//! Decode on the CPU: the fused attend of every format against plain f32 attention with the same threads.
//!
//! `cargo bench --bench cpu_attend [-- TOKENS]`. Each row is the fastest of its steps: one whole decode step of one
//! sequence (query preparation, attend, merge). GB/s count the packed codes and ranges, or the plain f32 rows, that a
//! step must read.

use std::time::{Duration, Instant};

use kvpack::backend::SpanWrite;
use kvpack::cpu::{CpuStore, attend_plan, plain_attention, quantize};
use kvpack::format::{AffineFormat, Grouping, TensorFormat};
use kvpack::plan::{AttendPlan, Elements, Page, QueryRun, RowLayout, SpanView, Split, StoreView, TokenRange};
use kvpack::{AttentionShape, Bits, Calibration, Result, SegmentFormat, TILE_TOKENS};

const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;

fn main() -> Result<()> {
    let tokens = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(8192);
    println!(
        "{tokens} tokens, {KV_HEADS} KV heads, head_dim {HEAD_DIM}, {} threads; fastest step",
        rayon::current_num_threads()
    );
    println!("{:<44} {:>3} {:>10} {:>8} {:>9} {:>10}", "", "G", "bytes", "ms", "GB/s", "× plain");
    for group in [1, 4] {
        let rows = Rows::new(AttentionShape::new(KV_HEADS * group, KV_HEADS, HEAD_DIM)?, tokens);
        let plain = rows.time_plain()?;
        print_row("plain f32 attention", group, rows.plain_bytes(), plain, plain);
        for (format, calibration) in formats() {
            let (bytes, time) = rows.time_format(format, calibration)?;
            let name = format!("{format}{}", if calibration.is_some() { ", calibrated" } else { "" });
            print_row(&name, group, bytes, time, plain);
        }
    }
    Ok(())
}

fn formats() -> Vec<(SegmentFormat, Option<Calibration>)> {
    let affine = |bits, grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
    let both = |format| SegmentFormat { key: format, value: format };
    let per_channel = [Bits::Eight, Bits::Four, Bits::Two, Bits::One].map(SegmentFormat::per_channel);
    let kivi = SegmentFormat {
        key: affine(Bits::Two, Grouping::ChannelTokens(32)),
        value: affine(Bits::Two, Grouping::TokenChannels(32)),
    };
    std::iter::once(SegmentFormat::F16)
        .chain(per_channel)
        .chain([both(affine(Bits::Four, Grouping::Token)), kivi])
        .chain([Bits::Four, Bits::Two].map(|bits| SegmentFormat::turboquant(bits, HEAD_DIM)))
        .map(|format| (format, None))
        .chain([(SegmentFormat::per_channel(Bits::One), Some(Calibration::IDENTITY))])
        .collect()
}

fn print_row(name: &str, group: usize, bytes: usize, time: Duration, plain: Duration) {
    let seconds = time.as_secs_f64();
    println!(
        "{name:<44} {group:>3} {bytes:>10} {:>8.3} {:>9.2} {:>10.2}",
        seconds * 1e3,
        bytes as f64 / seconds / 1e9,
        plain.as_secs_f64() / seconds
    );
}

struct Rows {
    shape: AttentionShape,
    tokens: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
    query: Vec<f32>,
}

impl Rows {
    fn new(shape: AttentionShape, tokens: usize) -> Self {
        let mut state = 1u32;
        let mut random = |count: usize| -> Vec<f32> {
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            (0..count).map(|_| next()).collect()
        };
        let rows = shape.kv_heads() * tokens * shape.head_dim();
        let query = shape.query_heads() * shape.head_dim();
        Self { shape, tokens, keys: random(rows), values: random(rows), query: random(query) }
    }

    fn plain_bytes(&self) -> usize {
        (self.keys.len() + self.values.len()) * size_of::<f32>()
    }

    fn time_plain(&self) -> Result<Duration> {
        fastest(|| plain_attention(&self.shape, &self.keys, &self.values, self.tokens, &self.query).map(drop))
    }

    /// Bytes that a step reads, and its time.
    fn time_format(&self, format: SegmentFormat, calibration: Option<Calibration>) -> Result<(usize, Duration)> {
        let pages: Vec<Page> =
            (0..self.tokens.div_ceil(TILE_TOKENS) as u32).map(|index| Page { shard: 0, index }).collect();
        let mut store = CpuStore::new(self.shape, format)?;
        store.add_shard(pages.len() as u32)?;
        store.reserve_ranges(1)?;
        let write = SpanWrite {
            rows: RowLayout::head_major(self.tokens, &self.shape),
            tokens: TokenRange::new(0, self.tokens)?.into(),
            pages: &pages,
            range_slot: 0,
            centre: None,
        };
        quantize(&mut store, Elements::F32(&self.keys), Elements::F32(&self.values), write)?;
        let span =
            SpanView { sequence: 0, start: 0, tokens: self.tokens, gathered: None, pages: &pages, range_slot: 0 };
        let plan = || {
            let view = StoreView { format, calibration, spans: vec![span.clone()] };
            AttendPlan::new(self.shape, &QueryRun::decode_batch(1), &[view])
        };
        let plan = plan()?;
        let time = fastest(|| attend_plan(&plan, &[&store], Elements::F32(&self.query), Split::default()).map(drop))?;
        Ok((store.bytes() as usize, time))
    }
}

/// Time of the fastest call, over about half a second.
fn fastest(mut call: impl FnMut() -> Result<()>) -> Result<Duration> {
    call()?;
    let begin = Instant::now();
    let mut best = Duration::MAX;
    while begin.elapsed() < Duration::from_millis(500) {
        let start = Instant::now();
        call()?;
        best = best.min(start.elapsed());
    }
    Ok(best)
}
