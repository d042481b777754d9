//! Normalised mean square errors of attention outputs, and checks that 16-bit outputs are rounded well.

use half::{bf16, f16};

use crate::conformance::report::{Failure, Limits, OutputError};
use crate::plan::ElementType;

/// The exact outputs of some heads, and the data needed to judge others against them.
#[derive(Clone, Debug, Default)]
pub(in crate::conformance) struct Expected {
    /// `[heads, head_dim]`, the heads of all queries.
    pub outputs: Vec<f64>,
    /// Natural log-sum-exps, `[heads]`.
    pub lse: Vec<f64>,
    /// The mean of the value rows that each head reads, `[heads, head_dim]`.
    pub mean_values: Vec<f64>,
}

impl Expected {
    /// Adds the heads of `other` after its own.
    pub(in crate::conformance) fn extend(&mut self, other: Self) {
        self.outputs.extend(other.outputs);
        self.lse.extend(other.lse);
        self.mean_values.extend(other.mean_values);
    }

    /// The errors of `got`, in the layout of the outputs.
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
        // For a plain average only the rounding of the mean remains.
        let informative = (informative > 1e-12 * output).then(|| ratio(error, informative));
        OutputError { nmse: ratio(error, output), worst_head, informative }
    }

    /// The failures of `got`, described by `what`, and of its error against the limits.
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
        if let Some(failure) = Failure::of_length(what, got.len(), self.outputs.len()) {
            return vec![failure];
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

    /// The log-sum-exp with the largest deviation, if it exceeds rounding: scores of packed keys have about ten bits
    /// after the binary point.
    pub(in crate::conformance) fn lse_failure(&self, what: &str, got: &[f32]) -> Option<Failure> {
        const LIMIT: f64 = 2e-3;
        let error = |(&got, want): (&f32, &f64)| match f64::from(got) == *want {
            true => 0.0, // −∞ too
            false => (f64::from(got) - want).abs() / (1.0 + want.abs()),
        };
        let error = got.iter().zip(&self.lse).map(error).fold(0.0, |a: f64, b| if a.is_nan() || b < a { a } else { b });
        let wrong = got.len() != self.lse.len() || error.is_nan() || error > LIMIT;
        wrong.then(|| Failure::Inaccurate { what: format!("{what}: log-sum-exp"), error, limit: LIMIT })
    }
}

/// The first element of `got` that is not the nearest value of its type to the element of `in_f32`, the output of the
/// same step in f32.
///
/// 16-bit outputs are not compared with the exact ones. An error of 2e-5 is within the limits, but it moves one element
/// in three hundred across the midpoint between two neighbours in bf16, where it counts as half a percent. If that
/// element is an outlier, it alone gives its head an NMSE of 2e-5. Whether this happens depends on the last bits of a
/// driver's arithmetic.
pub(super) fn rounding_failure(got: &[f32], in_f32: &[f32], output: ElementType, head_dim: usize) -> Option<Failure> {
    let nearest = |x: f64| match output {
        ElementType::F32 => x,
        ElementType::F16 => f16::from_f64(x).to_f64(),
        ElementType::Bf16 => bf16::from_f64(x).to_f64(),
    };
    let misrounded = |index: usize, x: f32| {
        let head = &in_f32[index / head_dim * head_dim..][..head_dim];
        let mean_square = head.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / head_dim as f64;
        // The two steps use different kernels, whose last bits may differ.
        let (x, slack) = (f64::from(x), 1e-5 * mean_square.sqrt());
        let between = nearest(x - slack)..=nearest(x + slack);
        (!between.contains(&f64::from(got[index]))).then(|| nearest(x))
    };
    if let Some(failure) = Failure::of_length("output", got.len(), in_f32.len()) {
        return Some(failure);
    }
    let mut wrong = in_f32.iter().enumerate().filter_map(|(index, &x)| Some((index, misrounded(index, x)?)));
    let (index, want) = wrong.next()?;
    Some(Failure::Misrounded { elements: 1 + wrong.count(), index, got: got[index], want: want as f32 })
}

/// An error relative to a magnitude. A zero error is 0 relative to anything.
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
    fn outputs_of_16_bits_are_rounded_to_the_nearest() {
        // Neighbours in bf16 between 1 and 2 lie 1/128 apart, in f16 1/1024. 1.00390625 is a midpoint in bf16.
        let in_f32 = [1.003, 1.0039063, 1.006, 1.9];
        let [down, middle, up, far] = in_f32.map(|x| bf16::from_f32(x).to_f32());
        let failure = |got: [f32; 4]| rounding_failure(&got, &in_f32, ElementType::Bf16, 4);
        assert_eq!(failure([down, middle, up, far]), None);
        assert_eq!(failure([down, 1.0078125, up, far]), None, "either neighbour of a middle");
        let truncated = Failure::Misrounded { elements: 1, index: 2, got: 1.0, want: up };
        assert_eq!(failure([down, middle, 1.0, far]), Some(truncated));
        assert_eq!(rounding_failure(&in_f32.map(|x| f16::from_f32(x).to_f32()), &in_f32, ElementType::F16, 4), None);
        assert!(rounding_failure(&[down, middle, up, far], &in_f32, ElementType::F16, 4).is_some());
        assert!(failure([f32::NAN; 4]).is_some());
    }

    #[test]
    fn log_sum_exps_have_a_limit() {
        assert_eq!(expected().lse_failure("output", &[1.001, 2.0]), None);
        for wrong in [&[1.01, 2.0][..], &[1.0, f32::NAN], &[1.0], &[f32::NAN, 2.0]] {
            assert!(expected().lse_failure("output", wrong).is_some(), "{wrong:?}");
        }
    }
}
