//! Normalised mean square errors of attention outputs.

use half::{bf16, f16};

use crate::conformance::report::{Failure, Limits, OutputError};
use crate::plan::ElementType;

/// The exact outputs of some heads and what is needed to judge others against them.
#[derive(Clone, Debug, Default)]
pub(in crate::conformance) struct Expected {
    /// `[heads, head_dim]`, the heads of all queries.
    pub outputs: Vec<f64>,
    /// Natural log-sum-exps, `[heads]`.
    pub lse: Vec<f64>,
    /// The mean over the value rows that each head reads, `[heads, head_dim]`.
    pub mean_values: Vec<f64>,
}

impl Expected {
    /// Adds the heads of `other` after its own.
    pub(in crate::conformance) fn extend(&mut self, other: Self) {
        self.outputs.extend(other.outputs);
        self.lse.extend(other.lse);
        self.mean_values.extend(other.mean_values);
    }

    /// The outputs as a tensor of this type holds them: that it rounds is no error of a kernel.
    pub(in crate::conformance) fn rounded_to(mut self, output: ElementType) -> Self {
        let rounded = |x: f64| match output {
            ElementType::F32 => x,
            ElementType::F16 => f16::from_f64(x).to_f64(),
            ElementType::Bf16 => bf16::from_f64(x).to_f64(),
        };
        self.outputs.iter_mut().for_each(|x| *x = rounded(*x));
        self
    }

    /// The errors of `got`, laid out as the outputs.
    pub(in crate::conformance) fn error_of(&self, got: &[f32], head_dim: usize) -> OutputError {
        let (mut error, mut output, mut informative, mut worst_head) = (0.0, 0.0, 0.0, 0.0f64);
        let heads = self.outputs.chunks(head_dim).zip(self.mean_values.chunks(head_dim));
        for (got, (want, mean)) in got.chunks(head_dim).zip(heads) {
            let head_error: f64 = got.iter().zip(want).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
            let head_output: f64 = want.iter().map(|w| w * w).sum();
            error += head_error;
            output += head_output;
            informative += want.iter().zip(mean).map(|(w, m)| (w - m).powi(2)).sum::<f64>();
            worst_head = worst_head.max(ratio(head_error, head_output));
        }
        // What is left of a plain average is the rounding of the mean.
        let informative = (informative > 1e-12 * output).then(|| ratio(error, informative));
        OutputError { nmse: ratio(error, output), worst_head, informative }
    }

    /// What of `got`, which is `what`, and of its error breaks the limits.
    pub(in crate::conformance) fn failures(
        &self,
        what: &str,
        got: &[f32],
        error: &OutputError,
        limits: &Limits,
    ) -> Vec<Failure> {
        if let Some(index) = got.iter().position(|x| !x.is_finite()) {
            return vec![Failure::OutputNotFinite { index }];
        }
        let judged = [
            ("NMSE", error.nmse, limits.nmse),
            ("worst head's NMSE", error.worst_head, limits.worst_head),
            ("NMSE of the informative part", error.informative.unwrap_or(0.0), limits.informative),
        ];
        judged
            .into_iter()
            .filter(|(_, error, limit)| error > limit || error.is_nan())
            .map(|(kind, error, limit)| Failure::Inaccurate { what: format!("{what}: {kind}"), error, limit })
            .collect()
    }

    /// The log-sum-exp furthest off, if that is further than rounding: scores of packed keys have about ten bits after the
    /// point.
    pub(in crate::conformance) fn lse_failure(&self, what: &str, got: &[f32]) -> Option<Failure> {
        const LIMIT: f64 = 2e-3;
        let error = |(&got, want): (&f32, &f64)| (f64::from(got) - want).abs() / (1.0 + want.abs());
        let error = got.iter().zip(&self.lse).map(error).fold(0.0, |a: f64, b| if a.is_nan() || b < a { a } else { b });
        let wrong = got.len() != self.lse.len() || error.is_nan() || error > LIMIT;
        wrong.then(|| Failure::Inaccurate { what: format!("{what}: log-sum-exp"), error, limit: LIMIT })
    }
}

/// An error relative to a magnitude; no error is 0 of anything.
fn ratio(error: f64, magnitude: f64) -> f64 {
    if error == 0.0 { 0.0 } else { error / magnitude.max(f64::MIN_POSITIVE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected() -> Expected {
        Expected { outputs: vec![3.0, 4.0, 1.0, 0.0], lse: vec![1.0, 2.0], mean_values: vec![3.0, 3.0, 0.0, 0.0] }
    }

    #[test]
    fn exact_outputs_have_no_error() {
        assert_eq!(
            expected().error_of(&[3.0, 4.0, 1.0, 0.0], 2),
            OutputError { informative: Some(0.0), ..OutputError::default() }
        );
    }

    #[test]
    fn each_error_has_its_own_denominator() {
        let error = expected().error_of(&[3.0, 4.5, 1.5, 0.0], 2);
        assert_eq!(error.nmse, 0.5 / 26.0);
        assert_eq!(error.worst_head, 0.25);
        assert_eq!(error.informative, Some(0.5 / 2.0));
    }

    #[test]
    fn nan_fails_whatever_the_limit() {
        let expected = expected();
        let got = [3.0, f32::NAN, 1.0, 0.0];
        let error = expected.error_of(&got, 2);
        let failures = expected.failures(
            "output",
            &got,
            &error,
            &Limits { nmse: f64::MAX, worst_head: f64::MAX, informative: f64::MAX },
        );
        assert_eq!(failures, [Failure::OutputNotFinite { index: 1 }]);
    }

    #[test]
    fn log_sum_exps_have_a_limit() {
        assert_eq!(expected().lse_failure("output", &[1.001, 2.0]), None);
        for wrong in [&[1.01, 2.0][..], &[1.0, f32::NAN], &[1.0], &[f32::NAN, 2.0]] {
            assert!(expected().lse_failure("output", wrong).is_some(), "{wrong:?}");
        }
    }
}
