//! Sequences as bytes: what comes back, and what bytes of others' making may do.

use kvpack::backend::{Forward, Forwarding, QueryPrecision};
use kvpack::cache::{Budget, Growth, KvCache, ModelCache, ModelRecipe, Recipe, TokenRun, write_checksum};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::format::sketch::Sketch;
use kvpack::format::{AffineFormat, Grouping, Rotation, TensorFormat};
use kvpack::plan::{ElementType, QueryRun, RowLayout};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};
use pollster::block_on;

use any_backend::model_steps::{LAYERS, shape};
use any_backend::random_rows::Random;
use any_backend::swapped_bytes::{self, cache, filled};

#[test]
fn sequences_come_back_from_bytes() {
    swapped_bytes::check(&Cpu::new());
}

fn bytes_of(text: &str, count: impl Fn(usize) -> usize) -> Vec<u8> {
    let mut from = filled(&Cpu::new(), text, count);
    let swapped = block_on(from.swap_out(0)).unwrap();
    block_on(from.swapped_to_bytes(&swapped)).unwrap()
}

fn refused(cache: &ModelCache<Cpu>, bytes: &[u8]) -> String {
    match block_on(cache.swapped_from_bytes(bytes)) {
        Err(Error::Buffer { what: "the bytes of a sequence", reason }) => reason,
        other => panic!("{other:?}"),
    }
}

/// Damage of any kind is found, wherever it is.
#[test]
fn damaged_bytes_are_refused() {
    let (whole, of) = (bytes_of("saw-int4", |layer| 20 + 60 * layer), cache(&Cpu::new(), "saw-int4"));
    let mut random = Random::new(4);
    for at in (0..64).chain((0..200).map(|_| random.below(whole.len()))) {
        refused(&of, &whole[..at]);
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        refused(&of, &damaged);
    }
    let swapped_words = [&whole[..40], &whole[48..56], &whole[40..48], &whole[56..]].concat();
    assert!(refused(&of, &swapped_words).contains("checksum"));
    assert!(refused(&of, &[whole.as_slice(), &[0]].concat()).contains("checksum"));
    let mut longer = [whole.as_slice(), &[0]].concat();
    write_checksum(&mut longer);
    assert!(refused(&of, &longer).contains("follow"));
    let mut newer = whole.clone();
    newer[8] = 2;
    assert!(refused(&of, &newer).contains("version 2"));
    assert!(block_on(of.swapped_from_bytes(&whole)).is_ok());
}

/// A backend whose pages lie otherwise.
#[derive(Clone)]
struct Other(Cpu);

impl Forward for Other {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.0
    }

    fn span_layout(&self) -> &'static str {
        "other"
    }
}

/// Bytes of other layers, formats or backends are refused, and say why.
#[test]
fn bytes_of_other_caches_are_refused() {
    let bytes = bytes_of("saw-int4", |_| 50);
    for other in ["f16", "int8", "saw-int4+centre", "saw-int4+layers=1:f16"] {
        assert!(refused(&cache(&Cpu::new(), other), &bytes).contains("was stored as"), "{other}");
    }
    let recipe: ModelRecipe = "saw-int4".parse().unwrap();
    for layers in [1, LAYERS - 1, LAYERS + 1] {
        let layers = vec![(shape(), recipe.layer(0, &shape())); layers];
        refused(&ModelCache::new(&Cpu::new(), &layers, 1).unwrap(), &bytes);
    }
    let elsewhere = cache(&Forwarding(Other(Cpu::new())), "saw-int4");
    let reason = block_on(elsewhere.swapped_from_bytes(&bytes)).unwrap_err().to_string();
    assert!(reason.contains("'cpu 1 little'") && reason.contains("'other 1 little'"), "{reason}");
    // What attends otherwise is stored alike.
    let layers = vec![(shape(), recipe.layer(0, &shape()).with_query(QueryPrecision::Int8)); LAYERS];
    block_on(ModelCache::new(&Cpu::new(), &layers, 1).unwrap().swapped_from_bytes(&bytes)).unwrap();
}

/// Codes that were rotated or sketched by other signs are other codes, though their format has the same name.
#[test]
fn bytes_of_other_seeds_are_refused() {
    let rotated = |seed| {
        let rotation = Rotation::randomized(64, seed);
        let turned = AffineFormat::new(Bits::Four, Grouping::Token).rotated(rotation);
        SegmentFormat { key: TensorFormat::F16, value: TensorFormat::Affine(turned) }
    };
    let sketched = |seed| {
        let mut format = SegmentFormat::turboquant_prod(Bits::Three, 64);
        if let TensorFormat::Codebook(codebook) = &mut format.key {
            codebook.sketch = Some(Sketch { seed });
        }
        format
    };
    for of in [&rotated as &dyn Fn(u32) -> SegmentFormat, &sketched] {
        let new = |seed| {
            let layers = vec![(AttentionShape::new(2, 1, 64).unwrap(), Recipe::pack_all(of(seed)))];
            ModelCache::new(&Cpu::new(), &layers, 1).unwrap()
        };
        let mut from = new(7);
        let runs = [TokenRun::chunk(0, 9)];
        block_on(from.reserve_for_append(&runs)).unwrap();
        from.begin_append(&runs).unwrap();
        let rows = CpuTensor::F32(vec![0.5; 9 * 64]);
        let layout = RowLayout::token_major(9, &AttentionShape::new(2, 1, 64).unwrap());
        block_on(from.store(0, layout, &rows, &rows)).unwrap();
        from.commit().unwrap();
        let swapped = block_on(from.swap_out(0)).unwrap();
        let bytes = block_on(from.swapped_to_bytes(&swapped)).unwrap();
        block_on(new(7).swapped_from_bytes(&bytes)).unwrap();
        let reason = refused(&new(8), &bytes);
        assert!(reason.contains(" 7") && reason.contains(" 8"), "{reason}");
    }
}

/// Bytes that somebody forged are refused, or make a sequence that can be used and removed.
#[test]
fn forged_bytes_do_no_harm() {
    let mut random = Random::new(9);
    for text in ["saw-int4", "calibquant:2+window=0", "saw-int4+window=1+centre"] {
        for parted in [false, true] {
            let whole = bytes_of(text, |layer| if parted { 20 + 60 * layer } else { 50 });
            let mut entered = 0;
            for _ in 0..150 {
                let mut forged = whole.clone();
                // Numbers lie before the contents of the layers, and between them.
                for _ in 0..1 + random.below(3) {
                    let below = if random.below(4) > 0 { 400 } else { forged.len() };
                    let at = random.below(below);
                    forged[at] = [0, 1, 2, 127, 128, 255, random.below(256) as u8][random.below(7)];
                }
                write_checksum(&mut forged);
                entered += usize::from(enters(text, &forged));
            }
            assert!(entered > 0, "{text}: some change contents alone");
        }
    }
}

/// Uses a sequence of these bytes if there is one. Says whether there is.
fn enters(text: &str, bytes: &[u8]) -> bool {
    let backend = Cpu::new().with_memory_limit(1 << 22);
    let mut cache = cache(&backend, text).with_budget(Budget::of_bytes(1 << 22).growing(Growth::Exact));
    let swapped = match block_on(cache.swapped_from_bytes(bytes)) {
        Ok(swapped) => swapped,
        Err(error) => {
            assert!(matches!(error, Error::Buffer { .. } | Error::Limit { .. }), "{error:?}");
            return false;
        }
    };
    if block_on(cache.swap_in(0, &swapped)).is_err() {
        return false;
    }
    let token = CpuTensor::F32(vec![0.5; 2 * 64]);
    for _ in 0..2 {
        let runs = [TokenRun::decode(0)];
        if block_on(cache.reserve_for_append(&runs)).is_err() || cache.begin_append(&runs).is_err() {
            break;
        }
        for layer in 0..LAYERS {
            block_on(cache.store(layer, RowLayout::token_major(1, &shape()), &token, &token)).unwrap();
        }
        cache.commit().unwrap();
    }
    let _ = block_on(cache.pack_windows(0));
    if cache.begin_attend(&[QueryRun::decode(0)]).is_ok() {
        let queries = CpuTensor::F32(vec![0.5; 4 * 64]);
        let _ = block_on(cache.attend(LAYERS - 1, &queries, ElementType::F32));
        cache.abandon();
    }
    for layer in 0..LAYERS {
        cache.dequantize(layer, 0).unwrap();
        block_on(cache.positions(layer, 0)).unwrap();
    }
    cache.fork(0, 1).unwrap();
    let length = cache.length(0).unwrap();
    let _ = cache.truncate(0, length / 2);
    [0, 1].into_iter().for_each(|sequence| cache.clear(sequence).unwrap());
    assert_eq!(cache.memory().in_use_bytes(), 0);
    true
}

/// The same for the cache of one layer.
#[test]
fn one_layer_comes_back_from_bytes() {
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, recipe).unwrap();
    let rows = CpuTensor::F32((0..7 * 2 * 64).map(|at| (at as f32).sin()).collect());
    block_on(cache.extend(0, RowLayout::token_major(7, &shape()), &rows, &rows)).unwrap();
    let before = cache.dequantize(0).unwrap().remove(0).keys.to_f32();
    let swapped = block_on(cache.swap_out(0)).unwrap();
    let bytes = block_on(cache.swapped_to_bytes(&swapped)).unwrap();
    block_on(cache.swap_in(0, &block_on(cache.swapped_from_bytes(&bytes)).unwrap())).unwrap();
    assert_eq!(cache.dequantize(0).unwrap().remove(0).keys.to_f32(), before);
}
