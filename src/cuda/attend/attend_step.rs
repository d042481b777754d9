//! A step of attention: planned from lengths, bound to memory.

use std::f32::consts::LOG2_E;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::launch::{AttendCall, BoundAttendStep, Launch};
use super::parts::{QueryKernels, SegmentParts, query_blocks};
use super::run_variant::WORK_COUNTER_BYTES;
use super::scratch::{AttendScratch, ScratchSizes, SegmentTables, Sizing};
use super::segment::{PlannedLaunch, assign_states};
use crate::cuda::Cuda;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::page_format::PageFormat;
use crate::cuda::device::store::Store;
use crate::cuda::device::tensor::Tensor;
use crate::format::{AttentionShape, Calibration, KeyOrValue};
use crate::plan::{AttendPlan, ElementType, QueryLayout, Scoring};
use crate::{Error, Result};

/// The tensors of a step.
pub type AttendTensors<'a> = crate::backend::AttendTensors<'a, Tensor>;

/// A step in the form that the CUDA kernels run: decided from lengths alone, without using the device.
///
/// The [`AttendPlan`] is cut so that the blocks of its items fill the device once. Neighbouring queries of a run share
/// items. Runs of up to 32 rows (of queries and query heads) do so with a warp for every eight rows, on compute
/// capability 9.0, if a segment is packed, none is calibrated and a query has at most eight heads.
///
/// Longer runs share items of up to 256 rows: 192 at 64 channels on compute capability 9.0, 128 at 256 channels. They
/// begin at 9 rows in f16 and at 33 over packed pages. On compute capability 9.0, packed pages of 64, 128 and 256
/// channels begin at 9 rows where ranges belong to groups or, at 4 bits, to tokens, and at 17 elsewhere. Calibrated
/// scores begin at 33, on 9.0 alone. Otherwise an item has as many queries as eight query heads hold.
///
/// Where items read packed tiles several times, the tiles are unpacked first, some KV heads at a time, into at most
/// 128 MiB of scratch. One head that needs more is unpacked only where no other kernel serves it.
#[derive(Clone, Debug)]
pub struct AttendStep {
    pub(super) shape: AttentionShape,
    rows: usize,
    segments: Vec<PlannedLaunch>,
    states: usize,
    /// Queries that see no token.
    pub(super) unseen: Vec<usize>,
    pub(super) scoring: Scoring,
    query_rows: QueryLayout,
    pub(super) output_rows: QueryLayout,
}

impl AttendStep {
    /// Plans a step for a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a format without a CUDA kernel, [`Error::Limit`] for one that does not fit the
    /// device.
    pub fn new(backend: &Cuda, plan: &AttendPlan) -> Result<Self> {
        Self::for_device(backend.kernels().facts(), plan)
    }

    pub(super) fn for_device(facts: &DeviceFacts, plan: &AttendPlan) -> Result<Self> {
        let shape = *plan.shape();
        let kernels = QueryKernels::of(facts, plan);
        let blocks = query_blocks(plan, kernels);
        let mut segments = Vec::new();
        for segment in plan.segments() {
            for parts in SegmentParts::of(plan, segment, &blocks, kernels) {
                segments.push(PlannedLaunch::new(facts, &shape, segment, parts, plan.scoring())?);
            }
        }
        if let [segment] = segments.as_mut_slice() {
            segment.cluster = segment.common_cluster();
        }
        segments.iter_mut().for_each(PlannedLaunch::order_items);
        let (states, unseen) = assign_states(plan, &blocks, &mut segments)?;
        // Launches of a step run beside each other: small ones find room where the blocks of a large one leave it.
        segments.sort_by_key(|segment| std::cmp::Reverse(segment.bytes()));
        let dense = QueryLayout::dense(&shape);
        let (rows, scoring) = (plan.rows(), plan.scoring().clone());
        Ok(Self { shape, rows, segments, states, unseen, scoring, query_rows: dense, output_rows: dense })
    }

    /// The same step for queries with this layout, instead of contiguous rows.
    #[must_use]
    pub fn with_query_layout(self, rows: QueryLayout) -> Self {
        Self { query_rows: rows, ..self }
    }

    /// The same step for outputs with this layout, instead of contiguous rows.
    #[must_use]
    pub fn with_output_layout(self, rows: QueryLayout) -> Self {
        Self { output_rows: rows, ..self }
    }

    /// Kernel launches of the step, by name.
    pub fn launch_labels(&self) -> Vec<String> {
        let labels = |segment: &PlannedLaunch| {
            let extremes = segment.calibration.map(|_| format!("score extremes {}", segment.format));
            let unpacks = segment.kernel.unpacked().map(|_| format!("unpack_tiles {}", segment.format));
            let attends = format!("{} {}", segment.kernel.name(), segment.format);
            extremes.into_iter().chain(unpacks).chain([attends]).collect::<Vec<_>>()
        };
        let merges = self.segments.iter().filter(|segment| segment.merges());
        let merges = merges.map(|segment| format!("merge_run {}", segment.format));
        self.segments.iter().flat_map(labels).chain(merges).collect()
    }

    /// Allocates scratch, resolves the pages of `stores` (in the order of the plan's stores) and uploads the tables.
    /// With `lse`, f32 `[rows, query_heads]`, the step also writes the natural log-sum-exp of every query and head.
    ///
    /// # Errors
    /// [`Error::Plan`] or [`Error::Elements`] when stores, queries or output do not match the plan;
    /// [`Error::OutOfMemory`]; errors from compiling kernels on first use.
    pub fn bind(&self, backend: &Cuda, stores: &[&Store], tensors: AttendTensors<'_>) -> Result<BoundAttendStep> {
        self.check_tensors(tensors)?;
        let scratch = AttendScratch::new(backend.stream(), &self.sizes(Sizing::Exact))?;
        self.bind_with(backend, stores, tensors, &scratch)
    }

    /// Binds the step with the scratch that the calls of the backend share, and launches it.
    ///
    /// # Errors
    /// As [`AttendStep::bind`] and [`BoundAttendStep::launch`].
    pub(in crate::cuda) fn run(&self, backend: &Cuda, stores: &[&Store], tensors: AttendTensors<'_>) -> Result<()> {
        self.check_tensors(tensors)?;
        let shared = backend.attend_scratch();
        let scratch = shared.of_sizes(backend.stream(), &self.sizes(Sizing::Exact))?;
        let step = self.bind_with(backend, stores, tensors, &scratch)?;
        let _queued_together = shared.lock();
        step.launch()
    }

    fn bind_with(
        &self,
        backend: &Cuda,
        stores: &[&Store],
        tensors: AttendTensors<'_>,
        scratch: &AttendScratch,
    ) -> Result<BoundAttendStep> {
        let stream = backend.stream();
        let tables =
            |segment: &PlannedLaunch| segment.upload(stream, self.store_of(segment, stores)?, self.shape.query_heads());
        let tables = self.segments.iter().map(tables).collect::<Result<Vec<_>>>()?;
        self.bind_to(backend, stores, tensors, scratch, &tables)
    }

    /// Checks queries, output and log-sum-exps.
    fn check_tensors(&self, AttendTensors { queries, output, lse }: AttendTensors<'_>) -> Result<()> {
        let heads = self.shape.query_heads();
        self.query_rows.check("queries", queries.elements(), self.rows, &self.shape)?;
        self.output_rows.check("output", output.elements(), self.rows, &self.shape)?;
        if let Some(lse) = lse.filter(|lse| lse.elements() != self.rows * heads) {
            let shape = format!("{} queries × {heads} query heads", self.rows);
            return Err(Error::Elements { what: "lse", given: lse.elements(), expected: self.rows * heads, shape });
        }
        if let Some(lse) = lse.filter(|lse| lse.element_type() != ElementType::F32) {
            let reason = format!("is {:?}, log-sum-exps are f32", lse.element_type());
            return Err(Error::Buffer { what: "lse", reason });
        }
        Ok(())
    }

    /// Checks that tensors have at least the rows of the plan.
    pub(in crate::cuda) fn check_rows(&self, AttendTensors { queries, output, lse }: AttendTensors<'_>) -> Result<()> {
        self.query_rows.check_room("queries", queries.elements(), self.rows, &self.shape)?;
        self.output_rows.check_room("output", output.elements(), self.rows, &self.shape)?;
        let heads = self.shape.query_heads();
        match lse.map(Tensor::elements).filter(|&given| given < self.rows * heads) {
            None => Ok(()),
            Some(given) => {
                let shape = format!("{} queries × {heads} query heads", self.rows);
                Err(Error::Elements { what: "log-sum-exps", given, expected: self.rows * heads, shape })
            }
        }
    }

    /// Whether bindings for another step serve this one: they have the same kernels, and tables and scratch of the same
    /// size.
    pub(in crate::cuda) fn is_bound_like(&self, other: &Self) -> bool {
        let same = |(a, b): (&PlannedLaunch, &PlannedLaunch)| a.is_bound_like(b);
        self.sizes(Sizing::Classes) == other.sizes(Sizing::Classes)
            && self.scoring == other.scoring
            && self.unseen == other.unseen
            && self.segments.len() == other.segments.len()
            && self.segments.iter().zip(&other.segments).all(same)
    }

    /// Whether it may overlap with the kernels that store its layer. A launch waits for those before it, so with
    /// several launches the second would wait for the first.
    pub(in crate::cuda) fn begins_beside_storing(&self, facts: &DeviceFacts) -> bool {
        let one = matches!(self.segments.as_slice(), [segment] if segment.knows_fresh_pages());
        one && facts.is_9_0_or_newer()
    }

    /// Rows of queries.
    pub(in crate::cuda) const fn rows(&self) -> usize {
        self.rows
    }

    pub(in crate::cuda) const fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// Whether the rows of queries and outputs are contiguous.
    pub(in crate::cuda) fn has_dense_rows(&self) -> bool {
        let dense = QueryLayout::dense(&self.shape);
        self.query_rows == dense && self.output_rows == dense
    }

    /// Sizes of the scratch that the step needs.
    pub(in crate::cuda) fn sizes(&self, room: Sizing) -> ScratchSizes {
        let heads = self.shape.query_heads();
        let states = room.of(self.states) * heads;
        let stored_channels = PageFormat::f16(self.shape.head_dim()).head_dim;
        // As many counters as the finest chunks need, after those of works.
        let arrivals = self.work_counters() + room.of(self.rows) * heads * size_of::<u32>();
        let halves = |of: &PlannedLaunch| of.halves_bytes(room.of(of.pages().len()), self.shape.kv_heads());
        let halves = self.segments.iter().map(halves).max().unwrap_or(0);
        ScratchSizes { states: states * stored_channels * 4, lse: states * 4, arrivals, halves }
    }

    /// Bytes of the counters of works: one for each launch, since launches overlap.
    const fn work_counters(&self) -> usize {
        self.segments.len() * WORK_COUNTER_BYTES
    }

    /// The launches of the step, by segment.
    pub(in crate::cuda) fn segments(&self) -> &[PlannedLaunch] {
        &self.segments
    }

    fn store_of<'s>(&self, segment: &PlannedLaunch, stores: &[&'s Store]) -> Result<&'s Store> {
        let store = stores.get(segment.store).copied().filter(|store| *store.shape() == self.shape);
        store.filter(|store| *store.format() == segment.format).ok_or_else(|| Error::Plan {
            what: "attend",
            reason: format!("store {} is missing, of another shape or not in {}", segment.store, segment.format),
        })
    }

    /// Binds scratch, and the tables of every segment, to the stores and tensors of one layer.
    ///
    /// # Errors
    /// [`Error::Plan`] when something belongs to another stream, or a store is not that of the plan.
    pub(in crate::cuda) fn bind_to(
        &self,
        backend: &Cuda,
        stores: &[&Store],
        AttendTensors { queries, output, lse }: AttendTensors<'_>,
        scratch: &AttendScratch,
        tables: &[SegmentTables],
    ) -> Result<BoundAttendStep> {
        let stream = backend.stream();
        queries.memory().check_stream("queries", stream)?;
        output.memory().check_stream("output", stream)?;
        lse.map_or(Ok(()), |lse| lse.memory().check_stream("lse", stream))?;
        let mut step = BoundAttendStep::new(stream, scratch);
        let sinks = self.upload_sinks(stream)?;
        step.memory.extend(sinks.clone());
        self.bind_unseen(&mut step, output, lse)?;
        step.memory.extend([queries.memory().clone(), output.memory().clone()]);
        step.memory.extend(lse.map(|lse| lse.memory().clone()));
        let mut merges = Vec::new();
        for (place, (segment, tables)) in self.segments.iter().zip(tables).enumerate() {
            let store = self.store_of(segment, stores)?;
            store.check_stream("attend", stream)?;
            let chunks = segment.chunks(&self.shape);
            let counters = if segment.kernel.takes_works() { place * WORK_COUNTER_BYTES } else { self.work_counters() };
            let base_2 = |tau: fn(&Calibration) -> f32| segment.calibration.as_ref().map_or(0.0, tau) * LOG2_E;
            let call = AttendCall {
                pages: tables.pages,
                items: tables.items,
                queries: queries.address_of(self.query_rows.first),
                output: output.address_of(self.output_rows.first),
                lse: lse.map_or(0, Tensor::address),
                key_ranges: store.slot_address(KeyOrValue::Key, 0),
                value_ranges: store.slot_address(KeyOrValue::Value, 0),
                states: scratch.states.address(),
                state_lse: scratch.lse.address(),
                arrivals: scratch.arrivals.address() + counters as u64,
                extremes: tables.extremes.as_ref().map_or(0, |extremes| extremes.address()),
                sinks: sinks.as_ref().map_or(0, |sinks| sinks.address()),
                halves: scratch.halves.address(),
                query_stride: self.query_rows.stride as u64,
                output_stride: self.output_rows.stride as u64,
                kv_heads: self.shape.kv_heads() as u32,
                group: self.shape.group() as u32,
                chunks: chunks as u32,
                score_scale: self.scoring.log2_scale(&self.shape),
                query_type: queries.type_code(),
                output_type: output.type_code(),
                cluster: segment.cluster as u32,
                tau1: base_2(Calibration::tau1),
                tau2: base_2(Calibration::tau2),
                beside: 0,
                early: 0,
                soft_cap: self.scoring.soft_cap().unwrap_or(1.0) * LOG2_E,
                item_room: tables.item_count as u32,
                row_parts: segment.kernel.row_parts(self.shape.group()) as u32,
                first_head: 0,
                section_heads: self.shape.kv_heads() as u32,
            };
            let mut launches = segment.launches(backend, call, tables)?;
            if self.segments.len() == 1 {
                step.storing = segment.storing_launch(backend, call, tables)?;
            }
            if launches.len() == 1 && launches[0].kernel.overlaps && !step.launches.is_empty() {
                launches = launches.into_iter().map(Launch::beside_the_one_before).collect();
            }
            step.launches.extend(launches);
            merges.extend(segment.merge_launch(backend, call)?);
            step.memory.extend(tables.memory.iter().cloned());
            step.memory.extend(store.memory());
        }
        step.launches.extend(merges);
        Ok(step)
    }

    /// The logits of the sinks in units of log2, where the layer has them. A head without one has the lowest f32.
    fn upload_sinks(&self, stream: &Arc<CudaStream>) -> Result<Option<Arc<Memory>>> {
        let Some(sinks) = self.scoring.sinks() else { return Ok(None) };
        let base_2: Vec<f32> = sinks.iter().map(|sink| (sink * LOG2_E).max(f32::MIN)).collect();
        Memory::upload(stream, "sinks", bytemuck::cast_slice(&base_2)).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel::SegmentKernel;
    use super::super::segment::Item;
    use super::super::variant::AttendVariant;
    use super::*;
    use crate::Bits;
    use crate::conformance::decode_formats;
    use crate::format::{SegmentFormat, TILE_TOKENS};
    use crate::plan::{Page, QueryRun, SpanView, StoreView};

    const H200: DeviceFacts = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };

    fn attend_variant(step: &AttendStep) -> AttendVariant {
        match step.segments[0].kernel {
            SegmentKernel::Attend(variant) => variant,
            SegmentKernel::Run(variant) => panic!("{variant:?}"),
        }
    }

    /// Items of a cluster belong to one sequence and share its row. With one more sequence, of another length, there
    /// are no clusters.
    #[test]
    fn clusters_are_of_one_sequence() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let pages: Vec<Page> = (0..2000).map(|index| Page { shard: 0, index }).collect();
        let step = |lengths: &[usize], facts: &DeviceFacts| {
            let span = |(sequence, &tokens): (usize, &usize)| SpanView {
                sequence,
                start: 0,
                tokens,
                gathered: None,
                pages: &pages[..tokens.div_ceil(TILE_TOKENS)],
                range_slot: sequence,
            };
            let spans = lengths.iter().enumerate().map(span).collect();
            let store = StoreView { format: SegmentFormat::F16, calibration: None, spans };
            let plan = AttendPlan::new(shape, &QueryRun::decode_batch(lengths.len()), &[store]).unwrap();
            AttendStep::for_device(facts, &plan).unwrap()
        };
        for (lengths, cluster) in [(vec![32_768; 8], 2), (vec![4096], 8), (vec![131_072], 2), (vec![32_768, 100], 1)] {
            let step = step(&lengths, &H200);
            assert_eq!(step.segments[0].cluster, cluster, "{lengths:?}");
            for group in step.segments[0].items.chunks(cluster) {
                let of = |item: &Item| (item.row, item.state, item.states);
                assert!(group.iter().all(|item| of(item) == of(&group[0])));
            }
        }
        let a100 = DeviceFacts { capability: (8, 0), ..H200 };
        assert_eq!(step(&[32_768; 8], &a100).segments[0].cluster, 1);
    }

    /// Only a step of one launch overlaps, and only where launches may overlap.
    #[test]
    fn one_launch_begins_beside_what_is_stored() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let pages = [Page { shard: 0, index: 0 }];
        let a100 = DeviceFacts { capability: (8, 0), ..H200 };
        let formats = [SegmentFormat::saw_int4(), SegmentFormat::F16];
        for (stores, facts, begins) in [(1, H200, true), (2, H200, false), (1, a100, false)] {
            let store = |(place, &format): (usize, &SegmentFormat)| {
                let span = SpanView {
                    sequence: 0,
                    start: 128 * place,
                    tokens: 128,
                    gathered: None,
                    pages: &pages,
                    range_slot: 0,
                };
                StoreView { format, calibration: None, spans: vec![span] }
            };
            let views: Vec<StoreView<'_>> = formats[..stores].iter().enumerate().map(store).collect();
            let plan = AttendPlan::new(shape, &QueryRun::decode_batch(1), &views).unwrap();
            let step = AttendStep::for_device(&facts, &plan).unwrap();
            assert_eq!(step.begins_beside_storing(&facts), begins, "{stores} stores, {:?}", facts.capability);
        }
    }

    /// Items of few steps get as many warps as share them evenly.
    #[test]
    fn short_items_have_no_more_warps_than_they_occupy() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let pages: Vec<Page> = (0..256).map(|index| Page { shard: 0, index }).collect();
        let format = SegmentFormat::per_channel(Bits::Eight);
        for (sequences, tiles, warps) in [(1, 32, 8), (8, 256, 12)] {
            let spans = (0..sequences).map(|sequence| SpanView {
                sequence,
                start: 0,
                tokens: tiles * TILE_TOKENS,
                gathered: None,
                pages: &pages[..tiles],
                range_slot: sequence,
            });
            let store = StoreView { format, calibration: None, spans: spans.collect() };
            let plan = AttendPlan::new(shape, &QueryRun::decode_batch(sequences), &[store]).unwrap();
            let step = AttendStep::for_device(&H200, &plan).unwrap();
            assert_eq!(attend_variant(&step).warps, warps, "{sequences} sequences of {tiles} tiles");
        }
    }

    /// Items cover every token of every span once, in pages of the right shard, and each has a state row of its own.
    #[test]
    fn items_cover_all_tokens_once() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        let pages: Vec<Page> = (0..400).map(|i| Page { shard: i / 37, index: i % 37 }).collect();
        let span = |sequence, tokens: usize, first: usize| SpanView {
            sequence,
            start: 0,
            tokens,
            gathered: None,
            pages: &pages[first..first + tokens.div_ceil(TILE_TOKENS)],
            range_slot: sequence,
        };
        let store = |format, spans| StoreView { format, calibration: None, spans };
        let stores = [
            store(SegmentFormat::per_channel(Bits::Two), vec![span(0, 40_000, 0), span(1, 129, 320)]),
            store(SegmentFormat::F16, vec![span(1, 1, 330), span(0, 700, 331)]),
        ];
        let plan = AttendPlan::new(shape, &QueryRun::decode_batch(2), &stores).unwrap();
        let step = AttendStep::for_device(&H200, &plan).unwrap();
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
            let span =
                |range_slot| SpanView { sequence: 0, start: 0, tokens, gathered: None, pages: &pages, range_slot };
            let store = StoreView { format, calibration: None, spans: (0..spans).map(span).collect() };
            let plan = AttendPlan::new(shape, &QueryRun::decode_batch(1), &[store]).unwrap();
            attend_variant(&AttendStep::for_device(&H200, &plan).unwrap())
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
            start: 0,
            tokens,
            gathered: None,
            pages: &pages[range],
            range_slot: 0,
        };
        let calibration = crate::Calibration::new(0.0, 1.0).ok();
        let spans = vec![span(0, 0..2, 200), span(0, 2..3, 100)];
        let store = StoreView { format: SegmentFormat::F16, calibration, spans };
        let plan = AttendPlan::new(shape, &QueryRun::decode_batch(1), &[store]).unwrap();
        let step = AttendStep::for_device(&H200, &plan).unwrap();
        assert_eq!(step.launch_labels(), ["score extremes f16", "attend f16"]);
        for item in &step.segments[0].items {
            assert_eq!(item.extremes, u32::from(item.first_page == 2));
        }
    }
}
