//! The methods that keep some tokens of a prompt, as recipes name them.

use super::parsed::Parsed;
use crate::Result;
use crate::policy::{BudgetRule, KeepRule, Merging, Policy, TextRule};

/// A published method that keeps some tokens of a prompt and evicts the others, or a baseline, that recipes name.
#[derive(Clone, Copy, Debug)]
pub struct Eviction {
    /// The name in recipes.
    pub name: &'static str,
    /// What follows the name: `SHARE` of the prompt's tokens over all layers, 0 to 1, or numbers of tokens.
    pub arguments: &'static str,
    /// Which tokens it keeps.
    pub keeps: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    policy: fn(&[&str]) -> Option<Result<Policy>>,
}

/// All of them. A recipe begins with one, see [`ModelRecipe`](super::ModelRecipe).
pub const EVICTIONS: &[Eviction] = &[
    Eviction {
        name: "vlcache",
        arguments: "SHARE",
        keeps: "what the last 50 tokens after the image attend to, more in layers of denser attention; a tenth recent",
        source: "VL-Cache, arXiv 2410.23317",
        policy: |given| share(given, Policy::vlcache),
    },
    Eviction {
        name: "uniform",
        arguments: "SHARE",
        keeps: "as vlcache, as many in every layer",
        source: "VL-Cache without its layer budgets: a baseline",
        policy: |given| share(given, |share| Ok(Policy { budget: BudgetRule::Uniform, ..Policy::vlcache(share)? })),
    },
    Eviction {
        name: "lookm",
        arguments: "SHARE",
        keeps: "text before images, then what all tokens attend to; half recent; evicted tokens are merged",
        source: "LOOK-M, arXiv 2406.18139",
        policy: |given| share(given, Policy::lookm),
    },
    Eviction {
        name: "h2o",
        arguments: "SHARE",
        keeps: "what all tokens attend to; half recent",
        source: "H2O, arXiv 2306.14048",
        policy: |given| share(given, Policy::h2o),
    },
    Eviction {
        name: "snapkv",
        arguments: "SHARE",
        keeps: "what the last 32 tokens attend to, smoothed over 7 neighbours, and those 32",
        source: "SnapKV, arXiv 2404.14469",
        policy: |given| share(given, Policy::snapkv),
    },
    Eviction {
        name: "pyramidkv",
        arguments: "SHARE",
        keeps: "what the last 8 tokens attend to, smoothed over 7 neighbours, and those 8; fewer in higher layers",
        source: "PyramidKV, arXiv 2406.02069",
        policy: |given| share(given, Policy::pyramidkv),
    },
    Eviction {
        name: "streaming",
        arguments: "FIRST,LAST",
        keeps: "so many first tokens and so many last ones",
        source: "StreamingLLM, arXiv 2309.17453",
        policy: |given| match given {
            [first, last] => Some(Ok(Policy::streaming(first.parse().ok()?, last.parse().ok()?))),
            _ => None,
        },
    },
    Eviction {
        name: "random",
        arguments: "SHARE[,SEED]",
        keeps: "any tokens, others in every layer and KV head; the same seed keeps the same",
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
    /// The policy that a text names; `None` where it names none of them. What is wrong is said in words.
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

/// What an option changes of a policy, read.
#[derive(Clone, Copy, Debug)]
pub(super) enum EvictionOption {
    /// What becomes of evicted tokens.
    Merge(Option<Merging>),
    /// What being text means.
    Text(TextRule),
    /// After how many appended tokens a sequence is compressed again.
    Every(usize),
}

impl EvictionOption {
    /// Reads an option; `None` where it is none of a policy.
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

    /// Changes a policy, or after how many tokens it decides again. What is wrong is said in words.
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
