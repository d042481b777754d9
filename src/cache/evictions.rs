//! The methods that keep some tokens of a prompt, as named in recipes.

use super::parsed::Parsed;
use crate::Result;
use crate::policy::{BudgetRule, KeepRule, Merging, Policy, TextRule};

/// A named method that keeps some tokens of a prompt and evicts the others: a published one, or a baseline.
#[derive(Clone, Copy, Debug)]
pub struct Eviction {
    /// The name in recipes.
    pub name: &'static str,
    /// The arguments after the name: `SHARE`, the fraction of the prompt's tokens over all layers, 0 to 1, or numbers
    /// of tokens.
    pub arguments: &'static str,
    /// The tokens that it keeps.
    pub keeps: &'static str,
    /// Its source.
    pub source: &'static str,
    policy: fn(&[&str]) -> Option<Result<Policy>>,
}

/// All of them. A recipe may begin with one, see [`ModelRecipe`](super::ModelRecipe).
pub const EVICTIONS: &[Eviction] = &[
    Eviction {
        name: "vlcache",
        arguments: "SHARE",
        keeps: "the tokens that the last 50 after the image attend to most, more in denser layers; a tenth recent",
        source: "VL-Cache, arXiv 2410.23317",
        policy: |given| share(given, Policy::vlcache),
    },
    Eviction {
        name: "uniform",
        arguments: "SHARE",
        keeps: "as vlcache, the same number in every layer",
        source: "VL-Cache without its layer budgets: a baseline",
        policy: |given| share(given, |share| Ok(Policy { budget: BudgetRule::Uniform, ..Policy::vlcache(share)? })),
    },
    Eviction {
        name: "lookm",
        arguments: "SHARE",
        keeps: "text before images, then the most attended tokens; half recent; evicted tokens are merged",
        source: "LOOK-M, arXiv 2406.18139",
        policy: |given| share(given, Policy::lookm),
    },
    Eviction {
        name: "h2o",
        arguments: "SHARE",
        keeps: "the most attended tokens; half recent",
        source: "H2O, arXiv 2306.14048",
        policy: |given| share(given, Policy::h2o),
    },
    Eviction {
        name: "snapkv",
        arguments: "SHARE",
        keeps: "the tokens that the last 32 attend to most, smoothed over 7 neighbours, and those 32",
        source: "SnapKV, arXiv 2404.14469",
        policy: |given| share(given, Policy::snapkv),
    },
    Eviction {
        name: "pyramidkv",
        arguments: "SHARE",
        keeps: "as snapkv with the last 8 tokens, and fewer tokens in higher layers",
        source: "PyramidKV, arXiv 2406.02069",
        policy: |given| share(given, Policy::pyramidkv),
    },
    Eviction {
        name: "streaming",
        arguments: "FIRST,LAST",
        keeps: "the first FIRST and the last LAST tokens",
        source: "StreamingLLM, arXiv 2309.17453",
        policy: |given| match given {
            [first, last] => Some(Ok(Policy::streaming(first.parse().ok()?, last.parse().ok()?))),
            _ => None,
        },
    },
    Eviction {
        name: "random",
        arguments: "SHARE[,SEED]",
        keeps: "random tokens, independent in every layer and KV head; a seed repeats its choice",
        source: "a baseline",
        policy: |given| match given {
            [share] => Some(Policy::random(share.parse().ok()?, 0)),
            [share, seed] => Some(Policy::random(share.parse().ok()?, seed.parse().ok()?)),
            _ => None,
        },
    },
];

fn share(given: &[&str], policy: impl Fn(f64) -> Result<Policy>) -> Option<Result<Policy>> {
    match given {
        [share] => Some(policy(share.parse().ok()?)),
        _ => None,
    }
}

impl Eviction {
    /// The policy that a text names; `None` if it names none. Errors are messages.
    pub(super) fn parse(text: &str) -> Option<Parsed<Policy>> {
        let (name, arguments) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        let eviction = EVICTIONS.iter().find(|eviction| eviction.name == name)?;
        let given: Vec<&str> = arguments.map_or(Vec::new(), |arguments| arguments.split(',').collect());
        Some(match (eviction.policy)(&given) {
            Some(policy) => policy.map_err(|error| error.to_string()),
            None => Err(format!("{name} comes as {name}:{}", eviction.arguments)),
        })
    }

    /// Their names.
    pub(super) fn names() -> String {
        EVICTIONS.iter().map(|eviction| eviction.name).collect::<Vec<_>>().join(", ")
    }
}

/// A parsed option of a policy.
#[derive(Clone, Copy, Debug)]
pub(super) enum EvictionOption {
    /// How evicted tokens are merged.
    Merge(Option<Merging>),
    /// How text is preferred.
    Text(TextRule),
    /// The number of appended tokens after which a sequence is compressed again.
    Every(usize),
}

impl EvictionOption {
    /// Parses an option; `None` if it is not an option of policies.
    pub(super) fn parse(name: &str, value: &str) -> Option<Parsed<Self>> {
        let unknown = |allowed| Err(format!("{name}={value}: {allowed} is needed"));
        Some(match name {
            "merge" => match value {
                "none" => Ok(Self::Merge(None)),
                "averaged" => Ok(Self::Merge(Some(Merging::Averaged))),
                "pivotal" => Ok(Self::Merge(Some(Merging::Pivotal))),
                "weighted" => Ok(Self::Merge(Some(Merging::Weighted))),
                _ => unknown("none, averaged, pivotal or weighted"),
            },
            "text" => match value {
                "equal" => Ok(Self::Text(TextRule::Equal)),
                "raised" => Ok(Self::Text(TextRule::Raised)),
                "stays" => Ok(Self::Text(TextRule::Stays)),
                _ => unknown("equal, raised or stays"),
            },
            "every" => match value.parse() {
                Ok(tokens) if tokens > 0 => Ok(Self::Every(tokens)),
                _ => unknown("a number of tokens, at least 1,"),
            },
            _ => return None,
        })
    }

    /// Applies the option to a policy, or to the number of tokens after which it decides again. Errors are messages.
    pub(super) fn apply(self, policy: &mut Policy, every: &mut Option<usize>) -> Parsed<()> {
        match (self, &mut policy.keep) {
            (Self::Every(tokens), _) => *every = Some(tokens),
            (Self::Merge(merging), _) => policy.merging = merging,
            (Self::Text(rule), KeepRule::Best { text, .. }) => *text = rule,
            (Self::Text(_), _) => return Err("text= needs a method that looks at scores".into()),
        }
        Ok(())
    }
}
