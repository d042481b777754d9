//! Decode steps of realistic size, for timing: the part of the registry that `kvpack bench` runs.

use super::attend::{DataKind, InputLayout, RowOrder, SinkPlace};
use super::batch_format::{BatchFormat, BatchPart};
use super::data::{DataRecipe, SequenceData};
use crate::format::{AffineFormat, AttentionShape, Bits, Grouping, SegmentFormat, TILE_TOKENS, TensorFormat};
use crate::plan::{ElementType, TokenRange};
use crate::{Backend, Result};

/// The lengths of the sequences of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchLengths {
    /// All of them as long as the longest.
    Even,
    /// Eight lengths in turn, from an eighth of the longest upwards. None fills a tile.
    Ragged,
}

/// The order of a batch's pages in its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOrder {
    /// One after the other.
    Consecutive,
    /// Shuffled, as after sequences have grown in turn and released pages.
    Shuffled,
}

/// A decode step: one query per sequence over a span each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Unique name.
    pub name: String,
    /// Heads of the layer.
    pub shape: AttentionShape,
    /// Sequences of the batch.
    pub sequences: usize,
    /// Tokens of the longest sequence.
    pub tokens: usize,
    /// The lengths of the others.
    pub lengths: BatchLengths,
    /// The order of their pages.
    pub pages: PageOrder,
    /// Tokens of a span with ranges of its own. The remainder of a sequence is a span too.
    pub span_tokens: usize,
    /// Whether the shape belongs to the small set for a quick run.
    pub quick: bool,
}

impl DecodeShape {
    /// Sequences of this many tokens, each in one span of consecutive pages. Not in the small set.
    pub fn even(name: impl Into<String>, shape: AttentionShape, sequences: usize, tokens: usize) -> Self {
        Self {
            name: name.into(),
            shape,
            sequences,
            tokens,
            lengths: BatchLengths::Even,
            pages: PageOrder::Consecutive,
            span_tokens: usize::MAX,
            quick: false,
        }
    }
}

/// Tokens of an image in LLaVA-1.5 (arXiv 2310.03744): 24 × 24 patches.
const IMAGE_TOKENS: usize = 576;

/// The timed decode steps: two that read 0.5 GiB of keys and as much of values even at 1 bit, group sizes 1 and 4 to
/// 16, batches of equal and of mixed lengths, a single long sequence, shuffled pages, sequences of many spans, other
/// head dimensions, and two small ones.
pub fn decode_shapes() -> Vec<DecodeShape> {
    let step = |name: &str, (query_heads, kv_heads, head_dim), sequences, tokens| {
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim).expect("the registry's shapes have kernels");
        DecodeShape { quick: sequences * tokens <= 4096, ..DecodeShape::even(name, shape, sequences, tokens) }
    };
    let ragged = |name, heads, sequences, tokens| DecodeShape {
        lengths: BatchLengths::Ragged,
        ..step(name, heads, sequences, tokens)
    };
    vec![
        ragged("g1-b64-ragged", (32, 32, 128), 64, 8192),
        ragged("g4-b64-ragged", (32, 8, 128), 64, 32_768),
        step("g1-b128-8k", (32, 32, 128), 128, 8192),
        step("g4-b128-32k", (32, 8, 128), 128, 32_768),
        step("g1-b8-8k", (32, 32, 128), 8, 8192),
        step("g4-b8-32k", (32, 8, 128), 8, 32_768),
        step("g4-b32-8k", (32, 8, 128), 32, 8192),
        DecodeShape { pages: PageOrder::Shuffled, ..step("g4-b8-32k-shuffled", (32, 8, 128), 8, 32_768) },
        DecodeShape { span_tokens: IMAGE_TOKENS, ..step("g4-b8-32k-images", (32, 8, 128), 8, 32_768) },
        step("g8-b8-32k", (64, 8, 128), 8, 32_768),
        step("g16-b8-32k", (32, 2, 128), 8, 32_768),
        step("g4-b1-128k", (32, 8, 128), 1, 131_072),
        step("g7-b4-16k", (28, 4, 128), 4, 16_384),
        step("g3-d64-b8-8k", (9, 3, 64), 8, 8192),
        step("g4-b1-4k", (32, 8, 128), 1, 4096),
        step("g1-b1-4k", (8, 8, 128), 1, 4096),
    ]
}

/// The timed formats, f16 first: every width with one range per channel, and the groupings of other methods.
pub fn decode_formats() -> Vec<SegmentFormat> {
    // The rotation divides the heads of all shapes of the registry.
    decode_formats_of(64)
}

/// The same with rotations for heads of other channels.
pub fn decode_formats_of(head_dim: usize) -> Vec<SegmentFormat> {
    let affine = |bits, grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
    let both = |format| SegmentFormat { key: format, value: format };
    let mut formats = vec![SegmentFormat::F16];
    formats.extend(Bits::ALL.into_iter().rev().map(SegmentFormat::calibquant));
    formats.push(both(affine(Bits::Four, Grouping::Token)));
    formats.push(both(affine(Bits::Two, Grouping::Token)));
    formats.extend([Bits::Four, Bits::Two].map(SegmentFormat::kivi));
    // A range per channel and tile, as CalibQuant packs every full tile.
    formats.extend([Bits::Four, Bits::Two].map(|bits| both(affine(bits, Grouping::ChannelTokens(TILE_TOKENS)))));
    formats.push(SegmentFormat::saw_int4());
    let turboquant = |bits| SegmentFormat::turboquant(bits, head_dim);
    formats.extend([Bits::Four, Bits::Three, Bits::Two, Bits::One].map(turboquant));
    formats.extend([Bits::Four, Bits::Three, Bits::Two].map(|bits| SegmentFormat::turboquant_prod(bits, head_dim)));
    formats.push(SegmentFormat::qjl(head_dim));
    formats
}

/// Batches in segments of mixed precision: the parts of Cocktail's chunks (arXiv 2503.23294), and halves.
pub fn decode_mixes() -> Vec<BatchFormat> {
    let per_channel = SegmentFormat::calibquant;
    vec![
        BatchFormat::of_parts([(SegmentFormat::F16, 1), (per_channel(Bits::Four), 3), (per_channel(Bits::Two), 4)]),
        BatchFormat::of_parts([(per_channel(Bits::Four), 4), (per_channel(Bits::Two), 4)]),
    ]
}

/// Keys and values of one sequence on a device, and queries for all sequences. Every sequence of the batch, and every
/// copy, stores the same keys and values in pages of its own.
pub struct DecodeData<B: Backend> {
    /// The step that the data are for.
    pub decode: DecodeShape,
    pub(super) host: SequenceData,
    pub(super) keys: B::Tensor,
    pub(super) values: B::Tensor,
    pub(super) queries: B::Tensor,
}

impl<B: Backend> DecodeData<B> {
    /// Generates Gaussian data with a sink, and with a landmark in every sixteenth, and uploads them as f16.
    ///
    /// # Errors
    /// When they do not fit the device.
    pub async fn generated(backend: &B, decode: DecodeShape) -> Result<Self> {
        let input = InputLayout { elements: ElementType::F16, order: RowOrder::TokenMajor };
        let host = SequenceData::new(&DataRecipe {
            shape: decode.shape,
            tokens: decode.tokens,
            queries: 1,
            kind: DataKind::ChannelOffsets,
            sink: SinkPlace::First,
            input,
            seed: 1,
        });
        let host = host.with_landmarks(&decode.shape);
        Self::of_sequence(backend, decode, host).await
    }

    /// Uploads the data of one sequence.
    ///
    /// # Errors
    /// When they are not those of `decode`, or do not fit the device.
    pub async fn of_sequence(backend: &B, decode: DecodeShape, host: SequenceData) -> Result<Self> {
        host.check(&decode.shape, decode.tokens)?;
        let queries: Vec<f32> = host.queries.repeat(decode.sequences);
        Ok(Self {
            decode,
            keys: backend.upload(host.keys.elements()).await?,
            values: backend.upload(host.values.elements()).await?,
            queries: backend.upload(queries.as_slice().into()).await?,
            host,
        })
    }

    /// Replaces the queries, `[rows, query_heads, head_dim]`.
    ///
    /// # Errors
    /// When they do not fit the device.
    pub async fn set_queries(&mut self, backend: &B, queries: &[f32]) -> Result<()> {
        self.queries = backend.upload(queries.into()).await?;
        Ok(())
    }

    /// The queries, `[sequences, query_heads, head_dim]`.
    pub fn queries(&self) -> &B::Tensor {
        &self.queries
    }

    /// The data on the host: keys, values and queries of one sequence.
    pub fn host(&self) -> &SequenceData {
        &self.host
    }
}

impl DecodeShape {
    /// Tokens of a sequence.
    pub const fn length(&self, sequence: usize) -> usize {
        match self.lengths {
            BatchLengths::Even => self.tokens,
            BatchLengths::Ragged => {
                let eighths = sequence % 8 + 1;
                (self.tokens * eighths).div_ceil(8).saturating_sub(5 * eighths).saturating_add(1)
            }
        }
    }

    /// Tokens of all sequences.
    pub fn total_tokens(&self) -> usize {
        (0..self.sequences).map(|sequence| self.length(sequence)).sum()
    }

    /// The tokens of each span that a part of a sequence is stored in.
    pub(super) fn spans(&self, part: &BatchPart, sequence: usize) -> Result<Vec<TokenRange>> {
        let tokens = part.tokens(self.length(sequence));
        let span = |start: usize| TokenRange::new(start, start.saturating_add(self.span_tokens).min(tokens.end));
        tokens.clone().step_by(self.span_tokens).map(span).collect()
    }

    /// Bytes of one batch in a format without ranges: the minimum that one step must read.
    pub fn code_bytes(&self, format: &BatchFormat) -> u64 {
        let bytes = |part: &BatchPart| {
            let tokens: usize = (0..self.sequences).map(|sequence| part.tokens(self.length(sequence)).len()).sum();
            let elements = tokens * self.shape.kv_heads() * self.shape.head_dim();
            ((part.format.key.element_bits() + part.format.value.element_bits()) * elements / 8) as u64
        };
        format.parts().iter().map(bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::HEAD_DIMS;

    /// A rotation divides the channels of a head, whichever they are.
    #[test]
    fn formats_fit_their_heads() {
        for head_dim in HEAD_DIMS {
            let shape = AttentionShape::new(4, 2, head_dim).unwrap();
            let rotated = |format: &SegmentFormat| format.key.rotation().is_some();
            for format in decode_formats_of(head_dim).into_iter().filter(rotated) {
                assert_eq!(format.check(&shape), Ok(()), "{format} at {head_dim}");
            }
        }
    }
}
