//! The CPU reference of every kernel: f32 arithmetic, f64 for long sums, parallel over threads with rayon.
//!
//! The names are those of the shaders. [`Cpu`] combines them into a [`Backend`](crate::Backend). Other backends are
//! tested against these kernels, and these kernels are tested against the oracle [`exact_attention`].

mod append;
mod attend;
mod backend;
mod calibration_search;
mod centre_keys;
mod check;
mod dense;
mod dequantize;
mod exact_attention;
mod foreign;
mod hadamard;
mod key_mean;
mod key_tiles;
mod memory;
mod merge_states;
mod non_finite_flags;
mod pack_windows;
mod plain_attention;
mod prepare_query;
mod quantize;
mod scores;
mod select;
mod simd;
mod softmax;
mod span_bytes;
mod states;
mod store;
mod tile_lines;
mod uncentre_keys;
mod uncentre_lse;
mod unfused_attention;
mod value_tiles;
mod weighted_values;
mod write_step;

pub use backend::Cpu;
pub use calibration_search::{CalibrationResult, CalibrationSample};
pub use dense::{CpuIndices, CpuTensor};
pub use exact_attention::{DenseSegment, ExactState, exact_attention, exact_scored_attention, nmse};
pub use foreign::{ElementsMut, ForeignTensor};
pub use non_finite_flags::NonFiniteFlags;
pub use plain_attention::plain_attention;
pub use states::States;
pub use store::CpuStore;
pub use unfused_attention::unfused_attention;
// The kernels one by one, which `Cpu` calls. Public for tests that compare a kernel with its reference.
#[doc(hidden)]
pub use {
    append::append,
    attend::attend,
    backend::attend_plan,
    dense::first_non_finite,
    dequantize::dequantize,
    hadamard::hadamard,
    key_mean::key_mean,
    merge_states::{merge_pair, merge_states},
    pack_windows::pack_windows,
    quantize::quantize,
    scores::{ScoreExtremes, SegmentScores, scores},
    select::{
        ColumnStats, DenseRows, KeptTokens, RowStats, StatsInput, attention_column_stats, attention_row_stats,
        chunk_similarity, gather, merge_tokens, nearest_kept, reorder_chunks, sum_counts, sum_partials, token_scores,
        top_k,
    },
    uncentre_lse::uncentre_lse,
    weighted_values::weighted_values,
    write_step::write_step,
};
