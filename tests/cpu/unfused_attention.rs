//! Attention in the steps of Cocktail's algorithm 1 against the fused kernel, over the same stores.

use kvpack::backend::{SpanRead, SpanWrite};
use kvpack::cpu::{
    CpuStore, DenseSegment, States, attend_plan, dequantize, exact_attention, nmse, quantize, unfused_attention,
};
use kvpack::format::{Calibration, KeyOrValue};
use kvpack::plan::{AttendPlan, Elements, Page, QueryRun, RowLayout, SpanView, Split, StoreView, TokenRange};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat, TILE_TOKENS};

use any_backend::random_rows::Random;

/// Tokens of one format, in two spans.
struct Block {
    store: CpuStore,
    spans: Vec<(usize, Vec<Page>)>,
}

const QUERIES: usize = 3;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

impl Block {
    /// Random rows; `sink` is added to one key, so that it draws most of the attention.
    fn new(format: SegmentFormat, tokens: [usize; 2], sink: f32, random: &mut Random) -> Self {
        let mut store = CpuStore::new(shape(), format).unwrap();
        let count = |tokens: usize| tokens.div_ceil(TILE_TOKENS) as u32;
        store.add_shard(tokens.iter().map(|&tokens| count(tokens)).sum()).unwrap();
        store.reserve_ranges(tokens.len()).unwrap();
        let (mut spans, mut first) = (Vec::new(), 0);
        for (range_slot, tokens) in tokens.into_iter().enumerate() {
            let mut rows = || -> Vec<f32> { (0..tokens * 2 * 64).map(|_| random.normal()).collect() };
            let (mut keys, values) = (rows(), rows());
            keys[..64].iter_mut().for_each(|x| *x += sink);
            let pages: Vec<Page> = (first..first + count(tokens)).map(|index| Page { shard: 0, index }).collect();
            first += count(tokens);
            let rows = RowLayout::head_major(tokens, &shape());
            let all = TokenRange::new(0, tokens).unwrap().into();
            let write = SpanWrite { rows, tokens: all, pages: &pages, range_slot, centre: None };
            quantize(&mut store, Elements::F32(&keys), Elements::F32(&values), write).unwrap();
            spans.push((tokens, pages));
        }
        Self { store, spans }
    }

    fn view(&self, calibration: Option<Calibration>) -> StoreView<'_> {
        let spans = self.spans.iter().enumerate();
        let spans = spans.map(|(range_slot, (tokens, pages))| SpanView {
            sequence: 0,
            start: 0,
            tokens: *tokens,
            gathered: None,
            pages,
            range_slot,
        });
        StoreView { format: *self.store.format(), calibration, spans: spans.collect() }
    }

    /// What is stored, span by span.
    fn dense(&self) -> Vec<(Vec<f32>, Vec<f32>, usize)> {
        let of = |(range_slot, (tokens, pages)): (usize, &(usize, Vec<Page>))| {
            let read = SpanRead { pages, tokens: *tokens, range_slot, centre: None };
            let rows = |which| dequantize(&self.store, which, read).unwrap();
            (rows(KeyOrValue::Key), rows(KeyOrValue::Value), *tokens)
        };
        self.spans.iter().enumerate().map(of).collect()
    }
}

fn plan(blocks: &[Block], calibration: Option<Calibration>) -> AttendPlan {
    let views: Vec<StoreView<'_>> = blocks.iter().map(|block| block.view(calibration)).collect();
    AttendPlan::new(shape(), &[QueryRun { queries: QUERIES, ..QueryRun::decode(0) }], &views).unwrap()
}

#[test]
fn steps_yield_what_the_fused_kernel_yields() {
    let mut random = Random::new(15);
    let mut blocks = |sink| {
        [
            (SegmentFormat::F16, [40, 200]),
            (SegmentFormat::kivi(Bits::Four), [160, 300]),
            (SegmentFormat::kivi(Bits::Two), [32, 128]),
        ]
        .map(|(format, tokens)| Block::new(format, tokens, sink, &mut random))
    };
    for blocks in [blocks(0.0), blocks(1.5)] {
        let queries: Vec<f32> = (0..QUERIES * 4 * 64).map(|i| (i as f32 * 0.37).sin() + 0.3).collect();
        let stores: Vec<&CpuStore> = blocks.iter().map(|block| &block.store).collect();
        let given = Elements::F32(&queries);
        let fused = attend_plan(&plan(&blocks, None), &stores, given, Split::default()).unwrap();
        let unfused = unfused_attention(&plan(&blocks, Some(Calibration::IDENTITY)), &stores, given).unwrap();
        let dense: Vec<_> = blocks.iter().flat_map(Block::dense).collect();
        let segments: Vec<DenseSegment<'_>> = dense
            .iter()
            .map(|(keys, values, tokens)| DenseSegment { keys, values, tokens: *tokens, calibration: None })
            .collect();
        let (mut outputs, mut lse) = (Vec::new(), Vec::new());
        for query in queries.chunks_exact(4 * 64) {
            let state = exact_attention(&shape(), &segments, query).unwrap();
            outputs.extend(state.outputs);
            lse.extend(state.lse);
        }
        let errors = |states: &States| [nmse(states.outputs(), &outputs), nmse(states.lse(), &lse)];
        for error in [errors(&fused), errors(&unfused)].concat() {
            assert!(error <= 1e-10, "{:?} fused, {:?} in steps", errors(&fused), errors(&unfused));
        }
    }
}

/// Queries of a causal run that see nothing of a span are attended to the others.
#[test]
fn causal_runs_see_what_they_may() {
    let block = Block::new(SegmentFormat::kivi(Bits::Four), [128, 2], 0.0, &mut Random::new(4));
    let queries: Vec<f32> = (0..QUERIES * 4 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
    let plan = |calibration| {
        let mut view = block.view(calibration);
        view.spans[1].start = 128;
        AttendPlan::new(shape(), &[QueryRun::causal(0, QUERIES)], &[view]).unwrap()
    };
    let (stores, given) = ([&block.store], Elements::F32(&queries));
    let fused = attend_plan(&plan(None), &stores, given, Split::default()).unwrap();
    let unfused = unfused_attention(&plan(Some(Calibration::IDENTITY)), &stores, given).unwrap();
    let in_f64 = |rows: &[f32]| -> Vec<f64> { rows.iter().map(|&x| f64::from(x)).collect() };
    assert!(nmse(unfused.outputs(), &in_f64(fused.outputs())) < 1e-10);
    assert!(nmse(unfused.lse(), &in_f64(fused.lse())) < 1e-10);
}

#[test]
fn stores_without_places_for_scores_are_refused() {
    let blocks = [Block::new(SegmentFormat::F16, [1, 2], 0.0, &mut Random::new(1))];
    let (stores, queries) = ([&blocks[0].store], vec![0.5; QUERIES * 4 * 64]);
    let refused = unfused_attention(&plan(&blocks, None), &stores, Elements::F32(&queries));
    assert!(matches!(refused, Err(Error::Plan { .. })), "{refused:?}");
    let calibrated = plan(&blocks, Some(Calibration::IDENTITY));
    assert!(matches!(unfused_attention(&calibrated, &[], Elements::F32(&queries)), Err(Error::Plan { .. })));
    let short = unfused_attention(&calibrated, &stores, Elements::F32(&queries[1..]));
    assert!(matches!(short, Err(Error::Elements { .. })), "{short:?}");
}
