//! A policy that decides again, over the tokens that a sequence still holds.

use super::eviction::{sink_and_recent, text_first};
use super::method::{KeepRule, LayerStatistics, MeasuredRows, Policy, check_statistics, drawn, no_statistics};
use super::query_positions::QueryPositions;
use super::selection::{LayerSelection, Selection};
use super::spans::Spans;
use crate::{Error, Result};

impl Policy {
    /// Query rows to measure when a sequence is compressed again after `appended` new tokens: the newest of them, as
    /// many as the policy measures of a prompt. A policy that measures after an image measures at the end here, since
    /// appended tokens are text. 0 if the policy measures nothing.
    pub fn rows_again(&self, appended: usize) -> usize {
        match self.rows {
            MeasuredRows::None => 0,
            MeasuredRows::PostVision { most } | MeasuredRows::Last(most) => appended.min(most),
            MeasuredRows::All => appended,
        }
    }

    /// The tokens that stay of those that a sequence holds: [`Policy::select`] for a sequence from which tokens were
    /// evicted before.
    ///
    /// `spans` are those of the whole sequence, evicted tokens included. Budgets are shares of its length, and a layer
    /// whose budget exceeds the tokens that it holds keeps all of them. `held` names the tokens that each layer holds
    /// by their positions in the sequence, and the result does too. The newest `rows` tokens were measured, and scores
    /// are of these alone: earlier sums are forgotten, also those that H2O and LOOK-M accumulate.
    /// `statistics` cover the tokens that a layer holds: column sums are `[kv_heads, held]`, in the order of positions.
    /// The first and last tokens, and neighbours, are those among the held tokens.
    ///
    /// # Errors
    /// [`Error::Selection`] when layers hold tokens of a sequence of another length, or statistics are missing;
    /// [`Error::Elements`] when statistics do not fit; [`Error::Budget`] when more rows were measured than a layer
    /// holds tokens, or more text must stay than may; [`Error::NotANumber`] when a column sum is NaN.
    pub fn select_again(
        &self,
        spans: &Spans,
        held: &Selection,
        rows: usize,
        statistics: &[LayerStatistics],
    ) -> Result<Selection> {
        let places = self.places_again(spans, held, rows, statistics)?;
        Selection::new(held.layers().iter().zip(&places).map(|(held, places)| held.at(places)).collect::<Result<_>>()?)
    }

    /// The number of held tokens that every KV head of each layer keeps.
    ///
    /// # Errors
    /// As [`Policy::select_again`], except for text that must stay and column sums, which are not checked.
    pub(crate) fn budgets_again(
        &self,
        spans: &Spans,
        held: &Selection,
        rows: usize,
        statistics: &[LayerStatistics],
    ) -> Result<Vec<usize>> {
        let (layers, length) = (held.layers(), spans.tokens());
        if layers[0].tokens() != length {
            let reason = format!("the sequence has {} tokens, but the spans cover {length}", layers[0].tokens());
            return Err(Error::Selection { reason });
        }
        let measures = self.rows != MeasuredRows::None;
        if measures && rows == 0 {
            let reason = "this policy measures query rows, and none was given".into();
            return Err(Error::Selection { reason });
        }
        if measures {
            check_statistics(layers.len(), statistics)?;
        }
        let budgets = self.layer_budgets(length, layers.len(), layers[0].kv_heads(), || {
            check_statistics(layers.len(), statistics)?;
            layers.iter().zip(statistics).map(|(layer, of)| of.sparsity(&rows_of(layer, rows)?)).collect()
        })?;
        Ok(budgets.into_iter().zip(layers).map(|(budget, layer)| budget.min(layer.count())).collect())
    }

    /// [`Policy::select_again`], returned as places among the tokens that each layer holds.
    pub(crate) fn places_again(
        &self,
        spans: &Spans,
        held: &Selection,
        rows: usize,
        statistics: &[LayerStatistics],
    ) -> Result<Vec<LayerSelection>> {
        let budgets = self.budgets_again(spans, held, rows, statistics)?;
        let text = spans.text_mask()?;
        let mut selected = Vec::with_capacity(budgets.len());
        for (index, (layer, count)) in held.layers().iter().zip(budgets).enumerate() {
            let (tokens, kv_heads) = (layer.count(), layer.kv_heads());
            let of_head = |head: usize| -> Result<Vec<u32>> {
                match self.keep {
                    KeepRule::SinkAndRecent { sink, recent } => sink_and_recent(tokens, sink, recent),
                    KeepRule::Random { seed } => drawn(tokens, count, seed, (index * kv_heads + head) as u64),
                    KeepRule::Best { recent, text: rule } => {
                        let sums = statistics
                            .get(index)
                            .ok_or_else(|| no_statistics("the best tokens need measured rows"))?
                            .of_head(head, kv_heads, tokens)?;
                        let recent = recent.of(count)?;
                        let scores = self.scores.apply(sums, &rows_of(layer, rows)?, recent)?;
                        let text: Vec<bool> =
                            layer.kept(head).iter().map(|&position| text[position as usize]).collect();
                        text_first(&scores, &text, rule, recent, count - recent)
                    }
                }
            };
            selected.push(LayerSelection::new(tokens, (0..kv_heads).map(of_head).collect::<Result<_>>()?)?);
        }
        Ok(selected)
    }
}

/// The newest rows, over the tokens that a layer holds.
fn rows_of(layer: &LayerSelection, rows: usize) -> Result<QueryPositions> {
    QueryPositions::last(rows, layer.count())
}
