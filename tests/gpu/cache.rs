//! The cache on the wgpu backend against the naive model. `gpu_device` says on which adapter.

use std::cell::RefCell;

use kvpack::cache::{Appended, Recipe};
use kvpack::format::{AffineFormat, CodebookFormat, Grouping, TensorFormat};
use kvpack::wgpu::Wgpu;
use kvpack::{AttentionShape, TILE_TOKENS};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::gpu_device;
use any_backend::cache_model::decode_loop::{Filled, formats, reuse_pages};
use any_backend::cache_model::recipes::recipes;
use any_backend::cache_model::{Operation, Subject, cases, check, check_losing, short_operations};
use any_backend::{growing_stores, rounding};

/// Three pages of the f16 store to a shard, so that decode steps meet several bindings.
fn shard_bytes(shape: &AttentionShape) -> u64 {
    (3 * TILE_TOKENS * 2 * shape.kv_heads() * shape.head_dim()) as u64
}

/// Operations of one case.
const OPERATIONS: usize = 125;

/// A thousand operations on devices that are lost among them. Half of the calls were begun and dropped before. `PROPTEST_CASES=80` makes ten thousand.
#[test]
fn the_cache_agrees_with_the_model() {
    let device = RefCell::new(gpu_device::fresh());
    let case = (
        short_operations(OPERATIONS),
        prop::sample::select(recipes()),
        prop::sample::select(vec![(2, 2, 64), (3, 1, 64), (4, 2, 80)]),
        any::<u64>(),
    );
    let cases = cases(if gpu_device::is_brief() { 2 } else { 1000 / OPERATIONS as u32 });
    let agrees = TestRunner::new(cases).run(&case, |(operations, recipe, (query_heads, kv_heads, head_dim), seed)| {
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim).unwrap();
        let open = || device.borrow().clone().with_binding_limit(shard_bytes(&shape));
        let lose = |lost: &Wgpu| {
            lost.device().destroy();
            device.replace(gpu_device::fresh());
        };
        check_losing(Subject { open, lose, most_tokens: 400 }, shape, &recipe, &operations, seed);
        Ok(())
    });
    agrees.unwrap();
}

#[test]
fn what_grows_by_little_is_what_was_reserved() {
    growing_stores::check(&gpu_device::shared());
}

/// What a tensor is packed by.
fn kind(tensor: TensorFormat) -> &'static str {
    match tensor {
        TensorFormat::F16 => "f16",
        TensorFormat::Affine(AffineFormat { rotation: Some(_), .. }) => "rotated",
        TensorFormat::Affine(AffineFormat { grouping, .. }) => match grouping {
            Grouping::Channel => "channels",
            Grouping::ChannelTokens(_) => "tokens of channels",
            Grouping::Token => "tokens",
            Grouping::TokenChannels(_) => "channels of tokens",
        },
        TensorFormat::Codebook(CodebookFormat { sketch: Some(_), .. }) => "sketch",
        TensorFormat::Codebook(_) => "codebook",
    }
}

/// The first recipe of each family: what keys and values are packed by where tokens are appended to, when they are packed,
/// and whether keys are centred. The tests of the CPU have all recipes.
fn one_of_each_family() -> Vec<Recipe> {
    let mut families = Vec::new();
    let is_new = |recipe: &Recipe| {
        let (store, when) = match recipe.appended() {
            Appended::Keep => (recipe.packed(), "never"),
            Appended::AtOnce(to) => (&recipe.stores()[to.index()], "at once"),
            Appended::Tiles { to, .. } => (&recipe.stores()[to.index()], "by windows"),
        };
        let family = (kind(store.format.key), kind(store.format.value), when, recipe.is_centred());
        let is_new = !families.contains(&family);
        families.push(family);
        is_new
    };
    recipes().into_iter().filter(is_new).collect()
}

/// Two full windows in a row, at every family of recipes: the second joins the first where ranges belong to tiles. Tokens
/// come one by one where windows become full, and in chunks up to there.
#[test]
fn windows_are_packed_when_they_are_full() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let recipes = one_of_each_family();
    assert!(recipes.len() > 12, "{}", recipes.len());
    for recipe in recipes {
        let newer = if let Appended::Tiles { newer, .. } = recipe.appended() { newer } else { 0 };
        let prefill = Operation::Prefill { sequence: 0, spans: vec![(10, 0), (128, 1)], half: false };
        let chunk = |sequence, tokens| Operation::Extend { sequence, tokens, half: false };
        let append = |tokens| Operation::Append { tokens, sequences: 0b11, half: false };
        let operations = [
            prefill,
            chunk(0, newer + 120),
            chunk(1, newer + 120),
            append(7),
            append(1),
            chunk(0, 120),
            chunk(1, 120),
            append(7),
            append(2),
        ];
        check(gpu_device::shared(), shape, &recipe, &operations, 1);
    }
}

/// Appended tokens are those of a prefill, bit for bit.
#[test]
fn a_decode_loop_stores_what_a_prefill_stores() {
    for (format, tokens) in formats().into_iter().zip([300, 260, 200, 130]) {
        Filled::new(gpu_device::shared, format, tokens).compare_decoded();
    }
}

#[test]
fn what_an_earlier_sequence_left_does_not_count() {
    reuse_pages(gpu_device::shared);
}

#[test]
fn outputs_are_rounded_to_even() {
    rounding::outputs_are_rounded_to_even(gpu_device::shared());
}
