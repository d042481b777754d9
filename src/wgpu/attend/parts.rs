//! The shader variant of an [`AttendRecipe`]: files for slots, numbers for constants.

use super::recipe::{
    AttendRecipe, ByteWeights, Exchange, Field, FloatQuery, FloatWeights, GivenQuery, IntegerQuery, KeyRanges, KeyRows,
    Logits, LseOutput, Merge, QueryFields, QueryMemory, RunArrivals, RunCodes, RunItems, RunRows, Scores, SignedBytes,
    Sinks, Sums, ValueRanges, ValueRangesOfRun, Values, Work, WrittenOutputs,
};
use crate::format::{Bits, Direction};
use crate::plan::{ElementType, ItemMask};
use crate::wgpu::device::Variant;
use crate::wgpu::pack::hadamard::{DirectedRotation, with_turn};
use crate::wgpu::sources::SHADERS;

impl AttendRecipe {
    /// The kernel.
    pub fn variant(&self) -> Variant {
        match self {
            Self::Attend { work, scores, logits, values, softmax, merge } => {
                let variant = logits.put(scores.put(work.put(Variant::new(&SHADERS, "attend"))));
                let variant = put_merge(put_softmax(values.put(variant, work.head_dim), *softmax), *merge);
                let variant = put_numbering(variant, scores.exchange(), values.exchange());
                // Queries and output may be parts of one buffer of the engine, for example if it allocates from large
                // pages.
                match (scores.reads_queries(), merge) {
                    (true, Merge::Last(_)) => variant.writable("inputs"),
                    _ => variant,
                }
            }
            Self::Matrix { work, query_parts, query } => query
                .put(work.put(Variant::new(&SHADERS, "attend_matrix")))
                .with_f16()
                .with_matrices()
                .constant("QUERY_PARTS", *query_parts),
            Self::Run { work, rows, keys, key_vector, values, rotation, arrivals, items, outputs } => {
                let (kernel, rotated) = arrivals.parts();
                let variant = rows.put(work.put(Variant::new(&SHADERS, kernel))).with_f16().with_matrices();
                let variant = variant.constant("SCORE_ROW", rows.score_row(*arrivals));
                let variant = variant.constant("MAX_TILES", super::specialisation::MAX_RUN_TILES);
                let variant = outputs.put(put_run_codes(variant, [*keys, *values], *key_vector));
                let variant = items.put(variant);
                let variant = match rotation {
                    None => variant,
                    Some(rotation) => {
                        let turn = DirectedRotation { rotation: *rotation, direction: Direction::Inverse };
                        with_turn(variant.import("run_outputs", rotated), turn, work.head_dim)
                    }
                };
                match *arrivals {
                    RunArrivals::ByTurns => variant,
                    RunArrivals::First => variant.import("run_arrivals", "attend/run_arrivals.wgsl#first"),
                    RunArrivals::Ahead => variant.import("run_arrivals", "attend/run_arrivals.wgsl#ahead"),
                    RunArrivals::Apart(buffers) => variant.constant("TILE_BUFFERS", buffers),
                }
            }
            Self::Scores { work, scores } => scores.put(work.put(Variant::new(&SHADERS, "scores"))),
            Self::WeightedValues { work, tau, values, softmax, merge } => {
                let variant =
                    work.put(Variant::new(&SHADERS, "weighted_values")).float("TAU_1", tau.0).float("TAU_2", tau.1);
                let variant = put_merge(put_softmax(values.put(variant, work.head_dim), *softmax), *merge);
                put_numbering(variant, Exchange::Memory, values.exchange())
            }
        }
    }
}

impl Work {
    fn put(&self, variant: Variant) -> Variant {
        variant
            .constant("HEAD_DIM", self.head_dim)
            .constant("KV_HEADS", self.kv_heads)
            .constant("QUERY_HEADS", self.query_heads)
            .constant("QUERIES", self.queries)
            .constant("HEADS", self.heads.heads)
            .constant("CHUNKS", self.heads.chunks)
            .constant("MAX_TILES", super::specialisation::MAX_TILES)
    }
}

impl WrittenOutputs {
    /// Slots `output`, `lse` and `sinks`.
    pub(super) fn put(self, variant: Variant) -> Variant {
        let variant = variant.import("output", output_file(self.element_type));
        let variant = match self.lse {
            LseOutput::None => variant,
            LseOutput::F32 => variant.import("lse", "attend/lse.wgsl#f32"),
        };
        match self.sinks {
            Sinks::None => variant,
            Sinks::Logits => variant.import("sinks", "attend/sinks.wgsl#logits"),
        }
    }
}

impl Logits {
    fn put(self, variant: Variant) -> Variant {
        let Self { soft_cap, mask } = self;
        if soft_cap.is_none() && mask == ItemMask::None {
            return variant;
        }
        variant
            .import("logits", "attend/logits.wgsl#bent")
            .constant("CAPPED", soft_cap.is_some().into())
            .constant("MASKED", mask as usize)
            .float("SOFT_CAP", soft_cap.unwrap_or(1.0))
    }
}

impl RunArrivals {
    /// The kernel, and its choice of `run_outputs` that rotates back.
    const fn parts(self) -> (&'static str, &'static str) {
        match self {
            Self::ByTurns | Self::First | Self::Ahead => ("attend_run", "attend/run_outputs.wgsl#rotated"),
            Self::Apart(_) => ("attend_run_apart", "attend/run_outputs.wgsl#rotated_apart"),
        }
    }
}

impl RunItems {
    fn put(self, variant: Variant) -> Variant {
        match self {
            Self::Parts => variant,
            // Queries and output may be parts of one buffer of the engine, as in `attend`.
            Self::Whole(query) => query
                .put(variant)
                .import("run_queries", "attend/run_queries.wgsl#given")
                .import("run_states", "attend/run_states.wgsl#none")
                .writable("inputs"),
        }
    }
}

impl RunRows {
    fn put(self, variant: Variant) -> Variant {
        let variant = variant.constant("SUBGROUPS", self.subgroups).constant("ROW_BLOCKS", self.blocks);
        variant.constant("INVOCATIONS", self.invocations())
    }
}

/// Slots `run_keys` and `run_values`. If all codes have 4 bits, a word holds eight of them, and a lane holds fewer
/// words.
fn put_run_codes(variant: Variant, [keys, values]: [RunCodes; 2], key_vector: usize) -> Variant {
    use RunCodes::{Channel, ChannelTokens, F16, Levels, Token};
    let four = [keys, values].iter().all(RunCodes::has_four_bits);
    let of_keys = |file, bits: Bits| {
        let variant = variant.clone().import("run_keys", file).constant("KEY_VECTOR", key_vector);
        match bits {
            Bits::Eight => variant.import("run_key_codes", "attend/run_key_codes.wgsl#pairs"),
            _ => variant.constant("KEY_BITS", bits.count() as usize),
        }
    };
    let variant = match keys {
        F16 => variant,
        Channel(_) if four => variant.import("run_keys", "attend/run_keys.wgsl#channel_4bit"),
        Token(..) if four => variant.import("run_keys", "attend/run_keys.wgsl#token_4bit"),
        Channel(bits) => of_keys("attend/run_keys.wgsl#channel", bits),
        Token(bits, groups) => of_keys("attend/run_keys.wgsl#token", bits).constant("KEY_CHANNEL_GROUPS", groups),
        ChannelTokens(bits, groups) => {
            of_keys("attend/run_keys.wgsl#channel_tokens", bits).constant("KEY_TOKEN_GROUPS", groups)
        }
        Levels(bits, unit) => of_keys("attend/run_keys.wgsl#levels", bits).float("KEY_UNIT", unit),
    };
    let of_values = |file, bits: Bits| {
        let variant = variant.clone().import("run_values", file);
        match bits {
            Bits::Eight => variant.import("run_value_codes", "attend/run_value_codes.wgsl#pairs"),
            _ => variant.constant("VALUE_BITS", bits.count() as usize),
        }
    };
    match values {
        F16 => variant,
        Channel(_) if four => variant.import("run_values", "attend/run_values.wgsl#channel_4bit"),
        Token(..) if four => variant.import("run_values", "attend/run_values.wgsl#token_4bit"),
        Channel(bits) => of_values("attend/run_values.wgsl#channel", bits),
        Token(bits, _) if ValueRangesOfRun::of([keys, values]) == ValueRangesOfRun::Staged => {
            of_values("attend/run_values.wgsl#token_staged", bits)
                .import("run_factors", "attend/run_factors.wgsl#padded")
        }
        Token(bits, groups) => of_values("attend/run_values.wgsl#token", bits).constant("VALUE_CHANNEL_GROUPS", groups),
        ChannelTokens(bits, groups) => {
            of_values("attend/run_values.wgsl#channel_tokens", bits).constant("VALUE_TOKEN_GROUPS", groups)
        }
        Levels(bits, unit) => of_values("attend/run_values.wgsl#levels", bits).float("VALUE_UNIT", unit),
    }
}

fn put_softmax(variant: Variant, exchange: Exchange) -> Variant {
    match exchange {
        Exchange::Memory => variant,
        Exchange::Subgroup => variant.import("workgroup_max", "attend/workgroup_max.wgsl#subgroup"),
    }
}

fn put_merge(variant: Variant, merge: Merge) -> Variant {
    match merge {
        Merge::Later => variant,
        Merge::Last(output) => variant.import("merge", "attend/merge.wgsl#last").import("output", output_file(output)),
    }
}

/// Shuffles need invocations that are numbered subgroup by subgroup.
fn put_numbering(variant: Variant, scores: Exchange, values: Exchange) -> Variant {
    match (scores, values) {
        (Exchange::Memory, Exchange::Memory) => variant,
        _ => variant.import("numbering", "attend/numbering.wgsl#subgroup"),
    }
}

impl Scores {
    fn put(&self, variant: Variant) -> Variant {
        match self {
            Self::Dot { rows, bytes, ranges, query_planes, query } => {
                let variant = ranges.put(bytes.put(KEYS, rows.put(variant)));
                query.put(variant).constant("QUERY_PLANES", *query_planes)
            }
            Self::Fma { rows, field, query } => {
                query.put(field.put_keys(rows.put(variant))).import("step_scores", "attend/step_scores.wgsl#fma")
            }
            Self::Groups { rows, bytes, ranges, totals, query } => {
                let variant = query.put(ranges.fields.put(bytes.put(KEYS, rows.put(variant))));
                let variant = variant
                    .import("step_scores", "attend/step_scores.wgsl#groups")
                    .constant("KEY_TOKEN_GROUPS", ranges.groups)
                    .constant("KEY_AHEAD", ranges.ahead)
                    .float("KEY_MIDDLE", ranges.middle);
                let variant = ranges.memory.put(variant);
                match totals {
                    Exchange::Memory => variant,
                    Exchange::Subgroup => variant.import("key_totals", "attend/key_totals.wgsl#subgroup"),
                }
            }
            Self::Sketch { rows, bits, query_rows, query_planes, level_unit, sketch_level } => {
                let variant = rows.put(variant).import("step_scores", "attend/step_scores.wgsl#sketch");
                let variant = match bits {
                    Bits::Three => variant.import("sketch_fields", "attend/sketch_fields.wgsl#three"),
                    _ => variant,
                };
                variant
                    .constant("KEY_BITS", bits.count() as usize)
                    .constant("KEY_PARTS", *query_rows)
                    .constant("QUERY_PLANES", *query_planes)
                    .float("LEVEL_UNIT", *level_unit)
                    .float("SKETCH_LEVEL", *sketch_level)
            }
        }
    }

    /// Whether workgroups read the given queries directly.
    fn reads_queries(&self) -> bool {
        match self {
            Self::Dot { query, .. } => matches!(query, IntegerQuery::Own { .. }),
            Self::Fma { query, .. } | Self::Groups { query, .. } => matches!(query, FloatQuery::Own(_)),
            Self::Sketch { .. } => false,
        }
    }

    fn exchange(&self) -> Exchange {
        match self {
            Self::Dot { query: IntegerQuery::Own { totals, .. }, .. } | Self::Groups { totals, .. } => *totals,
            _ => Exchange::Memory,
        }
    }
}

impl QueryMemory {
    fn put(self, variant: Variant) -> Variant {
        match self {
            Self::Own => variant,
            Self::OfWeights { vectors } => variant
                .import("query_bytes", "attend/query_bytes.wgsl#of_weights")
                .constant("LEAST_WEIGHT_VECTORS", vectors),
        }
    }
}

impl KeyRows {
    fn put(&self, variant: Variant) -> Variant {
        let vector = match self.vector {
            4 => "vec4<u32>",
            3 => "array<u32, 3>",
            2 => "vec2<u32>",
            _ => "array<u32, 1>",
        };
        variant.alias("KeyVector", vector).constant("KEY_VECTOR", self.vector).constant("KEY_VECTORS", self.vectors)
    }
}

/// The names that differ between keys and values.
struct CodeNames {
    slot: &'static str,
    levels: &'static str,
    three: &'static str,
    bits: &'static str,
    mask: &'static str,
}

const KEYS: CodeNames = CodeNames {
    slot: "key_bytes",
    levels: "attend/key_bytes.wgsl#levels",
    three: "attend/key_bytes.wgsl#three",
    bits: "KEY_BITS",
    mask: "KEY_MASK",
};

const VALUES: CodeNames = CodeNames {
    slot: "value_bytes",
    levels: "attend/value_bytes.wgsl#levels",
    three: "attend/value_bytes.wgsl#three",
    bits: "VALUE_BITS",
    mask: "VALUE_MASK",
};

impl SignedBytes {
    fn put(self, names: CodeNames, variant: Variant) -> Variant {
        match self {
            Self::Top(bits) => variant.constant(names.bits, bits.count() as usize).constant(names.mask, top_bits(bits)),
            Self::Levels(bits) => variant.import(names.slot, names.levels).constant(names.bits, bits.count() as usize),
            Self::ThreeTop => variant.import(names.slot, names.three),
            Self::ThreeLevels => {
                variant.import(names.slot, names.three).import("three_bytes", "attend/three_bytes.wgsl#levels")
            }
        }
    }
}

/// The top `bits` bits of every byte.
fn top_bits(bits: Bits) -> usize {
    ((bits.max_code() << (8 - bits.count())) * 0x0101_0101) as usize
}

impl KeyRanges {
    fn put(self, variant: Variant) -> Variant {
        match self {
            Self::Folded => variant,
            Self::Token { middle } => {
                variant.import("key_ranges", "attend/key_ranges.wgsl#token").float("KEY_MIDDLE", middle)
            }
        }
    }
}

impl Field {
    fn put_keys(self, variant: Variant) -> Variant {
        let with_codes = |codes, file| {
            let variant = variant.clone().import("key_field", file);
            match codes {
                Bits::Three => variant.import("key_codes", "attend/key_codes.wgsl#three"),
                bits => variant.constant("KEY_BITS", bits.count() as usize),
            }
        };
        match self {
            Self::F16 => variant,
            Self::ChannelTokens(codes, groups) => {
                with_codes(codes, "attend/key_field.wgsl#channel_tokens").constant("KEY_TOKEN_GROUPS", groups)
            }
            Self::TokenChannels(codes, channels) => {
                with_codes(codes, "attend/key_field.wgsl#token_channels").constant("KEY_GROUP_CHANNELS", channels)
            }
        }
    }

    fn put_values(self, variant: Variant) -> Variant {
        let with_codes = |codes, file| {
            let variant = variant.clone().import("value_field", file);
            match codes {
                Bits::Three => {
                    variant.alias("ValueVector", "array<u32, 3>").import("value_codes", "attend/value_codes.wgsl#three")
                }
                bits => variant.constant("VALUE_BITS", bits.count() as usize),
            }
        };
        match self {
            Self::F16 => variant,
            Self::ChannelTokens(codes, groups) => {
                with_codes(codes, "attend/value_field.wgsl#channel_tokens").constant("VALUE_TOKEN_GROUPS", groups)
            }
            Self::TokenChannels(codes, channels) => {
                with_codes(codes, "attend/value_field.wgsl#token_channels").constant("VALUE_GROUP_CHANNELS", channels)
            }
        }
    }
}

impl IntegerQuery {
    fn put(self, variant: Variant) -> Variant {
        let Self::Own { given, fields, totals } = self else { return variant };
        let variant = given.put(fields.put(variant)).import("query", "attend/query.wgsl#own");
        match totals {
            Exchange::Memory => variant,
            Exchange::Subgroup => variant.import("team_totals", "attend/team_totals.wgsl#subgroup"),
        }
    }
}

impl FloatQuery {
    fn put(self, variant: Variant) -> Variant {
        match self {
            Self::Prepared => variant,
            Self::Own(given) => given.put(variant).import("query", "attend/query.wgsl#own_f32"),
        }
    }
}

impl GivenQuery {
    pub(super) fn put(self, variant: Variant) -> Variant {
        variant.float("SCORE_SCALE", self.scale).import("input", input_file(self.input))
    }
}

impl QueryFields {
    pub(super) fn put(self, variant: Variant) -> Variant {
        let variant = match self.span_middle {
            Some(middle) => variant.import("query_ranges", "attend/query_ranges.wgsl#span").float("KEY_MIDDLE", middle),
            None => variant,
        };
        variant
            .constant("PLACE_WORDS", self.place.0)
            .constant("PLACE_PLANES", self.place.1)
            .float("QUERY_LARGEST", self.largest)
            .float("CODE_UNIT", self.code_unit)
    }
}

impl Values {
    fn put(&self, variant: Variant, head_dim: usize) -> Variant {
        let variant =
            variant.constant("CHANNELS", self.channels.channels).constant("CHANNEL_BLOCKS", self.channels.blocks);
        let variant = match self.rotation {
            Some(rotation) => {
                let variant = variant.import("output_rotation", "attend/output_rotation.wgsl#hadamard");
                with_turn(variant, DirectedRotation { rotation, direction: Direction::Inverse }, head_dim)
            }
            None => variant,
        };
        match &self.sums {
            Sums::Fma { field, weights } => {
                let variant = field.put_values(variant).import("values", "attend/values.wgsl#fma");
                match weights {
                    FloatWeights::F16 => variant.with_f16().alias("Weights", "vec4<f16>"),
                    FloatWeights::F32 => variant,
                }
            }
            Sums::Dot { bytes, ranges } => ranges.put(bytes.put(VALUES, variant)),
            Sums::Byte { bytes, weights, block_max } => {
                let variant = bytes.put(VALUES, variant).import("values", "attend/values.wgsl#byte");
                let variant = weights.put(variant, 32 / self.channels.channels);
                match block_max {
                    Exchange::Memory => variant,
                    Exchange::Subgroup => variant.import("block_max", "attend/block_max.wgsl#subgroup"),
                }
            }
        }
    }

    fn exchange(&self) -> Exchange {
        match self.sums {
            Sums::Byte { block_max, .. } => block_max,
            Sums::Fma { .. } | Sums::Dot { .. } => Exchange::Memory,
        }
    }
}

impl ValueRanges {
    fn put(self, variant: Variant) -> Variant {
        match self {
            Self::Folded { middle } => variant.float("VALUE_MIDDLE", middle),
            Self::Token { middle, unit } => variant
                .import("value_ranges", "attend/value_ranges.wgsl#token")
                .float("VALUE_MIDDLE", middle)
                .float("VALUE_UNIT", unit),
        }
    }
}

impl ByteWeights {
    /// `stride` is the distance between a lane's channels if all must belong to one group.
    fn put(self, variant: Variant, stride: usize) -> Variant {
        match self {
            Self::Shared { middle } => variant.float("VALUE_MIDDLE", middle),
            Self::Tiles => variant.import("value_ranges", "attend/value_ranges.wgsl#tiles"),
            Self::Groups { groups, centre } => variant
                .import("byte_weights", "attend/byte_weights.wgsl#groups")
                .constant("WEIGHT_GROUPS", groups)
                .constant("CHANNEL_STRIDE", stride)
                .float("VALUE_CENTRE", centre),
        }
    }
}

/// Slot `input`.
pub(super) fn input_file(input: ElementType) -> &'static str {
    match input {
        ElementType::F32 => "attend/input.wgsl#f32",
        ElementType::F16 => "attend/input.wgsl#f16",
        ElementType::Bf16 => "attend/input.wgsl#bf16",
    }
}

/// Slot `output`.
pub(super) fn output_file(output: ElementType) -> &'static str {
    match output {
        ElementType::F32 => "attend/output.wgsl#f32",
        ElementType::F16 => "attend/output.wgsl#f16",
        ElementType::Bf16 => "attend/output.wgsl#bf16",
    }
}
