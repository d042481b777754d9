//! What storing one more token costs: `append` for a batch, and the packing of full tiles behind a window.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use indicatif::ProgressBar;
use kvpack::backend::{SpanRead, SpanWrite};
use kvpack::plan::{
    LayerWrites, Page, PageAllocator, RowLayout, StoreCapacity, TokenRange, TokenWrite, WindowCapacity, WindowMove,
    WriteLayout, WriteTable,
};
use kvpack::{AttentionShape, Backend, SegmentFormat, TILE_TOKENS};
use kvpack_report::{Median, Run, Skipped, Spread};
use serde::Serialize;

use super::UNSTEADY_PERCENT;
use super::output::Style;
use super::timed::{Guard, SPREAD, Timed, WALL_CLOCK, figure, figure_or_dash, skipped};
use crate::outcome::Wrong;
use crate::print::{self, say};
use crate::provenance;

/// Sequences of the batch.
pub const SEQUENCES: usize = 64;

/// A backend whose stores can be timed.
pub trait TimedStores: Backend {
    /// One step: the tokens `writes` of `rows` into open pages. The default is the wall clock of each step, where
    /// calls return when their work is done.
    ///
    /// # Errors
    /// Whatever the backend reports.
    async fn time_append(&self, batch: &mut Batch<Self>, steps: &[Vec<TokenWrite>]) -> kvpack::Result<Median>
    where
        Self: Sized,
    {
        let rows = batch.rows;
        for writes in steps {
            self.append(&mut batch.open, &batch.keys, &batch.values, rows, writes)?;
        }
        let mut samples = Vec::with_capacity(steps.len());
        for writes in steps {
            let start = Instant::now();
            self.append(&mut batch.open, &batch.keys, &batch.values, rows, writes)?;
            samples.push(start.elapsed().as_secs_f64());
        }
        Ok(Median::of(samples))
    }

    /// How long it takes to pack one full f16 page per sequence, the same ones each time. The default is the wall clock
    /// of each call, where calls return when their work is done.
    ///
    /// # Errors
    /// Whatever the backend reports.
    async fn time_pack(&self, batch: &mut Batch<Self>, packed: &mut Self::Store) -> kvpack::Result<PackTimes>
    where
        Self: Sized,
    {
        let windows: Vec<WindowMove> = batch.windows();
        let mut samples = Vec::with_capacity(PACKED);
        for _ in 0..PACKED {
            let start = Instant::now();
            self.pack_windows(&batch.shape, &batch.open, packed, &windows)?;
            samples.push(start.elapsed().as_secs_f64());
        }
        Ok(PackTimes { full: Median::of(samples), idle: 0.0 })
    }

    /// The clock of both.
    const CLOCK: &'static str = WALL_CLOCK;
}

/// How often windows are packed where calls are timed by the wall clock.
const PACKED: usize = 5;

/// What packing takes.
#[derive(Clone, Copy)]
pub struct PackTimes {
    /// One full page of every sequence.
    pub full: Median,
    /// Seconds of a step that has no full page: a graph that was captured launches the kernel all the same.
    pub idle: f64,
}

/// One open page for each sequence, and a token for each of its slots and sequences.
pub struct Batch<B: Backend> {
    /// Shape of the layer.
    pub shape: AttentionShape,
    /// The store of the open pages.
    pub open: B::Store,
    /// The pages.
    pub pages: Vec<Page>,
    /// A page that no sequence has.
    spare: Page,
    /// `[128 · sequences, kv_heads, head_dim]`: step by step.
    pub keys: B::Tensor,
    /// As the keys.
    pub values: B::Tensor,
    /// Where the rows lie.
    pub rows: RowLayout,
}

/// What was found, as it is printed in JSON.
#[derive(Serialize)]
#[serde(tag = "kind", rename = "append")]
pub struct AppendReport {
    backend: String,
    run: Run,
    timer: &'static str,
    sequences: usize,
    kv_heads: usize,
    head_dim: usize,
    rows: Vec<AppendRow>,
    skipped: Vec<Skipped>,
}

/// One format.
#[derive(Serialize)]
struct AppendRow {
    format: String,
    /// Where a new token goes: "f16", "packed" or "f16 window".
    token: &'static str,
    /// A step of `append`, one token for each sequence.
    append_us: f64,
    append_spread: Spread,
    /// The packing of full windows, spread over the 128 steps that fill them, with what steps pay that have none;
    /// nothing where tokens are packed at once.
    pack_us: Option<f64>,
    pack_spread: Option<Spread>,
    /// Both, for one token.
    token_ns: f64,
    /// How much of the guard's best rate was missing before or after, in percent.
    guard_low_percent: f64,
}

/// Times formats and prints them.
///
/// # Errors
/// When the backend fails; [`Wrong`] when it stored something else than `quantize` does.
pub fn run<B: TimedStores + Timed>(
    backend: &B,
    driver: String,
    formats: Vec<SegmentFormat>,
    style: Style,
) -> Result<()> {
    let shape = AttentionShape::new(32, 8, 128)?;
    let progress = ProgressBar::new(formats.len() as u64).with_style(print::bar());
    let mut report = AppendReport {
        backend: backend.name(),
        run: provenance::run(driver, None),
        timer: B::CLOCK,
        sequences: SEQUENCES,
        kv_heads: shape.kv_heads(),
        head_dim: shape.head_dim(),
        rows: Vec::new(),
        skipped: Vec::new(),
    };
    let mut guard = pollster::block_on(Guard::new(backend))?;
    let done = formats.into_iter().try_for_each(|format| {
        progress.set_message(format.to_string());
        match pollster::block_on(row(backend, shape, format, &mut guard)) {
            Ok(row) => report.rows.push(row),
            Err(error) => report.skipped.push(progress.suspend(|| skipped(format.to_string(), error))?),
        }
        progress.inc(1);
        Ok(())
    });
    progress.finish_and_clear();
    let tolerated = backend.guard_tolerance().map_or(UNSTEADY_PERCENT, |fraction| fraction * 100.0);
    style.print(&report, |report| print_report(report, tolerated))?;
    done
}

async fn row<B: TimedStores + Timed>(
    backend: &B,
    shape: AttentionShape,
    format: SegmentFormat,
    guard: &mut Guard,
) -> Result<AppendRow> {
    let at_once = format.takes_single_tokens();
    let mut batch = Batch::new(backend, shape, if at_once { format } else { SegmentFormat::F16 }).await?;
    let step = |slot: usize| -> Vec<TokenWrite> {
        let write = |(i, &page): (usize, &Page)| TokenWrite { token: slot * SEQUENCES + i, page, slot, centre: None };
        batch.pages.iter().enumerate().map(write).collect()
    };
    let steps: Vec<Vec<TokenWrite>> = (0..TILE_TOKENS).map(step).collect();
    let mut slowest = guard.look(backend).await?;
    let append = backend.time_append(&mut batch, &steps).await?;
    slowest = slowest.min(guard.look(backend).await?);
    batch.check(backend).await?;
    let pack = match at_once {
        true => None,
        false => {
            let mut packed = backend.create_store(shape, format)?;
            // As the open store it has a page that no sequence has, with ranges of its own.
            backend.add_shard(&mut packed, SEQUENCES as u32 + 1).await?;
            backend.reserve_ranges(&mut packed, SEQUENCES + 1).await?;
            slowest = slowest.min(guard.look(backend).await?);
            let times = backend.time_pack(&mut batch, &mut packed).await?;
            slowest = slowest.min(guard.look(backend).await?);
            batch.check_packed(backend, &mut packed).await?;
            Some(times.full.part(TILE_TOKENS, times.idle))
        }
    };
    Ok(AppendRow {
        format: format.to_string(),
        token: match format {
            SegmentFormat::F16 => "f16",
            _ if at_once => "packed",
            _ => "f16 window",
        },
        append_us: append.us(),
        append_spread: append.spread,
        pack_us: pack.map(|pack| pack.us()),
        pack_spread: pack.map(|pack| pack.spread),
        token_ns: (append.us() + pack.map_or(0.0, |pack| pack.us())) * 1e3 / SEQUENCES as f64,
        guard_low_percent: guard.missing(slowest) * 100.0,
    })
}

impl<B: Backend> Batch<B> {
    async fn new(backend: &B, shape: AttentionShape, format: SegmentFormat) -> Result<Self> {
        let mut open = backend.create_store(shape, format)?;
        let all_pages = SEQUENCES as u32 + 1;
        backend.add_shard(&mut open, all_pages).await?;
        backend.reserve_ranges(&mut open, 1).await?;
        let mut allocator = PageAllocator::default();
        allocator.add_shard(all_pages)?;
        let tokens = TILE_TOKENS * SEQUENCES;
        let row = shape.kv_heads() * shape.head_dim();
        let wave = |rate: f32| (0..tokens * row).map(move |i| (i as f32 * rate).sin() * 2.0).collect::<Vec<f32>>();
        Ok(Self {
            shape,
            open,
            pages: allocator.allocate(SEQUENCES)?,
            spare: Page { shard: 0, index: SEQUENCES as u32 },
            keys: backend.upload(wave(0.37).as_slice().into()).await?,
            values: backend.upload(wave(0.53).as_slice().into()).await?,
            rows: RowLayout::token_major(tokens, &shape),
        })
    }

    /// The page of every sequence on its way into the page of the same number, with a range slot of its own.
    pub fn windows(&self) -> Vec<WindowMove> {
        let window = |(range_slot, &page): (usize, &Page)| WindowMove { from: page, to: page, range_slot };
        self.pages.iter().enumerate().map(window).collect()
    }

    /// The table of every step of `append`, in one layout.
    ///
    /// # Errors
    /// When a step does not fit the store.
    pub fn append_tables(&self, open: StoreCapacity, steps: &[Vec<TokenWrite>]) -> kvpack::Result<Vec<WriteTable>> {
        let layout = Arc::new(WriteLayout::new(self.shape, self.rows.tokens, vec![open], vec![])?);
        let table = |writes: &Vec<TokenWrite>| {
            let (mut step, mut table) = (LayerWrites::of(&layout), WriteTable::new(&layout));
            step.stores[0].tokens.extend_from_slice(writes);
            table.set(&step).map(|()| table)
        };
        steps.iter().map(table).collect()
    }

    /// The table of a step with one full window of every sequence, and that of a step with none.
    ///
    /// # Errors
    /// When the windows do not fit the stores.
    pub fn pack_tables(&self, stores: [StoreCapacity; 2]) -> kvpack::Result<[WriteTable; 2]> {
        let pair = WindowCapacity { from: 0, to: 1, windows: SEQUENCES, newer: 0 };
        let layout = Arc::new(WriteLayout::new(self.shape, 0, stores.into(), vec![pair])?);
        let (mut step, idle) = (LayerWrites::of(&layout), WriteTable::new(&layout));
        step.windows[0] = self.windows();
        let mut full = idle.clone();
        full.set(&step)?;
        Ok([full, idle])
    }

    /// Holds what was appended to the last sequence against what `quantize` stores of the same tokens.
    async fn check(&mut self, backend: &B) -> Result<()> {
        let row = self.shape.kv_heads() * self.shape.head_dim();
        let of_last = async |tensor: &B::Tensor| -> kvpack::Result<B::Tensor> {
            let rows = backend.download(tensor).await?;
            let steps = rows.chunks_exact(SEQUENCES * row);
            let rows: Vec<f32> = steps.flat_map(|step| &step[(SEQUENCES - 1) * row..]).copied().collect();
            backend.upload(rows.as_slice().into()).await
        };
        let (keys, values) = (of_last(&self.keys).await?, of_last(&self.values).await?);
        let (rows, tokens) = (RowLayout::token_major(TILE_TOKENS, &self.shape), TokenRange::new(0, TILE_TOKENS)?);
        let write = SpanWrite { rows, tokens: tokens.into(), pages: &[self.spare], range_slot: 0, centre: None };
        backend.quantize(&mut self.open, &keys, &values, write)?;
        let appended = read_tile(backend, &self.open, self.pages[SEQUENCES - 1], 0).await?;
        let quantized = read_tile(backend, &self.open, self.spare, 0).await?;
        check_alike("append", &appended, &quantized)
    }

    /// Holds what was packed of the window of the last sequence against what `quantize` stores of the window's rows.
    async fn check_packed(&self, backend: &B, packed: &mut B::Store) -> Result<()> {
        let (last, spare_slot) = (SEQUENCES - 1, SEQUENCES);
        let page = [self.pages[last]];
        let read = SpanRead { pages: &page, tokens: TILE_TOKENS, range_slot: 0, centre: None };
        let (keys, values) = backend.dequantize(&self.open, read)?;
        let (rows, tokens) = (RowLayout::head_major(TILE_TOKENS, &self.shape), TokenRange::new(0, TILE_TOKENS)?);
        let pages = &[self.spare];
        let write = SpanWrite { rows, tokens: tokens.into(), pages, range_slot: spare_slot, centre: None };
        backend.quantize(packed, &keys, &values, write)?;
        let windows = read_tile(backend, packed, page[0], last).await?;
        let quantized = read_tile(backend, packed, self.spare, spare_slot).await?;
        check_alike("pack_windows", &windows, &quantized)
    }
}

/// The keys and the values that a full page holds.
async fn read_tile<B: Backend>(
    backend: &B,
    store: &B::Store,
    page: Page,
    range_slot: usize,
) -> kvpack::Result<[Vec<f32>; 2]> {
    let read = SpanRead { pages: &[page], tokens: TILE_TOKENS, range_slot, centre: None };
    let (keys, values) = backend.dequantize(store, read)?;
    Ok([backend.download(&keys).await?, backend.download(&values).await?])
}

/// Refuses a tile that is another than that of `quantize`, or empty.
fn check_alike(kernel: &str, stored: &[Vec<f32>; 2], quantized: &[Vec<f32>; 2]) -> Result<()> {
    let any = stored.iter().all(|rows| rows.iter().any(|&x| x != 0.0));
    ensure!(any, Wrong(format!("{kernel} stored nothing")));
    ensure!(stored == quantized, Wrong(format!("{kernel} stored something else than quantize does")));
    Ok(())
}

fn print_report(report: &AppendReport, tolerated: f64) -> Result<()> {
    say!("{}", report.backend)?;
    say!(
        "\nOne token for each of {} sequences, {} KV heads × {} ({})",
        report.sequences,
        report.kv_heads,
        report.head_dim,
        report.timer
    )?;
    let mut table = print::results(&["format", "token goes to", "append µs", "pack µs", "ns per token"], 2);
    for row in &report.rows {
        table.add_row([
            row.format.clone(),
            row.token.into(),
            figure(row.append_us, row.append_spread, 2),
            figure_or_dash(row.pack_us, row.pack_spread, 2),
            format!("{:.1}", row.token_ns),
        ]);
    }
    say!("{table}")?;
    for row in report.rows.iter().filter(|row| row.guard_low_percent > tolerated) {
        say!("{}: the device ran {:.0} % below its best before or after it", row.format, row.guard_low_percent)?;
    }
    say!(
        "\npack: a full window of each sequence, spread over the 128 steps that fill it, and what steps pay that have none."
    )?;
    say!("Each launch packs the same windows, 34 MB of f16: a device with a larger cache finds them there.")?;
    say!("{SPREAD}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvpack::Bits;
    use kvpack::cpu::Cpu;

    use super::*;

    /// Whether what is packed passes: before anything is, all windows, and another window in place of the last.
    async fn packed_passes<B: Backend>(backend: &B) -> Result<[bool; 3]> {
        let shape = AttentionShape::new(2, 1, 64)?;
        let mut batch = Batch::new(backend, shape, SegmentFormat::F16).await?;
        let tokens = TokenRange::new(0, SEQUENCES * TILE_TOKENS)?;
        let write =
            SpanWrite { rows: batch.rows, tokens: tokens.into(), pages: &batch.pages, range_slot: 0, centre: None };
        backend.quantize(&mut batch.open, &batch.keys, &batch.values, write)?;
        let mut packed = backend.create_store(shape, SegmentFormat::calibquant(Bits::Four))?;
        backend.add_shard(&mut packed, SEQUENCES as u32 + 1).await?;
        backend.reserve_ranges(&mut packed, SEQUENCES + 1).await?;
        let nothing = batch.check_packed(backend, &mut packed).await.is_ok();
        let mut windows = batch.windows();
        backend.pack_windows(&shape, &batch.open, &mut packed, &windows)?;
        let all = batch.check_packed(backend, &mut packed).await.is_ok();
        windows[SEQUENCES - 1].from = windows[0].from;
        backend.pack_windows(&shape, &batch.open, &mut packed, &windows)?;
        let another = batch.check_packed(backend, &mut packed).await.is_ok();
        Ok([nothing, all, another])
    }

    #[test]
    fn what_is_packed_is_checked() {
        assert_eq!(pollster::block_on(packed_passes(&Cpu::new())).unwrap(), [false, true, false]);
    }
}
