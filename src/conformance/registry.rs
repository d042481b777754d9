//! The registry: all checks.

use super::attend::{attend_cases, state_cases};
use super::check::Check;
use super::merge::merge_cases;
use super::pack::pack_cases;
use super::select::{chunks_cases, eviction_cases, statistics_cases, token_scores_cases, top_k_cases};

/// All checks, kind by kind. Names are unique; the order is stable.
pub fn checks() -> Vec<Check> {
    let mut checks: Vec<Check> = attend_cases().into_iter().map(Check::Attention).collect();
    checks.extend(state_cases().into_iter().map(Check::States));
    checks.extend(merge_cases().into_iter().map(Check::Merge));
    checks.extend(pack_cases().into_iter().map(Check::Packing));
    checks.extend(statistics_cases().into_iter().map(Check::Statistics));
    checks.extend(token_scores_cases().into_iter().map(Check::TokenScores));
    checks.extend(top_k_cases().into_iter().map(Check::TopK));
    checks.extend(eviction_cases().into_iter().map(Check::Eviction));
    checks.extend(chunks_cases().into_iter().map(Check::Chunks));
    checks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Kind;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_plain() {
        let checks = checks();
        let names: BTreeSet<&str> = checks.iter().map(Check::name).collect();
        assert_eq!(names.len(), checks.len());
        assert!(names.iter().all(|n| n.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-')));
    }

    #[test]
    fn the_quick_subset_is_small_and_has_every_kind() {
        for kind in Kind::ALL {
            let quick = checks().iter().filter(|check| check.kind() == kind && check.is_quick()).count();
            assert!((1..=64).contains(&quick), "{quick} quick checks of {kind}");
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
    }
}
