//! How one layer attends, where the layers of a model differ.

use super::AttendPlan;
use super::runs::QueryRun;
use super::scoring::Scoring;
use super::visible::Visible;
use crate::format::AttentionShape;
use crate::{Error, Result};

/// How a layer attends: its scoring, and its sliding window where it has one.
///
/// Queries of a layer with a window see their own position and those up to `left` before it: decoding queries, causal
/// runs, and spans that see themselves.
///
/// ```
/// use kvpack::plan::{LayerAttention, QueryRun, Visible};
/// // Every other layer of GPT-OSS sees 128 positions.
/// let local = LayerAttention::default().with_window(127);
/// assert_eq!(local.visible(&QueryRun::decode(0))?, Visible::Window { left: 127 });
/// assert_eq!(LayerAttention::default().visible(&QueryRun::causal(0, 9))?, Visible::Causal);
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Default)]
pub struct LayerAttention {
    scoring: Option<Scoring>,
    left: Option<usize>,
}

impl LayerAttention {
    /// The same with a scoring in place of that of the shape.
    #[must_use]
    pub fn with_scoring(self, scoring: Scoring) -> Self {
        Self { scoring: Some(scoring), ..self }
    }

    /// The same with a window of `left` positions before a query's own. Plans refuse 0. A cache gives back pages whose
    /// tokens lie behind the window of the next query, but for the newest 128 of them, so that as many tokens of a
    /// draft can be taken back.
    #[must_use]
    pub fn with_window(self, left: usize) -> Self {
        Self { left: Some(left), ..self }
    }

    /// The scoring, if it is not that of the shape.
    pub const fn scoring(&self) -> Option<&Scoring> {
        self.scoring.as_ref()
    }

    /// Positions before a query's own that it sees; none: all of them.
    pub const fn window(&self) -> Option<usize> {
        self.left
    }

    /// What the queries of a run see in this layer.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a tree, and for several queries that see all tokens, where the layer has a window.
    pub fn visible(&self, run: &QueryRun) -> Result<Visible> {
        let Some(left) = self.left else { return Ok(run.visible.clone()) };
        let refuse = |what: &str| {
            let hint = "a window is causal; ask for causal runs, or for single queries".into();
            Err(Error::Unsupported { what: format!("{what} in a layer with a window of {left} positions"), hint })
        };
        match &run.visible {
            Visible::Causal => Ok(Visible::Window { left }),
            Visible::All if run.queries == 1 => Ok(Visible::Window { left }),
            Visible::Window { left: asked } => Ok(Visible::Window { left: left.min(*asked) }),
            Visible::Spans { left: asked, spans } => {
                Ok(Visible::Spans { left: Some(asked.map_or(left, |asked| left.min(asked))), spans: spans.clone() })
            }
            Visible::All => refuse("several queries that see all tokens"),
            Visible::Tree(_) => refuse("a draft tree"),
        }
    }

    /// Whether the same kernels serve both layers. A kernel has a scale and a cap of its own, and whether there is a
    /// window and whether there are sinks.
    pub(crate) fn is_alike(&self, other: &Self) -> bool {
        let of = |layer: &Self| {
            let scoring = layer.scoring.as_ref();
            let has_sinks = scoring.is_some_and(|scoring| scoring.sinks().is_some());
            (layer.left.is_some(), scoring.map(|of| (of.scale(), of.soft_cap())), has_sinks)
        };
        of(self) == of(other)
    }

    /// Whether a query of a decoded token sees these tokens.
    pub(crate) fn sees_decoding(&self, visible: &Visible) -> bool {
        match self.left {
            None => *visible == Visible::All,
            Some(left) => *visible == Visible::Window { left },
        }
    }

    /// A plan with the scoring of this layer.
    ///
    /// # Errors
    /// Those of [`AttendPlan::with_scoring`].
    pub fn score(&self, plan: AttendPlan) -> Result<AttendPlan> {
        match &self.scoring {
            Some(scoring) => plan.with_scoring(scoring.clone()),
            None => Ok(plan),
        }
    }

    /// Factor on `q·k` in a layer of this shape.
    pub fn scale(&self, shape: &AttentionShape) -> f32 {
        self.scoring.as_ref().map_or_else(|| Scoring::of(shape).scale(), Scoring::scale)
    }

    /// Checks that policies can measure the attention of a layer. `knows_lse` says that its log-sum-exps are known.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a soft cap, which statistics do not apply, and for sinks without log-sum-exps.
    pub(crate) fn check_measured(&self, layer: usize, knows_lse: bool) -> Result<()> {
        let Some(scoring) = &self.scoring else { return Ok(()) };
        let (what, hint) = match (scoring.soft_cap(), scoring.sinks()) {
            (Some(cap), _) => {
                (format!("a soft cap of {cap}"), "choose the tokens by other means and pass them (ModelCache::keep)")
            }
            (None, Some(_)) if !knows_lse => (
                "sinks".into(),
                "pass the log-sum-exps of the layer's own attention, which contain them, to a policy that counts no \
                 entries",
            ),
            _ => return Ok(()),
        };
        let what = format!("a policy that measures attention, with {what} in layer {layer}");
        Err(Error::Unsupported { what, hint: hint.into() })
    }

    /// Checks that keys of centred stores can be scored like this.
    pub(crate) fn check_centred(&self) -> Result<()> {
        self.scoring.as_ref().map_or(Ok(()), Scoring::check_centred)
    }

    /// Checks that calibrated scores can be seen like this. Steps would refuse it once packed tokens lie behind the
    /// window or under the cap, when their sequence cannot go back.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a sliding window and for a soft cap.
    pub(crate) fn check_calibrated(&self) -> Result<()> {
        let what = match (self.left, self.scoring.as_ref().and_then(Scoring::soft_cap)) {
            (Some(left), _) => format!("a sliding window of {left} positions over calibrated scores"),
            (None, Some(cap)) => format!("a soft cap of {cap} on calibrated scores"),
            (None, None) => return Ok(()),
        };
        let hint = "calibration maps the scores of a whole packed span; leave it out (tau=) in such layers";
        Err(Error::Unsupported { what, hint: hint.into() })
    }

    /// Checks what does not depend on tokens.
    ///
    /// # Errors
    /// [`Error::Elements`] when there are more or fewer sinks than query heads.
    pub(crate) fn check(&self, shape: &AttentionShape) -> Result<()> {
        self.scoring.as_ref().map_or(Ok(()), |scoring| scoring.check(shape))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of two windows the shorter one holds, whoever asks for it.
    #[test]
    fn the_shorter_window_holds() {
        let layer = LayerAttention::default().with_window(20);
        let visible = |visible| layer.visible(&QueryRun::new(0, 3, visible)).unwrap();
        for (asked, seen) in [(9, 9), (20, 20), (31, 20)] {
            assert_eq!(visible(Visible::Window { left: asked }), Visible::Window { left: seen });
            let spans = |left| Visible::Spans { left: Some(left), spans: [0..2, 3..4].into() };
            assert_eq!(visible(spans(asked)), spans(seen));
        }
    }
}
