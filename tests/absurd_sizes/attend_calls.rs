//! Functions that take numbers within a plan, a table or a request: attention, steps and the measuring of attention.

use kvpack::backend::{
    AttendOptions, Attention, AttentionStates, FilledSpan, FilledStores, KeptAndEvicted, NewSpan, Packing,
    QueriesAndKeys, QueryBytes, QueryPrecision, RowCentres, RowStatistics, SpanPlace, SpanSource, Storage, TensorRows,
    TokenSelection, WindowMove, WriteInput,
};
use kvpack::cpu::{
    CalibrationSample, Cpu, CpuIndices, CpuStore, CpuTensor, DenseRows, DenseSegment, KeptTokens, NonFiniteFlags,
    States, StatsInput, attention_column_stats, attention_row_stats, exact_attention, exact_scored_attention, gather,
    merge_tokens, nearest_kept, pack_windows, scores, uncentre_lse, weighted_values, write_step,
};
use kvpack::format::{Calibration, ScoreMap};
use kvpack::plan::{
    Elements, KeyMean, LayerWrites, Page, PageCopy, QueryRun, RowLayout, Rows, Scoring, Split, StoreCapacity,
    TokenRange, TokenWrite, WindowCapacity, Work, WriteLayout, WriteTable,
};
use kvpack::policy::{ColumnRequest, HeadAggregation, Merging, Nearest, QueryPositions, RowStatsSource, StatsRequest};
use kvpack::{Bits, SegmentFormat};
use pollster::block_on;
use std::sync::Arc;

use crate::format_calls::each_format;
use crate::plan_calls::{calibrated_plan, plan};
use crate::{Call, calls, done, few_triples, floats, pairs, shape, sizes, words};

/// Rows of 3 tokens.
const ROWS: [f32; 3 * 2 * 64] = [0.5; 3 * 2 * 64];

const PAGE: Page = Page { shard: 0, index: 0 };

/// How a plan may be cut. With three numbers of every size attention would take minutes.
const SPLITS: [(usize, usize, usize); 5] =
    [(0, 0, 0), (1, 1, 1), (usize::MAX, 1, 1), (1, usize::MAX, 1 << 32), (usize::MAX, usize::MAX, usize::MAX)];

fn splits(call: impl Fn(Split)) {
    for (target_items, tile_step, max_tiles) in SPLITS {
        call(Split { target_items, tile_step, max_tiles });
    }
}

fn layouts(call: impl Fn(RowLayout)) {
    few_triples(|tokens, token_stride, head_stride| call(RowLayout { tokens, token_stride, head_stride }));
    call(RowLayout::token_major(3, &shape()));
}

fn pages(call: impl Fn(Page)) {
    words(|shard| words(|index| call(Page { shard, index })));
}

fn tensor() -> CpuTensor {
    CpuTensor::F32(ROWS.to_vec())
}

fn query() -> CpuTensor {
    CpuTensor::F32(vec![0.5; 256])
}

fn store(format: SegmentFormat) -> CpuStore {
    let mut store = CpuStore::new(shape(), format).unwrap();
    store.add_shard(3).unwrap();
    store.reserve_ranges(1).unwrap();
    store
}

fn options(split: Split) -> AttendOptions {
    AttendOptions { split, ..AttendOptions::default() }
}

fn filled(backend: &Cpu) -> FilledStores<Cpu> {
    FilledStores::new(backend, shape(), &[SegmentFormat::F16, SegmentFormat::saw_int4()]).unwrap()
}

/// Spans of which nothing was placed.
fn spans(call: impl Fn(FilledSpan)) {
    pairs(|a, b| {
        for (store, tokens) in [(a, b), (0, a), (1, a)] {
            let span = NewSpan { store, sequence: b, start: a, tokens };
            call(FilledSpan { span, pages: vec![PAGE], range_slot: b });
        }
    });
}

pub fn calls() -> Vec<Call> {
    let mut all = attention();
    all.extend(stores());
    all.extend(placed());
    all.extend(steps());
    all.extend(measured());
    all.extend(merged());
    all
}

fn attention() -> Vec<Call> {
    calls! {
        "backend::QueryBytes::of" => each_format(|&key| done(QueryBytes::of(&SegmentFormat { key, value: key })));
        "backend::QueryPrecision::bytes" => each_format(|&value| {
            done(QueryPrecision::ByFormat.bytes(&SegmentFormat { key: value, value }));
        });
        "backend::Attention::arithmetic" => each_format(|&key| {
            done(Cpu::new().arithmetic(&shape(), &SegmentFormat { key, value: key }, QueryPrecision::Int8));
        });
        "backend::Attention::attend" => splits(|split| {
            let (plan, store) = (plan(&[QueryRun::decode(0)]).unwrap(), store(SegmentFormat::F16));
            done(block_on(Cpu::new().attend(&plan, &[&store], &query(), options(split))));
        });
        "backend::Attention::attend_into" => splits(|split| {
            let (plan, store) = (plan(&[QueryRun::decode(0)]).unwrap(), store(SegmentFormat::F16));
            done(block_on(Cpu::new().attend_into(&plan, &[&store], &query(), &mut query(), options(split))));
        });
        "backend::Attention::attend_states" => splits(|split| {
            let (plan, store) = (plan(&[QueryRun::decode(0)]).unwrap(), store(SegmentFormat::F16));
            done(block_on(Cpu::new().attend_states(&plan, &[&store], &query(), options(split))));
        });
        "backend::Attention::uncentre_lse" => floats(|scale| words(|slot| {
            let states = AttentionStates { outputs: query(), lse: CpuTensor::F32(vec![0.5; 4]) };
            let centres = RowCentres { slots: &[slot], scale };
            done(block_on(Cpu::new().uncentre_lse(&store(SegmentFormat::F16), &query(), centres, states)));
        }));
        "cpu::uncentre_lse" => floats(|scale| words(|slot| {
            let (centres, states) = (RowCentres { slots: &[slot], scale }, States::new(1, &shape()).unwrap());
            done(uncentre_lse(&store(SegmentFormat::F16), Elements::F32(&[0.5; 256]), centres, states));
        }));
        "cpu::weighted_values" => floats(|slope| floats(|offset| {
            let plan = calibrated_plan(&[QueryRun::decode(0)], Some(Calibration::IDENTITY)).unwrap();
            let work = Work::new(&plan, Split { target_items: 4, tile_step: 1, max_tiles: 2 }, 1).unwrap();
            let (store, segment) = (store(SegmentFormat::F16), &work.segments()[0]);
            let found = scores(segment, &store, Elements::F32(&[0.5; 256])).unwrap();
            let mut states = States::new(work.states(), &shape()).unwrap();
            done(weighted_values(segment, &store, &found, &[ScoreMap { slope, offset }; 4], &mut states));
        }));
        "cpu::exact_attention" => sizes(|tokens| {
            let segment = DenseSegment { keys: &ROWS, values: &ROWS, tokens, calibration: None };
            done(exact_attention(&shape(), &[segment], &[0.5; 256]));
            done(exact_attention(&shape(), &[segment; 3], &[0.5; 256]));
        });
        "cpu::exact_scored_attention" => sizes(|tokens| {
            let segment = DenseSegment { keys: &[], values: &ROWS, tokens, calibration: None };
            done(exact_scored_attention(&shape(), &Scoring::of(&shape()), &[segment], &[0.5; 256]));
        });
        "cpu::Calibration::search" => layouts(|rows| pairs(|start, end| {
            let Ok(packed) = TokenRange::new(start, end) else { return };
            let of = Elements::F32(&ROWS);
            let sample = CalibrationSample { shape: shape(), keys: of, values: of, rows, packed, queries: of };
            done(Calibration::search(&sample, SegmentFormat::calibquant(Bits::One)));
        }));
    }
}

fn stores() -> Vec<Call> {
    calls! {
        "backend::Storage::create_store" => each_format(|&key| {
            done(Cpu::new().create_store(shape(), SegmentFormat { key, value: key }).is_ok());
        });
        "backend::Storage::max_shard_pages" => each_format(|&key| {
            done(Cpu::new().max_shard_pages(&shape(), &SegmentFormat { key, value: key }));
        });
        "cpu::CpuStore::new" => each_format(|&key| done(CpuStore::new(shape(), SegmentFormat { key, value: key }).is_ok()));
        "backend::FilledStores::new" => each_format(|&key| {
            done(FilledStores::new(&Cpu::new(), shape(), &[SegmentFormat { key, value: key }]).is_ok());
        });
        "cpu::CpuStore::read_span" => sizes(|slot| pages(|page| for store in [store(SegmentFormat::F16), store(SegmentFormat::saw_int4())] {
            done(store.read_span(SpanPlace { pages: &[page], range_slot: Some(slot), centre: Some(slot) }));
            done(store.read_span(SpanPlace { pages: &[page], range_slot: None, centre: Some(slot) }));
        }));
        "cpu::CpuStore::write_span" => sizes(|slot| pages(|page| {
            let mut store = store(SegmentFormat::saw_int4());
            let bytes = store.read_span(SpanPlace { pages: &[PAGE], range_slot: None, centre: None }).unwrap();
            done(store.write_span(&bytes, SpanPlace { pages: &[page], range_slot: Some(slot), centre: Some(slot) }));
            done(store.write_span(&bytes, SpanPlace { pages: &[page], range_slot: None, centre: None }));
        }));
        "backend::Storage::read_spans" => sizes(|slot| {
            let place = SpanPlace { pages: &[PAGE], range_slot: Some(slot), centre: Some(slot) };
            done(block_on(Cpu::new().read_spans(&[(&store(SegmentFormat::F16), place)])));
        });
        "backend::Storage::begin_reads" => sizes(|slot| {
            let place = SpanPlace { pages: &[PAGE], range_slot: Some(slot), centre: Some(slot) };
            done(Cpu::new().begin_reads(&[(&store(SegmentFormat::F16), place)]));
        });
        "backend::Storage::write_span" => sizes(|slot| {
            let (cpu, mut store) = (Cpu::new(), store(SegmentFormat::F16));
            let place = SpanPlace { pages: &[PAGE], range_slot: None, centre: None };
            let bytes = block_on(cpu.read_spans(&[(&store, place)])).unwrap().remove(0);
            done(cpu.write_span(&mut store, &bytes, SpanPlace { range_slot: Some(slot), ..place }));
            done(cpu.write_span(&mut store, &bytes, SpanPlace { centre: Some(slot), ..place }));
        });
        "cpu::pack_windows" => sizes(|range_slot| pages(|page| {
            let (from, mut to) = (store(SegmentFormat::F16), store(SegmentFormat::calibquant(Bits::Two)));
            done(pack_windows(&from, &mut to, &[WindowMove { from: page, to: PAGE, range_slot }]));
            done(pack_windows(&from, &mut to, &[WindowMove { from: PAGE, to: page, range_slot }]));
        }));
        "backend::Packing::pack_windows" => sizes(|range_slot| pages(|page| {
            let (from, mut to) = (store(SegmentFormat::F16), store(SegmentFormat::calibquant(Bits::Two)));
            let window = WindowMove { from: page, to: page, range_slot };
            done(Cpu::new().pack_windows(&shape(), &from, &mut to, &[window]));
        }));
    }
}

fn placed() -> Vec<Call> {
    calls! {
        "backend::FilledStores::place" => spans(|span| {
            let cpu = Cpu::new().with_memory_limit(1 << 20);
            done(block_on(filled(&cpu).place(&cpu, &[span.span])));
        });
        "backend::FilledStores::fill" => layouts(|rows| sizes(|tokens| {
            let (cpu, tensor) = (Cpu::new().with_memory_limit(1 << 20), tensor());
            let of = Rows::Run(TokenRange::new(0, 3).unwrap());
            let source = SpanSource { rows, tokens: of, keys: &tensor, values: &tensor };
            let span = NewSpan { store: 1, sequence: 0, start: 0, tokens };
            done(block_on(filled(&cpu).fill(&cpu, &[(span, source)])));
        }));
        "backend::FilledStores::quantize" => spans(|span| {
            let (cpu, tensor) = (Cpu::new(), tensor());
            let tokens = Rows::Run(TokenRange::new(0, 3).unwrap());
            let rows = RowLayout::token_major(3, &shape());
            done(filled(&cpu).quantize(&cpu, &span, SpanSource { rows, tokens, keys: &tensor, values: &tensor }));
        });
        "backend::FilledStores::read" => spans(|span| done(block_on(filled(&Cpu::new()).read(&Cpu::new(), &span))));
        "backend::FilledStores::plan" => spans(|span| {
            done(filled(&Cpu::new()).plan(&[QueryRun::decode(0)], [&span].into_iter(), &[]));
        });
        "backend::FilledStores::pack_windows" => sizes(|a| pages(|page| {
            let window = WindowMove { from: page, to: PAGE, range_slot: a };
            done(filled(&Cpu::new()).pack_windows(&Cpu::new(), [0, 1], &[window]));
            done(filled(&Cpu::new()).pack_windows(&Cpu::new(), [a, 1], &[window]));
        }));
    }
}

/// The layout of small steps of an f16 store with centres, and a store that its windows move to.
fn step_layout() -> Arc<WriteLayout> {
    let of = |format, tokens| StoreCapacity {
        format,
        shard_pages: vec![3],
        range_slots: 1,
        tokens,
        copies: 1,
        centres: tokens.min(1),
        centre_slots: tokens.min(1),
    };
    let stores = vec![of(SegmentFormat::F16, 2), of(SegmentFormat::calibquant(Bits::Two), 0)];
    let windows = vec![WindowCapacity { from: 0, to: 1, windows: 1, newer: 0 }];
    Arc::new(WriteLayout::new(shape(), 3, stores, windows).unwrap())
}

/// The table of every single write.
fn written(call: impl Fn(kvpack::Result<()>, WriteTable)) {
    let set = |change: &dyn Fn(&mut LayerWrites)| {
        let layout = step_layout();
        let (mut writes, mut table) = (LayerWrites::of(&layout), WriteTable::new(&layout));
        change(&mut writes);
        let outcome = table.set(&writes);
        call(outcome, table);
    };
    pages(|page| {
        set(&|writes| writes.stores[0].copies.push(PageCopy { from: page, to: PAGE }));
        set(&|writes| writes.stores[1].copies.push(PageCopy { from: PAGE, to: page }));
        set(&|writes| writes.windows[0].push(WindowMove { from: PAGE, to: page, range_slot: 0 }));
        set(&|writes| writes.stores[0].tokens.push(TokenWrite { token: 0, page, slot: 0, centre: Some(0) }));
    });
    pairs(|a, b| {
        set(&|writes| writes.windows[0].push(WindowMove { from: PAGE, to: PAGE, range_slot: a }));
        set(&|writes| writes.stores[0].tokens.push(TokenWrite { token: a, page: PAGE, slot: b, centre: Some(0) }));
        set(&|writes| writes.stores[0].tokens.push(TokenWrite { token: 0, page: PAGE, slot: a, centre: Some(b) }));
        if let Ok(tokens) = TokenRange::new(0, a) {
            set(&|writes| writes.stores[0].centres.push(KeyMean { tokens, slot: b }));
        }
    });
}

fn write(table: &WriteTable, rows: RowLayout) {
    let flags = NonFiniteFlags::new(1).unwrap();
    let (mut f16, mut packed) = (store(SegmentFormat::F16), store(SegmentFormat::calibquant(Bits::Two)));
    f16.reserve_centres(1).unwrap();
    let of = Elements::F32(&ROWS);
    let input = WriteInput { keys: &of, values: &of, rows, flags: &flags, layer: rows.tokens };
    done(write_step(&mut [&mut f16, &mut packed], Some(input), table));
}

fn steps() -> Vec<Call> {
    calls! {
        "plan::WriteTable::set" => written(|outcome, table| {
            assert!(outcome.is_ok() || table.words().iter().all(|&word| word == 0), "{outcome:?} left something behind");
        });
        "cpu::write_step" => written(|outcome, table| if outcome.is_ok() {
            layouts(|rows| write(&table, rows));
        });
        "backend::Packing::write_step" => layouts(|rows| sizes(|layer| {
            let (cpu, layout) = (Cpu::new(), step_layout());
            let flags = cpu.create_non_finite_flags(2).unwrap();
            let (mut f16, mut packed) = (store(SegmentFormat::F16), store(SegmentFormat::calibquant(Bits::Two)));
            f16.reserve_centres(1).unwrap();
            let (mut writes, mut table) = (LayerWrites::of(&layout), WriteTable::new(&layout));
            writes.stores[0].tokens.push(TokenWrite { token: 2, page: PAGE, slot: 1, centre: Some(0) });
            table.set(&writes).unwrap();
            let input = WriteInput { keys: &tensor(), values: &tensor(), rows, flags: &flags, layer };
            done(cpu.write_step(&mut [&mut f16, &mut packed], Some(input), &table));
        }));
    }
}

fn stats(threshold: f32) -> ColumnRequest {
    ColumnRequest { aggregation: HeadAggregation::Sum, threshold: Some(threshold) }
}

/// Rows of queries and keys in every layout of either.
fn inputs(call: impl Fn(&StatsInput<'_>)) {
    let (positions, good) = (QueryPositions::last(1, 3).unwrap(), RowLayout::token_major(3, &shape()));
    let queries = RowLayout { tokens: 1, token_stride: 256, head_stride: 64 };
    let of = |queries, keys| StatsInput {
        shape: shape(),
        scale: 0.125,
        rows: &positions,
        queries: DenseRows { elements: Elements::F32(&ROWS), layout: queries },
        keys: DenseRows { elements: Elements::F32(&ROWS), layout: keys },
    };
    layouts(|layout| [of(layout, good), of(queries, layout)].iter().for_each(&call));
}

fn measured() -> Vec<Call> {
    calls! {
        "cpu::attention_row_stats" => inputs(|input| sizes(|end| if let Ok(range) = TokenRange::new(0, end) {
            done(attention_row_stats(input, range));
        }));
        "cpu::attention_column_stats" => inputs(|input| floats(|threshold| {
            let range = TokenRange::new(0, 3).unwrap();
            done(attention_column_stats(input, range, stats(threshold), &[0.5; 4], &[0.5; 4]));
            done(attention_column_stats(input, range, stats(threshold), &[], &[0.5; 4]));
        }));
        "backend::TokenSelection::measure_attention" => inputs(|input| floats(|threshold| {
            let tensor = tensor();
            let of = |layout| TensorRows { tensor: &tensor, layout };
            let (queries, keys) = (of(input.queries.layout), of(input.keys.layout));
            let input = QueriesAndKeys { shape: shape(), scale: 0.125, rows: input.rows, queries, keys };
            let request = StatsRequest { columns: stats(threshold), rows: RowStatsSource::Measured };
            done(Cpu::new().measure_attention(input, request, None).is_ok());
        }));
        "backend::TokenSelection::measure_rows" => inputs(|input| {
            let tensor = tensor();
            let of = |layout| TensorRows { tensor: &tensor, layout };
            let (queries, keys) = (of(input.queries.layout), of(input.keys.layout));
            done(Cpu::new().measure_rows(QueriesAndKeys { shape: shape(), scale: 0.125, rows: input.rows, queries, keys }).is_ok());
        });
        "backend::TokenSelection::measure_columns" => inputs(|input| floats(|threshold| {
            let tensor = tensor();
            let of = |layout| TensorRows { tensor: &tensor, layout };
            let (queries, keys) = (of(input.queries.layout), of(input.keys.layout));
            let input = QueriesAndKeys { shape: shape(), scale: 0.125, rows: input.rows, queries, keys };
            for given in [0, 4] {
                let known = || CpuTensor::F32(vec![0.5; given]);
                let rows = RowStatistics { max: known(), lse: known() };
                done(Cpu::new().measure_columns(input, stats(threshold), &rows).is_ok());
            }
        }));
        "cpu::gather" => layouts(|layout| words(|w| {
            done(gather(&shape(), DenseRows { elements: Elements::F32(&ROWS), layout }, &[0, w]));
        }));
        "backend::TokenSelection::gather" => layouts(|layout| {
            let (indices, tensor) = (CpuIndices::new(&[0, 2], 2, 3).unwrap(), tensor());
            done(Cpu::new().gather(&shape(), TensorRows { tensor: &tensor, layout }, &indices));
        });
    }
}

fn merged() -> Vec<Call> {
    calls! {
        "cpu::nearest_kept" => layouts(|layout| words(|w| {
            let tokens = KeptTokens { kept: &[0, w], evicted: &[1, 1] };
            done(nearest_kept(&shape(), DenseRows { elements: Elements::F32(&ROWS), layout }, tokens));
        }));
        "cpu::merge_tokens" => layouts(|layout| words(|kept| floats(|similarity| {
            let tokens = KeptTokens { kept: &[0, 0], evicted: &[1, 1] };
            let (rows, nearest) = (DenseRows { elements: Elements::F32(&ROWS), layout }, [Nearest { kept, similarity }; 2]);
            done(merge_tokens(&shape(), rows, tokens, &nearest, Merging::Weighted));
        })));
        "backend::TokenSelection::merge_tokens" => layouts(|rows| {
            let of = |tokens: &[u32]| CpuIndices::new(tokens, 2, 3).unwrap();
            let (kept, evicted, tensor) = (of(&[0, 0]), of(&[1, 1]), tensor());
            let of = KeptAndEvicted { shape: shape(), rows, keys: &tensor, values: &tensor, kept: &kept, evicted: &evicted };
            done(Cpu::new().merge_tokens(of, Merging::Averaged).is_ok());
        });
    }
}
