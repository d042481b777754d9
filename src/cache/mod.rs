//! Caches: the convenient interface.
//!
//! A cache holds the keys and values of attention layers for a batch of sequences. It keeps the page tables (spans,
//! pages, range slots, positions) and leaves storing and computing to a [`Backend`](crate::Backend).
//!
//! | type | holds |
//! | --- | --- |
//! | [`KvCache`] | one layer |
//! | [`ModelCache`] | all layers of a model: a step changes their page tables once, and every layer stores and attends |
//! | [`ObservedPrompt`] | a prompt that a [policy](crate::policy) looks at, of which [`ModelCache::compress`] stores what stays |
//! | [`ObservedParts`] | the same for a prompt in parts, which steps of the engine append |
//!
//! A [`PrefixCache`] keeps beginnings of prompts in sequences of a [`ModelCache`] for requests that begin alike.
//!
//! A [`Recipe`] lists the stores of a cache (f16, and any number of packed ones) and the rule for appended tokens. A
//! [`PromptSpan`] assigns tokens of a prompt to a store. A [`ModelRecipe`] is the text form of both, and of the policy
//! that evicts tokens of a prompt.
//!
//! A call that fails has changed nothing. A future that is dropped before its end is no such failure: it may leave
//! tokens in the page tables, or layers that differ. Poll the futures of calls that change a cache to their end.

mod budget;
mod change;
mod chunks;
mod compress;
mod decided;
mod evictions;
mod generation;
mod kv_cache;
mod kv_room;
mod kv_steps;
mod larger_shards;
mod last_step;
mod layer_reads;
mod layers;
mod measured_layers;
mod memory;
mod methods;
mod mixture;
mod model_attention;
mod model_cache;
mod model_room;
mod model_sequences;
mod observed;
mod observed_parts;
mod pack_parts;
mod page_tables;
mod parsed;
mod prefixes;
mod prompt;
mod recipe;
mod recipe_layers;
mod recipe_option;
mod recipe_text;
mod recompress;
mod replaced;
mod reserve;
mod room;
mod sequence;
mod share;
mod slots;
mod step;
mod swap;
mod swap_out;
mod swapped_bytes;
mod together;
mod write_table;

pub use budget::{Budget, Growth};
pub use chunks::{ChunkOrder, ChunkSpans, ChunkStores};
pub use evictions::{EVICTIONS, Eviction};
pub(crate) use generation::Generation;
pub use kv_cache::KvCache;
pub use layer_reads::StoredSpan;
pub use memory::{CacheMemory, StoreMemory};
pub use methods::{METHODS, Method};
pub use mixture::Mixture;
pub use model_cache::ModelCache;
pub use observed::{DenseLayer, MeasuredQueries, ObservedPrompt};
pub use observed_parts::{ObservedParts, PartQueries};
pub use prefixes::{PinnedPrefix, PrefixCache};
pub use prompt::PromptSpan;
pub use recipe::{Appended, MOST_STORES, Recipe, StoreId};
pub use recipe_text::ModelRecipe;
pub(crate) use replaced::Replaced;
pub use room::{SequencePages, StoreRoom};
pub use sequence::{Positions, SpanPositions};
pub use step::TokenRun;
pub use swap::SwappedSequence;
pub use swap_out::SwapOut;
#[doc(hidden)]
pub use swapped_bytes::write_checksum;

pub use crate::plan::StoreFormat;

/// A sequence's centre is the mean of at most this many keys, taken from the start of its first call.
pub const CENTRE_TOKENS: usize = 64;

const _: () = assert!(CENTRE_TOKENS <= crate::plan::MOST_MEAN_TOKENS, "centres are made within steps");

/// Maximum number of sequences in one cache.
pub const MOST_SEQUENCES: usize = 1 << 20;
