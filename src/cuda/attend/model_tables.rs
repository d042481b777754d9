//! The tables of a step of attention for all layers of a model. They are written once, with addresses of every layer's
//! own pages.

use std::sync::Arc;

use super::attend_step::AttendStep;
use super::scratch::{SegmentTables, Sizing};
use super::segment::PlannedLaunch;
use crate::cuda::Cuda;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::store::{MOST_SHARDS, Store};
use crate::cuda::table_upload::{PagePlaces, TableUpload};
use crate::plan::{Page, WriteTable};
use crate::{Error, Result};

/// Bits of a page's index in a word of the table. The shard's number takes the other bits, except for the mark.
const INDEX_BITS: u32 = 27;

/// Marks a page in which the step stores something.
const FRESH: u32 = 1 << 31;

/// The tables of steps of one class on the device, shared by all layers.
#[derive(Debug)]
pub(in crate::cuda) struct ModelTables {
    /// Words of the pages of a segment that the step writes, in order.
    fresh: Vec<u32>,
    /// Items of every segment.
    items: Arc<Memory>,
    segments: Vec<SegmentPlaces>,
}

/// The places of the tables of one segment.
#[derive(Debug)]
struct SegmentPlaces {
    /// Bytes from the start of all items.
    items_at: usize,
    items: usize,
    extremes: Option<Arc<Memory>>,
    pages: PagePlaces,
}

impl ModelTables {
    /// Tables for steps that are bound like `plan`, over the stores of these layers.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Limit`] for stores with more shards or pages than words can name.
    pub fn new(backend: &Cuda, plan: &AttendStep, layers: &[Vec<&Store>], query_heads: usize) -> Result<Self> {
        let stream = backend.stream();
        let mut bytes = 0;
        let mut take = |of: &PlannedLaunch| {
            let at = bytes;
            bytes = (at + of.item_room() * item_bytes(of)).next_multiple_of(16);
            at
        };
        let places: Vec<usize> = plan.segments().iter().map(&mut take).collect();
        let segment = |(of, &items_at): (&PlannedLaunch, &usize)| {
            let stores: Vec<&Store> = layers.iter().filter_map(|stores| stores.get(of.store()).copied()).collect();
            let shards = stores.iter().map(|store| shard_words(store)).collect::<Result<Vec<_>>>()?;
            let shards = Memory::upload(stream, "shards of layers", bytemuck::cast_slice(shards.as_flattened()))?;
            let (pages, layers) = (of.page_room(), stores.len());
            let addresses = Memory::zeroed(stream, "page addresses", layers * pages * size_of::<u64>())?;
            let page_bytes = stores.first().map_or(0, |store| store.page_bytes());
            let extremes = of.extremes_memory(stream, Sizing::Classes, query_heads)?;
            let pages = PagePlaces { addresses, shards, page_bytes, pages, layers };
            Ok(SegmentPlaces { items_at, items: of.item_room(), extremes, pages })
        };
        let segments = plan.segments().iter().zip(&places).map(segment).collect::<Result<_>>()?;
        Ok(Self { fresh: Vec::new(), items: Memory::zeroed(stream, "items of a step", bytes)?, segments })
    }

    /// The tables of a layer, by segment.
    pub fn of_layer(&self, layer: usize) -> Vec<SegmentTables> {
        let of = |SegmentPlaces { items_at, items, extremes, pages }: &SegmentPlaces| SegmentTables {
            pages: pages.addresses.address() + (layer * pages.pages * size_of::<u64>()) as u64,
            page_count: pages.pages,
            items: self.items.address() + *items_at as u64,
            item_count: *items,
            extremes: extremes.clone(),
            memory: [&self.items, &pages.addresses, &pages.shards]
                .map(Arc::clone)
                .into_iter()
                .chain(extremes.clone())
                .collect(),
        };
        self.segments.iter().map(of).collect()
    }

    /// Adds the tables of a step that is bound like the one they were created for to what the step uploads. Pages that
    /// `fresh` writes are marked.
    ///
    /// # Errors
    /// [`Error::Buffer`] when the step is bound otherwise.
    pub fn stage(&mut self, plan: &AttendStep, fresh: Option<&WriteTable>, upload: &mut TableUpload) -> Result<()> {
        for (segment, places) in plan.segments().iter().zip(&self.segments) {
            self.fresh.clear();
            self.fresh.extend(fresh.into_iter().flat_map(|table| table.pages_written(segment.store())).map(page_word));
            self.fresh.sort_unstable();
            let word = |&page: &Page| {
                let word = page_word(page);
                if self.fresh.binary_search(&word).is_ok() { word | FRESH } else { word }
            };
            // Places without a page name one all the same: `unpack_tiles` reads what every place names.
            let unused = segment.pages().last().map_or(0, |&page| page_word(page));
            upload.pages(segment.pages().iter().map(word).chain(std::iter::repeat(unused)), &places.pages)?;
            let room = places.items * item_bytes(segment);
            upload.copy(segment.item_bytes(), room, (&self.items, places.items_at))?;
        }
        Ok(())
    }
}

/// Bytes of an item, given those of all items.
fn item_bytes(segment: &PlannedLaunch) -> usize {
    segment.item_bytes().len() / segment.item_count().max(1)
}

const fn page_word(page: Page) -> u32 {
    page.shard << INDEX_BITS | page.index
}

/// Addresses of a store's shards, if words can name all of its pages.
fn shard_words(store: &Store) -> Result<[u64; MOST_SHARDS]> {
    let addresses = store.shard_addresses(store.shards())?;
    let pages = (0..store.shards() as u32).map(|shard| store.shard_pages(shard)).max().unwrap_or(0);
    let (needed, allowed) = (u64::from(pages), 1 << INDEX_BITS);
    if needed > allowed {
        let hint = "spread what the store holds over more caches";
        return Err(Error::Limit { what: "the pages of a shard".into(), needed, allowed, hint });
    }
    Ok(addresses)
}
