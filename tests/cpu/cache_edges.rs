//! Edges of a cache on the CPU.

use kvpack::cache::{Appended, PromptSpan};
use kvpack::cpu::Cpu;
use kvpack::format::KeyOrValue;
use kvpack::plan::TokenRange;
use kvpack::{SegmentFormat, TILE_TOKENS};
use pollster::block_on;

use any_backend::cache_edges;
use any_backend::cache_edges::{Edge, recipe, shape};

#[test]
fn truncation_leaves_nothing() {
    cache_edges::truncation_leaves_nothing(&Cpu::new());
}

#[test]
fn the_largest_elements_are_taken() {
    cache_edges::the_largest_elements_are_taken(&Cpu::new());
}

#[test]
fn steps_write_into_outputs() {
    cache_edges::steps_write_into_outputs(&Cpu::new());
}

/// With shards of one page there is never a page that was not asked for.
#[test]
fn every_page_that_is_needed_is_reserved() {
    for name in ["f16", "int8", "saw-int4", "kivi:2", "int8+sink=130"] {
        for before in [0, 1, 127, 128, 129, 255] {
            for more in [1, 2, 127, 128, 129, 130, 256, 257] {
                let recipe = recipe(name);
                // A page of f16 is the largest there is.
                let page = SegmentFormat::F16.tensor_page_bytes(KeyOrValue::Key, &shape());
                let mut edge = Edge::new(Cpu::new().with_max_shard_bytes(page as u64), recipe);
                if before > 0 {
                    edge.extend(0, before).unwrap();
                    block_on(edge.cache.pack_windows(0)).unwrap();
                }
                edge.extend(before, more).unwrap_or_else(|error| panic!("{name}, {before} and {more}: {error}"));
                block_on(edge.cache.pack_windows(0)).unwrap();
                edge.append(before + more, 2).unwrap_or_else(|error| panic!("{name}, {before} and {more}: {error}"));
                assert_eq!(edge.cache.tokens(0), Ok(before + more + 2));
                edge.attend().unwrap();
            }
        }
    }
}

/// Pages that a fork shares are copied before they are written: one more is needed then.
#[test]
fn pages_that_are_shared_are_reserved_too() {
    for more in [1, 127, 128, 129] {
        let page = SegmentFormat::F16.tensor_page_bytes(KeyOrValue::Key, &shape());
        let backend = Cpu::new().with_max_shard_bytes(page as u64);
        let mut cache = kvpack::KvCache::new(backend, shape(), 2, recipe("f16")).unwrap();
        let rows = |tokens: usize| {
            let elements = (0..tokens * 64).map(|i| (i as f32 * 0.3).sin()).collect();
            (kvpack::plan::RowLayout::token_major(tokens, &shape()), cache_edges::host(elements))
        };
        let (layout, tensor) = rows(130);
        block_on(cache.extend(0, layout, &tensor, &tensor)).unwrap();
        cache.fork(0, 1).unwrap();
        let (layout, tensor) = rows(more);
        block_on(cache.extend(1, layout, &tensor, &tensor)).unwrap();
        assert_eq!([cache.tokens(0), cache.tokens(1)], [Ok(130), Ok(130 + more)]);
    }
}

/// Tiles that are packed one after another become one span, whatever the ranges of a prompt would span.
#[test]
fn packed_windows_join() {
    for name in ["kivi:2", "int8-symmetric-channel", "calibquant:2+window=0", "calibquant:1+window=0+tau=0,3"] {
        let recipe = recipe(name);
        let Appended::Tiles { to, .. } = recipe.appended() else { panic!("{name} packs tiles") };
        let mut edge = Edge::new(Cpu::new(), recipe.clone());
        edge.extend(0, 8 * TILE_TOKENS + 5).unwrap();
        block_on(edge.cache.pack_windows(0)).unwrap();
        let packed = |edge: &Edge<Cpu>| -> Vec<usize> {
            let spans = edge.spans();
            assert_eq!(spans.iter().map(|(tokens, _)| tokens).sum::<usize>(), edge.cache.tokens(0).unwrap(), "{name}");
            let packed = spans.into_iter().filter(|(_, format)| *format == recipe.stores()[to.index()].format);
            packed.map(|(tokens, _)| tokens).collect()
        };
        let spans = packed(&edge);
        assert!(spans.len() == 1 && spans[0] >= 4 * TILE_TOKENS, "{name}: {spans:?}");
        edge.append(8 * TILE_TOKENS + 5, 2 * TILE_TOKENS).unwrap();
        let later = packed(&edge);
        assert!(later.len() == 1 && later[0] > spans[0], "{name}: {later:?}");
    }
}

/// Every format takes the largest elements that it says, in any place, and gives back finite ones that are near, in f16
/// too; more are refused.
#[test]
fn every_format_holds_what_it_takes() {
    for recipe in kvpack::cache::ModelRecipe::all() {
        let (name, of_layer) = (recipe.to_string(), recipe.layer(0, &shape()));
        let largest = |which| of_layer.packed().format.tensor(which).largest_element(64);
        let rows = |key: f32, value: f32| {
            let layout = kvpack::plan::RowLayout::token_major(300, &shape());
            // A row all of one sign, one of both, and one with a single element: the longest norms and the
            // widest spreads.
            let element = |i: usize, most: f32| match i / 64 % 3 {
                0 => most,
                1 => [most, -most][i % 2],
                _ => most * f32::from(u8::from(i % 64 == 5)),
            };
            let tensor = |most| cache_edges::host((0..300 * 64).map(|i| element(i, most)).collect());
            (layout, tensor(key), tensor(value))
        };
        let mut cache = kvpack::KvCache::new(Cpu::new(), shape(), 1, of_layer.clone()).unwrap();
        for (key, value) in [(1.001, 1.0), (1.0, 1.001)] {
            let (layout, keys, values) = rows(key * largest(KeyOrValue::Key), value * largest(KeyOrValue::Value));
            let whole = [PromptSpan::f16(TokenRange::new(0, 300).unwrap())];
            let refused = block_on(cache.prefill(0, layout, &keys, &values, &whole));
            assert!(matches!(refused, Err(kvpack::Error::NotFinite { .. })), "{name}: {refused:?}");
        }
        let (layout, keys, values) = rows(largest(KeyOrValue::Key), largest(KeyOrValue::Value));
        block_on(cache.extend(0, layout, &keys, &values)).unwrap();
        block_on(cache.pack_windows(0)).unwrap();
        for span in cache.dequantize(0).unwrap() {
            for (which, stored) in [(KeyOrValue::Key, &span.keys), (KeyOrValue::Value, &span.values)] {
                let stored = stored.to_f32();
                assert!(stored.iter().all(|x| half::f16::from_f32(*x).is_finite()), "{name}, {which}");
                // What is stored is as long as what was given, but for what codes of few bits lose.
                let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                let given =
                    norm(&stored) / (f64::from(largest(which)) * (span.tokens as f64 * 64.0 * 2.0 / 3.0).sqrt());
                // One bit of CalibQuant shrinks its ranges.
                let least = if name == "calibquant:1" { 0.2 } else { 0.6 };
                assert!((least..1.7).contains(&given), "{name}, {which}: {given}");
            }
        }
        let query = cache_edges::host(vec![1e-6; 2 * 64]);
        let output = block_on(cache.attend(&query, kvpack::plan::ElementType::F16)).unwrap();
        assert!(output.to_f32().iter().all(|x| x.is_finite()), "{name}");
    }
}
