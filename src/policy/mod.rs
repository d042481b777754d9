//! Which tokens of a prompt stay: pure functions on small arrays, independent of formats and backends.
//!
//! Kernels measure ([`attention_column_stats`](crate::cpu::attention_column_stats) and related ones), this module
//! decides, and a cache carries out the decision, a [`Selection`]. Every policy therefore works with every format.
//!
//! | idea | here | from |
//! | --- | --- | --- |
//! | text and images of a prompt, the text after the last image | [`Spans`] | VL-Cache |
//! | which query rows are measured | [`QueryPositions`] | |
//! | how the scores of a group's query heads become one | [`HeadAggregation`] | |
//! | sparsity of heads and layers | [`sparsity`] | VL-Cache |
//! | tokens per layer | [`uniform_budgets`], [`vlcache_budgets`], [`pyramid_budgets`] | VL-Cache, PyramidKV |
//! | scores that are comparable, smooth | [`normalize_by_visibility`], [`Pooling`] | RoCo, ZipCache; SnapKV |
//! | the k best | [`top_k`] | |
//! | the kept tokens of a head | [`recent_and_best`], [`sink_and_recent`], [`text_prior`], [`keep`] | H2O, StreamingLLM, LOOK-M |
//! | what becomes of evicted tokens | [`Merging`], [`merge_plan`] | LOOK-M eq. 9-12 |
//! | the same as scores, for a device to choose by | [`ScoreRequest`] | |
//! | all of it as one method | [`Policy`] | |
//! | precision of the chunks of a context | [`chunk_search`], [`chunk_shares`], [`reorder_plan`] | Cocktail eq. 1-3, algorithm 1 |
//!
//! VL-Cache is [arXiv 2410.23317](https://arxiv.org/abs/2410.23317), LOOK-M
//! [2406.18139](https://arxiv.org/abs/2406.18139), H2O [2306.14048](https://arxiv.org/abs/2306.14048), SnapKV
//! [2404.14469](https://arxiv.org/abs/2404.14469), PyramidKV [2406.02069](https://arxiv.org/abs/2406.02069),
//! StreamingLLM [2309.17453](https://arxiv.org/abs/2309.17453), RoCo [2402.06262](https://arxiv.org/abs/2402.06262),
//! ZipCache [2405.14256](https://arxiv.org/abs/2405.14256), and Cocktail
//! [2503.23294](https://arxiv.org/abs/2503.23294).
//!
//! ```
//! use kvpack::plan::TokenRange;
//! use kvpack::policy::{Spans, TextRule, keep, text_prior};
//!
//! // Two words, an image of four tokens, two words; the scores of one KV head.
//! let spans = Spans::new(8, &[TokenRange::new(2, 6)?])?;
//! let scores = [0.1, 0.9, 0.2, 0.7, 0.1, 0.3, 0.4, 0.5];
//! assert_eq!(spans.post_vision()?, TokenRange::new(6, 8)?);
//!
//! // The last two tokens and the three best of the others, text first.
//! let kept = text_prior(&scores, &spans, TextRule::Raised, 2, 3)?;
//! assert_eq!(kept, [0, 1, 3, 6, 7]);
//! # Ok::<(), kvpack::Error>(())
//! ```

mod budget;
mod chunk_search;
mod eviction;
mod heads;
mod held;
mod merging;
mod method;
mod pooling;
mod pyramid_budget;
mod query_positions;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod score_tables;
mod selection;
mod spans;
mod sparsity;
mod statistics;
mod token_scores;
mod top_k;
mod visibility;
mod vlcache_budget;

pub use budget::{check_ratio, uniform_budgets};
pub use chunk_search::{
    CHUNK_TOKENS, ChunkPrecision, ChunkSearch, ChunkThresholds, check_order, check_widths, chunk_search, chunk_shares,
    reorder_plan,
};
pub(crate) use eviction::lowered;
pub use eviction::{TextRule, keep, recent_and_best, sink_and_recent, text_prior};
pub use heads::HeadAggregation;
pub use merging::{Merging, Nearest, merge_plan};
pub use method::{BudgetRule, KeepRule, LayerStatistics, MeasuredRows, Policy, Recent, ScoreRule, Weighing};
pub use pooling::{Pool, Pooling};
pub use pyramid_budget::{PyramidShape, pyramid_budgets};
pub use query_positions::QueryPositions;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use score_tables::ScoreTables;
pub use selection::{LayerSelection, Merge, Selection};
pub use spans::Spans;
pub use sparsity::{DEFAULT_THRESHOLD, layer_sparsity, sparsity};
pub use statistics::{ColumnRequest, RowStatsSource, StatsRequest};
pub use token_scores::ScoreRequest;
pub use top_k::{evicted, top_k};
pub use visibility::normalize_by_visibility;
pub use vlcache_budget::{VlCacheBudgets, VlCacheLimits, vlcache_budgets};
