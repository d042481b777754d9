//! Packs full pages of one store into pages of another, many at once: kernels `dequantize` and `quantize`.

use super::quantize::{PIECE_BYTES, PlacedPage};
use super::{DequantizePlan, QuantizePlan};
use crate::Result;
use crate::backend::{SpanRead, WindowMove};
use crate::format::{AttentionShape, SegmentFormat, TILE_TOKENS};
use crate::plan::{ElementType, Page, RowLayout};
use crate::wgpu::device::{Kernels, Launches, Store, Tensor};

/// Reads full pages of one store and stores each as a span of its own in another: decided, but for the buffers.
///
/// The rows pass through scratch memory of at most 16 MiB each for keys and values, as many pages at a time as that holds; the
/// memory is freed with the bound launches. A piece takes the dispatches of a [`DequantizePlan`] and of a [`QuantizePlan`],
/// whose ranges per channel are made by one `ranges_window` each for keys and values.
#[derive(Clone, Debug)]
pub struct PackWindowsPlan {
    shape: AttentionShape,
    pieces: Vec<Piece>,
}

/// Pages that pass at once.
#[derive(Clone, Debug)]
struct Piece {
    read: DequantizePlan,
    write: QuantizePlan,
}

impl PackWindowsPlan {
    /// Plans moves from a store of one format to a store of another, both of this shape.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) when a format does not fit the shape; [`Error::NoTokens`](crate::Error::NoTokens)
    /// when there are no moves.
    pub fn new(
        shape: &AttentionShape,
        from: &SegmentFormat,
        to: &SegmentFormat,
        windows: &[WindowMove],
    ) -> Result<Self> {
        let page_bytes = TILE_TOKENS * shape.kv_heads() * shape.head_dim() * size_of::<f32>();
        let piece = |windows: &[WindowMove]| {
            let pages: Vec<Page> = windows.iter().map(|window| window.from).collect();
            let tokens = windows.len() * TILE_TOKENS;
            let read = DequantizePlan::new(shape, from, &SpanRead { pages: &pages, tokens, range_slot: 0 })?;
            let placed = windows.iter().map(|window| PlacedPage { page: window.to, range_slot: window.range_slot });
            let rows = RowLayout::head_major(tokens, shape);
            Ok(Piece { read, write: QuantizePlan::windows(shape, to, rows, placed.collect())? })
        };
        let most = (PIECE_BYTES / page_bytes).max(1);
        // A call without moves is refused like a span without tokens.
        let pieces = windows.chunks(most).chain(windows.is_empty().then_some(windows)).map(piece);
        Ok(Self { shape: *shape, pieces: pieces.collect::<Result<_>>()? })
    }

    /// Binds the stores.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when a store is not of the planned shape and format, or lacks a page or a range
    /// slot; [`Error::OutOfMemory`](crate::Error::OutOfMemory) when there is no room for the scratch.
    pub fn bind(&self, kernels: &Kernels, from: &Store, to: &Store) -> Result<Launches> {
        let most = self.pieces.iter().map(|piece| piece.read.elements()).max().unwrap_or(0);
        let scratch = || Tensor::zeroed(kernels.device(), most, ElementType::F32);
        let (keys, values) = (scratch()?, scratch()?);
        let mut launches = Vec::new();
        for piece in &self.pieces {
            let of_piece = |tensor: &Tensor| tensor.slice(0, piece.read.elements());
            let (keys, values) = (of_piece(&keys)?, of_piece(&values)?);
            launches.extend(piece.read.bind(kernels, from, &keys, &values)?);
            launches.extend(piece.write.bind(kernels, to, &keys, &values)?);
        }
        Ok(launches.into_iter().collect())
    }

    /// Shape of both stores.
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }
}
