//! Decode steps of sizes that a user gives.

use std::str::FromStr;

use anyhow::{Result, ensure};
use kvpack::AttentionShape;
use kvpack::SegmentFormat;
use kvpack::conformance::DecodeShape;

/// Sizes of decode steps; every combination of the values is timed.
#[derive(Clone, Debug, clap::Args)]
pub struct SizeArgs {
    /// Time steps of your own sizes instead of named ones: sequences of the batch, such as 1,8,32 [default: 1]
    #[arg(long, value_name = "N,N", value_delimiter = ',', help_heading = SIZES)]
    batch: Vec<usize>,
    /// Tokens of each sequence, such as 4k,32k or 1000 [default: 4k]
    #[arg(long, value_name = "N,N", value_delimiter = ',', help_heading = SIZES)]
    tokens: Vec<Tokens>,
    /// Query and KV heads, such as 32/8,64/8 [default: 32/8]
    #[arg(long, value_name = "Q/KV", value_delimiter = ',', help_heading = SIZES)]
    heads: Vec<Heads>,
    /// Channels of a head: 64, 80, 96, 128 or 256 [default: 128]
    #[arg(long, value_name = "N,N", value_delimiter = ',', help_heading = SIZES)]
    head_dim: Vec<usize>,
}

const SIZES: &str = "Sizes";

/// Most sequences of a batch, and tokens of a sequence.
const MOST_SEQUENCES: usize = 1 << 12;
const MOST_TOKENS: usize = 1 << 22;

/// Most bytes of f16 keys and values of a step: 64 GiB.
const MOST_BYTES: u64 = 64 << 30;

/// Tokens of a sequence; `4k` is 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tokens(usize);

impl FromStr for Tokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) = match text.strip_suffix(['k', 'K']) {
            Some(digits) => (digits, 1024),
            None => (text, 1),
        };
        let tokens = digits.parse::<usize>().ok().and_then(|count| count.checked_mul(unit));
        let tokens = tokens.filter(|tokens| (1..=MOST_TOKENS).contains(tokens));
        tokens.map(Self).ok_or_else(|| format!("give tokens as 1000 or 4k, from 1 to {}k", MOST_TOKENS / 1024))
    }
}

/// Query heads and KV heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Heads {
    query: usize,
    kv: usize,
}

impl FromStr for Heads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let heads = text.split_once('/').and_then(|(query, kv)| {
            let (query, kv) = (query.parse().ok()?, kv.parse().ok()?);
            Some(Self { query, kv })
        });
        heads.ok_or_else(|| "give query heads and KV heads, as in 32/8".into())
    }
}

impl SizeArgs {
    /// True if any size was given.
    pub fn given(&self) -> bool {
        !(self.batch.is_empty() && self.tokens.is_empty() && self.heads.is_empty() && self.head_dim.is_empty())
    }

    /// A step for every combination, the first option varying slowest.
    ///
    /// # Errors
    /// When a step cannot be, or is too large for any device.
    pub fn steps(&self) -> Result<Vec<DecodeShape>> {
        let or = |given: &[usize], default: usize| if given.is_empty() { vec![default] } else { given.to_vec() };
        let tokens: Vec<usize> = self.tokens.iter().map(|tokens| tokens.0).collect();
        let heads = if self.heads.is_empty() { vec![Heads { query: 32, kv: 8 }] } else { self.heads.clone() };
        let mut steps = Vec::new();
        for sequences in or(&self.batch, 1) {
            for tokens in or(&tokens, 4096) {
                for &heads in &heads {
                    for head_dim in or(&self.head_dim, 128) {
                        steps.push(step(sequences, tokens, heads, head_dim)?);
                    }
                }
            }
        }
        Ok(steps)
    }
}

fn step(sequences: usize, tokens: usize, heads: Heads, head_dim: usize) -> Result<DecodeShape> {
    ensure!(
        (1..=MOST_SEQUENCES).contains(&sequences),
        "--batch {sequences}: from 1 to {MOST_SEQUENCES} sequences can be timed"
    );
    let name = format!("b{sequences}-{}-h{}x{}-d{head_dim}", short(tokens), heads.query, heads.kv);
    let step = DecodeShape::even(name, AttentionShape::new(heads.query, heads.kv, head_dim)?, sequences, tokens);
    // As u128: heads may be any number.
    let bytes = [sequences, tokens, heads.kv, head_dim, 4].iter().fold(1, |product, &x| product * x as u128);
    ensure!(
        bytes <= u128::from(MOST_BYTES),
        "--batch {sequences} --tokens {tokens}: {} of f16 keys and values; the limit is {}",
        crate::print::bytes(u64::try_from(bytes).unwrap_or(u64::MAX)),
        crate::print::bytes(MOST_BYTES)
    );
    debug_assert!(step.code_bytes(&SegmentFormat::F16.into()) as u128 >= bytes);
    Ok(step)
}

/// `32k`, or the number itself.
fn short(tokens: usize) -> String {
    if tokens.is_multiple_of(1024) { format!("{}k", tokens / 1024) } else { tokens.to_string() }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        sizes: SizeArgs,
    }

    fn steps(arguments: &[&str]) -> Result<Vec<DecodeShape>> {
        Command::try_parse_from(["x"].iter().chain(arguments))?.sizes.steps()
    }

    #[test]
    fn every_combination_is_a_step() {
        let names: Vec<String> = steps(&["--batch", "1,8", "--tokens", "4k,1000", "--heads", "32/8"])
            .unwrap()
            .into_iter()
            .map(|step| step.name)
            .collect();
        assert_eq!(names, ["b1-4k-h32x8-d128", "b1-1000-h32x8-d128", "b8-4k-h32x8-d128", "b8-1000-h32x8-d128"]);
        assert_eq!(steps(&["--head-dim", "64"]).unwrap()[0].shape.head_dim(), 64);
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for (arguments, part) in [
            (["--batch", "0"], "from 1 to"),
            (["--batch", "18446744073709551615"], "from 1 to"),
            (["--tokens", "0"], "as 1000 or 4k"),
            (["--tokens", "18014398509481984k"], "as 1000 or 4k"),
            (["--heads", "32"], "as in 32/8"),
            (["--heads", "7/2"], "heads"),
            (["--heads", "4294967296/4294967296"], ""),
            (["--head-dim", "63"], "63"),
        ] {
            let error = format!("{:#}", steps(&arguments).unwrap_err());
            assert!(error.contains(part), "{arguments:?}: {error}");
        }
        let error = steps(&["--batch", "4096", "--tokens", "4096k"]).unwrap_err().to_string();
        assert!(error.contains("the limit is 64 GiB"), "{error}");
    }
}
