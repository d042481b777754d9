//! The fuzz targets as functions of bytes: `cargo fuzz run <name>` runs them under libFuzzer, and the test `corpus` of
//! this package replays `fuzz/corpus` through them on stable Rust.
//!
//! Each may refuse what it is given, but panic only over a mistake in kvpack. It returns whether it took its input: a
//! run that takes none has fuzzed nothing but the first check.

mod cache;
pub mod mutate;
pub mod sequence;
pub mod weights;

use kvpack::AttentionShape;
use kvpack::cache::{Appended, KvCache, ModelRecipe};
use kvpack::cpu::Cpu;
use kvpack::format::HEAD_DIMS;
use kvpack_cli::readers;

pub use cache::cache;

/// Something that takes any bytes, and whether it took them.
pub type Target = fn(&[u8]) -> bool;

/// Every target by its name, which is that of its folder in the corpus.
pub const TARGETS: [(&str, Target); 7] = [
    ("cache", cache),
    ("dump", dump),
    ("golden", golden),
    ("model", model),
    ("recipe", recipe),
    ("sequence", read_sequence),
    ("weights", read_weights),
];

/// The reader of sequences that were swapped out.
///
/// # Panics
/// As [`sequence::enters`].
pub fn read_sequence(bytes: &[u8]) -> bool {
    sequence::enters(bytes)
}

/// The reader of quantised checkpoints.
///
/// # Panics
/// As [`weights::read`].
pub fn read_weights(bytes: &[u8]) -> bool {
    weights::read(bytes)
}

/// The reader of dumps of keys, values and queries.
pub fn dump(bytes: &[u8]) -> bool {
    readers::dump(bytes).is_ok()
}

/// The reader of golden files, and their ops on the CPU.
pub fn golden(bytes: &[u8]) -> bool {
    readers::golden(bytes).is_ok()
}

/// The reader of GGUF models, and a forward pass of a few tokens.
pub fn model(bytes: &[u8]) -> bool {
    readers::model(bytes).is_ok()
}

/// The grammar of recipes: what it takes can be printed, read again, and made a cache of or refused.
///
/// # Panics
/// When a recipe does not come back.
pub fn recipe(bytes: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(bytes) else { return false };
    let Ok(recipe) = text.parse::<ModelRecipe>() else { return false };
    let again: ModelRecipe = recipe.to_string().parse().expect("a printed recipe is one");
    assert_eq!(again.highest_layer(), recipe.highest_layer(), "{text}");
    for head_dim in HEAD_DIMS {
        let shape = AttentionShape::new(4, 2, head_dim).expect("a head dimension with kernels");
        for layer in [0, 1, recipe.highest_layer().unwrap_or(0)] {
            let of_layer = recipe.layer(layer, &shape);
            assert_eq!(again.layer(layer, &shape), of_layer, "{text}");
            let made = KvCache::new(Cpu::new(), shape, 1, of_layer.clone());
            let fit = of_layer.stores().iter().all(|store| store.format.check(&shape).is_ok());
            assert_eq!(made.is_ok(), fit && packs_what_it_may(&of_layer), "{text}");
        }
    }
    true
}

/// True unless single tokens are packed in a format whose ranges span several.
fn packs_what_it_may(recipe: &kvpack::Recipe) -> bool {
    match recipe.appended() {
        Appended::AtOnce(to) => recipe.stores()[to.index()].format.takes_single_tokens(),
        Appended::Keep | Appended::Tiles { .. } => true,
    }
}
