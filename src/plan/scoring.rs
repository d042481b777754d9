//! How products of queries and keys become the logits of the softmax.

use std::sync::Arc;

use crate::format::AttentionShape;
use crate::{Error, Result};

/// How a layer scores: `cap · tanh(scale · q·k / cap)`, and a logit without a value for every query head.
///
/// The order is fixed: the product is scaled, then capped, then masked. A sink is neither scaled nor capped. It counts
/// in the denominator of the softmax and in the log-sum-exp, once for every query.
///
/// ```
/// use kvpack::AttentionShape;
/// use kvpack::plan::Scoring;
/// let shape = AttentionShape::new(8, 2, 64)?;
/// assert_eq!(Scoring::of(&shape).scale(), 0.125);
/// // Gemma 2 divides by the square root of another dimension and caps at 50.
/// let gemma = Scoring::of(&shape).with_scale(0.0625)?.with_soft_cap(50.0)?;
/// assert_eq!(gemma.soft_cap(), Some(50.0));
/// assert!(Scoring::of(&shape).with_soft_cap(0.0).is_err());
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Scoring {
    scale: f32,
    soft_cap: Option<f32>,
    sinks: Option<Arc<[f32]>>,
}

impl Scoring {
    /// Largest scale and largest cap. Kernels multiply them by log2(e), and the product is finite in f32.
    pub const LARGEST: f32 = f32::MAX / 2.0;

    /// The scoring of a shape that says nothing else: `1/√head_dim`, no cap, no sinks.
    pub fn of(shape: &AttentionShape) -> Self {
        Self { scale: 1.0 / (shape.head_dim() as f32).sqrt(), soft_cap: None, sinks: None }
    }

    /// The same with another factor on `q·k`.
    ///
    /// # Errors
    /// [`Error::Plan`] unless the factor lies between the least normal number and [`Scoring::LARGEST`].
    pub fn with_scale(self, scale: f32) -> Result<Self> {
        positive("softmax scale", scale)?;
        Ok(Self { scale, ..self })
    }

    /// The same with scores that stay within ±`cap`. Scores that are not finite stay what they are.
    ///
    /// # Errors
    /// [`Error::Plan`] unless the cap lies between the least normal number and [`Scoring::LARGEST`].
    pub fn with_soft_cap(self, cap: f32) -> Result<Self> {
        positive("soft cap", cap)?;
        Ok(Self { soft_cap: Some(cap), ..self })
    }

    /// The same with one sink logit for every query head, `[query_heads]`; −∞ is a head without a sink.
    ///
    /// # Errors
    /// [`Error::Plan`] when a logit is NaN or +∞. A plan checks that there are as many as query heads.
    pub fn with_sinks(self, logits: &[f32]) -> Result<Self> {
        if let Some(head) = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            let reason =
                format!("query head {head} has the logit {}; use finite numbers, or −∞ for none", logits[head]);
            return Err(Error::Plan { what: "sinks", reason });
        }
        Ok(Self { sinks: Some(logits.into()), ..self })
    }

    /// The same without sinks: of all parts that are merged, one has them.
    #[must_use]
    pub fn without_sinks(self) -> Self {
        Self { sinks: None, ..self }
    }

    /// The same with sinks of −∞ in place of its own, if it has any.
    #[must_use]
    pub(crate) fn with_empty_sinks(self) -> Self {
        let sinks = self.sinks.map(|sinks| sinks.iter().map(|_| f32::NEG_INFINITY).collect());
        Self { sinks, ..self }
    }

    /// Factor on `q·k`.
    pub const fn scale(&self) -> f32 {
        self.scale
    }

    /// Largest magnitude of a scaled score, where it has one.
    pub const fn soft_cap(&self) -> Option<f32> {
        self.soft_cap
    }

    /// The sink logit of every query head.
    pub fn sinks(&self) -> Option<&[f32]> {
        self.sinks.as_deref()
    }

    /// Factor on `q·k` for scores in units of log2.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) fn log2_scale(&self, shape: &AttentionShape) -> f32 {
        use std::f32::consts::LOG2_E;
        // The quotient is rounded once, the product twice.
        let is_default = self.scale == Self::of(shape).scale;
        if is_default { LOG2_E / (shape.head_dim() as f32).sqrt() } else { LOG2_E * self.scale }
    }

    /// Checks that the sinks are those of a shape.
    pub(super) fn check(&self, shape: &AttentionShape) -> Result<()> {
        match self.sinks() {
            Some(sinks) if sinks.len() != shape.query_heads() => Err(Error::Elements {
                what: "sinks",
                given: sinks.len(),
                expected: shape.query_heads(),
                shape: format!("{} query heads", shape.query_heads()),
            }),
            _ => Ok(()),
        }
    }

    /// Checks that scores of centred keys, which lack an offset for each query, become what they should.
    ///
    /// A softmax over all scores forgets the offset. A cap does not, and neither does a sink, which has none.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a soft cap and for sinks.
    pub fn check_centred(&self) -> Result<()> {
        let what = match (self.soft_cap, &self.sinks) {
            (None, None) => return Ok(()),
            (Some(_), _) => "a soft cap on the scores of centred keys",
            (None, Some(_)) => "sinks with the scores of centred keys",
        };
        let hint =
            "centred keys have scores without the offset of their centre; store the keys of such a layer as they are";
        Err(Error::Unsupported { what: what.into(), hint: hint.into() })
    }
}

fn positive(what: &'static str, x: f32) -> Result<()> {
    // Kernels may take a number below the normal ones for 0.
    if (f32::MIN_POSITIVE..=Scoring::LARGEST).contains(&x) {
        return Ok(());
    }
    let (least, largest) = (f32::MIN_POSITIVE, Scoring::LARGEST);
    Err(Error::Plan { what, reason: format!("{x:e} was given; use a number from {least:e} to {largest:e}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_score_nothing_are_refused() {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let scoring = Scoring::of(&shape);
        for x in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(scoring.clone().with_scale(x).is_err(), "{x}");
            assert!(scoring.clone().with_soft_cap(x).is_err(), "{x}");
        }
        for x in [f32::NAN, f32::INFINITY] {
            assert!(scoring.clone().with_sinks(&[0.0, x]).is_err(), "{x}");
        }
        assert!(scoring.clone().with_sinks(&[f32::NEG_INFINITY, -2.0]).unwrap().check(&shape).is_err());
        let scoring = scoring.with_sinks(&[f32::NEG_INFINITY, -2.0, 0.0, 3.0]).unwrap();
        assert!(scoring.check(&shape).is_ok() && scoring.check_centred().is_err());
    }
}
