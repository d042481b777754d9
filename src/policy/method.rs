//! A whole method: what it measures, how much each layer keeps, and which tokens.

use super::budget::{check_layers, check_ratio, share_of, share_of_tokens};
use super::eviction::{TextRule, sink_and_recent, text_prior};
use super::heads::HeadAggregation;
use super::merging::Merging;
use super::pooling::{Pool, Pooling};
use super::pyramid_budget::{PyramidShape, pyramid_budgets};
use super::query_positions::QueryPositions;
use super::selection::{LayerSelection, Selection};
use super::spans::Spans;
use super::sparsity::{DEFAULT_THRESHOLD, layer_sparsity, sparsity};
use super::visibility::normalize_by_visibility;
use super::vlcache_budget::{VlCacheLimits, budgets_to_target};
use crate::counts::{TokenCount, collected, filled, reserved};
use crate::format::MOST_HEADS;
use crate::{Error, Result};

/// A policy. It states which measurements it needs ([`Policy::query_rows`], [`Policy::threshold`]) and turns them into
/// a [`Selection`].
///
/// Published methods are presets. Their parts combine freely.
///
/// ```
/// use kvpack::policy::{LayerStatistics, Policy, Spans};
/// let spans = Spans::new(8, &[])?;
/// let policy = Policy { rows: kvpack::policy::MeasuredRows::All, ..Policy::h2o(0.5)? };
/// // Two layers of one KV head whose column sums were measured.
/// let layer = LayerStatistics { column_sums: vec![4., 1., 0.5, 1.5, 0.4, 0.3, 0.2, 0.1], counts: Vec::new() };
/// let selection = policy.select(&spans, 2, 1, &[layer.clone(), layer])?;
/// assert_eq!(selection.layers()[0].kept(0), [0, 3, 6, 7]);
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Fraction of the prompt's tokens that all layers together keep. [`KeepRule::SinkAndRecent`] ignores it.
    pub ratio: f64,
    /// The query rows whose attention is measured.
    pub rows: MeasuredRows,
    /// How the column sums of those rows become scores.
    pub scores: ScoreRule,
    /// How layers share the budget.
    pub budget: BudgetRule,
    /// The rule by which tokens stay.
    pub keep: KeepRule,
    /// How the other tokens are merged; `None` drops them.
    pub merging: Option<Merging>,
}

/// The query rows whose attention a policy needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeasuredRows {
    /// None: the policy does not use scores.
    None,
    /// The text after the last image, limited to its last `most` tokens.
    PostVision {
        /// Maximum number of rows.
        most: usize,
    },
    /// The last tokens of the prompt, this many, or all of a shorter one.
    Last(usize),
    /// All rows.
    All,
}

/// How column sums become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreRule {
    /// How the query heads of a group are combined.
    pub aggregation: HeadAggregation,
    /// Whether tokens are compared by the sum, or by the mean over the rows that see them.
    pub weighing: Weighing,
    /// Smoothing over neighbouring tokens before the recent ones.
    pub pooling: Option<Pooling>,
}

/// Whether rows that do not see a token count in its score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weighing {
    /// Attention summed over all rows.
    Sum,
    /// The mean over the rows that see the token.
    MeanOfVisible,
}

/// How layers share the budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BudgetRule {
    /// Every layer the same number of tokens: the share of the prompt's tokens, rounded down. The layers of a step then
    /// stay in one part.
    Uniform,
    /// By sparsity.
    VlCache {
        /// Entries below this fraction of a row's largest entry count as nothing.
        threshold: f32,
        /// Bounds on each layer.
        limits: VlCacheLimits,
    },
    /// Smaller budgets in higher layers.
    Pyramid {
        /// Steepness.
        beta: usize,
    },
}

/// The rule by which tokens stay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeepRule {
    /// The most recent tokens and the best-scored of the others.
    Best {
        /// The number of recent tokens.
        recent: Recent,
        /// How text is preferred.
        text: TextRule,
    },
    /// The first and the last tokens.
    SinkAndRecent {
        /// First tokens.
        sink: usize,
        /// Last tokens.
        recent: usize,
    },
    /// Random tokens: the baseline of all scores. Layers and heads draw independently.
    Random {
        /// The same seed draws the same tokens.
        seed: u64,
    },
}

/// The number of last tokens that always stay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Recent {
    /// A fraction of the tokens that the layer keeps.
    Share(f64),
    /// This many, as far as the layer's budget goes.
    Tokens(usize),
}

/// Measurements of a layer.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct LayerStatistics {
    /// `[kv_heads, tokens]`: column sums over the policy's rows, aggregated by the policy's rule.
    pub column_sums: Vec<f32>,
    /// `[query_heads, rows]`: entries at or above the policy's threshold. Only [`BudgetRule::VlCache`] needs them.
    pub counts: Vec<u32>,
}

const MEAN: ScoreRule = ScoreRule { aggregation: HeadAggregation::Mean, weighing: Weighing::Sum, pooling: None };

impl Policy {
    /// VL-Cache: scores from the text after the image, budgets by sparsity, a tenth of each budget recent. In long
    /// questions the last 50 rows count, as in the paper's measurements. Every layer keeps at least 1 % of the prompt.
    ///
    /// # Errors
    /// [`Error::Budget`] when the ratio is not in 0 ..= 1. The same holds for the presets below.
    pub fn vlcache(ratio: f64) -> Result<Self> {
        let keep = KeepRule::Best { recent: Recent::Share(0.1), text: TextRule::Equal };
        let budget = BudgetRule::VlCache { threshold: DEFAULT_THRESHOLD, limits: VlCacheLimits::default() };
        Self { ratio, rows: MeasuredRows::PostVision { most: 50 }, scores: MEAN, budget, keep, merging: None }.checked()
    }

    /// LOOK-M: accumulated scores, text before images, half of the budget recent, pivotal merging.
    ///
    /// # Errors
    /// [`Error::Budget`].
    pub fn lookm(ratio: f64) -> Result<Self> {
        let keep = KeepRule::Best { recent: Recent::Share(0.5), text: TextRule::Raised };
        Ok(Self { keep, merging: Some(Merging::default()), ..Self::h2o(ratio)? })
    }

    /// H2O: accumulated scores, half of the budget recent.
    ///
    /// # Errors
    /// [`Error::Budget`].
    pub fn h2o(ratio: f64) -> Result<Self> {
        let keep = KeepRule::Best { recent: Recent::Share(0.5), text: TextRule::Equal };
        let budget = BudgetRule::Uniform;
        Self { ratio, rows: MeasuredRows::All, scores: MEAN, budget, keep, merging: None }.checked()
    }

    /// SnapKV: scores from the last 32 rows, averaged over 7 neighbouring tokens. Those rows stay. [`Pool::Max`] is the
    /// other choice of pooling.
    ///
    /// # Errors
    /// [`Error::Budget`].
    pub fn snapkv(ratio: f64) -> Result<Self> {
        let keep = KeepRule::Best { recent: Recent::Tokens(32), text: TextRule::Equal };
        let scores = ScoreRule { pooling: Some(Pooling::new(Pool::Average, 7)?), ..MEAN };
        Ok(Self { rows: MeasuredRows::Last(32), scores, keep, ..Self::h2o(ratio)? })
    }

    /// PyramidKV: SnapKV with the last 8 rows, averaged over 7 tokens, and budgets that shrink with the layer.
    ///
    /// # Errors
    /// [`Error::Budget`].
    pub fn pyramidkv(ratio: f64) -> Result<Self> {
        let keep = KeepRule::Best { recent: Recent::Tokens(8), text: TextRule::Equal };
        let budget = BudgetRule::Pyramid { beta: 20 };
        Ok(Self { rows: MeasuredRows::Last(8), budget, keep, ..Self::snapkv(ratio)? })
    }

    /// StreamingLLM: the first `sink` and the last `recent` tokens. They keep the positions that they had in the sequence,
    /// where StreamingLLM counts positions within its cache.
    pub const fn streaming(sink: usize, recent: usize) -> Self {
        let keep = KeepRule::SinkAndRecent { sink, recent };
        Self { ratio: 1.0, rows: MeasuredRows::None, scores: MEAN, budget: BudgetRule::Uniform, keep, merging: None }
    }

    /// Random tokens.
    ///
    /// # Errors
    /// [`Error::Budget`].
    pub fn random(ratio: f64, seed: u64) -> Result<Self> {
        Ok(Self { rows: MeasuredRows::None, keep: KeepRule::Random { seed }, ..Self::h2o(ratio)? })
    }

    /// The rows of a prompt to measure; `None` if the policy needs no measurement.
    ///
    /// # Errors
    /// [`Error::NoTextAfterImage`] when the policy needs the text after the image and there is none.
    pub fn query_rows(&self, spans: &Spans) -> Result<Option<QueryPositions>> {
        let tokens = spans.tokens();
        match self.rows {
            MeasuredRows::None => Ok(None),
            MeasuredRows::PostVision { most } => {
                QueryPositions::of_range(spans.post_vision()?, Some(most), tokens).map(Some)
            }
            MeasuredRows::Last(rows) => QueryPositions::last(rows.min(tokens), tokens).map(Some),
            MeasuredRows::All => QueryPositions::last(tokens, tokens).map(Some),
        }
    }

    /// The threshold for counting entries, as a fraction of a row's largest entry; `None` if the policy needs no
    /// counts.
    pub const fn threshold(&self) -> Option<f32> {
        match self.budget {
            BudgetRule::VlCache { threshold, .. } => Some(threshold),
            _ => None,
        }
    }

    /// Tokens that every KV head of each of `layers` layers keeps.
    ///
    /// # Errors
    /// [`Error::Budget`], [`Error::Elements`] or [`Error::Selection`] when statistics are missing or do not fit.
    pub fn budgets(
        &self,
        spans: &Spans,
        layers: usize,
        kv_heads: usize,
        statistics: &[LayerStatistics],
    ) -> Result<Vec<usize>> {
        self.layer_budgets(spans.tokens(), layers, kv_heads, || {
            let rows = self.query_rows(spans)?.ok_or_else(|| no_statistics("budgets by sparsity measure rows"))?;
            check_statistics(layers, statistics)?;
            statistics.iter().map(|layer| layer.sparsity(&rows)).collect()
        })
    }

    /// Budgets of layers for a sequence of `length` tokens. `sparsities` is only called if the budgets depend on it.
    pub(super) fn layer_budgets(
        &self,
        length: usize,
        layers: usize,
        kv_heads: usize,
        sparsities: impl FnOnce() -> Result<Vec<f64>>,
    ) -> Result<Vec<usize>> {
        check_layers(layers)?;
        check_heads(kv_heads)?;
        if let KeepRule::SinkAndRecent { sink, recent } = self.keep {
            return filled("budgets of layers", layers, length.min(sink.saturating_add(recent)));
        }
        match self.budget {
            BudgetRule::Uniform => filled("budgets of layers", layers, share_of_tokens(1, length, self.ratio)?),
            BudgetRule::Pyramid { beta } => {
                let capacity = share_of_tokens(1, length, self.ratio)?;
                let recent = match self.keep {
                    KeepRule::Best { recent, .. } => recent.of(capacity)?,
                    _ => 0,
                };
                // If the recent tokens fill the budget, nothing remains to be shared out.
                if recent >= capacity {
                    return filled("budgets of layers", layers, capacity);
                }
                pyramid_budgets(layers, length, PyramidShape { capacity, recent, beta })
            }
            BudgetRule::VlCache { limits, .. } => {
                let sparsities = sparsities()?;
                // The budget counts tokens of all heads; a remainder too small for all heads of a layer is unused.
                let target = share_of_tokens(layers * kv_heads, length, self.ratio)? / kv_heads;
                Ok(budgets_to_target(&sparsities, length, self.ratio, limits, target)?.tokens)
            }
        }
    }

    /// The tokens that stay, in every one of `layers` layers of `kv_heads` KV heads.
    ///
    /// # Errors
    /// As [`Policy::budgets`]; [`Error::NotANumber`] when a column sum is NaN.
    pub fn select(
        &self,
        spans: &Spans,
        layers: usize,
        kv_heads: usize,
        statistics: &[LayerStatistics],
    ) -> Result<Selection> {
        let budgets = self.budgets(spans, layers, kv_heads, statistics)?;
        check_all_heads(layers, kv_heads)?;
        let rows = self.query_rows(spans)?;
        let tokens = spans.tokens();
        if let (KeepRule::Best { .. }, Some(_)) = (self.keep, &rows) {
            check_statistics(layers, statistics)?;
        }
        let mut selected = reserved("layers of a selection", layers)?;
        for (layer, &count) in budgets.iter().enumerate() {
            let of_head = |head: usize| match self.keep {
                KeepRule::SinkAndRecent { sink, recent } => sink_and_recent(tokens, sink, recent),
                KeepRule::Random { seed } => drawn(tokens, count, seed, (layer * kv_heads + head) as u64),
                KeepRule::Best { recent, text } => {
                    let rows = rows.as_ref().ok_or_else(|| no_statistics("the best tokens need measured rows"))?;
                    let sums = statistics[layer].of_head(head, kv_heads, tokens)?;
                    let recent = recent.of(count)?;
                    let scores = self.scores.apply(sums, rows, recent)?;
                    text_prior(&scores, spans, text, recent, count - recent)
                }
            };
            selected.push(LayerSelection::new(tokens, (0..kv_heads).map(of_head).collect::<Result<_>>()?)?);
        }
        Selection::new(selected)
    }

    fn checked(self) -> Result<Self> {
        check_ratio("share of tokens to keep", self.ratio)?;
        Ok(self)
    }
}

impl ScoreRule {
    /// Scores of one KV head from its column sums. Pooling leaves the last `recent` tokens alone.
    pub(crate) fn apply(&self, sums: &[f32], rows: &QueryPositions, recent: usize) -> Result<Vec<f32>> {
        let mut scores = match self.weighing {
            Weighing::Sum => sums.to_vec(),
            Weighing::MeanOfVisible => normalize_by_visibility(sums, rows)?,
        };
        if let Some(pooling) = self.pooling {
            let before = scores.len() - recent;
            let pooled = pooling.apply(&scores[..before]);
            scores[..before].copy_from_slice(&pooled);
        }
        Ok(scores)
    }
}

impl Recent {
    /// The number of recent tokens in a budget of `count`.
    ///
    /// # Errors
    /// [`Error::Budget`] when a share is not in 0 ..= 1.
    pub(super) fn of(self, count: usize) -> Result<usize> {
        match self {
            Self::Share(share) => {
                check_ratio("share of recent tokens", share)?;
                Ok(share_of(count as f64, share))
            }
            Self::Tokens(tokens) => Ok(tokens.min(count)),
        }
    }
}

impl LayerStatistics {
    /// Sparsity of the layer, from the counts of these rows.
    pub(super) fn sparsity(&self, rows: &QueryPositions) -> Result<f64> {
        Ok(layer_sparsity(&sparsity(&self.counts, rows)?))
    }

    pub(super) fn of_head(&self, head: usize, kv_heads: usize, tokens: usize) -> Result<&[f32]> {
        let (given, expected) = (self.column_sums.len(), kv_heads.saturating_mul(tokens));
        if given == expected {
            return Ok(&self.column_sums[head * tokens..][..tokens]);
        }
        let shape = format!("[{kv_heads}, {tokens}]");
        Err(Error::Elements { what: "column sums of a layer", given, expected, shape })
    }
}

pub(super) fn check_statistics(layers: usize, statistics: &[LayerStatistics]) -> Result<()> {
    if statistics.len() == layers {
        return Ok(());
    }
    Err(Error::Selection { reason: format!("statistics of {} layers; they must cover all {layers}", statistics.len()) })
}

pub(super) fn no_statistics(why: &str) -> Error {
    Error::Selection { reason: format!("{why}, and this policy measures none") }
}

/// `count` of `tokens` positions at random, ascending.
pub(super) fn drawn(tokens: usize, count: usize, seed: u64, stream: u64) -> Result<Vec<u32>> {
    let mut random = fastrand::Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream);
    let mut positions = collected("random tokens", TokenCount::new(tokens)?.positions())?;
    random.shuffle(&mut positions);
    positions.truncate(count);
    positions.sort_unstable();
    Ok(positions)
}

/// Most KV heads of all layers that a policy selects for.
const MOST_MODEL_HEADS: usize = 1 << 16;

fn check_all_heads(layers: usize, kv_heads: usize) -> Result<()> {
    let given = layers.saturating_mul(kv_heads);
    if given <= MOST_MODEL_HEADS {
        return Ok(());
    }
    let (given, allowed) = (given.to_string(), format!("at most {MOST_MODEL_HEADS}"));
    Err(Error::Budget { what: "number of KV heads of all layers", given, allowed })
}

fn check_heads(kv_heads: usize) -> Result<()> {
    if (1..=MOST_HEADS).contains(&kv_heads) {
        return Ok(());
    }
    Err(Error::Budget {
        what: "number of KV heads",
        given: kv_heads.to_string(),
        allowed: format!("1 to {MOST_HEADS}"),
    })
}
