//! How `attend` is compiled for a format on a device.

use crate::cuda::sources::SOURCES;
use cudarc::driver::CudaFunction;

use super::logits::Logits;
use super::split::{BIT_TOKEN_RATE, MOST_CLUSTER, TOKEN_RATE};
use crate::cuda::Cuda;
use crate::cuda::device::driver::DeviceFacts;
use crate::cuda::device::launch::set_shared_bytes;
use crate::cuda::device::page_format::PageFormat;
use crate::cuda::device::program::Program;
use crate::format::{KeyOrValue, TILE_TOKENS};
use crate::{Error, Result};

/// Bytes of keys and values that one stage of a warp's ring should hold.
const STAGE_BYTES: usize = 8192;

/// Bytes of shared memory that `attend` needs in addition to its rings and to [`AttendVariant::fixed_bytes`].
const SPARE_SHARED_BYTES: usize = 1 << 10;

/// Bytes of shared memory that every block costs in addition to its own.
const RESERVED_SHARED_BYTES: usize = 1 << 10;

/// Outputs that go to a block of a cluster at a time; `CLUSTER_RUN` in `cuda/merge_states.cu`.
const CLUSTER_RUN: usize = 32;

/// Lines of the L2 cache, to which stages are aligned: `LINE_BYTES` in `cuda/common/attend_call.cuh`.
pub(super) const LINE_BYTES: usize = 128;

/// How a launch of `attend` uses scores: `SCORE_PASS` in `cuda/common/calibration.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScorePass {
    /// Weighs values with them.
    Plain = 0,
    /// Only finds their extremes over each span.
    Extremes = 1,
    /// Maps them by those extremes and weighs values.
    Mapped = 2,
}

impl ScorePass {
    /// Those of a segment: two where its scores are calibrated.
    pub(super) const fn of(calibrated: bool) -> &'static [Self] {
        if calibrated { &[Self::Extremes, Self::Mapped] } else { &[Self::Plain] }
    }
}

/// How `attend` is compiled for a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttendVariant {
    pub(super) pages: PageFormat,
    /// Up to 8 query heads to a block instead of 4.
    pub(super) wide: bool,
    /// Tokens that are copied at once.
    pub(super) step_tokens: usize,
    /// Tokens whose scores a warp holds at once.
    pub(super) pass_tokens: usize,
    pub(super) stages: usize,
    pub(super) warps: usize,
    /// Blocks that share a multiprocessor.
    pub(super) blocks: usize,
    /// Copies by the copy engine, which compute capability 9.0 has.
    pub(super) bulk_copies: bool,
    /// Maximum number of queries of an item. Several queries share a block with all their heads.
    pub(super) queries: usize,
    /// Whether each query of an item may see one more token than the one before it. Otherwise they see the same.
    pub(super) moving: bool,
    /// Warps that attend to the same tokens, each for its own of a block's heads.
    pub(super) row_warps: usize,
    pub(super) logits: Logits,
    /// Whether blocks also store the tokens of the step: `STORES` in `cuda/attend.cu`.
    pub(super) stores: bool,
    /// Whether a block has one query head: 1-bit keys of whole tiles are then multiplied as bits.
    pub(super) lone_head: bool,
}

/// Most warps that attend to the same tokens.
const MOST_ROW_WARPS: usize = 4;

/// Query heads of a warp: columns of an MMA.
const WARP_HEADS: usize = 8;

/// Maximum number of queries that move in an item, of `group` query heads each, for which all these pages have a
/// variant; 1 if there is none.
pub(super) fn most_moving(pages: &[PageFormat], group: usize, facts: &DeviceFacts) -> usize {
    let all_have = |queries: usize| pages.iter().all(|&of| AttendVariant::moving(of, group, queries, facts).is_some());
    let sizes = [MOST_ROW_WARPS, MOST_ROW_WARPS / 2, 1].map(|row_warps| row_warps * WARP_HEADS / group);
    sizes.into_iter().find(|&queries| queries > 1 && all_have(queries)).unwrap_or(1)
}

/// Static shared memory that a block may have.
const MOST_STATIC_BYTES: usize = 48 << 10;

/// Tiles of short spans. Their blocks consist of start and end only, which other blocks must hide.
const SHORT_SPAN_TILES: usize = 16;

/// Sizes, in addition to the others, of blocks that share a multiprocessor where keys stay bits: those of many long spans
/// are bound to memory, and others go on while one of them begins or ends.
const LONE_HEAD_SIZES: [Sizes; 2] = [[128, 128, 2, 8, 2], [128, 128, 2, 4, 4]];

/// Tokens of a step and of a pass, stages, warps, and blocks to a multiprocessor.
type Sizes = [usize; 5];

impl AttendVariant {
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
        let variant = |[step_tokens, pass_tokens, stages, warps, blocks]: Sizes| Self {
            pages,
            wide,
            step_tokens,
            pass_tokens,
            stages,
            warps,
            blocks,
            bulk_copies,
            queries: 1,
            moving: false,
            row_warps: 1,
            logits: Logits::default(),
            stores: false,
            lone_head: group == 1 && !short,
        };
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
        let variant = |[step_tokens, pass_tokens, stages, warps, blocks]: Sizes| Self {
            pages,
            wide: true,
            step_tokens,
            pass_tokens,
            stages,
            warps,
            blocks,
            bulk_copies: true,
            queries: row_warps * WARP_HEADS / group,
            moving: true,
            row_warps,
            logits: Logits::default(),
            stores: false,
            lone_head: false,
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

    const fn has_room(&self, facts: &DeviceFacts) -> bool {
        let room = facts.shared_bytes - (self.blocks - 1) * RESERVED_SHARED_BYTES;
        (self.shared_bytes() + self.fixed_bytes()) * self.blocks <= room
    }

    /// The variant whose blocks also store the tokens of the step, where each attends to one query with all the query
    /// heads of a KV head, of which there are `group`. It needs the copy engine.
    pub(super) fn storing(self, group: usize, facts: &DeviceFacts) -> Option<Self> {
        let storing = Self { stores: true, ..self.in_half_steps().unwrap_or(self) };
        let alone = self.queries == 1 && self.row_warps == 1 && group <= self.block_heads() && self.warps > 2;
        (self.bulk_copies && alone && storing.has_room(facts)).then_some(storing)
    }

    /// Of a variant of many warps with one stage each, that with two stages of half as many tokens. Its rings are filled
    /// before the step begins, so that it begins sooner, and its last turn leaves fewer warps idle.
    pub(super) fn in_half_steps(self) -> Option<Self> {
        let tokens = self.step_tokens / 2;
        let halves = self.warps == 16 && self.stages == 1 && whole_loads(&self.pages, tokens);
        halves.then_some(Self { step_tokens: tokens, pass_tokens: tokens, stages: 2, ..self })
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

    /// The function of a pass, compiled unless it was compiled before, with its shared memory.
    pub(super) fn function(&self, backend: &Cuda, pass: ScorePass) -> Result<CudaFunction> {
        let function = backend.kernels().function(&self.program(pass), "attend")?;
        set_shared_bytes(&function, "attend", self.shared_bytes())?;
        Ok(function)
    }

    /// Whether the warps, which take the steps of an item in turn, are idle for more than a quarter of its time if it
    /// has `tiles` tiles.
    pub(super) const fn wastes_turns(&self, tiles: usize) -> bool {
        let steps = tiles * TILE_TOKENS / self.step_tokens;
        let idle = steps.next_multiple_of(self.warps) - steps;
        4 * idle > steps
    }

    /// Shared memory in addition to the rings: the query's fragments, the exchange between warps, and the data that the
    /// blocks of a cluster send.
    const fn fixed_bytes(&self) -> usize {
        let heads = self.block_heads();
        let key = &self.pages.key;
        let query_bytes = if key.bits == 16 || key.is_grouped(self.pages.head_dim) { 2 } else { 1 };
        let group_sums = heads * key.row_groups(self.pages.head_dim) * size_of::<f32>();
        let queries = if key.sketched() && key.bits > 1 { 2 } else { 1 };
        let rows = queries * 2 * heads * (self.pages.head_dim * query_bytes + 16);
        let joined =
            self.warps * self.warp_heads() * 3 * size_of::<f32>() + self.pages.head_dim * size_of::<[f32; 2]>();
        let outputs = heads * self.pages.head_dim + MOST_CLUSTER * (CLUSTER_RUN + heads);
        let stored = if self.stores { 2 * self.pages.head_dim * (size_of::<f32>() + size_of::<u16>()) } else { 0 };
        rows + group_sums + joined + outputs * size_of::<f32>() + stored + SPARE_SHARED_BYTES
    }

    /// Heads of a warp.
    const fn warp_heads(&self) -> usize {
        if self.wide { WARP_HEADS } else { WARP_HEADS / 2 }
    }

    /// Heads of a block.
    pub(super) const fn block_heads(&self) -> usize {
        self.row_warps * self.warp_heads()
    }

    pub(super) fn program(&self, pass: ScorePass) -> Program {
        let mut defines = self.pages.defines();
        defines.extend([
            ("WIDE", self.wide.into()),
            ("STEP_TOKENS", self.step_tokens),
            ("PASS_TOKENS", self.pass_tokens),
            ("STAGES", self.stages),
            ("WARPS", self.warps),
            ("BLOCKS_PER_SM", self.blocks),
            ("BULK_COPIES", self.bulk_copies.into()),
            ("QUERIES", self.queries),
            ("MOVING", self.moving.into()),
            ("ROW_WARPS", self.row_warps),
            ("SCORE_PASS", pass as usize),
        ]);
        defines.extend(self.logits.defines());
        defines.extend(self.stores.then_some(("STORES", 1)));
        defines.extend((pass == ScorePass::Plain && self.multiplies_bits()).then_some(("LONE_HEAD", 1)));
        Program { sources: &SOURCES, files: &["attend.cu"], defines }
    }

    /// Tokens of one head that a multiprocessor attends to in a microsecond.
    pub(super) fn token_rate(&self) -> f64 {
        let rate = if self.multiplies_bits() { BIT_TOKEN_RATE } else { TOKEN_RATE };
        rate / self.row_warps as f64
    }

    /// Whether keys stay bits where scores are not calibrated: `LONE_HEAD` in `cuda/common/attend_call.cuh`.
    fn multiplies_bits(&self) -> bool {
        let (key, value) = (&self.pages.key, &self.pages.value);
        let keys = key.bits == 1 && key.has_span_ranges() && value.has_span_ranges();
        let alone = self.lone_head && self.queries == 1 && self.row_warps == 1;
        alone && keys && self.pages.head_dim == 128 && self.pass_tokens == TILE_TOKENS
    }

    /// Bytes of keys and values that a block has under way.
    pub(super) const fn ring_bytes(&self) -> usize {
        self.warps / self.row_warps * self.stages * stage_bytes(&self.pages, self.step_tokens)
    }

    /// Shared memory of the rings, where the warps' sums are merged afterwards: those of minimums next to those of
    /// channels.
    pub(super) const fn shared_bytes(&self) -> usize {
        let rings = self.ring_bytes();
        let minimums = match self.pages.value.row_groups(self.pages.head_dim) {
            1 => 0,
            groups => groups.next_multiple_of(32),
        };
        let joined = self.warps * self.warp_heads() * (self.pages.head_dim + 8 + minimums) * size_of::<f32>();
        if rings > joined { rings } else { joined }
    }
}

/// Bytes of a stage, whole lines of the L2 cache: `STAGE_BYTES` in `cuda/common/attend_call.cuh`.
const fn stage_bytes(pages: &PageFormat, step_tokens: usize) -> usize {
    let tiles = (pages.tile_bytes(KeyOrValue::Key) + pages.tile_bytes(KeyOrValue::Value)) * step_tokens / TILE_TOKENS;
    let ranges = pages.key.step_range_bytes(pages.head_dim, step_tokens)
        + pages.value.step_range_bytes(pages.head_dim, step_tokens);
    (tiles + ranges).next_multiple_of(LINE_BYTES)
}

/// Whether the keys and the values of `tokens` tokens are whole loads.
fn whole_loads(pages: &PageFormat, tokens: usize) -> bool {
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
    use super::super::logits::TokenMask;
    use super::super::run_variant::{BLOCK_ROWS, RunVariant};
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

    /// What stores has the rings of what does not, in smaller parts where there was one.
    #[test]
    fn storing_halves_the_steps_of_many_warps() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        for (format, sizes) in [
            (SegmentFormat::saw_int4(), [32, 32, 2, 16]),
            (SegmentFormat::turboquant(Bits::Three, 128), [32, 32, 2, 16]),
            (SegmentFormat::F16, [16, 16, 2, 8]),
        ] {
            let pages = PageFormat::new(&shape, &format).unwrap();
            let whole = AttendVariant::candidates(pages, 4, 90, &H200).unwrap()[0];
            let storing = whole.storing(4, &H200).unwrap();
            let of = |variant: AttendVariant| [variant.step_tokens, variant.pass_tokens, variant.stages, variant.warps];
            assert_eq!(of(storing), sizes, "{format}");
            assert_eq!(storing.ring_bytes(), whole.ring_bytes(), "{format}");
        }
    }

    /// The sources of a format of every kind compile, with every way from scores to logits. This needs no device.
    #[test]
    #[ignore = "needs NVRTC"]
    fn kernels_compile() {
        let shape = AttentionShape::new(8, 2, 128).unwrap();
        let both = |tensor| SegmentFormat { key: tensor, value: tensor };
        let kivi = SegmentFormat {
            key: affine(Bits::Two, Grouping::ChannelTokens(32)),
            value: affine(Bits::Two, Grouping::TokenChannels(32)),
        };
        let formats = [
            SegmentFormat::F16,
            both(affine(Bits::Four, Grouping::Token)),
            both(affine(Bits::Three, Grouping::Channel)),
            kivi,
            SegmentFormat::turboquant_prod(Bits::Three, 128),
        ];
        for format in formats {
            let pages = PageFormat::new(&shape, &format).unwrap();
            for program in programs(pages, &shape) {
                let architecture = program.architecture(&H200);
                program.compile(&architecture).unwrap_or_else(|error| panic!("{format}: {error}"));
            }
        }
        let alone = AttentionShape::new(2, 2, 128).unwrap();
        let pages = PageFormat::new(&alone, &SegmentFormat::per_channel(Bits::One)).unwrap();
        for program in programs(pages, &alone) {
            program.compile(&program.architecture(&H200)).unwrap();
        }
        let wide = PageFormat::new(&AttentionShape::new(8, 2, 256).unwrap(), &SegmentFormat::F16).unwrap();
        let program = RunVariant::new(wide, BLOCK_ROWS / 2, &H200).unwrap().program(ScorePass::Plain);
        program.compile(&program.architecture(&H200)).unwrap();
    }

    /// Products of warpgroups do not wait for each other, and the sums of prompts stay in registers.
    #[test]
    #[ignore = "needs NVRTC"]
    fn prompts_neither_wait_nor_spill() {
        for head_dim in [64, 96, 128, 256] {
            let shape = AttentionShape::new(32, 8, head_dim).unwrap();
            let formats = [
                SegmentFormat::F16,
                SegmentFormat::saw_int4(),
                SegmentFormat::per_channel(Bits::Four),
                SegmentFormat::turboquant(Bits::Four, head_dim),
            ];
            for format in formats {
                let pages = PageFormat::new(&shape, &format).unwrap();
                let in_block = [16, 32, 64, BLOCK_ROWS / 2].map(|rows| RunVariant::new(pages, rows, &H200));
                let unpacked = RunVariant::over_unpacked(pages, &H200);
                let windowed = Logits { capped: true, sinks: true, mask: TokenMask::Window };
                let runs =
                    in_block.into_iter().flatten().chain(unpacked).flat_map(|run| [run, run.with_logits(windowed)]);
                for program in runs.map(|run| run.program(ScorePass::Plain)) {
                    let remarks = program.compiler_remarks(&program.architecture(&H200)).unwrap();
                    assert!(!remarks.contains("serialized"), "{format} at {head_dim}: {remarks}");
                    let numbers = remarks.split(" bytes spill stores").map(|before| before.rsplit(' ').next());
                    let stores: Vec<usize> = numbers.flatten().filter_map(|number| number.parse().ok()).collect();
                    // Places of rows and the like, once for each work: no sum.
                    assert!(stores.iter().all(|&bytes| bytes <= 64), "{format} at {head_dim}: {remarks}");
                    assert!(!stores.is_empty(), "{remarks}");
                }
            }
        }
    }

    /// What is compiled for steps over these pages.
    fn programs(pages: PageFormat, shape: &AttentionShape) -> Vec<Program> {
        let attend = AttendVariant::candidates(pages, shape.group(), 9, &H200).unwrap()[0];
        let calibrated = [ScorePass::Extremes, ScorePass::Mapped].map(|pass| attend.program(pass));
        let of_logits = |logits: Logits| AttendVariant { logits, ..attend }.program(ScorePass::Plain);
        let wide = AttendVariant { queries: 2, ..AttendVariant::candidates(pages, 8, 9, &H200).unwrap()[0] };
        let masks = [TokenMask::None, TokenMask::Window, TokenMask::Tree];
        let logits = masks.into_iter().flat_map(|mask| {
            [(false, false), (false, true), (true, false)].map(|(capped, sinks)| Logits { capped, sinks, mask })
        });
        let unpacked = RunVariant::over_unpacked(pages, &H200);
        let runs =
            [BLOCK_ROWS, BLOCK_ROWS / 2, 64, 32, 1].into_iter().filter_map(|rows| RunVariant::new(pages, rows, &H200));
        let runs = runs.chain(unpacked);
        let runs = runs.flat_map(|run| {
            let windowed = Logits { capped: true, sinks: true, mask: TokenMask::Window };
            [run, run.with_logits(windowed)].map(|run| run.program(ScorePass::Plain))
        });
        let many = RunVariant::pipelined(pages, &H200).into_iter();
        let many = many.flat_map(|run| [ScorePass::Extremes, ScorePass::Mapped].map(|pass| run.program(pass)));
        let rows = pages.rows_program();
        let wide = wide.program(ScorePass::Plain);
        let storing = attend.storing(shape.group(), &H200).map(|variant| variant.program(ScorePass::Plain));
        let moving = [2, 4, 8].map(|queries| AttendVariant::moving(pages, shape.group(), queries, &H200));
        let windowed = Logits { mask: TokenMask::Window, ..Logits::default() };
        let moving = moving.into_iter().flatten().flat_map(|variant| {
            [variant, AttendVariant { logits: windowed, ..variant }].map(|variant| variant.program(ScorePass::Plain))
        });
        let unpacks = unpacked.map(|run| run.unpack_program());
        calibrated
            .into_iter()
            .chain(logits.map(of_logits))
            .chain(runs)
            .chain(many)
            .chain(moving)
            .chain(storing)
            .chain(unpacks)
            .chain([wide, rows])
            .collect()
    }
}
