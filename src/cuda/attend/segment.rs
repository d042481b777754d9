//! The part of a step that concerns one store: its items, their kernel, and its tables.

use std::collections::BTreeSet;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::kernel::SegmentKernel;
use super::launch::{AttendCall, Launch};
use super::logits::Logits;
use super::page_table::PageTable;
use super::parts::{ItemQueries, SegmentParts};
use super::run_variant::RunVariant;
use super::scratch::{SegmentTables, Sizing};
use super::split::{self, BLOCK_TIME, RUN_BLOCK_TIME, WORK_TIME, Wave};
use super::unpack::TileReads;
use super::variant::{AttendVariant, ScorePass};
use crate::cuda::Cuda;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::page_format::PageFormat;
use crate::cuda::device::store::Store;
use crate::format::{AttentionShape, Calibration, SegmentFormat, TILE_TOKENS};
use crate::plan::{AttendPlan, Block, Page, Scoring, StateCounts, StorePart};
use crate::{Error, Result};

/// `Item` of `cuda/common/attend_call.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Item {
    pub(super) first_page: u32,
    pub(super) tokens: u32,
    pub(super) range_slot: u32,
    pub(super) row: u32,
    pub(super) state: u32,
    pub(super) first_state: u32,
    pub(super) states: u32,
    pub(super) extremes: u32,
    pub(super) queries: u32,
    pub(super) stride: u32,
    pub(super) seen: i32,
    pub(super) from: i32,
    pub(super) tree: [u32; 4],
}

/// One launch of a step: items of one segment that have one query each, or query blocks.
#[derive(Clone, Debug)]
pub(in crate::cuda) struct PlannedLaunch {
    pub(super) store: usize,
    pub(super) format: SegmentFormat,
    pub(super) kernel: SegmentKernel,
    pub(super) pages: Vec<Page>,
    pub(super) items: Vec<Item>,
    /// The query block of every item.
    pub(super) blocks: Vec<usize>,
    /// For `attend_run`: number of query blocks, whose first items come first.
    pub(super) merged_items: usize,
    pub(super) wave: Wave,
    pub(super) calibration: Option<Calibration>,
    /// Number of extremes of scores to keep: one per query and span.
    pub(super) extremes: usize,
    /// Number of consecutive items whose blocks form a cluster and share a row of states; 1 without clusters.
    pub(super) cluster: usize,
}

impl PlannedLaunch {
    pub(super) fn new(
        facts: &DeviceFacts,
        shape: &AttentionShape,
        segment: &StorePart,
        parts: SegmentParts,
        scoring: &Scoring,
    ) -> Result<Self> {
        let logits = Logits::new(scoring, parts.mask);
        let pages = PageFormat::new(shape, segment.format())?;
        let tiles: Vec<usize> = parts.parts.iter().map(|(_, part)| part.tokens.len().div_ceil(TILE_TOKENS)).collect();
        let longest = tiles.iter().copied().max().unwrap_or(0);
        let table = match parts.queries {
            ItemQueries::Few(_) | ItemQueries::Moving(_) => PageTable::whole(segment),
            ItemQueries::Many(_) => PageTable::of_parts(segment, &parts.parts),
        };
        let (kernel, wave, most) = match parts.queries {
            ItemQueries::Few(queries) => {
                let variants = AttendVariant::candidates(pages, queries * shape.group(), longest, facts)?;
                let variants = variants.into_iter().map(|variant| AttendVariant { queries, logits, ..variant });
                best_attend(facts, shape, variants, &tiles)
            }
            ItemQueries::Moving(queries) => {
                let variant = AttendVariant::moving(pages, shape.group(), queries, facts);
                let variant = variant.map(|variant| AttendVariant { logits, ..variant });
                best_attend(facts, shape, variant.into_iter(), &tiles)
            }
            ItemQueries::Many(queries) => {
                let reads = TileReads { tiles: tiles.iter().sum(), pages: table.pages.len() };
                let run = match segment.calibration() {
                    None => RunVariant::for_reads(pages, queries * shape.group(), reads, facts),
                    Some(_) => RunVariant::pipelined(pages, facts),
                };
                let run = run.map(|run| run.with_logits(logits).with_item_rows(parts.most_rows));
                run.map(|run| of_run(facts, shape, run, (&tiles, reads.pages)))
            }
        }
        .ok_or_else(|| Error::Plan { what: "attend", reason: format!("no variant of {}", segment.format()) })?;
        let (items, blocks, extremes) = cut_items(segment, &parts, &table, (&tiles, most));
        Ok(Self {
            store: segment.store(),
            format: *segment.format(),
            kernel,
            pages: table.pages,
            items,
            blocks,
            merged_items: 0,
            wave,
            calibration: segment.calibration().copied(),
            extremes,
            cluster: 1,
        })
    }

    /// Bytes of keys and values of one KV head that its items read.
    pub(super) fn bytes(&self) -> usize {
        let tiles: usize = self.items.iter().map(|item| (item.tokens as usize).div_ceil(TILE_TOKENS)).sum();
        tiles * self.wave.tile_bytes
    }

    /// Blocks that share the query heads of a KV head.
    pub(super) fn chunks(&self, shape: &AttentionShape) -> usize {
        self.kernel.chunks(shape.group())
    }

    /// The cluster size that the items of all queries allow. Items are still in the order of the spans.
    pub(super) fn common_cluster(&self) -> usize {
        if !self.kernel.forms_clusters() {
            return 1;
        }
        let runs: Vec<usize> = self.items.chunk_by(|a, b| a.row == b.row).map(<[Item]>::len).collect();
        let mut has_row = vec![false; self.items.iter().map(|item| item.row as usize + 1).max().unwrap_or(0)];
        self.items.iter().for_each(|item| has_row[item.row as usize] = true);
        // There are more runs than rows, so the spans of a query are not contiguous.
        let rows = has_row.iter().filter(|&&has| has).count();
        if rows < runs.len() { 1 } else { self.wave.cluster(&runs) }
    }

    /// Long items come first, so that none begins when the others end. Those of a cluster stay together.
    pub(super) fn order_items(&mut self) {
        if self.cluster == 1 {
            let order = longest_first(&self.items);
            self.items = order.iter().map(|&place| self.items[place as usize]).collect();
            self.blocks = order.iter().map(|&place| self.blocks[place as usize]).collect();
        }
        if matches!(self.kernel, SegmentKernel::Run(_)) {
            self.order_first_items();
        }
    }

    /// Moves the first item of every query block before all others: `merge_run` is launched for those.
    fn order_first_items(&mut self) {
        let mut seen = BTreeSet::new();
        let both = self.items.drain(..).zip(self.blocks.drain(..));
        let (first, others): (Vec<_>, Vec<_>) = both.partition(|&(_, block)| seen.insert(block));
        self.merged_items = first.len();
        (self.items, self.blocks) = first.into_iter().chain(others).unzip();
    }

    /// Its tables for one layer: page addresses, then items, and memory for extremes if needed.
    pub(super) fn upload(&self, stream: &Arc<CudaStream>, store: &Store, query_heads: usize) -> Result<SegmentTables> {
        for item in &self.items {
            store.check_slot("attend", item.range_slot as usize)?;
        }
        let addresses =
            self.pages.iter().map(|&page| store.page_address("attend", page)).collect::<Result<Vec<u64>>>()?;
        let mut bytes = bytemuck::cast_slice::<u64, u8>(&addresses).to_vec();
        bytes.extend_from_slice(self.item_bytes());
        let memory = Memory::upload(stream, "tables of a decode step", &bytes)?;
        let extremes = self.extremes_memory(stream, Sizing::Exact, query_heads)?;
        Ok(SegmentTables {
            pages: memory.address(),
            page_count: addresses.len(),
            items: memory.address() + size_of_val(addresses.as_slice()) as u64,
            item_count: self.items.len(),
            memory: [memory].into_iter().chain(extremes.clone()).collect(),
            extremes,
        })
    }

    /// Memory for the extremes of the scores of every query over every span, if needed.
    pub(in crate::cuda) fn extremes_memory(
        &self,
        stream: &Arc<CudaStream>,
        room: Sizing,
        query_heads: usize,
    ) -> Result<Option<Arc<Memory>>> {
        let bytes = room.of(self.extremes) * query_heads * size_of::<[u32; 2]>();
        self.calibration.map(|_| Memory::zeroed(stream, "extremes of scores", bytes)).transpose()
    }

    /// Its items in the form that kernels read.
    pub(in crate::cuda) fn item_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.items)
    }

    /// Items of the step, at least one.
    pub(in crate::cuda) const fn item_count(&self) -> usize {
        self.items.len()
    }

    /// Its pages.
    pub(in crate::cuda) fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// Its store.
    pub(in crate::cuda) const fn store(&self) -> usize {
        self.store
    }

    /// Number of items that tables have room for and for which blocks are launched: whole clusters.
    pub(in crate::cuda) fn item_room(&self) -> usize {
        Sizing::Classes.of(self.items.len() / self.cluster) * self.cluster
    }

    /// Number of pages that tables have room for.
    pub(in crate::cuda) fn page_room(&self) -> usize {
        Sizing::Classes.of(self.pages.len())
    }

    pub(super) fn is_bound_like(&self, other: &Self) -> bool {
        let of = |segment: &Self| {
            let rooms = [segment.item_room(), segment.page_room(), Sizing::Classes.of(segment.extremes)];
            let merged = segment.merges().then_some(segment.merged_items);
            (segment.store, segment.kernel, merged, segment.cluster, segment.calibration, rooms)
        };
        of(self) == of(other) && self.format == other.format
    }

    /// Whether its kernel itself waits for pages that the step writes.
    pub(super) const fn knows_fresh_pages(&self) -> bool {
        matches!(self.kernel, SegmentKernel::Attend(_)) && self.calibration.is_none()
    }

    /// Whether a separate launch merges its states.
    pub(super) fn merges(&self) -> bool {
        matches!(self.kernel, SegmentKernel::Run(_)) && self.items.iter().any(|item| item.states > 1)
    }

    /// The launch of `items` items' blocks.
    pub(super) fn launch(&self, backend: &Cuda, pass: ScorePass, call: AttendCall, items: usize) -> Result<Launch> {
        let each = call.section_heads as usize * call.chunks as usize * call.row_parts as usize;
        let blocks = self.kernel.blocks(items * each, backend.kernels().facts().multiprocessors);
        Ok(Launch { kernel: self.kernel.launch(backend, pass, blocks, call.cluster)?, call, clears: None })
    }

    /// Bytes of unpacked tiles of a section of the KV heads, for tables of as many pages. 0 where its kernel reads the
    /// pages themselves.
    pub(super) fn halves_bytes(&self, pages: usize, kv_heads: usize) -> usize {
        self.kernel.unpacked().map_or(0, |run| pages * run.section_heads(pages, kv_heads) * run.unpacked_bytes())
    }

    /// Its launches, in order: where tiles are unpacked, for one section of the KV heads after the other.
    pub(super) fn launches(&self, backend: &Cuda, call: AttendCall, tables: &SegmentTables) -> Result<Vec<Launch>> {
        let mut launches = match self.kernel.unpacked() {
            None => self.passes(backend, call, tables)?,
            Some(run) => {
                let heads = call.kv_heads as usize;
                let section = run.section_heads(tables.page_count, heads);
                let mut launches = Vec::new();
                for first in (0..heads).step_by(section) {
                    let of_section = section.min(heads - first);
                    let call = AttendCall { first_head: first as u32, section_heads: of_section as u32, ..call };
                    let unpack = run.unpack_launch(backend, tables.page_count * of_section)?;
                    launches.push(Launch { kernel: unpack, call, clears: None });
                    launches.extend(self.passes(backend, call, tables)?);
                }
                launches
            }
        };
        if let (Some(extremes), Some(first)) = (&tables.extremes, launches.first_mut()) {
            first.kernel.overlaps = false;
            first.clears = Some(extremes.clone());
        }
        Ok(launches)
    }

    /// The launches that attend: two if scores are calibrated.
    fn passes(&self, backend: &Cuda, call: AttendCall, tables: &SegmentTables) -> Result<Vec<Launch>> {
        let of_pass = |&pass: &ScorePass| {
            let cluster = if pass == ScorePass::Extremes { 1 } else { call.cluster };
            self.launch(backend, pass, AttendCall { cluster, ..call }, tables.item_count)
        };
        self.score_passes().iter().map(of_pass).collect()
    }

    const fn score_passes(&self) -> &'static [ScorePass] {
        ScorePass::of(self.calibration.is_some())
    }

    /// The launch that merges the states that `call` wrote, unless `attend` does so.
    pub(super) fn merge_launch(&self, backend: &Cuda, call: AttendCall) -> Result<Option<Launch>> {
        if !self.merges() {
            return Ok(None);
        }
        let queries = self.kernel.most_queries(call.group as usize);
        let pass = self.score_passes().last().copied().unwrap_or(ScorePass::Plain);
        let kernel = self.kernel.merge(backend, pass, self.merged_items, call.kv_heads as usize, queries)?;
        Ok(kernel.map(|kernel| Launch { kernel, call, clears: None }))
    }
}

/// The places of the items, those of the most tokens first, and of as many tokens in their order. Prompts have many
/// items of few lengths, so they are counted where that takes less than sorting.
fn longest_first(items: &[Item]) -> Vec<u32> {
    let longest = items.iter().map(|item| item.tokens as usize).max().unwrap_or(0);
    if longest > 4 * items.len() {
        let mut places: Vec<u32> = (0..items.len() as u32).collect();
        places.sort_by_key(|&place| std::cmp::Reverse(items[place as usize].tokens));
        return places;
    }
    let mut begins = vec![0; longest + 1];
    items.iter().for_each(|item| begins[item.tokens as usize] += 1);
    // Where the items of every length begin: behind those of greater lengths.
    let mut longer = 0;
    for place in begins.iter_mut().rev() {
        longer += std::mem::replace(place, longer);
    }
    let mut places = vec![0; items.len()];
    for (place, item) in (0u32..).zip(items) {
        let next: &mut usize = &mut begins[item.tokens as usize];
        places[*next] = place;
        *next += 1;
    }
    places
}

/// The items of a segment, the query block of each, and the number of extremes to keep. An item has up to `most` tiles.
fn cut_items(
    segment: &StorePart,
    parts: &SegmentParts,
    table: &PageTable,
    (tiles, most): (&[usize], usize),
) -> (Vec<Item>, Vec<usize>, usize) {
    // Extremes of the queries of a span's run are contiguous.
    let mut first_extremes = Vec::with_capacity(segment.spans().len());
    let mut extremes = 0;
    for span in segment.spans() {
        first_extremes.push(extremes);
        extremes += parts.runs[span.run].run.queries;
    }
    let count = tiles.iter().map(|&tiles| split::cut(tiles, most).count()).sum();
    let (mut items, mut blocks) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for ((index, part), &tiles) in parts.parts.iter().zip(tiles) {
        let span = &segment.spans()[*index];
        for (start, length) in split::cut(tiles, most) {
            let first = part.tokens.start + start * TILE_TOKENS;
            let end = (first + length * TILE_TOKENS).min(part.tokens.end);
            let limits = parts.seen(span, part, first);
            items.push(Item {
                first_page: table.place(*index, first / TILE_TOKENS) as u32,
                tokens: (end - first) as u32,
                range_slot: span.range_slot as u32,
                row: (parts.runs[span.run].first_row + part.first) as u32,
                state: 0, // these are known once all segments are cut
                first_state: 0,
                states: 0,
                extremes: (first_extremes[*index] + part.first) as u32,
                queries: part.queries as u32,
                stride: 0,
                seen: limits.seen,
                from: limits.from,
                tree: limits.tree,
            });
            blocks.push(part.block);
        }
    }
    (items, blocks, extremes)
}

/// A kernel, how its blocks fill the device, and the tiles of an item.
type Cut = (SegmentKernel, Wave, usize);

/// The fastest of some variants of `attend` for parts of this many tiles.
fn best_attend(
    facts: &DeviceFacts,
    shape: &AttentionShape,
    variants: impl Iterator<Item = AttendVariant>,
    tiles: &[usize],
) -> Option<Cut> {
    let mut best: Option<(Cut, (f64, usize, bool))> = None;
    for variant in variants {
        let heads = shape.group() * variant.queries;
        let wave = Wave {
            multiprocessors: facts.multiprocessors,
            blocks_each: variant.blocks,
            blocks_per_item: shape.kv_heads() * heads.div_ceil(variant.block_heads()),
            tile_bytes: variant.pages.head_bytes(),
            clusters: facts.is_9_0_or_newer(),
            token_rate: variant.token_rate(),
            block_time: BLOCK_TIME,
            state_bytes: 0,
        };
        let (most, time) = wave.tiles_per_item(tiles);
        // Of variants with the same estimated time, one whose blocks share no multiprocessor, and of these the first that
        // keeps its warps busy.
        let cost = (time, variant.blocks, variant.wastes_turns(most));
        if best.as_ref().is_none_or(|best| cost < best.1) {
            best = Some(((SegmentKernel::Attend(variant), wave, most), cost));
        }
    }
    best.map(|(cut, _)| cut)
}

/// How a variant of `attend_run` takes parts of this many tiles, of a table of as many pages.
fn of_run(facts: &DeviceFacts, shape: &AttentionShape, variant: RunVariant, (tiles, pages): (&[usize], usize)) -> Cut {
    let heads = if variant.unpacks_first() { variant.section_heads(pages, shape.kv_heads()) } else { shape.kv_heads() };
    let wave = Wave {
        multiprocessors: facts.multiprocessors,
        blocks_each: 1,
        blocks_per_item: heads * variant.row_parts(shape.group()),
        tile_bytes: variant.pages().head_bytes(),
        clusters: false,
        token_rate: variant.token_rate(),
        block_time: if variant.takes_works() { WORK_TIME } else { RUN_BLOCK_TIME },
        state_bytes: variant.rows() * variant.pages().head_dim * size_of::<f32>(),
    };
    let (most, _) = wave.tiles_per_run_item(tiles);
    (SegmentKernel::Run(variant), wave, most)
}

/// Parts the items of blocks whose queries have different numbers of items of their own into items of single queries:
/// an item of several queries tells by one number how many states are merged, and each of its queries waits for as many.
/// Seldom: where the queries of a block reach into another tile, and what they see of it is cut.
fn part_uneven(plan: &AttendPlan, blocks: &[Block], segments: &mut [PlannedLaunch]) {
    let mut alone = vec![0u32; plan.rows()];
    for segment in segments.iter() {
        let of_block = segment.items.iter().zip(&segment.blocks);
        let own = of_block.filter(|&(item, &block)| (item.queries as usize) < blocks[block].queries);
        own.for_each(|(item, _)| alone[item.row as usize] += 1);
    }
    let is_uneven = |block: &Block| {
        let first = plan.runs()[block.run].first_row + block.first;
        alone[first..first + block.queries].iter().any(|&own| own != alone[first])
    };
    let uneven: Vec<bool> = blocks.iter().map(is_uneven).collect();
    for segment in segments.iter_mut().filter(|segment| segment.blocks.iter().any(|&block| uneven[block])) {
        let both = segment.items.drain(..).zip(segment.blocks.drain(..));
        let parted = both.flat_map(|(item, block)| {
            let single = move |query| {
                let (row, extremes) = (item.row + query, item.extremes + query);
                (Item { row, extremes, queries: 1, ..item }, block)
            };
            match uneven[block] {
                true => (0..item.queries).map(single).collect(),
                false => vec![(item, block)],
            }
        });
        (segment.items, segment.blocks) = parted.unzip();
    }
}

/// Assigns state rows to every item, or every cluster of items, so that those of a query are contiguous. Returns the
/// number of rows, and the queries without any: they see no token.
pub(super) fn assign_states(
    plan: &AttendPlan,
    blocks: &[Block],
    segments: &mut [PlannedLaunch],
) -> Result<(usize, Vec<usize>)> {
    part_uneven(plan, blocks, segments);
    let mut counts = StateCounts::new(plan, blocks);
    for segment in segments.iter() {
        for (group, of) in segment.items.chunks(segment.cluster).zip(segment.blocks.chunks(segment.cluster)) {
            counts.count(of[0], group[0].row as usize, group[0].queries as usize);
        }
    }
    let mut rows = counts.assign_merged()?;
    for segment in segments.iter_mut() {
        for (group, of) in segment.items.chunks_mut(segment.cluster).zip(segment.blocks.chunks(segment.cluster)) {
            let place = rows.take(of[0], group[0].row as usize, group[0].queries as usize);
            for item in group {
                item.state = place.state;
                item.stride = place.stride;
                (item.first_state, item.states) = (place.rows.first, place.rows.end - place.rows.first);
            }
        }
    }
    Ok((rows.states, (0..rows.rows.len()).filter(|&row| rows.rows[row].end == rows.rows[row].first).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;
    use proptest::prelude::*;

    proptest! {
        /// Counted or sorted, items of as many tokens keep their order.
        #[test]
        fn items_of_the_most_tokens_are_first(
            lengths in (1u32..3000).prop_flat_map(|longest| prop::collection::vec(1..=longest, 0..200)),
        ) {
            let items: Vec<Item> = lengths.iter().map(|&tokens| Item { tokens, ..Item::zeroed() }).collect();
            let mut expected: Vec<u32> = (0..items.len() as u32).collect();
            expected.sort_by_key(|&place| std::cmp::Reverse(lengths[place as usize]));
            prop_assert_eq!(longest_first(&items), expected);
        }
    }
}
