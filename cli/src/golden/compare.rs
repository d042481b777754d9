//! The three ways in which outputs are compared.

use std::fmt;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// How an output is compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// Equal values; +0 equals −0.
    Exact,
    /// `|got − want| ≤ atol + rtol · |want|`.
    Close {
        /// Relative to the wanted value.
        rtol: f64,
        /// Absolute.
        atol: f64,
    },
    /// Equal as sets along the last axis, which is this long.
    Set {
        /// Length of the last axis.
        row: usize,
    },
}

/// The first difference found in an output.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    output: String,
    got: Place,
    want: Place,
}

/// A length or an element.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Length(usize),
    Element(usize, f64),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.got, self.want) {
            (Place::Element(at, got), Place::Element(_, want)) => {
                write!(f, "{}[{at}] is {got:e}, wanted {want:e}", self.output)
            }
            (got, want) => write!(f, "{} has {got:?}, wanted {want:?}", self.output),
        }
    }
}

impl Mode {
    /// Reads a mode as the metadata give it; `row` is the length of the output's last axis.
    pub fn parse(value: &Value, row: usize) -> Result<Self> {
        let number = |key: &str| value[key].as_f64().with_context(|| format!("'close' without a number '{key}'"));
        match value["mode"].as_str() {
            Some("exact") => Ok(Self::Exact),
            Some("close") => Ok(Self::Close { rtol: number("rtol")?, atol: number("atol")? }),
            Some("set") => Ok(Self::Set { row }),
            _ => bail!("unknown way to compare: {value}"),
        }
    }

    /// Compares an output and returns how much of the tolerance it uses.
    pub fn compare(self, output: &str, got: &[f64], want: &[f64]) -> Result<f64, Mismatch> {
        let mismatch = |got, want| Mismatch { output: output.into(), got, want };
        if got.len() != want.len() {
            return Err(mismatch(Place::Length(got.len()), Place::Length(want.len())));
        }
        let (got, want) = match self {
            Self::Set { row } => (sorted_rows(got, row), sorted_rows(want, row)),
            _ => (got.to_vec(), want.to_vec()),
        };
        let mut worst = 0.0f64;
        for (at, (&got, &want)) in got.iter().zip(&want).enumerate() {
            let used = match self {
                Self::Close { rtol, atol } if got != want => (got - want).abs() / (atol + rtol * want.abs()),
                _ if got == want => 0.0,
                _ => f64::INFINITY,
            };
            // NaN is never near enough.
            if used.is_nan() || used > 1.0 {
                return Err(mismatch(Place::Element(at, got), Place::Element(at, want)));
            }
            worst = worst.max(used);
        }
        Ok(worst)
    }
}

fn sorted_rows(values: &[f64], row: usize) -> Vec<f64> {
    let mut values = values.to_vec();
    values.chunks_mut(row.max(1)).for_each(|row| row.sort_by(f64::total_cmp));
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_mean_what_the_format_says() {
        assert!(Mode::Exact.compare("x", &[0.0, 1.0], &[-0.0, 1.0]).is_ok());
        assert!(Mode::Exact.compare("x", &[1.0], &[1.0 + f64::EPSILON]).is_err());
        assert!(Mode::Exact.compare("x", &[1.0], &[1.0, 2.0]).is_err());
        let close = Mode::Close { rtol: 0.1, atol: 1.0 };
        assert!(close.compare("x", &[12.0], &[10.0]).is_ok());
        assert!(close.compare("x", &[12.1], &[10.0]).is_err());
        assert!(close.compare("x", &[f64::NAN], &[10.0]).is_err());
        let exact_scale = Mode::Close { rtol: 1e-6, atol: 0.0 };
        assert_eq!(exact_scale.compare("x", &[0.0], &[0.0]), Ok(0.0));
        assert!(exact_scale.compare("x", &[1e-30], &[0.0]).is_err());
        let set = Mode::Set { row: 2 };
        assert!(set.compare("x", &[2.0, 1.0, 3.0, 4.0], &[1.0, 2.0, 3.0, 4.0]).is_ok());
        assert!(set.compare("x", &[3.0, 1.0, 2.0, 4.0], &[1.0, 2.0, 3.0, 4.0]).is_err());
        assert!(Mode::parse(&serde_json::json!({"mode": "close", "rtol": 0.1}), 1).is_err());
        assert!(Mode::parse(&serde_json::json!({"mode": "nearly"}), 1).is_err());
    }
}
