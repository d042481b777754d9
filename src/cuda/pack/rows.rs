//! Launches of the kernels that move rows of dense tensors into pages and back.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use super::scratch::PackScratch;
use crate::backend::{NewCentre, SpanRead, SpanWrite};
use crate::cuda::device::driver::driver_error;
use crate::cuda::device::indices::Indices;
use crate::cuda::device::kernels::Kernels;
use crate::cuda::device::memory::Memory;
use crate::cuda::device::page_format::PageFormat;
use crate::cuda::device::program::Program;
use crate::cuda::device::store::Store;
use crate::cuda::device::tensor::{Tensor, type_code};
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat, TILE_TOKENS};
use crate::plan::{ElementType, Page, RowLayout, Rows, TokenIndices};
use crate::{Error, Result};

/// Threads of a block.
const BLOCK: u32 = 256;

/// Tokens of one thread of `ranges_span_extremes`, `RANGE_CHUNK` in its source.
const RANGE_CHUNK: usize = 64;

/// Maximum bytes of the rotated rows that wait to be packed. Rows are rotated piece by piece.
const PIECE_BYTES: usize = 16 << 20;

/// Elements of one thread of `find_non_finite`, `FINITE_CHUNK` in its source.
const FINITE_CHUNK: usize = 8;

const BOTH: [KeyOrValue; 2] = [KeyOrValue::Key, KeyOrValue::Value];

/// `RowsCall` of `cuda/common/rows.cuh`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct RowsCall {
    rows: u64,
    pages: u64,
    ranges: u64,
    token_stride: u64,
    head_stride: u64,
    first_token: u32,
    tokens: u32,
    kv_heads: u32,
    element_type: u32,
    shrink: f32,
    /// Indices per KV head of gathered tokens, and their exclusive upper bound.
    index_stride: u32,
    indices: u64,
    below: u32,
    /// The largest valid element, for kernels that check elements.
    largest: f32,
    /// The centre of the sequence's keys, if they are centred.
    centre: u64,
}

// SAFETY: A struct of C layout without padding, the same on both sides. Addresses are plain integers.
unsafe impl DeviceRepr for RowsCall {}

/// A stream and the kernels that run on it.
#[derive(Clone, Copy)]
pub(crate) struct Launcher<'a> {
    pub(crate) stream: &'a Arc<CudaStream>,
    pub(crate) kernels: &'a Kernels,
}

/// The layout of dense keys or values.
struct Source<'a> {
    tensor: &'a Tensor,
    rows: RowLayout,
    first_token: usize,
    tokens: usize,
}

impl Source<'_> {
    fn call(&self, shape: &AttentionShape) -> RowsCall {
        RowsCall {
            rows: self.tensor.address(),
            token_stride: self.rows.token_stride as u64,
            head_stride: self.rows.head_stride as u64,
            first_token: self.first_token as u32,
            tokens: self.tokens as u32,
            kv_heads: shape.kv_heads() as u32,
            element_type: self.tensor.type_code(),
            ..RowsCall::default()
        }
    }
}

/// Rows of some pages of a span that are being packed into tiles.
struct Piece {
    call: RowsCall,
    /// A call that first rotates or centres rows into the memory that the main call reads, and its address.
    rewritten: Option<(RowsCall, u64)>,
}

/// The name of the kernel for keys or for values.
const fn named(which: KeyOrValue, keys: &'static str, values: &'static str) -> &'static str {
    match which {
        KeyOrValue::Key => keys,
        KeyOrValue::Value => values,
    }
}

impl Launcher<'_> {
    fn run(&self, program: &Program, name: &'static str, call: &RowsCall, threads: u64) -> Result<()> {
        self.run_with(program, name, call, None, threads)
    }

    fn run_with(
        &self,
        program: &Program,
        name: &'static str,
        call: &RowsCall,
        found: Option<&u64>,
        threads: u64,
    ) -> Result<()> {
        let function = self.kernels.function(program, name)?;
        let blocks = u32::try_from(threads.div_ceil(u64::from(BLOCK))).ok().filter(|&blocks| blocks <= i32::MAX as u32);
        let Some(blocks) = blocks.filter(|&blocks| blocks > 0) else {
            let what = format!("threads of kernel {name}");
            let hint = "write fewer tokens at once";
            return Err(Error::Limit { what, needed: threads, allowed: u64::from(BLOCK) * i32::MAX as u64, hint });
        };
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (BLOCK, 1, 1), shared_mem_bytes: 0 };
        let mut launch = self.stream.launch_builder(&function);
        launch.arg(call);
        if let Some(found) = found {
            launch.arg(found);
        }
        // SAFETY: The arguments match the kernel. The caller checked that the memory holds everything that the call
        // names. It lives until the stream has passed this launch, because it is freed in the order of the stream.
        unsafe { launch.launch(config) }.map(|_| ()).map_err(|error| driver_error(name, 0, error))
    }

    /// Page addresses on the device, in memory that the calls of the backend share.
    fn pages(
        &self,
        scratch: &mut PackScratch,
        what: &'static str,
        store: &Store,
        pages: &[Page],
    ) -> Result<Arc<Memory>> {
        let addresses = pages.iter().map(|&page| store.page_address(what, page)).collect::<Result<Vec<u64>>>()?;
        let table = scratch.table(self.stream, size_of_val(addresses.as_slice()))?;
        table.write(self.stream, "page addresses", 0, bytemuck::cast_slice(&addresses))?;
        Ok(table)
    }

    /// Kernel `key_mean`.
    pub(crate) fn key_mean(&self, store: &Store, keys: &Tensor, centre: NewCentre) -> Result<()> {
        let NewCentre { rows, tokens, slot, largest } = centre;
        let shape = store.shape();
        rows.check("keys", keys.elements(), shape)?;
        store.check_centre("key mean", Some(slot))?;
        if tokens.end() > rows.tokens {
            let reason = format!("tokens up to {} of {}", tokens.end(), rows.tokens);
            return Err(Error::Plan { what: "key mean", reason });
        }
        let source = Source { tensor: keys, rows, first_token: tokens.start(), tokens: tokens.len() };
        let call = RowsCall {
            shrink: 1.0 / tokens.len() as f32,
            largest,
            centre: store.centre_address(slot),
            ..source.call(shape)
        };
        let channels = (shape.kv_heads() * shape.head_dim()) as u64;
        self.run(&store.pages().mean_program(), "key_mean", &call, channels)
    }

    /// Kernels `centre_keys` or `hadamard`, `ranges_span`, `ranges_tile`, `code_rows` and `quantize`.
    pub(crate) fn quantize(
        &self,
        scratch: &mut PackScratch,
        store: &Store,
        keys: &Tensor,
        values: &Tensor,
        write: &SpanWrite<'_, Indices>,
    ) -> Result<()> {
        let shape = store.shape();
        write.rows.check("keys", keys.elements(), shape)?;
        write.rows.check("values", values.elements(), shape)?;
        check_span("quantize", write.tokens.len(), write.pages)?;
        write.tokens.check("quantize", &write.rows, shape)?;
        store.check_slot("quantize", write.range_slot)?;
        store.check_centre("quantize", write.centre)?;
        let pages = self.pages(scratch, "quantize", store, write.pages)?;
        for (which, tensor) in BOTH.into_iter().zip([keys, values]) {
            let (first_token, gathered) = match write.tokens {
                Rows::Run(run) => (run.start(), None),
                Rows::Gather(indices) => (0, Some(indices)),
            };
            let source = Source { tensor, rows: write.rows, first_token, tokens: write.tokens.len() };
            let call = RowsCall {
                indices: gathered.map_or(0, Indices::address),
                index_stride: gathered.map_or(0, |indices| indices.shape().count() as u32),
                below: gathered.map_or(0, |indices| indices.shape().below()),
                pages: pages.address(),
                ranges: store.slot_address(which, write.range_slot),
                shrink: shrink(store.format(), which),
                centre: write.centre.filter(|_| which == KeyOrValue::Key).map_or(0, |slot| store.centre_address(slot)),
                ..source.call(shape)
            };
            match store.pages().tensor(which).rotation {
                None if call.centre == 0 => self.pack(store, which, &[Piece { call, rewritten: None }])?,
                _ => self.pack_rewritten(scratch, store, which, call)?,
            }
        }
        Ok(())
    }

    /// Rewrites rows into scratch memory (rotated, centred or both), a few pages of tokens at a time, and packs them
    /// from there. If ranges span all pieces, the pieces are rewritten once for the ranges and once more for the codes.
    fn pack_rewritten(
        &self,
        scratch: &mut PackScratch,
        store: &Store,
        which: KeyOrValue,
        call: RowsCall,
    ) -> Result<()> {
        let (kv_heads, head_dim) = (store.shape().kv_heads(), store.pages().head_dim);
        let page_bytes = TILE_TOKENS * kv_heads * head_dim * size_of::<f32>();
        let piece_pages = (PIECE_BYTES / page_bytes).clamp(1, (call.tokens as usize).div_ceil(TILE_TOKENS));
        let rotated = scratch.rotated(self.stream, piece_pages * page_bytes)?;
        let pieces: Vec<Piece> = (0..call.tokens)
            .step_by(piece_pages * TILE_TOKENS)
            .map(|first| {
                let tokens = (call.tokens - first).min((piece_pages * TILE_TOKENS) as u32);
                let source = RowsCall { first_token: call.first_token + first, tokens, ..call };
                let call = RowsCall {
                    rows: rotated.address(),
                    pages: call.pages + u64::from(first) / TILE_TOKENS as u64 * size_of::<u64>() as u64,
                    token_stride: (kv_heads * head_dim) as u64,
                    head_stride: head_dim as u64,
                    first_token: 0,
                    tokens,
                    element_type: type_code(ElementType::F32),
                    indices: 0,
                    ..call
                };
                Piece { call, rewritten: Some((source, rotated.address())) }
            })
            .collect();
        self.pack(store, which, &pieces)
    }

    /// Ranges, then codes, of the pieces of a span.
    fn pack(&self, store: &Store, which: KeyOrValue, pieces: &[Piece]) -> Result<()> {
        let program = store.pages().rows_program();
        let channels = (store.shape().kv_heads() * store.pages().head_dim) as u64;
        let span_ranges = store.format().tensor(which).has_span_ranges();
        if let Some(first) = pieces.first().filter(|_| span_ranges) {
            self.zero("span ranges", first.call.ranges, store.slot_bytes())?;
            for piece in pieces {
                self.rewrite(&program, which, piece)?;
                let chunks = (piece.call.tokens as usize).div_ceil(RANGE_CHUNK) as u64;
                self.run(&program, "ranges_span_extremes", &piece.call, channels * chunks)?;
            }
            let name = named(which, "ranges_span_keys", "ranges_span_values");
            self.run(&program, name, &first.call, channels)?;
        }
        for piece in pieces {
            // A single piece is still in place from the computation of its ranges.
            if !span_ranges || pieces.len() > 1 {
                self.rewrite(&program, which, piece)?;
            }
            let tiles = (piece.call.tokens as u64).div_ceil(TILE_TOKENS as u64) * store.shape().kv_heads() as u64;
            let ranges = store.pages().ranges_per_tile(which) as u64;
            if store.pages().tensor(which).codes_rows() {
                let rows = tiles * TILE_TOKENS as u64;
                self.run(&program, named(which, "code_keys", "code_values"), &piece.call, rows * 32)?;
            } else if ranges > 0 {
                let name = named(which, "ranges_tile_keys", "ranges_tile_values");
                self.run(&program, name, &piece.call, tiles * ranges * 32)?;
            }
            let name = named(which, "quantize_keys", "quantize_values");
            self.run(&program, name, &piece.call, tiles * store.pages().units_per_tile(which) as u64)?;
        }
        Ok(())
    }

    fn rewrite(&self, program: &Program, which: KeyOrValue, piece: &Piece) -> Result<()> {
        let Some((source, rewritten)) = &piece.rewritten else { return Ok(()) };
        let rows = u64::from(source.tokens) * u64::from(source.kv_heads);
        let name = match source.centre {
            0 => named(which, "hadamard_keys", "hadamard_values"),
            _ => "centre_keys",
        };
        self.run_with(program, name, source, Some(rewritten), rows * 32)
    }

    fn zero(&self, what: &'static str, address: u64, bytes: usize) -> Result<()> {
        self.stream.context().bind_to_thread().map_err(|error| driver_error(what, 0, error))?;
        // SAFETY: The slot was checked to exist, and the memory belongs to the store.
        let zeroed = unsafe { cudarc::driver::result::memset_d8_async(address, 0, bytes, self.stream.cu_stream()) };
        zeroed.map_err(|error| driver_error(what, 0, error))
    }

    /// Kernel `dequantize`.
    pub(crate) fn dequantize(
        &self,
        scratch: &mut PackScratch,
        store: &Store,
        read: &SpanRead<'_>,
    ) -> Result<[Tensor; 2]> {
        check_span("dequantize", read.tokens, read.pages)?;
        store.check_slot("dequantize", read.range_slot)?;
        store.check_centre("dequantize", read.centre)?;
        let pages = self.pages(scratch, "dequantize", store, read.pages)?;
        let (shape, program) = (store.shape(), store.pages().rows_program());
        let read_back = |which: KeyOrValue| {
            let rows = RowLayout::head_major(read.tokens, shape);
            let elements = rows.elements_needed(shape);
            let tensor = Tensor::zeroed(self.stream, elements, ElementType::F32)?;
            let source = Source { tensor: &tensor, rows, first_token: 0, tokens: read.tokens };
            let call = RowsCall {
                pages: pages.address(),
                ranges: store.slot_address(which, read.range_slot),
                ..source.call(shape)
            };
            let units = (read.pages.len() * shape.kv_heads() * store.pages().units_per_tile(which)) as u64;
            let row_threads = (read.tokens * shape.kv_heads()) as u64 * 32;
            if store.pages().tensor(which).sketched() {
                self.run(&program, "dequantize_key_signs", &call, units)?;
                self.run(&program, "sketch_keys_back", &call, row_threads)?;
            }
            self.run(&program, named(which, "dequantize_keys", "dequantize_values"), &call, units)?;
            if store.pages().tensor(which).rotation.is_some() {
                let name = named(which, "hadamard_keys_back", "hadamard_values_back");
                self.run(&program, name, &call, row_threads)?;
            }
            if let Some(slot) = read.centre.filter(|_| which == KeyOrValue::Key) {
                let call = RowsCall { centre: store.centre_address(slot), ..call };
                self.run(&program, "uncentre_keys", &call, elements as u64)?;
            }
            Ok(tensor)
        };
        Ok([read_back(KeyOrValue::Key)?, read_back(KeyOrValue::Value)?])
    }

    /// Kernel `find_non_finite`: the index, in token order, of the first element that is NaN, infinite or beyond
    /// ±`largest`.
    pub(crate) fn find_non_finite(
        &self,
        what: &'static str,
        tensor: &Tensor,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> Result<Option<usize>> {
        rows.check(what, tensor.elements(), shape)?;
        let source = Source { tensor, rows: *rows, first_token: 0, tokens: rows.tokens };
        let found = Memory::upload(self.stream, "what was found", &u64::MAX.to_ne_bytes())?;
        // Only the head dimension matters.
        let program = PageFormat::f16(shape.head_dim()).rows_program();
        let elements = rows.tokens * shape.kv_heads() * shape.head_dim();
        let chunk = BLOCK as usize * FINITE_CHUNK;
        let threads = (elements.div_ceil(chunk) * BLOCK as usize) as u64;
        let call = RowsCall { largest, ..source.call(shape) };
        self.run_with(&program, "find_non_finite", &call, Some(&found.address()), threads)?;
        let index: u64 = bytemuck::pod_read_unaligned(&found.download(self.stream, "what was found")?);
        Ok((index != u64::MAX).then_some(index as usize))
    }
}

fn shrink(format: &SegmentFormat, which: KeyOrValue) -> f32 {
    format.tensor(which).affine().map_or(1.0, |affine| affine.shrink)
}

/// Checks that a span has tokens, and exactly the pages that they need.
fn check_span(what: &'static str, tokens: usize, pages: &[Page]) -> Result<()> {
    let needed = tokens.div_ceil(TILE_TOKENS);
    if tokens == 0 {
        return Err(Error::NoTokens { what, hint: "pass at least one token" });
    }
    if pages.len() != needed {
        let reason = format!("{tokens} tokens need {needed} pages; {} were given", pages.len());
        return Err(Error::Plan { what, reason });
    }
    Ok(())
}
