//! The tables of a step of attention for all layers of a model. They are written once, with addresses of every layer's
//! own pages.

use crate::cuda::sources::SOURCES;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use super::attend_step::AttendStep;
use super::scratch::{SegmentTables, Sizing};
use super::segment::PlannedLaunch;
use crate::cuda::Cuda;
use crate::cuda::device::driver::driver_error;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::pinned::Pinned;
use crate::cuda::device::program::Program;
use crate::cuda::device::store::{MOST_SHARDS, Store};
use crate::plan::{Page, WriteTable};
use crate::{Error, Result};

/// Bits of a page's index in a word of the table. The shard's number takes the other bits, except for the mark.
const INDEX_BITS: u32 = 27;

/// Marks a page in which the step stores something.
const FRESH: u32 = 1 << 31;

/// Threads of a block of `page_addresses`.
const THREADS: usize = 256;

/// The kernel that computes addresses.
pub(in crate::cuda) const PAGE_ADDRESSES: &str = "page_addresses";

/// `PagesCall` of `cuda/page_addresses.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PagesCall {
    pages: u64,
    shards: u64,
    addresses: u64,
    page_bytes: u64,
    capacity: u32,
    unused: u32,
}

// SAFETY: A struct of C layout without padding, the same on both sides. Addresses are plain integers.
unsafe impl DeviceRepr for PagesCall {}

/// The tables of steps of one class on the device, shared by all layers.
#[derive(Debug)]
pub(in crate::cuda) struct ModelTables {
    stream: Arc<CudaStream>,
    host: Pinned,
    staged: Vec<u8>,
    /// Words of the pages of a segment that the step writes, in order.
    fresh: Vec<u32>,
    /// Pages and items of every segment, in the form that is uploaded.
    uploaded: Arc<Memory>,
    segments: Vec<SegmentPlaces>,
    function: CudaFunction,
    layers: usize,
}

/// The places of the tables of one segment.
#[derive(Debug)]
struct SegmentPlaces {
    /// Bytes from the start of the uploaded data.
    pages_at: usize,
    items_at: usize,
    items: usize,
    extremes: Option<Arc<Memory>>,
    /// `[layer][page]`
    addresses: Arc<Memory>,
    /// `[layer][shard]`
    shards: Arc<Memory>,
    call: PagesCall,
}

impl ModelTables {
    /// Tables for steps that are bound like `plan`, over the stores of these layers.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Limit`] for stores with more shards or pages than words can name.
    pub fn new(backend: &Cuda, plan: &AttendStep, layers: &[Vec<&Store>], query_heads: usize) -> Result<Self> {
        let stream = backend.stream();
        let mut bytes = 0;
        let mut take = |needed: usize| {
            let at = bytes;
            bytes = (at + needed).next_multiple_of(16);
            at
        };
        let places: Vec<(usize, usize)> = plan
            .segments()
            .iter()
            .map(|of| (take(4 * of.page_room()), take(of.item_room() * item_bytes(of))))
            .collect();
        let uploaded = Memory::zeroed(stream, "tables of a step", bytes)?;
        let segment = |(of, &(pages_at, items_at)): (&PlannedLaunch, &(usize, usize))| {
            let stores: Vec<&Store> = layers.iter().filter_map(|stores| stores.get(of.store()).copied()).collect();
            let shards = stores.iter().map(|store| shard_words(store)).collect::<Result<Vec<_>>>()?;
            let shards = Memory::upload(stream, "shards of layers", bytemuck::cast_slice(shards.as_flattened()))?;
            let pages = of.page_room();
            let addresses = Memory::zeroed(stream, "page addresses", layers.len() * pages * size_of::<u64>())?;
            let call = PagesCall {
                pages: uploaded.address() + pages_at as u64,
                shards: shards.address(),
                addresses: addresses.address(),
                page_bytes: stores.first().map_or(0, |store| store.page_bytes() as u64),
                capacity: pages as u32,
                unused: 0,
            };
            let extremes = of.extremes_memory(stream, Sizing::Classes, query_heads)?;
            Ok(SegmentPlaces { pages_at, items_at, items: of.item_room(), extremes, addresses, shards, call })
        };
        let segments = plan.segments().iter().zip(&places).map(segment).collect::<Result<_>>()?;
        Ok(Self {
            stream: stream.clone(),
            host: Pinned::new(stream, bytes)?,
            staged: vec![0; bytes],
            fresh: Vec::new(),
            uploaded,
            segments,
            function: backend.kernels().function(&Self::program(), PAGE_ADDRESSES)?,
            layers: layers.len(),
        })
    }

    /// The sources of [`PAGE_ADDRESSES`].
    pub fn program() -> Program {
        Program { sources: &SOURCES, files: &["page_addresses.cu"], defines: Vec::new() }
    }

    /// The tables of a layer, by segment.
    pub fn of_layer(&self, layer: usize) -> Vec<SegmentTables> {
        let of = |segment: &SegmentPlaces| SegmentTables {
            pages: segment.addresses.address() + (layer * segment.call.capacity as usize * size_of::<u64>()) as u64,
            page_count: segment.call.capacity as usize,
            items: self.uploaded.address() + segment.items_at as u64,
            item_count: segment.items,
            extremes: segment.extremes.clone(),
            memory: [&self.uploaded, &segment.addresses, &segment.shards]
                .map(Arc::clone)
                .into_iter()
                .chain(segment.extremes.clone())
                .collect(),
        };
        self.segments.iter().map(of).collect()
    }

    /// Queues the tables of a step that is bound like the one they were created for: one upload, and a small kernel for
    /// every segment. Pages that `fresh` writes are marked.
    pub fn write(&mut self, plan: &AttendStep, fresh: Option<&WriteTable>) -> Result<()> {
        for (segment, places) in plan.segments().iter().zip(&self.segments) {
            self.fresh.clear();
            self.fresh.extend(fresh.into_iter().flat_map(|table| table.pages_written(segment.store())).map(page_word));
            self.fresh.sort_unstable();
            let word = |&page: &Page| {
                let word = page_word(page);
                if self.fresh.binary_search(&word).is_ok() { word | FRESH } else { word }
            };
            let words = self.staged[places.pages_at..].chunks_exact_mut(4).take(places.call.capacity as usize);
            // Places without a page name one all the same: `unpack_tiles` reads what every place names.
            let unused = segment.pages().last().map_or(0, |&page| page_word(page));
            let used = segment.pages().iter().map(word).chain(std::iter::repeat(unused));
            words.zip(used).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_ne_bytes()));
            let items = &mut self.staged[places.items_at..][..places.items * item_bytes(segment)];
            let (used, unused) = items.split_at_mut(segment.item_bytes().len());
            used.copy_from_slice(segment.item_bytes());
            unused.fill(0);
        }
        self.host.upload("tables of a step", &self.staged, &self.uploaded)?;
        self.segments.iter().try_for_each(|places| self.find_addresses(&places.call))
    }

    fn find_addresses(&self, call: &PagesCall) -> Result<()> {
        let grid_dim = ((call.capacity as usize).div_ceil(THREADS).max(1) as u32, self.layers as u32, 1);
        let config = LaunchConfig { grid_dim, block_dim: (THREADS as u32, 1, 1), shared_mem_bytes: 0 };
        let mut launch = self.stream.launch_builder(&self.function);
        launch.arg(call);
        // SAFETY: The only argument matches the kernel. Words, shards and addresses have the stated capacity, for as
        // many layers as there are rows of blocks. They live as long as the tables, which are freed in the order of the
        // stream.
        unsafe { launch.launch(config) }.map(|_| ()).map_err(|error| driver_error("page_addresses", 0, error))
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
