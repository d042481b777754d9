//! A decode step: planned from lengths, bound to memory.

use std::f32::consts::LOG2_E;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::{CudaStream, LaunchConfig};

use super::launch::{AttendCall, BoundStep, Launch};
use super::split::{self, Wave};
use super::variant::{AttendVariant, ScorePass};
use crate::cuda::Cuda;
use crate::cuda::device::driver::{DeviceFacts, driver_error};
use crate::cuda::device::memory::Memory;
use crate::cuda::device::page_format::PageFormat;
use crate::cuda::device::store::Store;
use crate::cuda::device::tensor::Tensor;
use crate::format::{AttentionShape, Calibration, KeyOrValue, SegmentFormat, TILE_TOKENS};
use crate::plan::{DecodePlan, Page, SegmentPlan};
use crate::{Error, Result};

/// `Item` of `cuda/common/attend_call.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Item {
    first_page: u32,
    tokens: u32,
    range_slot: u32,
    sequence: u32,
    state: u32,
    first_state: u32,
    states: u32,
    span: u32,
}

/// One segment of a step.
#[derive(Clone, Debug)]
struct SegmentStep {
    store: usize,
    format: SegmentFormat,
    variant: AttendVariant,
    pages: Vec<Page>,
    items: Vec<Item>,
    wave: Wave,
    calibration: Option<Calibration>,
    spans: usize,
    /// Items in a row whose blocks form a cluster and share a row of states; 1 where there are none.
    cluster: usize,
}

/// A step as the CUDA kernels run it: made from lengths alone, without touching the device.
///
/// The items of the [`DecodePlan`] are not used: they are cut anew, so that their blocks fill the device once.
#[derive(Clone, Debug)]
pub struct StepPlan {
    shape: AttentionShape,
    sequences: usize,
    segments: Vec<SegmentStep>,
    states: usize,
}

impl StepPlan {
    /// Plans a step for a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a format that has no CUDA kernel, [`Error::Limit`] for one that does not fit the device.
    pub fn new(backend: &Cuda, plan: &DecodePlan) -> Result<Self> {
        Self::for_device(backend.kernels().facts(), plan)
    }

    fn for_device(facts: &DeviceFacts, plan: &DecodePlan) -> Result<Self> {
        let shape = plan.shape;
        let mut segments =
            plan.segments.iter().map(|segment| SegmentStep::new(facts, &shape, segment)).collect::<Result<Vec<_>>>()?;
        if let [segment] = segments.as_mut_slice() {
            segment.cluster = segment.common_cluster();
        }
        segments.iter_mut().for_each(SegmentStep::order_items);
        let states = assign_states(plan.sequences(), &mut segments);
        Ok(Self { shape, sequences: plan.sequences(), segments, states })
    }

    /// Kernel launches of the step, by name.
    pub fn launch_labels(&self) -> Vec<String> {
        let labels = |segment: &SegmentStep| {
            let extremes = segment.calibration.map(|_| format!("score extremes {}", segment.format));
            extremes.into_iter().chain([format!("attend {}", segment.format)]).collect::<Vec<_>>()
        };
        self.segments.iter().flat_map(labels).collect()
    }

    /// Allocates scratch, resolves the pages of `stores` (in the order of the plan's stores) and uploads the tables.
    ///
    /// # Errors
    /// [`Error::Plan`] or [`Error::Elements`] when stores, queries or output are not those of the plan;
    /// [`Error::OutOfMemory`]; errors of compiling kernels on first use.
    pub fn bind(&self, backend: &Cuda, stores: &[&Store], queries: &Tensor, output: &Tensor) -> Result<BoundStep> {
        let heads = self.shape.query_heads();
        let expected = self.sequences * heads * self.shape.head_dim();
        for (what, tensor) in [("queries", queries), ("output", output)] {
            if tensor.elements() != expected {
                let channels = self.shape.head_dim();
                let shape = format!("{} sequences × {heads} query heads × {channels} channels", self.sequences);
                return Err(Error::Elements { what, given: tensor.elements(), expected, shape });
            }
        }
        let stream = backend.stream();
        queries.memory().check_stream("queries", stream)?;
        output.memory().check_stream("output", stream)?;
        let stored_channels = PageFormat::f16(self.shape.head_dim()).head_dim;
        let states = Memory::zeroed(stream, "attention states", self.states * heads * stored_channels * 4)?;
        let lse = Memory::zeroed(stream, "attention states", self.states * heads * 4)?;
        // As many counters as the finest chunks need.
        let arrivals = Memory::zeroed(stream, "arrivals", self.sequences * heads * 4)?;
        let mut step = BoundStep {
            stream: stream.clone(),
            launches: Vec::new(),
            memory: vec![states.clone(), lse.clone(), arrivals.clone()],
        };
        step.memory.extend([queries.memory().clone(), output.memory().clone()]);
        for segment in &self.segments {
            let store = stores.get(segment.store).filter(|store| *store.shape() == self.shape);
            let store = store.filter(|store| *store.format() == segment.format).ok_or_else(|| Error::Plan {
                what: "attend",
                reason: format!("store {} is missing, of another shape or not in {}", segment.store, segment.format),
            })?;
            store.check_stream("attend", stream)?;
            let tables = segment.tables(stream, store)?;
            let chunks = self.shape.group().div_ceil(segment.variant.chunk_heads());
            let extremes = segment.extremes(stream, heads)?;
            let base_2 = |tau: fn(&Calibration) -> f32| segment.calibration.as_ref().map_or(0.0, tau) * LOG2_E;
            let call = AttendCall {
                pages: tables.address(),
                items: tables.address() + (segment.pages.len() * size_of::<u64>()) as u64,
                queries: queries.address(),
                output: output.address(),
                key_ranges: store.slot_address(KeyOrValue::Key, 0),
                value_ranges: store.slot_address(KeyOrValue::Value, 0),
                states: states.address(),
                state_lse: lse.address(),
                arrivals: arrivals.address(),
                extremes: extremes.as_ref().map_or(0, |extremes| extremes.address()),
                kv_heads: self.shape.kv_heads() as u32,
                group: self.shape.group() as u32,
                chunks: chunks as u32,
                score_scale: LOG2_E / (self.shape.head_dim() as f32).sqrt(),
                query_type: queries.type_code(),
                output_type: output.type_code(),
                cluster: segment.cluster as u32,
                tau1: base_2(Calibration::tau1),
                tau2: base_2(Calibration::tau2),
                unused: 0,
            };
            let blocks = segment.items.len() * self.shape.kv_heads() * chunks;
            match extremes {
                None => step.launches.push(segment.launch(backend, ScorePass::Plain, call, blocks)?),
                Some(extremes) => {
                    let alone = AttendCall { cluster: 1, ..call };
                    let first = segment.launch(backend, ScorePass::Extremes, alone, blocks)?;
                    step.launches.push(Launch { clears: Some(extremes.clone()), overlaps: false, ..first });
                    step.launches.push(segment.launch(backend, ScorePass::Mapped, call, blocks)?);
                    step.memory.push(extremes);
                }
            }
            step.memory.push(tables);
            step.memory.extend(store.memory());
        }
        Ok(step)
    }
}

impl SegmentStep {
    fn new(facts: &DeviceFacts, shape: &AttentionShape, segment: &SegmentPlan) -> Result<Self> {
        let pages = PageFormat::new(shape, &segment.format)?;
        let tiles: Vec<usize> = segment.spans.iter().map(|span| (span.tokens as usize).div_ceil(TILE_TOKENS)).collect();
        let mut best: Option<(AttendVariant, Wave, usize, (f64, bool))> = None;
        let longest = tiles.iter().copied().max().unwrap_or(0);
        for variant in AttendVariant::candidates(pages, shape.group(), longest, facts)? {
            let wave = Wave {
                multiprocessors: facts.multiprocessors,
                blocks_each: variant.blocks,
                blocks_per_item: shape.kv_heads() * shape.group().div_ceil(variant.chunk_heads()),
                tile_bytes: pages.head_bytes(),
                clusters: facts.capability >= (9, 0),
            };
            let (most, time) = wave.tiles_per_item(&tiles);
            // Of variants that take the same time by what the wave knows of them, the first that keeps its warps busy.
            let cost = (time, variant.wastes_turns(most));
            if best.as_ref().is_none_or(|best| cost < best.3) {
                best = Some((variant, wave, most, cost));
            }
        }
        let Some((variant, wave, most, _)) = best else {
            return Err(Error::Plan { what: "attend", reason: format!("no variant of {}", segment.format) });
        };
        let mut items = Vec::new();
        for (index, (span, &tiles)) in segment.spans.iter().zip(&tiles).enumerate() {
            for (start, length) in split::cut(tiles, most) {
                let end = ((start + length) * TILE_TOKENS).min(span.tokens as usize);
                items.push(Item {
                    first_page: span.page_offset + start as u32,
                    tokens: (end - start * TILE_TOKENS) as u32,
                    range_slot: span.range_slot,
                    sequence: span.sequence,
                    state: 0, // these are known once all segments are cut
                    first_state: 0,
                    states: 0,
                    span: index as u32,
                });
            }
        }
        Ok(Self {
            store: segment.store,
            format: segment.format,
            variant,
            pages: pages_of(segment),
            items,
            wave,
            calibration: segment.calibration,
            spans: segment.spans.len(),
            cluster: 1,
        })
    }

    /// The cluster that the items of all sequences can form; they are still in the order of the spans.
    fn common_cluster(&self) -> usize {
        let runs: Vec<usize> = self.items.chunk_by(|a, b| a.sequence == b.sequence).map(<[Item]>::len).collect();
        let mut sequences: Vec<u32> = self.items.iter().map(|item| item.sequence).collect();
        sequences.sort_unstable();
        sequences.dedup();
        // More runs than sequences: the spans of a sequence are not beside each other.
        if sequences.len() < runs.len() { 1 } else { self.wave.cluster(&runs) }
    }

    /// Long items first, so that none begins when the others end; but those of a cluster stay together.
    fn order_items(&mut self) {
        if self.cluster == 1 {
            self.items.sort_by_key(|item| std::cmp::Reverse(item.tokens));
        }
    }

    /// Page addresses, then items.
    fn tables(&self, stream: &Arc<CudaStream>, store: &Store) -> Result<Arc<Memory>> {
        for item in &self.items {
            store.check_slot("attend", item.range_slot as usize)?;
        }
        let addresses =
            self.pages.iter().map(|&page| store.page_address("attend", page)).collect::<Result<Vec<u64>>>()?;
        let mut bytes = bytemuck::cast_slice::<u64, u8>(&addresses).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(&self.items));
        Memory::upload(stream, "tables of a decode step", &bytes)
    }

    /// Room for the extremes of the scores of every span and query head, where they are needed.
    fn extremes(&self, stream: &Arc<CudaStream>, query_heads: usize) -> Result<Option<Arc<Memory>>> {
        let bytes = self.spans * query_heads * size_of::<[u32; 2]>();
        self.calibration.map(|_| Memory::zeroed(stream, "extremes of scores", bytes)).transpose()
    }

    fn launch(&self, backend: &Cuda, pass: ScorePass, call: AttendCall, blocks: usize) -> Result<Launch> {
        let function = backend.kernels().function(&self.variant.program(pass), "attend")?;
        let shared = self.variant.shared_bytes();
        function
            .set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared as i32)
            .map_err(|error| driver_error("shared memory of attend", shared as u64, error))?;
        let config = LaunchConfig {
            grid_dim: (blocks as u32, 1, 1),
            block_dim: (self.variant.warps as u32 * 32, 1, 1),
            shared_mem_bytes: shared as u32,
        };
        Ok(Launch { function, config, call, overlaps: self.variant.bulk_copies, clears: None })
    }
}

/// The pages of a segment's table, shards restored: the plan has them only with its dispatches.
fn pages_of(segment: &SegmentPlan) -> Vec<Page> {
    let mut pages: Vec<Page> = segment.page_table.iter().map(|&index| Page { shard: 0, index }).collect();
    for dispatch in &segment.dispatches {
        for item in &segment.items[dispatch.first_item..][..dispatch.items] {
            let tiles = (item.tokens as usize).div_ceil(TILE_TOKENS);
            pages[item.page_offset as usize..][..tiles].iter_mut().for_each(|page| page.shard = dispatch.shard);
        }
    }
    pages
}

/// Gives every item, or every cluster of items, its state row so that the rows of a sequence are contiguous, and returns
/// how many there are.
fn assign_states(sequences: usize, segments: &mut [SegmentStep]) -> usize {
    let mut counts = vec![0u32; sequences];
    for group in segments.iter().flat_map(|segment| segment.items.chunks(segment.cluster)) {
        counts[group[0].sequence as usize] += 1;
    }
    let mut first = Vec::with_capacity(sequences);
    let mut states = 0;
    for &count in &counts {
        first.push(states);
        states += count;
    }
    let mut next = first.clone();
    for group in segments.iter_mut().flat_map(|segment| segment.items.chunks_mut(segment.cluster)) {
        let sequence = group[0].sequence as usize;
        for item in group {
            (item.state, item.first_state, item.states) = (next[sequence], first[sequence], counts[sequence]);
        }
        next[sequence] += 1;
    }
    states as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bits;
    use crate::conformance::decode_formats;
    use crate::plan::{SpanView, Split, StoreView};

    const H200: DeviceFacts = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };

    /// Items of a cluster are of one sequence and share its row; one sequence more, of another length, and there are none.
    #[test]
    fn clusters_are_of_one_sequence() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let pages: Vec<Page> = (0..2000).map(|index| Page { shard: 0, index }).collect();
        let step = |lengths: &[usize], facts: &DeviceFacts| {
            let span = |(sequence, &tokens): (usize, &usize)| SpanView {
                sequence,
                tokens,
                pages: &pages[..tokens.div_ceil(TILE_TOKENS)],
                range_slot: sequence,
            };
            let spans = lengths.iter().enumerate().map(span).collect();
            let store = StoreView { format: SegmentFormat::F16, calibration: None, spans };
            let plan = DecodePlan::new(shape, lengths.len(), &[store], Split::default()).unwrap();
            StepPlan::for_device(facts, &plan).unwrap()
        };
        for (lengths, cluster) in [(vec![32_768; 8], 2), (vec![4096], 8), (vec![131_072], 2), (vec![32_768, 100], 1)] {
            let step = step(&lengths, &H200);
            assert_eq!(step.segments[0].cluster, cluster, "{lengths:?}");
            for group in step.segments[0].items.chunks(cluster) {
                let of = |item: &Item| (item.sequence, item.state, item.states);
                assert!(group.iter().all(|item| of(item) == of(&group[0])));
            }
        }
        let a100 = DeviceFacts { capability: (8, 0), ..H200 };
        assert_eq!(step(&[32_768; 8], &a100).segments[0].cluster, 1);
    }

    /// Few steps go to as many warps as share them evenly.
    #[test]
    fn short_items_have_no_more_warps_than_they_occupy() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let pages: Vec<Page> = (0..256).map(|index| Page { shard: 0, index }).collect();
        let format = SegmentFormat::per_channel(Bits::Eight);
        for (sequences, tiles, warps) in [(1, 32, 8), (8, 256, 12)] {
            let spans = (0..sequences).map(|sequence| SpanView {
                sequence,
                tokens: tiles * TILE_TOKENS,
                pages: &pages[..tiles],
                range_slot: sequence,
            });
            let store = StoreView { format, calibration: None, spans: spans.collect() };
            let plan = DecodePlan::new(shape, sequences, &[store], Split::default()).unwrap();
            let step = StepPlan::for_device(&H200, &plan).unwrap();
            assert_eq!(step.segments[0].variant.warps, warps, "{sequences} sequences of {tiles} tiles");
        }
    }

    /// Items cover every token of every span once, in pages of the right shard, and each has a state row of its own.
    #[test]
    fn items_cover_all_tokens_once() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let pages: Vec<Page> = (0..400).map(|i| Page { shard: i / 37, index: i % 37 }).collect();
        let span = |sequence, tokens: usize, first: usize| SpanView {
            sequence,
            tokens,
            pages: &pages[first..first + tokens.div_ceil(TILE_TOKENS)],
            range_slot: sequence,
        };
        let store = |format, spans| StoreView { format, calibration: None, spans };
        let stores = [
            store(SegmentFormat::per_channel(Bits::Two), vec![span(0, 40_000, 0), span(1, 129, 320)]),
            store(SegmentFormat::F16, vec![span(1, 1, 330), span(0, 700, 331)]),
        ];
        let plan = DecodePlan::new(shape, 2, &stores, Split::default()).unwrap();
        let step = StepPlan::for_device(&H200, &plan).unwrap();
        let mut rows = vec![0; step.states];
        for (segment, store) in step.segments.iter().zip(&stores) {
            let tokens: u32 = segment.items.iter().map(|item| item.tokens).sum();
            assert_eq!(tokens as usize, store.spans.iter().map(|span| span.tokens).sum::<usize>());
            let expected: Vec<Page> = store.spans.iter().flat_map(|span| span.pages).copied().collect();
            assert_eq!(segment.pages, expected);
            for item in &segment.items {
                rows[item.state as usize] += 1;
                assert!((item.first_state..item.first_state + item.states).contains(&item.state));
            }
        }
        assert!(rows.iter().all(|&row| row == 1));
    }

    /// Many short spans go to small blocks, several to a multiprocessor; long ones do not.
    #[test]
    fn short_spans_take_small_blocks() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let variant = |format, spans: usize, tokens: usize| {
            let pages: Vec<Page> =
                (0..tokens.div_ceil(TILE_TOKENS) as u32).map(|index| Page { shard: 0, index }).collect();
            let span = |range_slot| SpanView { sequence: 0, tokens, pages: &pages, range_slot };
            let store = StoreView { format, calibration: None, spans: (0..spans).map(span).collect() };
            let plan = DecodePlan::new(shape, 1, &[store], Split::default()).unwrap();
            StepPlan::for_device(&H200, &plan).unwrap().segments[0].variant
        };
        for format in decode_formats() {
            let (short, long) = (variant(format, 456, 576), variant(format, 1, 131_072));
            assert!(short.blocks > long.blocks && short.warps < long.warps, "{format}: {short:?}, {long:?}");
        }
    }

    /// A calibrated segment is launched twice, and its items name their spans.
    #[test]
    fn calibrated_segments_take_two_launches() {
        let shape = AttentionShape::new(4, 2, 128).unwrap();
        let pages: Vec<Page> = (0..3).map(|index| Page { shard: 0, index }).collect();
        let span = |sequence, range: std::ops::Range<usize>, tokens| SpanView {
            sequence,
            tokens,
            pages: &pages[range],
            range_slot: 0,
        };
        let calibration = crate::Calibration::new(0.0, 1.0).ok();
        let spans = vec![span(0, 0..2, 200), span(0, 2..3, 100)];
        let store = StoreView { format: SegmentFormat::F16, calibration, spans };
        let plan = DecodePlan::new(shape, 1, &[store], Split::default()).unwrap();
        let step = StepPlan::for_device(&H200, &plan).unwrap();
        assert_eq!(step.launch_labels(), ["score extremes f16", "attend f16"]);
        for item in &step.segments[0].items {
            assert_eq!(item.span, u32::from(item.first_page == 2));
        }
    }
}
