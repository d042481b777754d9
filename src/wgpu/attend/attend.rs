//! Kernel `attend`, and what `scores` and `weighted_values` share with it: which shader parts serve a format.

use super::code_bytes::{CodeBytes, top_bits};
use super::merge_states::output_file;
use super::prepare_query::input_file;
use crate::backend::QueryPrecision;
use crate::format::codebook::level_unit;
use crate::format::sketch::sketch_level;
use crate::format::{AttentionShape, Bits, CodebookFormat, Grouping, SegmentFormat, TensorFormat, TileLayout};
use crate::plan::ElementType;
use crate::wgpu::device::{Capabilities, Variant};

/// How the query heads of a KV head are spread over workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadSplit {
    /// Query heads of one workgroup.
    pub heads: usize,
    /// Workgroups per KV head and work item. Each reads the keys and values again.
    pub chunks: usize,
}

/// How the channels of values are spread over the four teams of a workgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChannelSplit {
    /// Channels per lane.
    pub channels: usize,
    /// Blocks of `32 · channels` channels; the teams left over share the tiles of a step.
    pub blocks: usize,
}

/// What `attend` does beside attending, so that a step has fewer launches that wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fused {
    /// Element type of the queries that every workgroup prepares for its heads; none where `prepare_query` does.
    pub queries: Option<ElementType>,
    /// Element type of the output that the last workgroup of a query head writes; none where `merge_states` does.
    pub output: Option<ElementType>,
}

/// How keys with one range per channel and group of tokens are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyGroups {
    /// As floats, one after the other.
    Decoded,
    /// As integers where the query has one byte, by bytes of its own for every group: they are made a step ahead, between
    /// barriers.
    Integers,
}

/// Everything that chooses the attend variant of one segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Specialisation<'a> {
    pub shape: &'a AttentionShape,
    pub format: &'a SegmentFormat,
    pub query: QueryPrecision,
    pub capabilities: &'a Capabilities,
    /// Whether cooperative matrices may take the segment: not where it is calibrated, and not where the kernel could merge its
    /// states, which one with matrices cannot.
    pub may_use_matrices: bool,
}

/// Most tiles of a work item: what `tile_bases` in workgroup memory holds.
pub(super) const MAX_TILES: usize = 64;
pub(super) const STEP_TILES: usize = 4;
pub(super) const INVOCATIONS: usize = 128;
/// Blocks of a tile that weights of one byte are relative to.
pub(super) const WEIGHT_BLOCKS: usize = 4;
/// Most query heads of a workgroup. The others of a KV head go to further workgroups, which start together and share keys
/// and values in the cache of the device: on an H200 eight heads took 373 µs in two workgroups and 506 µs in one at f16, 145
/// and 153 µs at 2 bits.
const MOST_HEADS: usize = 4;
/// Where codes are decoded to floats, which every workgroup would do again; more would not fit the registers.
const MOST_DECODED_HEADS: usize = 8;

impl Specialisation<'_> {
    /// The fused kernel.
    pub fn attend(&self, fused: Fused) -> Variant {
        if let (true, Some(input)) = (self.uses_matrices(), fused.queries) {
            return self.attend_matrix(input);
        }
        let heads = self.head_split();
        let variant = self.with_work(Variant::new("attend"), heads);
        let variant = self.with_keys(variant, KeyGroups::Integers);
        let variant = match fused.queries {
            Some(input) => self.with_own_query(variant, input),
            None => variant,
        };
        self.with_softmax(with_merge(self.with_values(variant, heads.heads), fused.output))
    }

    /// True if every workgroup of `attend` can prepare the query itself. Rotations would take it too many barriers.
    pub fn prepares_own_query(&self) -> bool {
        self.format.key.rotation().is_none()
    }

    fn with_own_query(&self, variant: Variant, input: ElementType) -> Variant {
        let variant = variant.float("SCORE_SCALE", self.score_scale()).import("input", input_file(input));
        if !self.integer_keys() {
            return variant.import("query", "attend/query/own_f32.wgsl");
        }
        let variant = self.with_query_fields(variant.import("query", "attend/query/own.wgsl"));
        match self.capabilities.subgroups {
            Some(sizes) if sizes.min >= 32 && sizes.max as usize <= INVOCATIONS => variant
                .import("team_totals", "attend/team_totals/subgroup.wgsl")
                .import("numbering", "attend/numbering/subgroup.wgsl"),
            _ => variant,
        }
    }

    /// The unfused scores of packed keys.
    pub fn scores(&self) -> Variant {
        let heads = self.head_split();
        self.with_keys(self.with_work(Variant::new("scores"), heads), KeyGroups::Decoded)
    }

    /// The unfused weighted values, with the calibration (τ1, τ2). With an output, they are merged as in [`Fused::output`].
    pub fn weighted_values(&self, (tau1, tau2): (f32, f32), output: Option<ElementType>) -> Variant {
        let heads = self.head_split();
        let variant = self.with_work(Variant::new("weighted_values"), heads).float("TAU_1", tau1).float("TAU_2", tau2);
        self.with_softmax(with_merge(self.with_values(variant, heads.heads), output))
    }

    /// The most heads per workgroup that fit its memory, spread evenly.
    pub fn head_split(&self) -> HeadSplit {
        if self.uses_matrices() {
            return self.matrix_head_split();
        }
        let group = self.shape.group();
        let decoded_keys = self.format.key != TensorFormat::F16 && !self.integer_keys() && !self.has_key_groups();
        let decoded_values = self.format.value != TensorFormat::F16 && !self.integer_values();
        let most = if decoded_keys || decoded_values { MOST_DECODED_HEADS } else { MOST_HEADS };
        let fits = |heads: &usize| self.workgroup_bytes(*heads) <= self.capabilities.limits.workgroup_memory as usize;
        let most = (1..=most.min(group)).rev().find(fits).unwrap_or(1);
        let chunks = group.div_ceil(most);
        HeadSplit { heads: group.div_ceil(chunks), chunks }
    }

    /// Measured on an H200: few heads want many channels per lane, many heads want few, so that the running sums
    /// (heads · channels) stay in registers. f16 wants many, so that a weight that is read from workgroup memory is used
    /// often, but not where several workgroups read the same values.
    pub(super) fn channel_split(&self, heads: usize) -> ChannelSplit {
        let blocks = match heads {
            1 | 2 => 1,
            _ if *self.format == SegmentFormat::F16 && heads == self.shape.group() => 1,
            3..=5 => 2,
            _ => 4,
        };
        ChannelSplit::new(self.shape.head_dim(), blocks)
    }

    /// True if the prepared query is integers.
    pub fn integer_keys(&self) -> bool {
        is_dot(&self.format.key)
    }

    /// True if weights are integers.
    fn integer_values(&self) -> bool {
        is_dot(&self.format.value) || self.value_groups().is_some()
    }

    /// Byte planes of the prepared query.
    pub fn query_planes(&self) -> usize {
        match self.query {
            QueryPrecision::Int16 => 2,
            QueryPrecision::Int8 => 1,
        }
    }

    /// True if weights are integers of one byte.
    pub(super) fn byte_weights(&self) -> bool {
        let by_channel = self.format.value.grouping() == Some(Grouping::Channel);
        self.query == QueryPrecision::Int8 && (by_channel || self.value_groups().is_some())
    }

    /// 32-bit words of the prepared rows of one query.
    pub fn query_row_words(&self) -> usize {
        let channels = TileLayout::new(&self.format.key, self.shape.head_dim()).key_row_channels();
        let words = if self.integer_keys() { self.query_planes() * channels / 4 + 4 } else { channels + 4 };
        self.query_parts() * words
    }

    /// Workgroup memory of the attend variant with `heads` heads, as the shaders declare it.
    fn workgroup_bytes(&self, heads: usize) -> usize {
        let query = heads * self.query_row_words() * 4;
        let weights = match self.integer_values() {
            true if self.byte_weights() => heads * STEP_TILES * (8 * 16 + WEIGHT_BLOCKS * (4 + 2 * 4)),
            true => heads * 2 * STEP_TILES * 8 * 16,
            false if self.capabilities.f16 => heads * STEP_TILES * 32 * 8,
            false => heads * STEP_TILES * 32 * 16,
        };
        let split = self.channel_split(heads);
        let block_sums = STEP_TILES * 32 * split.channels * 4;
        let maxima = 4 * heads * 4 + 8;
        let last = heads * 4;
        let ranges = if self.format.value.has_span_ranges() { self.shape.head_dim() * 8 } else { 0 };
        let rotated = self.format.value.rotation().map_or(0, |_| self.shape.head_dim() * 4);
        let groups = self.group_bytes(heads);
        MAX_TILES * 4
            + rotated
            + query
            + weights
            + block_sums
            + heads * INVOCATIONS * 4
            + maxima
            + last
            + ranges
            + groups
    }

    pub(super) fn with_work(&self, variant: Variant, heads: HeadSplit) -> Variant {
        variant
            .constant("HEAD_DIM", self.shape.head_dim())
            .constant("KV_HEADS", self.shape.kv_heads())
            .constant("QUERY_HEADS", self.shape.query_heads())
            .constant("HEADS", heads.heads)
            .constant("CHUNKS", heads.chunks)
            .constant("MAX_TILES", MAX_TILES)
    }

    fn with_softmax(&self, variant: Variant) -> Variant {
        match self.capabilities.subgroups.is_some() {
            true => variant.import("workgroup_max", "attend/workgroup_max/subgroup.wgsl"),
            false => variant,
        }
    }

    fn with_keys(&self, variant: Variant, groups: KeyGroups) -> Variant {
        let layout = TileLayout::new(&self.format.key, self.shape.head_dim());
        let vector = layout.key_vector();
        let variant = variant
            .alias("KeyVector", key_vector_type(vector))
            .constant("KEY_VECTOR", vector)
            .constant("KEY_VECTORS", layout.key_row_words() / vector);
        let Some(bits) = self.format.key.code_bits() else {
            return variant.import("scores", "attend/scores/fma.wgsl");
        };
        let by_value = |field| {
            let variant = match bits {
                Bits::Three => variant.clone().import("key_codes", "attend/key_codes/three.wgsl"),
                bits => variant.clone().constant("KEY_BITS", bits.count() as usize),
            };
            variant.import("scores", "attend/scores/fma.wgsl").import("key_field", field)
        };
        if let Some(sketched) = self.format.key.sketched() {
            return self.with_sketched_keys(variant, sketched);
        }
        match self.format.key.grouping() {
            Some(Grouping::Token) => self
                .with_integer_query(variant, bits)
                .import("key_ranges", "attend/key_ranges/token.wgsl")
                .float("KEY_MIDDLE", self.key_bytes().middle * self.key_bytes().unit),
            Some(Grouping::ChannelTokens(tokens)) => match groups {
                KeyGroups::Integers if self.has_key_groups() => self.with_key_groups(variant, bits),
                _ => by_value("attend/key_field/channel_tokens.wgsl"),
            }
            .constant("KEY_TOKEN_GROUPS", crate::TILE_TOKENS / tokens),
            Some(Grouping::TokenChannels(channels)) => {
                by_value("attend/key_field/token_channels.wgsl").constant("KEY_GROUP_CHANNELS", channels)
            }
            Some(Grouping::Channel) | None => self.with_integer_query(variant, bits),
        }
    }

    fn with_sketched_keys(&self, variant: Variant, format: &CodebookFormat) -> Variant {
        let head_dim = self.shape.head_dim();
        // No store is made of a format without a unit.
        let unit = format.level_bits().and_then(|bits| level_unit(bits, head_dim)).unwrap_or(1.0);
        let variant = match format.bits {
            Bits::Three => variant.import("sketch_fields", "attend/sketch_fields/three.wgsl"),
            _ => variant,
        };
        variant
            .import("scores", "attend/scores/sketch.wgsl")
            .constant("KEY_BITS", format.bits.count() as usize)
            .constant("KEY_PARTS", self.query_parts())
            .constant("QUERY_PLANES", self.query_planes())
            .float("LEVEL_UNIT", unit)
            .float("SKETCH_LEVEL", sketch_level(head_dim))
    }

    /// Rows that a query is prepared in: one, or one for the signs of sketches and one for the levels beside them.
    pub fn query_parts(&self) -> usize {
        match self.format.key.sketched() {
            Some(format) if format.level_bits().is_some() => 2,
            _ => 1,
        }
    }

    fn with_integer_query(&self, variant: Variant, bits: Bits) -> Variant {
        self.with_key_bytes(variant, bits).constant("QUERY_PLANES", self.query_planes())
    }

    /// What makes signed bytes of keys.
    pub(super) fn with_key_bytes(&self, variant: Variant, bits: Bits) -> Variant {
        match (bits, &self.format.key) {
            (Bits::Three, TensorFormat::Codebook(_)) => variant
                .import("key_bytes", "attend/key_bytes/three.wgsl")
                .import("three_bytes", "attend/three_bytes/levels.wgsl"),
            (Bits::Three, _) => variant.import("key_bytes", "attend/key_bytes/three.wgsl"),
            // Two levels are an affine grid.
            (bits, TensorFormat::Codebook(_)) if bits != Bits::One => {
                variant.import("key_bytes", "attend/key_bytes/levels.wgsl").constant("KEY_BITS", bits.count() as usize)
            }
            (bits, _) => variant.constant("KEY_BITS", bits.count() as usize).constant("KEY_MASK", top_bits(bits)),
        }
    }

    /// The bytes of packed keys.
    pub(super) fn key_bytes(&self) -> CodeBytes {
        CodeBytes::new(&self.format.key, self.shape.head_dim())
    }
}

impl ChannelSplit {
    /// At most `wanted` blocks, as few as needed for lanes of at most four channels.
    fn new(head_dim: usize, wanted: usize) -> Self {
        let blocks_of_32 = head_dim.div_ceil(32);
        let blocks =
            [4, 2, 1].into_iter().find(|&blocks| blocks <= wanted && blocks_of_32.is_multiple_of(blocks)).unwrap_or(1);
        // A lane of more than four channels would need more registers than it saves loads.
        let blocks = if blocks_of_32 / blocks > 4 { blocks * 2 } else { blocks };
        Self { channels: blocks_of_32 / blocks, blocks }
    }
}

/// True if a product with the tensor is a sum of integer dot products: one range covers all that is summed, or each
/// token has one.
pub(super) fn is_dot(format: &TensorFormat) -> bool {
    matches!(format.grouping(), Some(Grouping::Channel | Grouping::Token))
}

fn with_merge(variant: Variant, output: Option<ElementType>) -> Variant {
    match output {
        Some(output) => variant.import("merge", "attend/merge/last.wgsl").import("output", output_file(output)),
        None => variant,
    }
}

fn key_vector_type(words: usize) -> &'static str {
    match words {
        4 => "vec4<u32>",
        3 => "array<u32, 3>",
        2 => "vec2<u32>",
        _ => "array<u32, 1>",
    }
}

#[cfg(test)]
mod tests {
    use super::super::StepPlan;
    use super::super::prepare_query::Extremes;
    use super::*;
    use crate::format::{AffineFormat, HEAD_DIMS, Rotation};
    use crate::plan::{DecodePlan, ElementType, Page, SpanView, Split, StoreView};
    use crate::wgpu::device::{KernelLimits, SubgroupSizes, Timestamps};

    fn capabilities(f16: bool, subgroups: bool, workgroup_memory: u32) -> Capabilities {
        let limits = KernelLimits {
            binding_bytes: 128 << 20,
            binding_alignment: 256,
            storage_buffers: 8,
            workgroup_memory,
            invocations: 256,
            workgroups: 65535,
        };
        let subgroups = subgroups.then_some(SubgroupSizes { min: if f16 { 32 } else { 4 }, max: 128 });
        Capabilities { f16, subgroups, coherent: f16, matrices: false, timestamps: Timestamps::None, limits }
    }

    /// Nothing, and everything.
    const FUSED: [Fused; 2] = [
        Fused { queries: None, output: None },
        Fused { queries: Some(ElementType::F16), output: Some(ElementType::Bf16) },
    ];

    fn tensor_formats(head_dim: usize) -> Vec<TensorFormat> {
        let groupings = [
            Grouping::Channel,
            Grouping::Token,
            Grouping::ChannelTokens(32),
            Grouping::TokenChannels(16),
            Grouping::TokenChannels(if head_dim.is_multiple_of(64) { 32 } else { 8 }),
        ];
        let affine = |bits| groupings.map(|grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping)));
        let rotated = groupings.map(|grouping| {
            TensorFormat::Affine(AffineFormat::new(Bits::Two, grouping).rotated(Rotation::randomized(16, 1)))
        });
        let codebooks = [Bits::One, Bits::Two, Bits::Three, Bits::Four]
            .map(|bits| TensorFormat::Codebook(CodebookFormat::turboquant(bits, head_dim)));
        std::iter::once(TensorFormat::F16)
            .chain(Bits::ALL.into_iter().flat_map(affine))
            .chain(rotated)
            .chain(codebooks)
            .collect()
    }

    fn validate(variant: &Variant) -> naga::Module {
        let source = variant.source().unwrap();
        let module = naga::front::wgsl::parse_str(&source.wgsl)
            .unwrap_or_else(|error| panic!("{}\n{}", variant.label(), error.emit_to_string(&source.wgsl)));
        naga::valid::Validator::new(naga::valid::ValidationFlags::all(), naga::valid::Capabilities::all())
            .validate(&module)
            .unwrap_or_else(|error| panic!("{}\n{}", variant.label(), error.emit_to_string(&source.wgsl)));
        module
    }

    /// Bytes of workgroup memory that a module declares.
    fn declared_workgroup_bytes(module: &naga::Module) -> usize {
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        let globals = module.global_variables.iter();
        globals
            .filter(|(_, variable)| variable.space == naga::AddressSpace::WorkGroup)
            .map(|(_, variable)| layouter[variable.ty].size as usize)
            .sum()
    }

    /// The planner counts workgroup memory from the same sizes as the shaders declare, and never plans past the limit.
    #[test]
    fn workgroup_memory_is_counted() {
        let count = tensor_formats(64).len() + 4;
        for (i, head_dim) in HEAD_DIMS.into_iter().cycle().take(count * 2).enumerate() {
            let formats = tensor_formats(head_dim);
            let sketched = [Bits::One, Bits::Two, Bits::Three, Bits::Four]
                .map(|bits| TensorFormat::Codebook(CodebookFormat::turboquant_prod(bits, head_dim)));
            let keys: Vec<TensorFormat> = formats.iter().copied().chain(sketched).collect();
            for group in [1, 4, 7, 8, 16] {
                let shape = AttentionShape::new(group, 1, head_dim).unwrap();
                let format = SegmentFormat { key: keys[i % keys.len()], value: formats[(i * 5 + 2) % formats.len()] };
                let capabilities = capabilities(i % 3 == 0, i % 2 == 0, 16 << 10);
                let (shape, format, capabilities) = (&shape, &format, &capabilities);
                let query = [QueryPrecision::Int16, QueryPrecision::Int8][i / 2 % 2];
                let special = Specialisation { shape, format, query, capabilities, may_use_matrices: true };
                let variant = special.attend(FUSED[i % 2 * usize::from(special.prepares_own_query())]);
                let module = validate(&variant);
                let counted = special.workgroup_bytes(special.head_split().heads);
                let declared = declared_workgroup_bytes(&module);
                assert!(declared <= counted && counted <= 16 << 10, "{}: {declared} of {counted}", variant.label());
            }
        }
    }

    /// Workgroup memory holds where so many tiles of an item lie.
    #[test]
    fn longer_items_than_kernels_take_are_refused() {
        let shape = AttentionShape::new(1, 1, 64).unwrap();
        let pages = vec![Page { shard: 0, index: 0 }; 2 * MAX_TILES];
        for (max_tiles, refused) in [(MAX_TILES, false), (2 * MAX_TILES, true)] {
            let spans = vec![SpanView { sequence: 0, tokens: pages.len() * 128, pages: &pages, range_slot: 0 }];
            let store = StoreView { format: SegmentFormat::F16, calibration: None, spans };
            let split = Split { target_items: 1, tile_step: 1, max_tiles };
            let plan = DecodePlan::new(shape, 1, &[store], split).unwrap();
            let step = StepPlan::new(
                &capabilities(true, true, 16 << 10),
                plan,
                ElementType::F32,
                crate::backend::AttendOptions::default(),
            );
            assert_eq!(matches!(step, Err(crate::Error::Limit { .. })), refused, "{max_tiles}");
        }
    }

    #[test]
    fn every_format_has_valid_kernels() {
        let capabilities = capabilities(true, true, 16 << 10);
        let shape = AttentionShape::new(6, 2, 80).unwrap();
        for tensor in tensor_formats(80) {
            let per_channel = TensorFormat::Affine(AffineFormat::new(Bits::Two, Grouping::Channel));
            let sketched = TensorFormat::Codebook(CodebookFormat::turboquant_prod(Bits::Three, 80));
            for (key, value) in [(tensor, per_channel), (per_channel, tensor), (sketched, tensor)] {
                let format = SegmentFormat { key, value };
                let query = QueryPrecision::Int8;
                let special = Specialisation {
                    shape: &shape,
                    format: &format,
                    query,
                    capabilities: &capabilities,
                    may_use_matrices: true,
                };
                for fused in &FUSED[..=usize::from(special.prepares_own_query())] {
                    validate(&special.attend(*fused));
                    validate(&special.weighted_values((1.0, 3.0), fused.output));
                }
                validate(&special.scores());
                validate(&special.prepare_query(ElementType::F16, Extremes::Reset));
                validate(&special.prepare_query(ElementType::F32, Extremes::None));
            }
        }
    }
}
