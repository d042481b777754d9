//! Arguments that no program means, through the public calls: each is an error, and none panics, aborts
//! or takes memory.

use kvpack::backend::{Packing, Storage};
use kvpack::cache::{KvCache, MOST_SEQUENCES, Recipe};
use kvpack::cpu::{Cpu, CpuStore, CpuTensor, DenseSegment, States, exact_attention, nmse, plain_attention, quantize};
use kvpack::format::interchange::saw_int4::{self, RowRounding};
use kvpack::format::{
    AffineFormat, Codebook, CodebookFormat, Grouping, KeyOrValue, MOST_HEADS, Rotation, TensorFormat,
};
use kvpack::plan::{ElementType, Elements, RowLayout, Rows, TokenRange};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};
use pollster::block_on;

use any_backend::random_rows::Random;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

#[test]
fn shapes_have_heads_that_can_be_counted() {
    for (query_heads, kv_heads) in [(1 << 60, 1 << 60), (usize::MAX, 1), (MOST_HEADS + 1, 1), (1 << 57, 2), (0, 0)] {
        let refused = AttentionShape::new(query_heads, kv_heads, 64);
        assert_eq!(refused, Err(Error::HeadCounts { query_heads, kv_heads }));
    }
    let most = AttentionShape::new(MOST_HEADS, MOST_HEADS, 256).unwrap();
    for format in [SegmentFormat::F16, SegmentFormat::calibquant(Bits::One), SegmentFormat::qjl(256)] {
        assert!(format.page_bytes(&most) > 0);
        let mut store = CpuStore::new(most, format).unwrap();
        assert!(matches!(store.add_shard(u32::MAX), Err(Error::OutOfMemory { .. })));
        if format.has_span_ranges() {
            assert!(matches!(store.reserve_ranges(usize::MAX), Err(Error::OutOfMemory { .. })));
        }
        assert_eq!(store.bytes(), 0);
    }
}

/// What the error about a head dimension tells a caller to do yields the attention of the head that was padded.
#[test]
fn a_head_that_is_padded_as_told_attends_as_it_is() {
    let (given, padded, tokens) = (112, 128, 30);
    let told = AttentionShape::new(1, 1, given).and_then(|shape| KvCache::new(Cpu::new(), shape, 1, Recipe::f16()));
    let told = told.err().unwrap().to_string();
    assert!(told.contains("multiply the queries by √(that one / 112)"), "{told}");

    let mut random = Random::new(4);
    let mut rows =
        |rows: usize| -> Vec<f32> { (0..rows * given).map(|_| (random.normal() * 16.0).round() / 16.0).collect() };
    let (keys, values, query) = (rows(tokens), rows(tokens), rows(1));
    let logits = keys.chunks(given).map(|key| {
        let product: f64 = key.iter().zip(&query).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum();
        product / (given as f64).sqrt()
    });
    let weights: Vec<f64> = logits.map(f64::exp).collect();
    let mut expected = vec![0.0; given];
    for (weight, value) in weights.iter().zip(values.chunks(given)) {
        let share = weight / weights.iter().sum::<f64>();
        expected.iter_mut().zip(value).for_each(|(sum, &value)| *sum += share * f64::from(value));
    }

    let pad = |rows: &[f32], factor: f32| {
        let row = |row: &[f32]| [row.iter().map(|x| x * factor).collect(), vec![0.0; padded - given]].concat();
        CpuTensor::F32(rows.chunks(given).flat_map(row).collect())
    };
    let shape = AttentionShape::new(1, 1, padded).unwrap();
    let mut cache = KvCache::new(Cpu::new(), shape, 1, Recipe::f16()).unwrap();
    block_on(cache.extend(0, RowLayout::token_major(tokens, &shape), &pad(&keys, 1.0), &pad(&values, 1.0))).unwrap();
    let query = pad(&query, (padded as f32 / given as f32).sqrt());
    let output = block_on(cache.attend(&query, ElementType::F32)).unwrap().to_f32();
    assert!(nmse(&output[..given], &expected) < 1e-6);
}

#[test]
fn caches_have_sequences_that_can_be_counted() {
    for sequences in [MOST_SEQUENCES + 1, usize::MAX] {
        let refused = KvCache::new(Cpu::new(), shape(), sequences, Recipe::f16());
        assert!(matches!(refused, Err(Error::Limit { .. })), "{sequences}");
    }
}

#[test]
fn states_that_memory_does_not_hold() {
    for rows in [usize::MAX, usize::MAX / 4, 1 << 55] {
        assert!(matches!(States::new(rows, &shape()), Err(Error::OutOfMemory { .. })), "{rows}");
    }
    assert_eq!(States::new(3, &shape()).unwrap().rows(), 3);
}

/// The products that their slices are held against wrap to the lengths given.
#[test]
fn attention_over_more_tokens_than_numbers_count() {
    let query = [0.0; 4 * 64];
    for tokens in [1 << 57, 1 << 58, usize::MAX] {
        let segment = DenseSegment { keys: &[], values: &[], tokens, calibration: None };
        let refused = exact_attention(&shape(), &[segment], &query);
        assert!(matches!(refused, Err(Error::Elements { .. })), "{tokens}: {refused:?}");
        let refused = plain_attention(&shape(), &[], &[], tokens, &query);
        assert!(matches!(refused, Err(Error::Elements { .. })), "{tokens}: {refused:?}");
    }
}

/// Strides whose sums wrap around to a place inside the tensor.
#[test]
fn rows_beyond_all_numbers() {
    let third = usize::MAX / 3 + 1;
    let wrapping = [
        RowLayout { tokens: 4, token_stride: third, head_stride: 0 },
        RowLayout { tokens: 2, token_stride: usize::MAX, head_stride: 1 },
        RowLayout { tokens: 1, token_stride: 0, head_stride: usize::MAX },
        RowLayout { tokens: usize::MAX, token_stride: 2, head_stride: 64 },
        RowLayout { tokens: 3, token_stride: 1 << 63, head_stride: 64 },
        RowLayout::head_major(usize::MAX, &shape()),
        RowLayout::token_major(usize::MAX, &shape()),
    ];
    let elements = vec![0.5; 4 * 2 * 64];
    let tensor = CpuTensor::F32(elements.clone());
    let is_refused = |error: &Error| matches!(error, Error::Elements { .. } | Error::Plan { .. });
    for rows in wrapping {
        let refused = rows.check("rows", elements.len(), &shape());
        assert!(refused.as_ref().is_err_and(is_refused), "{rows:?}: {refused:?}");

        let mut store = CpuStore::new(shape(), SegmentFormat::F16).unwrap();
        store.add_shard(1).unwrap();
        let write = kvpack::backend::SpanWrite {
            rows,
            tokens: Rows::Run(TokenRange::new(0, 1).unwrap()),
            pages: &[kvpack::plan::Page { shard: 0, index: 0 }],
            range_slot: 0,
            centre: None,
        };
        let elements = Elements::F32(&elements);
        let refused = quantize(&mut store, elements, elements, write);
        assert!(refused.as_ref().is_err_and(is_refused), "{rows:?}: {refused:?}");

        let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::f16()).unwrap();
        let refused = block_on(cache.extend(0, rows, &tensor, &tensor));
        assert!(refused.as_ref().is_err_and(is_refused), "{rows:?}: {refused:?}");
        let refused = block_on(cache.prefill(0, rows, &tensor, &tensor, &[]));
        assert!(refused.as_ref().is_err_and(is_refused), "{rows:?}: {refused:?}");
        assert_eq!(cache.tokens(0).unwrap(), 0);
    }
}

/// Rows that overlap: more of them lie in few elements than a kernel gets through in a day.
#[test]
fn rows_that_overlap() {
    let tensor = CpuTensor::F32(vec![0.5; 4 * 2 * 64]);
    for (token_stride, tokens) in [(0, usize::MAX), (1, 384), (63, 6)] {
        let rows = RowLayout { tokens, token_stride, head_stride: 64 };
        let refused = rows.check("rows", 4 * 2 * 64, &shape());
        assert!(matches!(refused, Err(Error::Plan { .. })), "{rows:?}: {refused:?}");
        let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::f16()).unwrap();
        let refused = block_on(cache.extend(0, rows, &tensor, &tensor));
        assert!(matches!(refused, Err(Error::Plan { .. })), "{rows:?}: {refused:?}");
    }
    // One row overlaps with none, and rows may touch.
    let one = RowLayout { tokens: 1, token_stride: 0, head_stride: 64 };
    assert_eq!(one.check("rows", 128, &shape()), Ok(()));
    let heads_apart = RowLayout { tokens: 4, token_stride: 64, head_stride: 256 };
    assert_eq!(heads_apart.check("rows", 512, &shape()), Ok(()));
}

#[test]
fn rotations_that_do_not_fit() {
    for rotation in [Rotation::hadamard(0), Rotation::hadamard(3), Rotation::dealt(512, 1), Rotation::dealt(128, 1)] {
        let mut row = [1.0; 64];
        assert!(matches!(rotation.rotate(&mut row), Err(Error::Format { .. })), "{rotation}");
        assert!(matches!(rotation.unrotate(&mut row), Err(Error::Format { .. })), "{rotation}");
        assert_eq!(row, [1.0; 64]);
        assert!(kvpack::cpu::hadamard(&mut row, 64, rotation, kvpack::format::Direction::Forward).is_err());
        let refused = saw_int4::quantize_row(&row, Some(rotation), RowRounding::F32);
        assert!(matches!(refused, Err(Error::Format { .. })), "{rotation}");
        let codebook = CodebookFormat { rotation, ..CodebookFormat::turboquant_prod(Bits::Two, 64) };
        assert!(matches!(codebook.encode_row(&row), Err(Error::Format { .. })), "{rotation}");
    }
    let fitting = CodebookFormat::turboquant_prod(Bits::Two, 64);
    assert!(fitting.encode_row(&[1.0; 64]).is_ok());
    assert!(matches!(fitting.encode_row(&[1.0; 63]), Err(Error::Format { .. })));
}

#[test]
fn groupings_of_nothing() {
    for grouping in [Grouping::ChannelTokens(0), Grouping::TokenChannels(0)] {
        let format = TensorFormat::Affine(AffineFormat::new(Bits::Two, grouping));
        let segment = SegmentFormat { key: format, value: format };
        assert!(matches!(segment.check(&shape()), Err(Error::Format { .. })));
        assert_eq!(format.ranges_per_tile(64), 0);
        format.range_index(64, 5, 6);
        assert!(segment.page_bytes(&shape()) > 0 && segment.bits_per_element(&shape()) > 0.0);
        assert!(CpuStore::new(shape(), segment).is_err());
    }
}

#[test]
fn codes_without_a_level() {
    let codebook = Codebook::of_format(Bits::Two, 64).unwrap();
    assert_eq!([4, 99, u32::MAX].map(|code| codebook.decode(code, 1.0)), [None; 3]);
}

/// Densities of any dimension have a codebook, soon: the 128 equations of 8 bits took 10 s.
#[test]
fn codebooks_of_any_dimension() {
    use kvpack::format::codebook::CoordinateDensity::{Gaussian, Sphere};
    let start = std::time::Instant::now();
    let mut densities =
        vec![(8, Sphere(3)), (8, Sphere(64)), (8, Gaussian(64)), (u32::MAX, Sphere(usize::MAX)), (0, Sphere(64))];
    for dimension in [0, 2, 3, 4096, 1 << 16, 1 << 32, usize::MAX] {
        densities.extend([(3, Sphere(dimension)), (3, Gaussian(dimension))]);
    }
    for (bits, density) in densities {
        let codebook = Codebook::lloyd_max(bits, density);
        assert!(codebook.centroids().is_sorted() && codebook.centroids().iter().all(|x| x.is_finite()), "{density:?}");
    }
    // Seconds; what was wrong here took minutes. A busy machine has time enough.
    assert!(start.elapsed().as_secs() < 100, "{:?}", start.elapsed());
}

#[test]
fn a_backend_refuses_what_it_cannot_hold() {
    let backend = Cpu::new();
    let mut store = backend.create_store(shape(), SegmentFormat::calibquant(Bits::Two)).unwrap();
    assert!(matches!(block_on(backend.reserve_ranges(&mut store, usize::MAX)), Err(Error::OutOfMemory { .. })));
    assert_eq!(backend.store_bytes(&store), 0);
    let tensor = CpuTensor::from_f32(vec![0.0; 64], ElementType::F32);
    let rows = RowLayout { tokens: 1, token_stride: usize::MAX, head_stride: usize::MAX };
    assert!(block_on(backend.first_non_finite(KeyOrValue::Key, &tensor, &rows, &shape(), 65504.0)).is_err());
}

/// However finely or coarsely a step is to be cut, it is the same step.
#[test]
fn splits_of_any_size() {
    use kvpack::plan::Split;
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::f16()).unwrap();
    let rows = RowLayout::token_major(700, &shape());
    let tensor = CpuTensor::F32((0..700 * 2 * 64).map(|i| (i as f32 * 0.3).sin()).collect());
    block_on(cache.extend(0, rows, &tensor, &tensor)).unwrap();
    let query = CpuTensor::F32((0..4 * 64).map(|i| (i as f32 * 0.7).cos()).collect());
    let expected = block_on(cache.attend(&query, ElementType::F32)).unwrap().to_f32();
    for (target_items, tile_step, max_tiles) in
        [(usize::MAX, 1, 1), (0, 0, 0), (1, usize::MAX, usize::MAX), (usize::MAX, usize::MAX, 1), (1, 3, usize::MAX)]
    {
        cache.set_split(Split { target_items, tile_step, max_tiles });
        let output = block_on(cache.attend(&query, ElementType::F32)).unwrap().to_f32();
        assert!(
            output.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5),
            "{target_items}, {tile_step}, {max_tiles}"
        );
    }
}

#[test]
fn layouts_of_tiles_that_there_are_not() {
    use kvpack::format::{TileLayout, TileOrder};
    for head_dim in [0, 1, 63, 512, 1 << 32, usize::MAX] {
        assert_eq!(TileLayout::new(&TensorFormat::F16, head_dim), Err(Error::HeadDim { given: head_dim }));
        for (from, to) in
            [(TileOrder::DotProduct, TileOrder::MmaFragment), (TileOrder::MmaFragment, TileOrder::DotProduct)]
        {
            let refused = from.convert(to, KeyOrValue::Key, &TensorFormat::F16, head_dim, &[]);
            assert_eq!(refused, Err(Error::HeadDim { given: head_dim }));
        }
    }
}

#[test]
fn flags_of_more_layers_than_models_have() {
    use kvpack::cpu::NonFiniteFlags;
    for layers in [kvpack::plan::MOST_LAYERS + 1, 1 << 32, usize::MAX / 2 + 1, usize::MAX] {
        assert!(matches!(NonFiniteFlags::new(layers), Err(Error::Limit { .. })), "{layers}");
    }
    assert_eq!(NonFiniteFlags::new(kvpack::plan::MOST_LAYERS).unwrap().layers(), kvpack::plan::MOST_LAYERS);
}

#[test]
fn spans_beyond_all_positions_are_not_placed() {
    use kvpack::backend::{FilledStores, NewSpan};
    let backend = Cpu::new();
    for (start, tokens) in [(0, usize::MAX), (usize::MAX, 1), (1 << 31, 1), (0, 1 << 32)] {
        let mut stores = FilledStores::new(&backend, shape(), &[SegmentFormat::F16]).unwrap();
        let refused = block_on(stores.place(&backend, &[NewSpan { store: 0, sequence: 0, start, tokens }]));
        assert!(matches!(refused, Err(Error::Limit { .. })), "{refused:?}");
        assert_eq!(stores.bytes(&backend), 0);
    }
}

/// The baseline gives the same bits whatever the number of threads.
#[test]
fn plain_attention_does_not_depend_on_threads() {
    let wave = |rate: f32, count: usize| (0..count).map(|i| (i as f32 * rate).sin()).collect::<Vec<f32>>();
    let (keys, values, query) = (wave(0.37, 3000 * 128), wave(0.53, 3000 * 128), wave(0.71, 4 * 64));
    let attend = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| plain_attention(&shape(), &keys, &values, 3000, &query)).unwrap()
    };
    let one = attend(1);
    assert!([2, 3, 7].into_iter().all(|threads| attend(threads) == one));
}
