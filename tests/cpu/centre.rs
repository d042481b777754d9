//! Keys that are stored less the centre of their sequence, on the CPU.

use futures::executor::block_on;
use kvpack::backend::{LARGEST_CENTRED_KEY, NewCentre, Packing, Storage};
use kvpack::cache::{KvCache, ModelCache, PromptSpan, Recipe, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor, DenseSegment, exact_attention, nmse};
use kvpack::format::{AffineFormat, Grouping, TensorFormat};
use kvpack::plan::{ElementType, QueryRun, RowLayout, TokenRange};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};

use any_backend::random_rows::Rows;

/// Random rows with a bias of 300 in three channels of every key, as projections with biases make them.
fn biased(shape: AttentionShape, tokens: usize, seed: u64) -> Rows {
    let mut rows = Rows::new(shape, tokens, seed);
    for key in rows.keys.chunks_exact_mut(shape.head_dim()) {
        [(9, 300.0), (20, -300.0), (41, 300.0)].into_iter().for_each(|(channel, bias)| key[channel] += bias);
    }
    rows
}

fn int4() -> SegmentFormat {
    let format = TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::Token));
    SegmentFormat { key: format, value: format }
}

fn filled(recipe: Recipe, rows: &Rows) -> KvCache<Cpu> {
    let mut cache = KvCache::new(Cpu::new(), rows.shape, 2, recipe).unwrap();
    let (keys, values) = (CpuTensor::F32(rows.keys.clone()), CpuTensor::F32(rows.values.clone()));
    let prompt = [PromptSpan::packed(TokenRange::new(0, rows.tokens).unwrap())];
    block_on(cache.prefill(0, rows.layout(), &keys, &values, &prompt)).unwrap();
    cache
}

/// NMSE of attention against attention over the rows as they were.
fn error(cache: &KvCache<Cpu>, rows: &Rows) -> f64 {
    let segment = DenseSegment { keys: &rows.keys, values: &rows.values, tokens: rows.tokens, calibration: None };
    let exact = exact_attention(&rows.shape, &[segment], &rows.query).unwrap();
    let output = block_on(cache.attend_to(&[0], &CpuTensor::F32(rows.query.clone()), ElementType::F32)).unwrap();
    nmse(&output.to_f32(), &exact.outputs)
}

/// In f64, attention over keys and over keys less their mean are one and the same, and log-sum-exps differ by q·m.
#[test]
fn softmax_forgets_the_centre() {
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let rows = biased(shape, 300, 1);
    let (head, head_dim) = (rows.tokens * 64, 64);
    let mean = |kv_head: usize, channel: usize| {
        let keys = rows.keys[kv_head * head..][..head].chunks(head_dim);
        (keys.take(64).map(|key| f64::from(key[channel])).sum::<f64>() / 64.0) as f32
    };
    let centre: Vec<f32> = (0..2 * head_dim).map(|i| mean(i / head_dim, i % head_dim)).collect();
    let centred: Vec<f32> =
        rows.keys.iter().enumerate().map(|(i, key)| key - centre[i / head * head_dim + i % head_dim]).collect();
    let attend = |keys: &[f32]| {
        let segment = DenseSegment { keys, values: &rows.values, tokens: rows.tokens, calibration: None };
        exact_attention(&shape, &[segment], &rows.query).unwrap()
    };
    let (plain, without) = (attend(&rows.keys), attend(&centred));
    let outputs: Vec<f32> = without.outputs.iter().map(|&x| x as f32).collect();
    assert!(nmse(&outputs, &plain.outputs) < 1e-6);
    for (h, (with, without)) in plain.lse.iter().zip(&without.lse).enumerate() {
        let query = &rows.query[h * head_dim..][..head_dim];
        let centre = &centre[h / 2 * head_dim..][..head_dim];
        let product: f64 = query.iter().zip(centre).map(|(&q, &m)| f64::from(q) * f64::from(m)).sum();
        assert!((with - without - product / 8.0).abs() < 1e-4, "{with} {without} {product}");
    }
}

/// A bias ruins ranges of single tokens, and a centre mends them.
#[test]
fn a_bias_costs_nothing_where_keys_are_centred() {
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let (plain, rows) = (Rows::new(shape, 700, 2), biased(shape, 700, 2));
    let formats = [
        (int4(), 1.5),
        (SegmentFormat::saw_int4(), 1.5),
        (SegmentFormat::turboquant(Bits::Four, 64), 1.5),
        (SegmentFormat::turboquant_renormalized(Bits::Three, 64), 1.5),
        (SegmentFormat::turboquant_prod(Bits::Four, 64), 1.5),
    ];
    for (format, more) in formats {
        let recipe = || Recipe::pack_all(format);
        let biased = error(&filled(recipe(), &rows), &rows);
        let centred = error(&filled(recipe().with_centre(), &rows), &rows);
        let without_bias = error(&filled(recipe().with_centre(), &plain), &plain);
        assert!(centred < biased / 5.0, "{format}: {centred} and {biased}");
        assert!(centred < more * without_bias, "{format}: {centred} and {without_bias}");
    }
}

/// What leaves a cache is in terms of the keys that it was given.
#[test]
fn states_and_keys_come_back_as_if_nothing_was_taken() {
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let rows = biased(shape, 200, 3);
    let cache = filled(Recipe::f16().with_centre(), &rows);
    let stored = &cache.dequantize(0).unwrap()[0];
    let far = stored.keys.to_f32().iter().zip(&rows.keys).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
    // Half a unit of f16 below 64, where the sink is; a bias of 300 alone would have cost 0.125.
    assert!(far <= 0.03125, "{far}");

    let segment = DenseSegment { keys: &rows.keys, values: &rows.values, tokens: 200, calibration: None };
    let exact = exact_attention(&shape, &[segment], &rows.query).unwrap();
    let query = CpuTensor::F32(rows.query.clone());
    let empty = KvCache::new(Cpu::new(), shape, 1, Recipe::f16().with_centre()).unwrap();
    let states = block_on(empty.attend_states(&[QueryRun::decode(0)], &query)).unwrap();
    assert_eq!(states.lse.to_f32(), [f32::NEG_INFINITY; 4], "nothing is stored, and there is no centre");
    let states = block_on(cache.attend_states(&[QueryRun::decode(0)], &query)).unwrap();
    for (got, want) in states.lse.to_f32().iter().zip(&exact.lse) {
        assert!((f64::from(*got) - want).abs() < 0.02, "{got} {want}");
    }
}

/// An engine's own centre, and what becomes of centres when sequences are cut, shared and forgotten.
#[test]
fn centres_belong_to_sequences() {
    let shape = AttentionShape::new(2, 2, 64).unwrap();
    let mut cache = KvCache::new(Cpu::new(), shape, 3, Recipe::pack_all(int4()).with_centre()).unwrap();
    let centre = |x: f32| CpuTensor::F32(vec![x; 128]);
    let centres = |cache: &KvCache<Cpu>| -> Vec<f32> {
        let store = cache.stores()[1];
        (0..store.centre_slots()).map(|slot| store.centre(slot).unwrap()[0]).collect()
    };
    block_on(cache.set_centre(1, &centre(300.0))).unwrap();
    assert_eq!(centres(&cache), [300.0, 0.0, 0.0]);
    assert!(matches!(block_on(cache.set_centre(1, &centre(1.0))), Err(Error::Plan { .. })), "it has one");
    assert!(matches!(block_on(cache.set_centre(3, &centre(1.0))), Err(Error::Sequence { .. })));
    assert!(matches!(block_on(cache.set_centre(0, &centre(f32::NAN))), Err(Error::NotFinite { .. })));
    let short = CpuTensor::F32(vec![1.0; 64]);
    assert!(matches!(block_on(cache.set_centre(0, &short)), Err(Error::Elements { .. })));

    // Tokens that equal the centre are stored exactly, whatever its size; the centre outlives a cut.
    let token = |x: f32| CpuTensor::F32(vec![x; 128]);
    let layout = RowLayout::token_major(1, &shape);
    block_on(cache.append_to(&[1], layout, &token(300.0), &token(0.5))).unwrap();
    cache.truncate(1, 0).unwrap();
    block_on(cache.append_to(&[1], layout, &token(301.0), &token(0.5))).unwrap();
    assert_eq!(cache.dequantize(1).unwrap()[0].keys.to_f32(), [301.0; 128]);
    assert_eq!(centres(&cache), [300.0, 0.0, 0.0]);

    // A fork shares it, and it is free when neither needs it.
    cache.fork(1, 2).unwrap();
    cache.clear(1).unwrap();
    block_on(cache.append_to(&[0], layout, &token(7.0), &token(0.5))).unwrap();
    assert_eq!(centres(&cache), [300.0, 7.0, 0.0], "a sequence that begins with a decoded token takes its key");
    cache.clear(2).unwrap();
    block_on(cache.append_to(&[2], layout, &token(8.0), &token(0.5))).unwrap();
    assert_eq!(centres(&cache), [8.0, 7.0, 0.0]);
    assert_eq!(cache.stores()[0].centre_slots(), 3, "every store has all of them");
}

/// A model's layers each have a centre of their own, and a step that is abandoned leaves none.
#[test]
fn layers_have_centres_of_their_own() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let recipe = || Recipe::pack_all(int4()).with_centre();
    let mut cache = ModelCache::new(&Cpu::new(), &[(shape, recipe()), (shape, recipe())], 2).unwrap();
    let row = |x: f32| CpuTensor::F32(vec![x; 64]);
    let centres = |cache: &ModelCache<Cpu>, layer: usize| {
        let store = cache.stores(layer).unwrap()[0];
        (0..2).map(|slot| store.centre(slot).unwrap()[0]).collect::<Vec<f32>>()
    };
    block_on(cache.set_centres(1, &[&row(5.0), &row(6.0)])).unwrap();
    assert!(matches!(block_on(cache.set_centres(0, &[&row(5.0)])), Err(Error::Plan { .. })));
    assert_eq!((centres(&cache, 0), centres(&cache, 1)), (vec![5.0, 0.0], vec![6.0, 0.0]));
    for kept in [false, true] {
        let runs = [TokenRun::decode(0)];
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        for (layer, x) in [2.0, 3.0].into_iter().enumerate() {
            let key = row(if kept { x } else { 99.0 });
            block_on(cache.store(layer, RowLayout::token_major(1, &shape), &key, &row(1.0))).unwrap();
            let states = block_on(cache.attend_states(layer, &CpuTensor::F32(vec![1.0; 128]))).unwrap();
            // One token: its score, 64 · x / 8.
            let score = if kept { 8.0 * x } else { 8.0 * 99.0 };
            assert_eq!(states.lse.to_f32(), [score; 2]);
        }
        if kept { cache.commit().unwrap() } else { cache.abandon() }
    }
    assert_eq!((centres(&cache, 0), centres(&cache, 1)), (vec![5.0, 2.0], vec![6.0, 3.0]));
}

/// More sequences begin at once than a table first has room for, with runs of their own among others' rows.
#[test]
fn many_sequences_begin_at_once() {
    const SEQUENCES: usize = 20;
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let recipe = Recipe::pack_all(int4()).with_centre();
    let mut cache = ModelCache::new(&Cpu::new(), &[(shape, recipe)], SEQUENCES).unwrap();
    let room = |cache: &ModelCache<Cpu>| cache.step_kind(0).unwrap().layout.stores()[1].centres;
    assert_eq!(room(&cache), 8);
    // Sequence i has i + 1 rows, of 0, 2, 4, …: their mean is i.
    let runs: Vec<TokenRun> = (0..SEQUENCES).map(|i| TokenRun::chunk(i, i + 1)).collect();
    let rows: Vec<f32> = (0..SEQUENCES).flat_map(|i| (0..=i).map(|row| 2.0 * row as f32)).collect();
    let keys = CpuTensor::F32(rows.iter().flat_map(|&x| [x; 64]).collect());
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    assert_eq!(cache.open_steps().unwrap().len(), 1);
    block_on(cache.store(0, RowLayout::token_major(rows.len(), &shape), &keys, &keys)).unwrap();
    cache.commit().unwrap();
    assert_eq!(room(&cache), 32);
    for store in cache.stores(0).unwrap() {
        for slot in 0..SEQUENCES {
            // 1 / n is rounded.
            let mean = store.centre(slot).unwrap()[63];
            assert!((mean - slot as f32).abs() < 1e-5, "{slot}: {mean}");
        }
    }
}

#[test]
fn ranges_per_channel_take_no_centre() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let refused = |recipe: Recipe| {
        let error = KvCache::new(Cpu::new(), shape, 1, recipe.with_centre()).err().unwrap();
        assert!(matches!(error, Error::Format { .. }) && error.to_string().contains("for every channel"), "{error}");
    };
    refused(Recipe::calibquant(Bits::Two));
    refused(Recipe::pack_all(int4()).with_store(SegmentFormat::per_channel(Bits::Four)).unwrap().0);
    let mut store = Cpu::new().create_store(shape, SegmentFormat::calibquant(Bits::Two)).unwrap();
    assert!(matches!(block_on(Cpu::new().reserve_centres(&mut store, 1)), Err(Error::Format { .. })));
    let plain = KvCache::new(Cpu::new(), shape, 1, Recipe::pack_all(int4()));
    assert!(matches!(block_on(plain.unwrap().set_centre(0, &CpuTensor::F32(vec![0.0; 64]))), Err(Error::Plan { .. })));
}

/// What is not finite counts as 0 in a mean, and places that are not there are refused.
#[test]
fn means_are_of_what_can_be_stored() {
    let (cpu, shape) = (Cpu::new(), AttentionShape::new(2, 1, 64).unwrap());
    let mut store = cpu.create_store(shape, SegmentFormat::F16).unwrap();
    block_on(cpu.reserve_centres(&mut store, 2)).unwrap();
    let mut keys = vec![1.0f32; 4 * 64];
    (keys[0], keys[65], keys[130]) = (f32::NAN, f32::NEG_INFINITY, 40000.0);
    let (rows, keys) = (RowLayout::token_major(4, &shape), CpuTensor::F32(keys));
    let centre = |start, end, slot| NewCentre {
        rows,
        tokens: TokenRange::new(start, end).unwrap(),
        slot,
        largest: LARGEST_CENTRED_KEY,
    };
    cpu.key_mean(&mut store, &keys, centre(0, 4, 1)).unwrap();
    assert_eq!(store.centre(1).unwrap()[..4], [0.75, 0.75, 0.75, 1.0]);
    assert_eq!(store.centre(0).unwrap(), [0.0; 64]);
    for (what, centre) in [("slot", centre(0, 4, 2)), ("token", centre(1, 5, 0))] {
        assert!(matches!(cpu.key_mean(&mut store, &keys, centre), Err(Error::Plan { .. })), "{what}");
    }
}

/// A key that is flagged and stored as 0 is one of 0 for the centre, too: it would be in every later key.
#[test]
fn flagged_keys_count_as_zero_in_centres() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let rows = Rows::new(shape, 21, 5);
    let row = RowLayout::token_major(1, &shape);
    let cache = |first: f32| {
        let recipe = Recipe::pack_all(SegmentFormat::saw_int4()).with_centre();
        let mut cache = KvCache::new(Cpu::new(), shape, 1, recipe).unwrap();
        for (token, (key, value)) in rows.keys.chunks(64).zip(rows.values.chunks(64)).enumerate() {
            let mut key = key.to_vec();
            if token == 0 {
                key[0] = first;
            }
            let [key, value] = [key, value.to_vec()].map(CpuTensor::F32);
            block_on(cache.append_to(&[0], row, &key, &value)).unwrap();
        }
        cache
    };
    let output = |cache: &KvCache<Cpu>| {
        block_on(cache.attend_to(&[0], &CpuTensor::F32(rows.query.clone()), ElementType::F32)).unwrap().to_f32()
    };
    let sound = cache(0.0);
    assert_eq!(block_on(sound.non_finite()).unwrap(), []);
    // Half of what rotated 4-bit keys of 64 channels hold, and what f16 holds.
    for first in [2048.0, 3e4, 4e4, f32::NAN] {
        let flagged = cache(first);
        assert_eq!(block_on(flagged.non_finite()).unwrap().len(), 1, "{first}");
        assert_eq!(output(&flagged), output(&sound), "{first}");
    }
}
