//! Which sizes of blocks `attend` is compiled with for a format on a device, the best first.

use super::logits::Logits;
use super::variant::{AttendVariant, MOST_ROW_WARPS, WARP_HEADS, stage_bytes};
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::page_format::PageFormat;
use crate::format::{KeyOrValue, TILE_TOKENS};
use crate::{Error, Result};

/// Bytes of keys and values that one stage of a warp's ring should hold.
const STAGE_BYTES: usize = 8192;

/// Static shared memory that a block may have.
const MOST_STATIC_BYTES: usize = 48 << 10;

/// Tiles of short spans. Their blocks consist of start and end only, which other blocks must hide.
const SHORT_SPAN_TILES: usize = 16;

/// Sizes, in addition to the others, of blocks that share a multiprocessor where keys stay bits: those of many long spans
/// are bound to memory, and others go on while one of them begins or ends.
const LONE_HEAD_SIZES: [Sizes; 2] = [[128, 128, 2, 8, 2], [128, 128, 2, 4, 4]];

/// Tokens of a step and of a pass, stages, warps, and blocks to a multiprocessor.
type Sizes = [usize; 5];

/// Maximum number of queries that move in an item, of `group` query heads each, for which all these pages have a
/// variant; 1 if there is none.
pub(super) fn most_moving(pages: &[PageFormat], group: usize, facts: &DeviceFacts) -> usize {
    let all_have = |queries: usize| pages.iter().all(|&of| AttendVariant::moving(of, group, queries, facts).is_some());
    let sizes = [MOST_ROW_WARPS, MOST_ROW_WARPS / 2, 1].map(|row_warps| row_warps * WARP_HEADS / group);
    sizes.into_iter().find(|&queries| queries > 1 && all_have(queries)).unwrap_or(1)
}

impl AttendVariant {
    /// Blocks of these sizes for single queries of up to 4 heads, which copy by themselves.
    fn of_sizes(pages: PageFormat, [step_tokens, pass_tokens, stages, warps, blocks]: Sizes) -> Self {
        Self {
            pages,
            wide: false,
            step_tokens,
            pass_tokens,
            stages,
            warps,
            blocks,
            bulk_copies: false,
            queries: 1,
            moving: false,
            row_warps: 1,
            logits: Logits::default(),
            stores: false,
            lone_head: false,
        }
    }

    /// The variants that serve a format best, for spans of up to `longest_span` tiles. One has blocks that own a
    /// multiprocessor. One has fewer warps, if a few steps would leave some warps of the first idle. For few bits, one has
    /// blocks that share a multiprocessor in pairs, for steps with more blocks than multiprocessors. For short spans, one
    /// has small blocks, several of which share a multiprocessor.
    pub(super) fn candidates(
        pages: PageFormat,
        group: usize,
        longest_span: usize,
        facts: &DeviceFacts,
    ) -> Result<Vec<Self>> {
        let wide = group > 4;
        let bulk_copies = facts.is_9_0_or_newer();
        let (tokens, bits) = (step_tokens(&pages), pages.key.bits + pages.value.bits);
        let short = longest_span <= SHORT_SPAN_TILES;
        let lone_head = group == 1 && !short;
        let variant = |sizes: Sizes| Self { wide, bulk_copies, lone_head, ..Self::of_sizes(pages, sizes) };
        let fits = |variant: &Self| variant.fits(tokens, facts);
        // More warps hide more latency, but more bytes in flight than memory needs only delay the first. With more
        // channels than 128, and with eight heads, registers would not suffice for many warps.
        let grouped = pages.is_grouped();
        let tuned = bulk_copies && pages.head_dim <= 128 && !grouped;
        // Scales of groups take registers in addition to queries and sums, most of all if a row of keys has several.
        let few = [64, 32].into_iter().find(|&few| few <= tokens && whole_loads(&pages, few)).unwrap_or(tokens);
        // A whole tile is one copy.
        let many_warps = grouped && bulk_copies && pages.head_dim <= 128 && pages.key.row_groups(pages.head_dim) == 1;
        let sizes: [(bool, Sizes); 13] = [
            (many_warps, [TILE_TOKENS, few, 1, 12, 1]),
            (many_warps, [few, few, 1, 12, 1]),
            (grouped, [few, few, 2, 8, 1]),
            (tuned && !wide && bits <= 2, [128, 128, 2, 16, 1]),
            (tuned && wide && bits <= 4, [128, 128, 3, 8, 1]),
            (tuned && !wide && bits > 2 && bits <= 4, [64, 64, 2, 12, 1]),
            (tuned && !wide && bits > 4 && bits <= 8, [tokens, tokens, 1, 16, 1]),
            (tuned && !wide && bits > 8 && bits <= 16, [tokens, tokens, 2, 12, 1]),
            (bulk_copies, [tokens, tokens, 2, 8, 1]),
            (true, [tokens, tokens, 3, 8, 1]),
            (true, [tokens, tokens, 3, 4, 1]),
            (true, [tokens, tokens, 2, 2, 1]),
            (true, [tokens, tokens, 1, 2, 1]),
        ];
        let even: [(bool, Sizes); 1] = [(tuned && !wide && bits > 8 && bits <= 16, [tokens, tokens, 2, 8, 1])];
        let shared: [(bool, Sizes); 2] = [
            (tuned && !wide && bits > 2 && bits <= 4, [64, 64, 2, 8, 2]),
            (tuned && !wide && bits <= 8, [tokens, tokens, 2, 6, 2]),
        ];
        let small: [(bool, Sizes); 4] = [
            (short && !wide && pages.head_dim <= 128, [few, few, 2, 4, 4]),
            (short && !wide && pages.head_dim <= 128, [few, few, 1, 4, 4]),
            (short, [few, few, 2, 4, 2]),
            (short, [few, few, 1, 4, 2]),
        ];
        let first =
            |sizes: &[(bool, Sizes)]| sizes.iter().filter(|(wanted, _)| *wanted).map(|&(_, s)| variant(s)).find(fits);
        let alone = first(&sizes).ok_or_else(|| {
            let least = variant([tokens, tokens, 1, 2, 1]);
            Error::Limit {
                what: "shared memory of a block".into(),
                needed: (least.shared_bytes() + least.fixed_bytes()) as u64,
                allowed: facts.shared_bytes as u64,
                hint: "use a device with more shared memory, or fewer bits",
            }
        })?;
        let variants = [Some(alone), first(&even), first(&shared), first(&small)];
        let of_bits = LONE_HEAD_SIZES
            .map(variant)
            .map(|variant| (fits(&variant) && variant.multiplies_bits()).then_some(variant));
        Ok(variants.into_iter().chain(of_bits).flatten().collect())
    }

    /// The variant for up to `queries` queries that move, of `group` query heads each. All its warps have the registers
    /// for eight heads. None where the device has no copy engine, or a warp does not hold the heads of a query.
    pub(super) fn moving(pages: PageFormat, group: usize, queries: usize, facts: &DeviceFacts) -> Option<Self> {
        let row_warps = (queries * group).div_ceil(WARP_HEADS).next_power_of_two();
        if !facts.is_9_0_or_newer() || group > WARP_HEADS || row_warps > MOST_ROW_WARPS {
            return None;
        }
        let tokens = step_tokens(&pages);
        let queries = row_warps * WARP_HEADS / group;
        let variant = |sizes: Sizes| {
            let of = Self::of_sizes(pages, sizes);
            Self { wide: true, bulk_copies: true, queries, moving: true, row_warps, ..of }
        };
        // Sixteen warps have registers for passes of 64 tokens.
        let few = [64, 32].into_iter().find(|&few| few <= tokens && whole_loads(&pages, few)).unwrap_or(tokens);
        let small = pages.head_dim <= 128 && !pages.is_grouped();
        let sizes: [(bool, Sizes); 6] = [
            (small, [few, few, 2, 16, 1]),
            (small, [few, few, 2, 12, 1]),
            (true, [few, few, 2, 8, 1]),
            (true, [tokens, tokens, 2, 8, 1]),
            (true, [tokens, tokens, 2, 4, 1]),
            (true, [tokens, tokens, 1, 4, 1]),
        ];
        let wanted = sizes.into_iter().filter(|(wanted, _)| *wanted).map(|(_, sizes)| variant(sizes));
        wanted.filter(|variant| variant.warps.is_multiple_of(row_warps)).find(|variant| variant.fits(tokens, facts))
    }

    /// Whether its loads are whole, of a step of at most `tokens` tokens, and its blocks find room.
    fn fits(&self, tokens: usize, facts: &DeviceFacts) -> bool {
        self.pass_tokens <= tokens
            && whole_loads(&self.pages, self.pass_tokens)
            && (self.row_warps == 1 || self.fixed_bytes() <= MOST_STATIC_BYTES)
            && self.has_room(facts)
    }

    /// Every variant that steps may use if their items have up to `queries` queries, whatever their lengths.
    pub(super) fn all(pages: PageFormat, group: usize, queries: usize, facts: &DeviceFacts) -> Result<Vec<Self>> {
        let mut all: Vec<Self> = Vec::new();
        for longest_span in [1, SHORT_SPAN_TILES + 1] {
            for variant in Self::candidates(pages, group * queries, longest_span, facts)? {
                let variant = Self { queries, ..variant };
                if !all.contains(&variant) {
                    all.push(variant);
                }
            }
        }
        Ok(all)
    }
}

/// Whether the keys and the values of `tokens` tokens are whole loads.
pub(super) fn whole_loads(pages: &PageFormat, tokens: usize) -> bool {
    let whole = |which: KeyOrValue| {
        let (bits, run) = (pages.tensor(which).bits, if which == KeyOrValue::Value { 32 } else { 16 });
        // At 3 bits the loads of top bits have the fewest bits.
        let least = if bits == 3 { 1 } else { bits };
        (bits == 16 || tokens.is_multiple_of(run)) && (tokens * pages.head_dim * least / 8).is_multiple_of(512)
    };
    whole(KeyOrValue::Key) && whole(KeyOrValue::Value)
}

/// Tokens of a step: the most whose keys and values fit a stage and are whole loads, otherwise the fewest.
fn step_tokens(pages: &PageFormat) -> usize {
    let sizes = [128, 64, 32, 16];
    let valid = |tokens: &usize| whole_loads(pages, *tokens);
    // Small groups have more bytes of ranges than of codes.
    let fits = |tokens: &usize| {
        pages.tile_bytes_of(*tokens) <= STAGE_BYTES
            && (!pages.is_grouped() || stage_bytes(pages, *tokens) <= 2 * STAGE_BYTES)
    };
    let largest = sizes.into_iter().filter(valid).find(fits);
    largest.or_else(|| sizes.into_iter().rev().find(valid)).unwrap_or(TILE_TOKENS)
}

impl PageFormat {
    /// Bytes of the keys and values of `tokens` tokens of one head, without ranges.
    fn tile_bytes_of(&self, tokens: usize) -> usize {
        (self.tile_bytes(KeyOrValue::Key) + self.tile_bytes(KeyOrValue::Value)) * tokens / TILE_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, CodebookFormat, Grouping, SegmentFormat, TensorFormat};
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
        let groupings = [
            Grouping::ChannelTokens(32),
            Grouping::ChannelTokens(128),
            Grouping::TokenChannels(32),
            Grouping::TokenChannels(4),
        ];
        let mut tensors = vec![TensorFormat::F16];
        tensors.extend(groupings.map(grouped));
        for bits in Bits::ALL {
            tensors.extend([affine(bits, Grouping::Channel), affine(bits, Grouping::Token)]);
        }
        for head_dim in crate::format::HEAD_DIMS {
            let shape = AttentionShape::new(8, 2, head_dim).unwrap();
            let sketched = [Bits::One, Bits::Two, Bits::Three, Bits::Four]
                .map(|bits| TensorFormat::Codebook(CodebookFormat::turboquant_prod(bits, head_dim)));
            let keys = tensors.iter().chain(&sketched);
            for (&key, &value) in keys.flat_map(|key| tensors.iter().map(move |value| (key, value))) {
                let pages = PageFormat::new(&shape, &SegmentFormat { key, value }).unwrap();
                for (facts, group, span) in [(H200, 4, 9), (H200, 8, 1), (small, 4, 9), (small, 16, 90), (H200, 4, 90)]
                {
                    let moving = [2, 4].map(|queries| AttendVariant::moving(pages, group, queries, &facts));
                    for variant in AttendVariant::candidates(pages, group, span, &facts)
                        .unwrap_or_else(|e| panic!("{key} {value} {head_dim} {group} {e}"))
                        .into_iter()
                        .chain(moving.into_iter().flatten())
                    {
                        assert!(variant.step_tokens.is_multiple_of(variant.pass_tokens));
                        assert!(TILE_TOKENS.is_multiple_of(variant.step_tokens));
                        let shared = (variant.shared_bytes() + variant.fixed_bytes()) * variant.blocks;
                        assert!(shared <= facts.shared_bytes, "{key} {value}");
                        for which in [KeyOrValue::Key, KeyOrValue::Value] {
                            let loads = variant.pass_tokens * pages.head_dim * pages.tensor(which).bits / 8;
                            assert_eq!(loads % 512, 0, "{key} {value} {head_dim}");
                        }
                        let run = if pages.value.bits == 16 { 16 } else { 32 };
                        assert!(variant.pass_tokens.is_multiple_of(run), "{key} {value} {head_dim}");
                    }
                }
            }
        }
    }

    /// A head alone multiplies bits in passes of whole tiles.
    #[test]
    fn bits_of_a_head_alone_are_multiplied() {
        let one_bit = SegmentFormat::per_channel(Bits::One);
        for (group, head_dim, format, expected) in [
            (1, 128, one_bit, true),
            (1, 128, SegmentFormat { value: affine(Bits::Four, Grouping::Channel), ..one_bit }, true),
            (1, 128, SegmentFormat { value: affine(Bits::One, Grouping::Token), ..one_bit }, false),
            (1, 128, SegmentFormat::turboquant(Bits::One, 128), false),
            (1, 64, one_bit, false),
            (4, 128, one_bit, false),
        ] {
            let shape = AttentionShape::new(8 * group, 8, head_dim).unwrap();
            let pages = PageFormat::new(&shape, &format).unwrap();
            for variant in AttendVariant::candidates(pages, group, 90, &H200).unwrap() {
                let expected = expected && variant.pass_tokens == TILE_TOKENS;
                assert_eq!(variant.multiplies_bits(), expected, "{format} {group} {head_dim} {variant:?}");
            }
        }
    }
}
