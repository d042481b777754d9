//! The CPU's kernels, its stores, and the backend that they make.

use std::sync::Arc;

use kvpack::backend::{
    Device, FilledSpan, FilledStores, LARGEST_CENTRED_KEY, NewCentre, NewQueries, NewSpan, Packing, SpanRead,
    SpanWrite, Storage, TensorRows, TokenSelection,
};
use kvpack::cpu::{
    Cpu, CpuIndices, CpuStore, CpuTensor, DenseRows, KeptTokens, NonFiniteFlags, States, append, attend_plan,
    dequantize, first_non_finite, hadamard, key_mean, plain_attention, quantize, reorder_chunks, scores, token_scores,
    top_k,
};
use kvpack::format::{Calibration, CodeRange, Direction, KeyOrValue, Rotation};
use kvpack::plan::{
    ElementType, Elements, Page, QueryLayout, QueryRun, RowLayout, Rows, Split, TokenRange, TokenWrite, Work,
};
use kvpack::policy::{ColumnRequest, HeadAggregation, Policy, QueryPositions, Spans};
use kvpack::{Bits, SegmentFormat};
use pollster::block_on;

use crate::plan_calls::{calibrated_plan, plan};
use crate::{Call, calls, done, few_triples, floats, pairs, shape, sizes, triples, words};

/// Rows of 3 tokens.
const ROWS: [f32; 3 * 2 * 64] = [0.5; 3 * 2 * 64];

fn layouts(call: impl Fn(RowLayout)) {
    few_triples(|tokens, token_stride, head_stride| call(RowLayout { tokens, token_stride, head_stride }));
    call(RowLayout::token_major(3, &shape()));
}

/// Stores of one page.
fn stores(mut call: impl FnMut(&mut CpuStore)) {
    for format in [SegmentFormat::F16, SegmentFormat::saw_int4(), SegmentFormat::calibquant(Bits::Two)] {
        let mut store = CpuStore::new(shape(), format).unwrap();
        store.add_shard(1).unwrap();
        store.reserve_ranges(1).unwrap();
        call(&mut store);
    }
}

fn pages(call: impl Fn(Page)) {
    words(|shard| words(|index| call(Page { shard, index })));
}

/// How a plan may be cut. With three numbers of every size attention would take minutes.
const SPLITS: [(usize, usize, usize); 5] =
    [(0, 0, 0), (1, 1, 1), (usize::MAX, 1, 1), (1, usize::MAX, 1 << 32), (usize::MAX, usize::MAX, usize::MAX)];

const PAGE: Page = Page { shard: 0, index: 0 };

fn span(rows: RowLayout, range_slot: usize, centre: Option<usize>) -> SpanWrite<'static, CpuIndices> {
    SpanWrite { rows, tokens: Rows::Run(TokenRange::new(0, 3).unwrap()), pages: &[PAGE], range_slot, centre }
}

pub fn calls() -> Vec<Call> {
    let mut all = kernels();
    all.extend(stored());
    all.extend(selecting());
    all.extend(backend());
    all
}

fn kernels() -> Vec<Call> {
    calls! {
        "cpu::append" => layouts(|rows| sizes(|a| stores(|store| {
            let write = |token, slot, centre| TokenWrite { token, page: PAGE, slot, centre };
            for write in [write(a, 0, None), write(0, a, None), write(0, 0, Some(a))] {
                done(append(store, Elements::F32(&ROWS), Elements::F32(&ROWS), rows, &[write]));
            }
        })));
        "cpu::quantize" => layouts(|rows| sizes(|a| stores(|store| {
            let rows_of = Elements::F32(&ROWS);
            done(quantize(store, rows_of, rows_of, span(rows, a, None)));
            done(quantize(store, rows_of, rows_of, span(rows, 0, Some(a))));
        })));
        "cpu::dequantize" => pairs(|tokens, range_slot| stores(|store| for which in [KeyOrValue::Key, KeyOrValue::Value] {
            done(dequantize(store, which, SpanRead { pages: &[PAGE], tokens, range_slot, centre: None }));
            done(dequantize(store, which, SpanRead { pages: &[PAGE], tokens: 3, range_slot: 0, centre: Some(tokens) }));
        }));
        "cpu::key_mean" => layouts(|rows| sizes(|slot| stores(|store| {
            let tokens = TokenRange::new(0, 3).unwrap();
            done(key_mean(store, Elements::F32(&ROWS), NewCentre { rows, tokens, slot, largest: LARGEST_CENTRED_KEY }));
        })));
        "cpu::attend_plan" => for (target_items, tile_step, max_tiles) in SPLITS {
            let mut store = CpuStore::new(shape(), SegmentFormat::F16).unwrap();
            store.add_shard(3).unwrap();
            let plan = plan(&[QueryRun::decode(0)]).unwrap();
            let split = Split { target_items, tile_step, max_tiles };
            done(attend_plan(&plan, &[&store], Elements::F32(&[0.5; 256]), split));
        };
        "cpu::hadamard" => pairs(|head_dim, order| {
            done(hadamard(&mut [0.5; 128], head_dim, Rotation::dealt(order, 3), Direction::Forward));
        });
        "cpu::plain_attention" => sizes(|tokens| done(plain_attention(&shape(), &[], &[], tokens, &[0.5; 256])));
        "cpu::first_non_finite" => layouts(|rows| floats(|x| {
            done(first_non_finite("rows", Elements::F32(&ROWS), &rows, &shape(), x));
        }));
        "cpu::SegmentScores::of_query" => pairs(|query, head| {
            let mut store = CpuStore::new(shape(), SegmentFormat::F16).unwrap();
            store.add_shard(3).unwrap();
            let plan = calibrated_plan(&[QueryRun::decode(0)], Some(Calibration::IDENTITY)).unwrap();
            let work = Work::new(&plan, Split { target_items: 4, tile_step: 1, max_tiles: 2 }, 1).unwrap();
            let found = scores(&work.segments()[0], &store, Elements::F32(&[0.5; 256])).unwrap();
            done(found.of_query(&work.segments()[0], query, head));
        });
    }
}

fn stored() -> Vec<Call> {
    calls! {
        "cpu::CpuTensor::from_address" => pairs(|address, elements| {
            // SAFETY: nothing reads or writes the tensor.
            done(unsafe { CpuTensor::from_address(Arc::new(()), address, elements, ElementType::F16) }.is_ok());
        });
        "cpu::CpuTensor::take_rows" => triples(|first, stride, rows| {
            done(CpuTensor::F32(vec![0.5; 512]).take_rows(QueryLayout { first, stride }, rows, &shape()));
        });
        "cpu::CpuTensor::put_rows" => pairs(|first, stride| {
            let mut tensor = CpuTensor::F32(vec![0.5; 512]);
            done(tensor.put_rows(QueryLayout { first, stride }, &CpuTensor::F32(vec![0.5; 512]), &shape()));
        });
        "cpu::CpuIndices::new" => sizes(|a| words(|w| done(CpuIndices::new(&[0, w], a, w))));
        "cpu::NonFiniteFlags::new" => sizes(|a| done(NonFiniteFlags::new(a)));
        "cpu::States::new" => sizes(|a| done(States::new(a, &shape())));
        "cpu::CpuStore::step_capacity" => pairs(|a, b| stores(|store| done(store.step_capacity(a, b))));
        "cpu::CpuStore::add_shard" => words(|w| stores(|store| done(store.add_shard(w))));
        "cpu::CpuStore::larger_shard" => words(|w| stores(|store| done(store.larger_shard(w).is_ok())));
        "cpu::CpuStore::reserve_ranges" => sizes(|a| stores(|store| done(store.reserve_ranges(a))));
        "cpu::CpuStore::reserve_centres" => sizes(|a| stores(|store| done(store.reserve_centres(a))));
        "cpu::CpuStore::centre" => sizes(|a| stores(|store| done(store.centre(a).is_ok())));
        "cpu::CpuStore::tile_words" => sizes(|a| pages(|page| stores(|store| done(store.tile_words(KeyOrValue::Key, page, a).is_ok()))));
        "cpu::CpuStore::write_tile" => sizes(|a| pages(|page| stores(|store| {
            done(store.write_tile(KeyOrValue::Value, page, a, &[1; 4096], &[]));
        })));
        "cpu::CpuStore::copy_page" => pages(|from| pages(|to| stores(|store| done(store.copy_page(from, to)))));
        "cpu::CpuStore::span_ranges" => sizes(|a| stores(|store| done(store.span_ranges(KeyOrValue::Key, a).is_ok())));
        "cpu::CpuStore::write_span_ranges" => sizes(|a| stores(|store| {
            done(store.write_span_ranges(KeyOrValue::Key, a, &[CodeRange::default(); 128]));
        }));
    }
}

fn selecting() -> Vec<Call> {
    calls! {
        "cpu::KeptTokens::check" => pairs(|heads, tokens| words(|w| {
            done(KeptTokens { kept: &[0, w], evicted: &[1, w] }.check(heads, tokens));
        }));
        "cpu::reorder_chunks" => layouts(|layout| sizes(|a| words(|w| {
            let rows = DenseRows { elements: Elements::F32(&ROWS), layout };
            done(reorder_chunks(&shape(), rows, a, &[w]));
        })));
        "cpu::token_scores" => sizes(|kv_heads| {
            let (spans, rows) = (Spans::new(6, &[]).unwrap(), QueryPositions::last(2, 6).unwrap());
            let policy = Policy::h2o(0.5).unwrap();
            let request = policy.score_request(&spans, &rows, 3).unwrap().unwrap();
            done(token_scores(&[0.5; 12], kv_heads, &request));
        });
        "cpu::top_k" => pairs(|heads, k| done(top_k(&[0.5, f32::NAN, f32::INFINITY, 0.0], heads, k)));
    }
}

fn backend() -> Vec<Call> {
    calls! {
        "cpu::Cpu::with_max_shard_bytes" => sizes(|a| {
            let backend = Cpu::new().with_max_shard_bytes(a as u64);
            done(backend.max_shard_pages(&shape(), &SegmentFormat::F16));
        });
        "cpu::Cpu::with_memory_limit" => sizes(|a| {
            let backend = Cpu::new().with_memory_limit(a as u64);
            let mut store = backend.create_store(shape(), SegmentFormat::F16).unwrap();
            done(block_on(backend.add_shard(&mut store, 1)));
        });
        "backend::Device::upload_indices" => sizes(|a| words(|w| done(block_on(Cpu::new().upload_indices(&[0, w], a, w)))));
        "backend::Storage::add_shard" => words(|w| stores(|store| done(block_on(Cpu::new().add_shard(store, w)))));
        "backend::Storage::larger_shard" => words(|w| stores(|store| done(block_on(Cpu::new().larger_shard(store, w)).is_ok())));
        "backend::Storage::reserve_ranges" => sizes(|a| stores(|store| done(block_on(Cpu::new().reserve_ranges(store, a)))));
        "backend::Storage::reserve_centres" => sizes(|a| stores(|store| done(block_on(Cpu::new().reserve_centres(store, a)))));
        "backend::Packing::first_non_finite" => layouts(|rows| floats(|x| {
            let tensor = CpuTensor::F32(ROWS.to_vec());
            done(block_on(Cpu::new().first_non_finite(KeyOrValue::Key, &tensor, &rows, &shape(), x)));
        }));
        "backend::Packing::key_mean" => sizes(|slot| stores(|store| {
            let (rows, tokens) = (RowLayout::token_major(3, &shape()), TokenRange::new(0, 3).unwrap());
            done(Cpu::new().key_mean(store, &CpuTensor::F32(ROWS.to_vec()), NewCentre { rows, tokens, slot, largest: LARGEST_CENTRED_KEY }));
        }));
        "backend::Packing::quantize" => sizes(|a| stores(|store| {
            let (rows, tensor) = (RowLayout::token_major(3, &shape()), CpuTensor::F32(ROWS.to_vec()));
            done(Cpu::new().quantize(store, &tensor, &tensor, span(rows, a, Some(a))));
        }));
        "backend::Packing::append" => sizes(|a| stores(|store| {
            let (rows, tensor) = (RowLayout::token_major(3, &shape()), CpuTensor::F32(ROWS.to_vec()));
            let write = TokenWrite { token: a, page: PAGE, slot: a, centre: Some(a) };
            done(Cpu::new().append(store, &tensor, &tensor, rows, &[write]));
        }));
        "backend::Packing::copy_page" => pages(|page| stores(|store| done(Cpu::new().copy_page(store, PAGE, page))));
        "backend::Packing::create_non_finite_flags" => sizes(|a| done(Cpu::new().create_non_finite_flags(a)));
        "backend::Packing::dequantize" => pairs(|tokens, range_slot| stores(|store| {
            done(Cpu::new().dequantize(store, SpanRead { pages: &[PAGE], tokens, range_slot, centre: Some(tokens) }));
        }));
        "backend::Packing::dequantize_with" => pairs(|tokens, range_slot| stores(|store| {
            let read = SpanRead { pages: &[PAGE], tokens, range_slot, centre: Some(tokens) };
            done(Cpu::new().dequantize_with(store, read, &mut None));
        }));
        "backend::TokenSelection::add_attention" => few_triples(|a, b, c| {
            let tensor = CpuTensor::F32(vec![0.5; 3 * 256]);
            let (rows, columns) = (QueryPositions::last(2, 3).unwrap(), ColumnRequest { aggregation: HeadAggregation::Sum, threshold: None });
            let of = |tokens, heads: usize| TensorRows { tensor: &tensor, layout: RowLayout { tokens, token_stride: heads * 64, head_stride: 64 } };
            for (first_row, queries, tokens, lse) in [(a, 3, 3, None), (1, b, 3, Some(&tensor)), (1, 3, c, None)] {
                let (rows, queries, keys) = (&rows, of(queries, 4), of(3, 2));
                let input = NewQueries { shape: shape(), scale: 0.125, rows, queries, first_row, log_sum_exps: lse, keys, tokens };
                done(Cpu::new().add_attention(input, columns, &mut None).is_ok());
            }
        });
        "backend::TokenSelection::token_scores" => sizes(|kv_heads| {
            let (spans, rows) = (Spans::new(6, &[]).unwrap(), QueryPositions::last(2, 6).unwrap());
            let policy = Policy::h2o(0.5).unwrap();
            let request = policy.score_request(&spans, &rows, 3).unwrap().unwrap();
            done(Cpu::new().token_scores(&CpuTensor::F32(vec![0.5; 12]), kv_heads, &request).is_ok());
        });
        "backend::TokenSelection::top_k" => pairs(|heads, k| done(Cpu::new().top_k(&CpuTensor::F32(vec![0.5; 12]), heads, k)));
        "backend::TokenSelection::reorder_chunks" => sizes(|a| words(|w| {
            let rows = TensorRows { tensor: &CpuTensor::F32(ROWS.to_vec()), layout: RowLayout::token_major(3, &shape()) };
            done(Cpu::new().reorder_chunks(&shape(), rows, a, &[w]));
        }));
        "backend::FilledStores::with_shards_of" => words(|w| filled(|stores| stores.with_shards_of(w), 300));
        "backend::FilledStores::with_centres" => sizes(|a| filled(|stores| stores.with_centres(a), 3));
        "backend::FilledStores::set_centre" => sizes(|sequence| {
            let mut stores = FilledStores::new(&Cpu::new(), shape(), &[SegmentFormat::F16]).unwrap();
            let of = (RowLayout::token_major(3, &shape()), TokenRange::new(0, 3).unwrap());
            done(stores.set_centre(&Cpu::new(), sequence, &CpuTensor::F32(ROWS.to_vec()), of));
        });
        "backend::FilledStores::append" => triples(|store, tokens, first| {
            let mut stores = FilledStores::new(&Cpu::new(), shape(), &[SegmentFormat::F16]).unwrap();
            let (rows, tensor) = (RowLayout::token_major(3, &shape()), CpuTensor::F32(ROWS.to_vec()));
            let span = NewSpan { store, sequence: 0, start: 0, tokens };
            let span = FilledSpan { span, pages: vec![PAGE], range_slot: first };
            done(stores.append(&Cpu::new(), &span, rows, [&tensor, &tensor], first));
            done(block_on(stores.read(&Cpu::new(), &span)));
            done(stores.plan(&[QueryRun::decode(0)], [&span].into_iter(), &[]));
        });
        "backend::FilledStores::copy_page" => sizes(|store| pages(|page| {
            let mut stores = FilledStores::new(&Cpu::new(), shape(), &[SegmentFormat::F16]).unwrap();
            done(stores.copy_page(&Cpu::new(), store, PAGE, page));
        }));
    }
}

/// Places spans of all sizes in stores that were made in some way.
fn filled(make: impl Fn(FilledStores<Cpu>) -> FilledStores<Cpu>, tokens: usize) {
    let stores = || make(FilledStores::new(&Cpu::new(), shape(), &[SegmentFormat::F16]).unwrap());
    let span = NewSpan { store: 0, sequence: 0, start: 0, tokens };
    done(block_on(stores().place(&Cpu::new(), &[span])));
    for (store, sequence) in [(0, 0), (0, usize::MAX), (1, 0), (usize::MAX, 0)] {
        sizes(|tokens| {
            done(block_on(stores().place(&Cpu::new(), &[NewSpan { store, sequence, start: tokens, tokens }])));
        });
    }
}
