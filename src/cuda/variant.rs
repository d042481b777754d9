//! How `attend` is compiled for a format on a device.

use super::device::DeviceFacts;
use super::page_format::PageFormat;
use super::program::Program;
use crate::format::{KeyOrValue, TILE_TOKENS};
use crate::{Error, Result};

/// Bytes of keys and values that one stage of a warp's ring should hold.
const STAGE_BYTES: usize = 8192;

/// Bytes of shared memory that `attend` needs beside its rings and what [`AttendVariant::fixed_bytes`] counts.
const SPARE_SHARED_BYTES: usize = 2 << 10;

/// The instructions that `attend` multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum AttendPath {
    /// MMAs of codes (`attend.cu`).
    Mma,
    /// Multiply-adds of floats (`attend_fma.cu`), for formats whose codes an MMA cannot sum.
    MultiplyAdd,
}

/// How `attend` is compiled for a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttendVariant {
    pub(super) path: AttendPath,
    pub(super) pages: PageFormat,
    /// Up to 8 query heads to a block instead of 4.
    pub(super) wide: bool,
    /// Tokens that are copied at once.
    pub(super) step_tokens: usize,
    /// Tokens whose scores a warp holds at once.
    pub(super) pass_tokens: usize,
    pub(super) stages: usize,
    pub(super) warps: usize,
    /// Copies by the copy engine, which compute capability 9.0 has.
    pub(super) bulk_copies: bool,
}

impl AttendVariant {
    pub(super) fn new(pages: PageFormat, group: usize, facts: &DeviceFacts) -> Result<Self> {
        let wide = group > 4;
        if pages.needs_multiply_adds() {
            return Self::by_multiply_adds(pages, wide, facts);
        }
        let bulk_copies = facts.capability >= (9, 0);
        let (tokens, bits) = (step_tokens(&pages), pages.key.bits + pages.value.bits);
        // Few bits are bound by instructions, and more warps hide more of their latency. With more channels than 128 their
        // registers would not suffice.
        let few = |most: usize| bits <= most && pages.head_dim <= 128 && bulk_copies;
        let sizes = [
            (few(2) && !wide, [128, 64, 3, 12]),
            (few(4), [64, 64, 4, 12]),
            (true, [tokens, tokens, 3, 8]),
            (true, [tokens, tokens, 3, 4]),
            (true, [tokens, tokens, 2, 4]),
            (true, [tokens, tokens, 2, 2]),
            (true, [tokens, tokens, 1, 2]),
        ];
        let variant = |&(_, [step_tokens, pass_tokens, stages, warps]): &(bool, [usize; 4])| Self {
            path: AttendPath::Mma,
            pages,
            wide,
            step_tokens,
            pass_tokens,
            stages,
            warps,
            bulk_copies,
        };
        let fits = |variant: &Self| variant.shared_bytes() + variant.fixed_bytes() <= facts.shared_bytes;
        let served = sizes.iter().filter(|(wanted, _)| *wanted).map(variant);
        served.filter(|variant| whole_loads(&pages, variant.pass_tokens)).find(fits).ok_or_else(|| {
            let least = variant(&(true, [tokens, tokens, 1, 2]));
            Error::Limit {
                what: "shared memory of a block".into(),
                needed: (least.shared_bytes() + least.fixed_bytes()) as u64,
                allowed: facts.shared_bytes as u64,
                hint: "use a device with more shared memory, or fewer bits",
            }
        })
    }

    /// A thread to every token of a tile.
    fn by_multiply_adds(pages: PageFormat, wide: bool, facts: &DeviceFacts) -> Result<Self> {
        let variant = Self {
            path: AttendPath::MultiplyAdd,
            pages,
            wide,
            step_tokens: TILE_TOKENS,
            pass_tokens: TILE_TOKENS,
            stages: 1,
            warps: TILE_TOKENS / 32,
            bulk_copies: false,
        };
        let needed = variant.shared_bytes() + variant.fixed_bytes();
        if needed > facts.shared_bytes {
            return Err(Error::Limit {
                what: "shared memory of a block".into(),
                needed: needed as u64,
                allowed: facts.shared_bytes as u64,
                hint: "use a device with more shared memory, or a format with a range per channel or per token",
            });
        }
        Ok(variant)
    }

    /// Blocks that one multiprocessor runs at once.
    pub(super) const fn blocks_at_once(&self, facts: &DeviceFacts) -> usize {
        match self.path {
            AttendPath::Mma => 1,
            AttendPath::MultiplyAdd => facts.shared_bytes / (self.shared_bytes() + self.fixed_bytes()),
        }
    }

    /// Shared memory beside the rings: the query's fragments, and what the warps tell each other.
    const fn fixed_bytes(&self) -> usize {
        if let AttendPath::MultiplyAdd = self.path {
            let queries_and_weights = self.chunk_heads() * (self.pages.head_dim + TILE_TOKENS) * size_of::<f32>();
            return queries_and_weights + SPARE_SHARED_BYTES;
        }
        let query_bytes = if self.pages.key.bits == 16 { 2 } else { 1 };
        let rows = (if self.wide { 16 } else { 8 }) * (self.pages.head_dim * query_bytes + 16);
        let warp_states = self.warps * self.chunk_heads() * 3 * size_of::<f32>();
        rows + warp_states + SPARE_SHARED_BYTES
    }

    pub(super) const fn chunk_heads(&self) -> usize {
        if self.wide { 8 } else { 4 }
    }

    pub(super) fn program(&self) -> Program {
        let mut defines = self.pages.defines();
        defines.extend([
            ("WIDE", self.wide.into()),
            ("STEP_TOKENS", self.step_tokens),
            ("PASS_TOKENS", self.pass_tokens),
            ("STAGES", self.stages),
            ("WARPS", self.warps),
            ("BULK_COPIES", self.bulk_copies.into()),
        ]);
        let files: &[&str] = match self.path {
            AttendPath::Mma => &["attend.cu"],
            AttendPath::MultiplyAdd => &["attend_fma.cu"],
        };
        Program { files, defines }
    }

    /// Shared memory of the rings, in which the warps' sums are joined afterwards, and blocks of a cluster leave theirs; by
    /// multiply-adds that of a tile's floats.
    pub(super) const fn shared_bytes(&self) -> usize {
        if let AttendPath::MultiplyAdd = self.path {
            return TILE_TOKENS * (self.pages.head_dim + 1) * size_of::<f32>();
        }
        let rings = self.warps * self.stages * stage_bytes(&self.pages, self.step_tokens);
        let joined = self.warps * self.chunk_heads() * (self.pages.head_dim + 8);
        let cluster = self.chunk_heads() * (self.pages.head_dim + 1);
        let after = (joined + cluster) * size_of::<f32>();
        if rings > after { rings } else { after }
    }
}

const fn stage_bytes(pages: &PageFormat, step_tokens: usize) -> usize {
    pages.head_bytes() * step_tokens / TILE_TOKENS
}

/// True if the keys and the values of so many tokens are whole loads.
fn whole_loads(pages: &PageFormat, tokens: usize) -> bool {
    let whole = |which: KeyOrValue| {
        let (bits, run) = (pages.tensor(which).bits, if which == KeyOrValue::Value { 32 } else { 16 });
        (bits == 16 || tokens.is_multiple_of(run)) && (tokens * pages.head_dim * bits / 8).is_multiple_of(512)
    };
    whole(KeyOrValue::Key) && whole(KeyOrValue::Value)
}

/// Tokens of a step: the most whose keys and values fit a stage and are whole loads, or else the fewest.
fn step_tokens(pages: &PageFormat) -> usize {
    let sizes = [128, 64, 32, 16];
    let valid = |tokens: &usize| whole_loads(pages, *tokens);
    let fits = |tokens: &usize| pages.tile_bytes_of(*tokens) <= STAGE_BYTES;
    let largest = sizes.into_iter().filter(valid).find(fits);
    largest.or_else(|| sizes.into_iter().rev().find(valid)).unwrap_or(TILE_TOKENS)
}

impl PageFormat {
    /// Bytes of the keys and values of so many tokens of one head, without ranges.
    fn tile_bytes_of(&self, tokens: usize) -> usize {
        (self.tile_bytes(KeyOrValue::Key) + self.tile_bytes(KeyOrValue::Value)) * tokens / TILE_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Grouping, SegmentFormat, TensorFormat};
    use crate::{AttentionShape, Bits};

    const H200: DeviceFacts = DeviceFacts { capability: (9, 0), multiprocessors: 132, shared_bytes: 232_448 };

    fn affine(bits: Bits, grouping: Grouping) -> TensorFormat {
        TensorFormat::Affine(AffineFormat::new(bits, grouping))
    }

    /// Every format at every head dimension has a variant whose loads are whole and whose rings fit.
    #[test]
    fn every_format_has_a_variant() {
        let small = DeviceFacts { shared_bytes: 101_376, ..H200 };
        let grouped = |grouping| affine(Bits::Two, grouping);
        let mut tensors =
            vec![TensorFormat::F16, grouped(Grouping::ChannelTokens(32)), grouped(Grouping::TokenChannels(32))];
        for bits in [Bits::One, Bits::Two, Bits::Four, Bits::Eight] {
            tensors.extend([affine(bits, Grouping::Channel), affine(bits, Grouping::Token)]);
        }
        for head_dim in super::super::HEAD_DIMS {
            let shape = AttentionShape::new(8, 2, head_dim).unwrap();
            for (&key, &value) in tensors.iter().flat_map(|key| tensors.iter().map(move |value| (key, value))) {
                let pages = PageFormat::new(&shape, &SegmentFormat { key, value }).unwrap();
                for (facts, group) in [(H200, 4), (H200, 8), (small, 4), (small, 16)] {
                    // Floats of a tile with so many channels need 132 KiB.
                    if pages.needs_multiply_adds() && head_dim == 256 && facts == small {
                        let error = AttendVariant::new(pages, group, &facts).unwrap_err();
                        assert!(matches!(error, Error::Limit { .. }), "{error}");
                        continue;
                    }
                    let variant = AttendVariant::new(pages, group, &facts).unwrap();
                    assert!(variant.step_tokens.is_multiple_of(variant.pass_tokens));
                    assert!(TILE_TOKENS.is_multiple_of(variant.step_tokens));
                    assert!(variant.shared_bytes() + variant.fixed_bytes() <= facts.shared_bytes, "{key} {value}");
                    for which in [KeyOrValue::Key, KeyOrValue::Value] {
                        let loads = variant.pass_tokens * head_dim * pages.tensor(which).bits / 8;
                        assert_eq!(loads % 512, 0, "{key} {value} {head_dim}");
                    }
                    let run = if pages.value.bits == 16 { 16 } else { 32 };
                    assert!(variant.pass_tokens.is_multiple_of(run), "{key} {value} {head_dim}");
                }
            }
        }
    }
}
