//! Kernel `attend`, and its halves `scores` and `weighted_values`: the parts for each format.

use super::recipe::{
    AttendRecipe, Field, FloatQuery, GroupedKeyRanges, IntegerQuery, KeyRanges, KeyRows, Logits, Merge, Scores,
    SignedBytes,
};
use super::specialisation::Specialisation;
use crate::format::codebook::level_unit;
use crate::format::sketch::sketch_level;
use crate::format::{Bits, CodebookFormat, Grouping, TensorFormat, TileLayout};
use crate::plan::ElementType;

/// Work that `attend` does in addition to attention, so that a step has fewer launches that wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fused {
    /// Element type of the queries that every workgroup prepares for its heads; `None` if `prepare_query` does.
    pub queries: Option<ElementType>,
    /// Element type of the output that the last workgroup of a query head writes; `None` if `merge_states` does.
    pub output: Option<ElementType>,
}

/// How keys with one range per channel and group of tokens are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyGroups {
    /// As floats, one code after another.
    Decoded,
    /// As integers if the query has one byte, with separate bytes for every group. They are computed a step ahead,
    /// between barriers.
    Integers,
}

impl Specialisation<'_> {
    /// The fused kernel of items that are not those of [`Specialisation::attend_run`].
    pub fn attend(&self, fused: Fused) -> AttendRecipe {
        if let (true, Some(input)) = (self.uses_matrices(), fused.queries) {
            return self.attend_matrix(input);
        }
        let heads = self.head_split();
        AttendRecipe::Attend {
            work: self.work(heads),
            scores: self.key_scores(KeyGroups::Integers, fused.queries),
            logits: self.logits(),
            values: self.values(heads.heads),
            softmax: self.softmax(),
            merge: merge(fused.output),
        }
    }

    /// What becomes of scores before the softmax.
    fn logits(&self) -> Logits {
        let soft_cap = self.scoring.soft_cap.map(|cap| cap * std::f32::consts::LOG2_E);
        Logits { soft_cap, mask: self.scoring.mask }
    }

    /// The unfused scores of packed keys.
    pub fn scores(&self) -> AttendRecipe {
        AttendRecipe::Scores { work: self.work(self.head_split()), scores: self.key_scores(KeyGroups::Decoded, None) }
    }

    /// The unfused weighted values, with the calibration (τ1, τ2). With an output, they are merged as in
    /// [`Fused::output`].
    pub fn weighted_values(&self, tau: (f32, f32), output: Option<ElementType>) -> AttendRecipe {
        let heads = self.head_split();
        AttendRecipe::WeightedValues {
            work: self.work(heads),
            tau,
            values: self.values(heads.heads),
            softmax: self.softmax(),
            merge: merge(output),
        }
    }

    /// Scores of keys with queries of this type, or with those that `prepare_query` wrote.
    fn key_scores(&self, groups: KeyGroups, queries: Option<ElementType>) -> Scores {
        let layout = TileLayout::of(&self.format.key, self.shape.head_dim());
        let vector = layout.key_vector();
        let rows = KeyRows { vector, vectors: layout.key_row_words() / vector };
        let query = match queries {
            Some(input) => FloatQuery::Own(self.given_query(input)),
            None => FloatQuery::Prepared,
        };
        let by_value = |field| Scores::Fma { rows, field, query };
        let Some(bits) = self.format.key.code_bits() else { return by_value(Field::F16) };
        if let Some(sketched) = self.format.key.sketched() {
            return self.sketched_scores(rows, sketched);
        }
        let bytes = SignedBytes::new(bits, &self.format.key);
        match self.format.key.grouping() {
            Some(Grouping::Token) => {
                let middle = self.key_bytes().middle * self.key_bytes().unit;
                self.dot_scores(rows, bytes, KeyRanges::Token { middle }, queries)
            }
            Some(Grouping::ChannelTokens(tokens)) => match groups {
                KeyGroups::Integers if self.has_key_groups() => Scores::Groups {
                    rows,
                    bytes,
                    ranges: GroupedKeyRanges {
                        groups: crate::TILE_TOKENS / tokens,
                        middle: self.key_bytes().middle,
                        fields: self.query_fields(),
                        memory: self.query_memory(self.head_split().heads),
                        ahead: self.keys_ahead(rows.vectors),
                    },
                    totals: self.key_totals(),
                    query,
                },
                _ => by_value(Field::ChannelTokens(bits, crate::TILE_TOKENS / tokens)),
            },
            Some(Grouping::TokenChannels(channels)) => by_value(Field::TokenChannels(bits, channels)),
            Some(Grouping::Channel) | None => self.dot_scores(rows, bytes, KeyRanges::Folded, queries),
        }
    }

    fn dot_scores(&self, rows: KeyRows, bytes: SignedBytes, ranges: KeyRanges, queries: Option<ElementType>) -> Scores {
        let query = match queries {
            Some(input) => IntegerQuery::Own {
                given: self.given_query(input),
                fields: self.query_fields(),
                totals: self.exchange_among(32),
            },
            None => IntegerQuery::Prepared,
        };
        Scores::Dot { rows, bytes, ranges, query_planes: self.query_planes(), query }
    }

    fn sketched_scores(&self, rows: KeyRows, format: &CodebookFormat) -> Scores {
        let head_dim = self.shape.head_dim();
        Scores::Sketch {
            rows,
            bits: format.bits,
            query_rows: self.query_parts(),
            query_planes: self.query_planes(),
            // A format without a unit is refused when a store is created.
            level_unit: format.level_bits().and_then(|bits| level_unit(bits, head_dim)).unwrap_or(1.0),
            sketch_level: sketch_level(head_dim),
        }
    }
}

impl SignedBytes {
    pub(super) fn new(bits: Bits, format: &TensorFormat) -> Self {
        match (bits, format) {
            (Bits::Three, TensorFormat::Codebook(_)) => Self::ThreeLevels,
            (Bits::Three, _) => Self::ThreeTop,
            // Two levels are an affine grid.
            (bits, TensorFormat::Codebook(_)) if bits != Bits::One => Self::Levels(bits),
            (bits, _) => Self::Top(bits),
        }
    }
}

fn merge(output: Option<ElementType>) -> Merge {
    output.map_or(Merge::Later, Merge::Last)
}

#[cfg(test)]
mod tests {
    use super::super::AttendStep;
    use super::super::prepare_query::Extremes;
    use super::super::recipe::{ByteWeights, Exchange, FloatWeights, QueryMemory, Sums, ValueRanges};
    use super::super::specialisation::{ItemScoring, MAX_TILES};
    use super::*;
    use crate::backend::QueryBytes;
    use crate::format::{AffineFormat, AttentionShape, HEAD_DIMS, Rotation, SegmentFormat};
    use crate::plan::{AttendPlan, ItemMask, Page, QueryRun, SpanView, Split, StoreView};
    use crate::wgpu::device::{Capabilities, KernelLimits, SubgroupSizes, Timestamps, Variant};

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

    /// With nothing fused, and with everything.
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

    /// The planner computes workgroup memory from the same sizes as the shaders declare, and never plans past the
    /// limit.
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
                let query = [QueryBytes::Two, QueryBytes::One][i / 2 % 2];
                let scoring = ItemScoring {
                    soft_cap: (i % 2 == 1).then_some(30.0),
                    mask: [ItemMask::None, ItemMask::Bits, ItemMask::Start][i % 3],
                    ..ItemScoring::plain(shape)
                };
                let special =
                    Specialisation { shape, format, query, capabilities, may_use_matrices: true, scoring, queries: 1 };
                let special = Specialisation { queries: special.most_queries().min(i % 3 + 1), ..special };
                let variant = special.attend(FUSED[i % 2 * usize::from(special.prepares_own_query())]).variant();
                let module = validate(&variant);
                let counted = special.workgroup_bytes(special.head_split().heads);
                let declared = declared_workgroup_bytes(&module);
                assert!(declared <= counted && counted <= 16 << 10, "{}: {declared} of {counted}", variant.label());
            }
        }
    }

    /// Workgroup memory holds the bases of this many tiles of an item.
    #[test]
    fn longer_items_than_kernels_take_are_refused() {
        let shape = AttentionShape::new(1, 1, 64).unwrap();
        let pages = vec![Page { shard: 0, index: 0 }; 2 * MAX_TILES];
        for (max_tiles, refused) in [(MAX_TILES, false), (2 * MAX_TILES, true)] {
            let spans = vec![SpanView {
                sequence: 0,
                start: 0,
                tokens: pages.len() * 128,
                gathered: None,
                pages: &pages,
                range_slot: 0,
            }];
            let store = StoreView { format: SegmentFormat::F16, calibration: None, spans };
            let split = Split { target_items: 1, tile_step: 1, max_tiles };
            let plan = AttendPlan::new(shape, &[QueryRun::decode(0)], &[store]).unwrap();
            let options = crate::backend::AttendOptions { split, ..Default::default() };
            let step = AttendStep::new(&capabilities(true, true, 16 << 10), &plan, ElementType::F32, options);
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
                let query = QueryBytes::One;
                let special = Specialisation {
                    shape: &shape,
                    format: &format,
                    query,
                    capabilities: &capabilities,
                    may_use_matrices: true,
                    scoring: ItemScoring::plain(&shape),
                    queries: 1,
                };
                for fused in &FUSED[..=usize::from(special.prepares_own_query())] {
                    validate(&special.attend(*fused).variant());
                    validate(&special.weighted_values((1.0, 3.0), fused.output).variant());
                }
                validate(&special.scores().variant());
                validate(&special.prepare_query(ElementType::F16, Extremes::Reset));
                validate(&special.prepare_query(ElementType::F32, Extremes::None));
            }
        }
    }

    /// The fused kernel of a format at four query heads per KV head, 128 channels.
    fn chosen(format: SegmentFormat, query: QueryBytes, capabilities: Capabilities) -> AttendRecipe {
        let shape = AttentionShape::new(8, 2, 128).unwrap();
        let (shape, format, capabilities) = (&shape, &format, &capabilities);
        let special = Specialisation {
            shape,
            format,
            query,
            capabilities,
            may_use_matrices: true,
            scoring: ItemScoring::plain(shape),
            queries: 1,
        };
        special.attend(FUSED[usize::from(special.prepares_own_query())])
    }

    fn affine(bits: Bits, grouping: Grouping) -> TensorFormat {
        TensorFormat::Affine(AffineFormat::new(bits, grouping))
    }

    #[test]
    fn plain_halves_are_multiplied_as_floats() {
        let recipe = chosen(SegmentFormat::F16, QueryBytes::One, capabilities(true, true, 16 << 10));
        let AttendRecipe::Attend { scores, values, softmax, merge, .. } = recipe else { panic!("{recipe:?}") };
        assert!(matches!(scores, Scores::Fma { field: Field::F16, query: FloatQuery::Own(_), .. }), "{scores:?}");
        assert_eq!(values.sums, Sums::Fma { field: Field::F16, weights: FloatWeights::F16 });
        assert_eq!((softmax, merge), (Exchange::Subgroup, Merge::Last(ElementType::Bf16)));
    }

    /// Ranges per channel: two byte planes of the query and weights of two bytes, or one and weights
    /// relative to blocks.
    #[test]
    fn the_precision_of_the_query_is_that_of_the_weights() {
        let format = SegmentFormat::per_channel(Bits::Two);
        let parts = |query| match chosen(format, query, capabilities(false, false, 16 << 10)) {
            AttendRecipe::Attend { scores: Scores::Dot { query_planes, ranges, .. }, values, .. } => {
                assert_eq!(ranges, KeyRanges::Folded);
                (query_planes, values.sums)
            }
            other => panic!("{other:?}"),
        };
        let (bytes, middle) = (SignedBytes::Top(Bits::Two), 2.0);
        assert_eq!(parts(QueryBytes::Two), (2, Sums::Dot { bytes, ranges: ValueRanges::Folded { middle } }));
        let weights = ByteWeights::Shared { middle: 0.0 };
        assert_eq!(parts(QueryBytes::One), (1, Sums::Byte { bytes, weights, block_max: Exchange::Memory }));
    }

    /// Ranges of groups (KIVI) are integers only with a one-byte query.
    #[test]
    fn ranges_of_groups_are_integers_beside_a_query_of_one_byte() {
        let format = SegmentFormat {
            key: affine(Bits::Two, Grouping::ChannelTokens(32)),
            value: affine(Bits::Two, Grouping::TokenChannels(32)),
        };
        let parts = |query| match chosen(format, query, capabilities(true, true, 16 << 10)) {
            AttendRecipe::Attend { scores, values, .. } => (scores, values.sums),
            other => panic!("{other:?}"),
        };
        let (scores, sums) = parts(QueryBytes::One);
        assert!(matches!(scores, Scores::Groups { bytes: SignedBytes::Top(Bits::Two), .. }), "{scores:?}");
        let weights = ByteWeights::Groups { groups: 4, centre: 1.5 };
        assert_eq!(sums, Sums::Byte { bytes: SignedBytes::Top(Bits::Two), weights, block_max: Exchange::Subgroup });
        let (scores, sums) = parts(QueryBytes::Two);
        assert!(matches!(scores, Scores::Fma { field: Field::ChannelTokens(Bits::Two, 4), .. }), "{scores:?}");
        let field = Field::TokenChannels(Bits::Two, 32);
        assert_eq!(sums, Sums::Fma { field, weights: FloatWeights::F16 });
    }

    /// Bytes of KIVI's queries share the memory of the weights only if workgroups would otherwise need more memory than
    /// every device has: the barriers that separate the two uses cost time.
    #[test]
    fn query_bytes_of_groups_share_memory_where_it_is_short() {
        let format = SegmentFormat::kivi(Bits::Two);
        let capabilities = capabilities(true, true, 48 << 10);
        for (group, vectors) in [(4, Some(4 * 4 * 33)), (1, None)] {
            let shape = AttentionShape::new(group, 1, 128).unwrap();
            let (shape, format, capabilities) = (&shape, &format, &capabilities);
            let query = QueryBytes::One;
            let special = Specialisation {
                shape,
                format,
                query,
                capabilities,
                may_use_matrices: true,
                scoring: ItemScoring::plain(shape),
                queries: 1,
            };
            let AttendRecipe::Attend { scores: Scores::Groups { ranges, .. }, .. } = special.attend(FUSED[1]) else {
                panic!("{format}")
            };
            assert_eq!(ranges.memory, vectors.map_or(QueryMemory::Own, |vectors| QueryMemory::OfWeights { vectors }));
            assert_eq!(ranges.ahead, 2);
            // Weights: four groups of four heads, and half a row between groups.
            let shared = vectors.map_or(0, |_| 4 * (4 * 4 * 8 + 2) * 16);
            assert_eq!(special.separate_bytes(group) - special.workgroup_bytes(group), shared);
        }
    }

    /// Two levels are an affine grid; a codebook has norms per token.
    #[test]
    fn codebooks_are_bytes_of_levels() {
        let codebook = |bits| TensorFormat::Codebook(CodebookFormat::turboquant(bits, 128));
        let bytes = |bits| {
            let format = SegmentFormat { key: codebook(bits), value: codebook(bits) };
            match chosen(format, QueryBytes::Two, capabilities(true, true, 16 << 10)) {
                AttendRecipe::Attend {
                    scores: Scores::Dot { bytes, ranges: KeyRanges::Token { .. }, query: IntegerQuery::Prepared, .. },
                    values,
                    ..
                } => {
                    assert!(values.rotation.is_some());
                    bytes
                }
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(
            [Bits::One, Bits::Three, Bits::Four].map(bytes),
            [SignedBytes::Top(Bits::One), SignedBytes::ThreeLevels, SignedBytes::Levels(Bits::Four)]
        );
    }
}
