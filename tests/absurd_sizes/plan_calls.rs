//! Pages, rows, tables and plans.

use kvpack::SegmentFormat;
use kvpack::cpu::CpuIndices;
use kvpack::format::Calibration;
use kvpack::plan::{
    AttendPlan, Dispatch, ElementType, Elements, IndexShape, ItemMask, LayerAttention, Page, PageAllocator, PlannedRun,
    PlannedSpan, QueryLayout, QueryRun, RowLayout, Rows, Scoring, SpanView, Split, StoreCapacity, StoreView,
    TableSection, TokenIndices, TokenRange, TreeMask, Visible, WindowCapacity, Work, WriteLayout, WriteTable,
};

use crate::{Call, calls, done, floats, pairs, shape, sizes, triples, words};

/// A plan over one sequence of 300 tokens in f16.
pub fn plan(runs: &[QueryRun]) -> kvpack::Result<AttendPlan> {
    calibrated_plan(runs, None)
}

/// The same over scores that are calibrated.
pub fn calibrated_plan(runs: &[QueryRun], calibration: Option<Calibration>) -> kvpack::Result<AttendPlan> {
    let pages = [0, 1, 2].map(|index| Page { shard: 0, index });
    let span = SpanView { sequence: 0, start: 0, tokens: 300, pages: &pages, range_slot: 0, gathered: None };
    AttendPlan::new(shape(), runs, &[StoreView { format: SegmentFormat::F16, calibration, spans: vec![span] }])
}

/// Every run of plans that see in every way, and a span that it sees.
fn runs(call: impl Fn(&PlannedRun, &PlannedSpan)) {
    let tree = TreeMask::from_parents(&[None, Some(0), Some(0)]).unwrap();
    let visible = [
        Visible::All,
        Visible::Causal,
        Visible::Window { left: 5 },
        Visible::spans(&[10..20, 290..300]),
        Visible::Tree(tree),
    ];
    for visible in visible {
        let plan = plan(&[QueryRun::new(0, 3, visible)]).unwrap();
        call(&plan.runs()[0], &plan.segments()[0].spans()[0]);
    }
}

/// Plans with a scoring, where there is one.
fn scored(scoring: kvpack::Result<Scoring>) {
    if let Ok(scoring) = scoring {
        done(plan(&[QueryRun::decode(0)]).unwrap().with_scoring(scoring));
    }
}

fn layouts(call: impl Fn(RowLayout)) {
    triples(|tokens, token_stride, head_stride| call(RowLayout { tokens, token_stride, head_stride }));
}

fn pages(call: impl Fn(Page)) {
    words(|shard| words(|index| call(Page { shard, index })));
}

/// Parts of tables of any number of stores.
fn sections(call: impl Fn(TableSection)) {
    let of = [TableSection::Copies, TableSection::Centres, TableSection::Tokens, TableSection::Windows];
    sizes(|a| of.into_iter().for_each(|section| call(section(a))));
}

/// A table of steps of one store.
fn table() -> WriteTable {
    let (format, shard_pages) = (SegmentFormat::F16, vec![3]);
    let store =
        StoreCapacity { format, shard_pages, range_slots: 1, tokens: 2, copies: 1, centres: 0, centre_slots: 0 };
    WriteTable::new(&std::sync::Arc::new(WriteLayout::new(shape(), 3, vec![store], vec![]).unwrap()))
}

pub fn calls() -> Vec<Call> {
    let mut all = rows();
    all.extend(plans());
    all
}

fn rows() -> Vec<Call> {
    calls! {
        "plan::Elements::get" => done(Elements::F32(&[1.0]).get(0));
        "plan::TokenRange::new" => pairs(|a, b| done(TokenRange::new(a, b).map(|range| range.len())));
        "plan::RowLayout::token_major" => sizes(|a| done(RowLayout::token_major(a, &shape()).elements_needed(&shape())));
        "plan::RowLayout::head_major" => sizes(|a| done(RowLayout::head_major(a, &shape()).elements_needed(&shape())));
        "plan::RowLayout::row" => layouts(|layout| done(layout.row(layout.head_stride, layout.token_stride)));
        "plan::RowLayout::check" => layouts(|layout| done(layout.check("rows", layout.tokens, &shape())));
        "plan::QueryLayout::row" => triples(|first, stride, row| done(QueryLayout { first, stride }.row(row)));
        "plan::QueryLayout::elements_needed" => triples(|first, stride, row| {
            done(QueryLayout { first, stride }.elements_needed(row, &shape()));
        });
        "plan::QueryLayout::check" => triples(|first, stride, row| {
            done(QueryLayout { first, stride }.check("queries", first, row, &shape()));
        });
        "plan::QueryLayout::check_room" => triples(|first, stride, row| {
            done(QueryLayout { first, stride }.check_room("queries", stride, row, &shape()));
        });
        "plan::IndexShape::new" => pairs(|a, b| words(|w| if let Ok(shape) = IndexShape::new(a, b, w) {
            done((shape.indices(), shape.others()));
        }));
        "plan::IndexShape::of" => sizes(|a| words(|w| done(IndexShape::of(&[0, w], a, w))));
        "plan::Rows::check" => layouts(|layout| {
            let indices = CpuIndices::new(&[0, 1], 2, 9).unwrap();
            done(Rows::Gather(&indices).check("rows", &layout, &shape()));
            done(Rows::<CpuIndices>::Run(TokenRange::new(3, 9).unwrap()).check("rows", &layout, &shape()));
            done(indices.shape());
        });
    }
}

fn plans() -> Vec<Call> {
    calls! {
        "plan::QueryRun::decode" => sizes(|a| done(plan(&[QueryRun::decode(a)])));
        "plan::QueryRun::causal" => pairs(|a, b| done(plan(&[QueryRun::causal(a, b)])));
        "plan::PlannedRun::limits" => sizes(|a| runs(|run, _| done(run.limits(a))));
        "plan::PlannedRun::seen" => sizes(|a| runs(|run, span| done(run.seen(a, span))));
        "plan::PlannedRun::sees" => pairs(|a, b| runs(|run, _| done(run.sees(a, b))));
        "plan::QueryRun::new" => pairs(|a, b| sizes(|left| {
            done(plan(&[QueryRun::new(a, b, Visible::Window { left })]));
            let span = left..left.saturating_add(3);
            done(plan(&[QueryRun::new(0, b, Visible::spans(std::slice::from_ref(&span)))]));
        }));
        "plan::LayerAttention::with_window" => sizes(|left| {
            let layer = LayerAttention::default().with_window(left);
            done(layer.visible(&QueryRun::causal(0, 3)));
        });
        "plan::LayerAttention::visible" => pairs(|a, b| {
            done(LayerAttention::default().with_window(5).visible(&QueryRun::causal(a, b)));
        });
        "plan::TreeMask::from_bits" => pairs(|a, b| done(TreeMask::from_bits(a, b, &[0xff; 4])));
        "plan::TreeMask::sees" => pairs(|a, b| done(TreeMask::from_parents(&[None, Some(0)]).unwrap().sees(a, b)));
        "plan::Scoring::with_scale" => floats(|a| scored(Scoring::of(&shape()).with_scale(a)));
        "plan::Scoring::with_soft_cap" => floats(|a| scored(Scoring::of(&shape()).with_soft_cap(a)));
        "plan::AttendPlan::new" => pairs(|sequence, tokens| words(|w| {
            let pages = vec![Page { shard: w, index: w }; 3];
            for (start, gathered) in [(0, None), (tokens, None), (0, Some(tokens)), (tokens, Some(sequence))] {
                let span = SpanView { sequence, start, tokens, pages: &pages, range_slot: sequence, gathered };
                let short = SpanView { tokens: 300, ..span };
                for span in [span, short] {
                    let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span] };
                    let end = QueryRun { end: Some(tokens), ..QueryRun::causal(sequence, 2) };
                    done(AttendPlan::new(shape(), &[QueryRun::decode(sequence)], std::slice::from_ref(&store)));
                    done(AttendPlan::new(shape(), &[end], &[store]));
                }
            }
        }));
        "plan::StorePart::pages_of" => pairs(|a, b| {
            let plan = plan(&[QueryRun::decode(0)]).unwrap();
            let part = &plan.segments()[0];
            for (first_page, tokens) in [(a, b), (1, a), (a, 1)] {
                let foreign = PlannedSpan { first_page, tokens, ..part.spans()[0] };
                assert!(part.pages_of(&foreign).len() <= 3);
            }
        });
        "plan::StoreWork::items_of" => pairs(|first_item, items| {
            let plan = plan(&[QueryRun::decode(0)]).unwrap();
            let work = Work::new(&plan, Split { target_items: 4, tile_step: 1, max_tiles: 2 }, 1).unwrap();
            let part = &work.segments()[0];
            let foreign = Dispatch { shard: u32::MAX, most_queries: items, workgroups: None, mask: ItemMask::Bits, first_item, items };
            assert!(part.items_of(&foreign).len() <= part.items().len());
        });
        "plan::AttendPlan::check_elements" => sizes(|a| done(plan(&[QueryRun::decode(0)]).unwrap().check_elements("queries", a)));
        "plan::Work::new" => triples(|target_items, tile_step, max_tiles| {
            let plan = plan(&[QueryRun::causal(0, 3)]).unwrap();
            let split = Split { target_items, tile_step, max_tiles };
            done(Work::new(&plan, split, 1).map(|work| work.states()));
            done(Work::new(&plan, split, max_tiles.max(1)).map(|work| work.states()));
        });
        "plan::PageAllocator::add_shard" => words(|w| {
            let mut pages = PageAllocator::default();
            done(pages.add_shard(w));
            done((pages.capacity(), pages.free(), pages.shard_pages().len()));
        });
        "plan::PageAllocator::with_larger_shard" => words(|w| {
            let mut pages = PageAllocator::default();
            done(pages.with_larger_shard(w).map(|larger| larger.capacity()));
            pages.add_shard(3).unwrap();
            done(pages.with_larger_shard(w).map(|larger| larger.capacity()));
        });
        "plan::PageAllocator::allocate" => sizes(|a| {
            let mut pages = PageAllocator::default();
            pages.add_shard(3).unwrap();
            done(pages.allocate(a));
        });
        "plan::PageAllocator::allocate_last" => sizes(|a| {
            let mut pages = PageAllocator::default();
            pages.add_shard(3).unwrap();
            done(pages.allocate_last(a));
        });
        "plan::PageAllocator::holders" => words(|shard| words(|index| {
            let mut pages = PageAllocator::default();
            pages.add_shard(3).unwrap();
            let page = Page { shard, index };
            done((pages.holders(page), pages.share(&[page]), pages.release(&[page])));
        }));
        "plan::WriteLayout::new" => triples(|a, b, c| {
            let capacity = |format| StoreCapacity {
                format,
                shard_pages: vec![u32::MAX, 0],
                range_slots: b,
                tokens: a,
                copies: b,
                centres: c,
                centre_slots: b,
            };
            let stores = || vec![capacity(SegmentFormat::F16), capacity(SegmentFormat::saw_int4())];
            let window = WindowCapacity { from: 0, to: 1, windows: c, newer: a };
            done(WriteLayout::new(shape(), a, stores(), vec![]));
            done(WriteLayout::new(shape(), b, stores(), vec![window]));
            done(WriteLayout::new(shape(), b, stores(), vec![WindowCapacity { from: a, to: b, ..window }]));
        });
        "plan::PageAllocator::share" => pages(|page| {
            let mut pages = PageAllocator::default();
            pages.add_shard(3).unwrap();
            pages.allocate(3).unwrap();
            done(pages.share(&[page; 2]));
        });
        "plan::PageAllocator::release" => pages(|page| {
            let mut pages = PageAllocator::default();
            pages.add_shard(3).unwrap();
            pages.allocate(3).unwrap();
            done(pages.release(&[page; 2]));
            done(pages.allocate(3));
        });
        "plan::WriteLayout::capacity" => sections(|section| {
            done(WriteLayout::new(shape(), 3, vec![], vec![]).unwrap().capacity(section));
        });
        "plan::WriteTable::count" => sections(|section| done(table().count(section)));
        "plan::WriteTable::entries" => sections(|section| done(table().entries(section).count()));
        "plan::WriteLayout::largest_element" => {
            let layout = WriteLayout::new(shape(), 3, vec![], vec![]).unwrap();
            done(layout.sections().count());
            done(ElementType::ALL);
        };
    }
}
