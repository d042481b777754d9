//! `gather`, `evicted`, `nearest_kept` and `merge_tokens`.

use super::{exact_numbers, far};
use crate::backend::{KeptAndEvicted, TensorRows};
use crate::conformance::attend::RowOrder;
use crate::conformance::pack::difference;
use crate::conformance::report::{Failure, Report};
use crate::cpu::{self, CpuTensor, DenseRows, KeptTokens};
use crate::format::AttentionShape;
use crate::plan::{ElementType, RowLayout};
use crate::policy::{Merging, Nearest, evicted};
use crate::{Backend, Error, Result};

/// The kind of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionKeys {
    /// Random.
    Random,
    /// All equal except the last, which is zeros: everything ties.
    Equal,
    /// Evicted ones point away from all kept ones, so that what is not there would be nearer than any. In the last KV
    /// head the last kept key is zeros, and nearest to all.
    Opposite,
}

/// A case of eviction: the kept tokens are gathered, the evicted ones merged into them.
#[derive(Clone, Debug, PartialEq)]
pub struct EvictionCase {
    /// Unique name: lower case letters, digits and dashes.
    pub name: String,
    /// Heads of the layer.
    pub shape: AttentionShape,
    /// Tokens of the context.
    pub tokens: usize,
    /// Number of tokens of each KV head that stay.
    pub kept: usize,
    /// How evicted tokens merge.
    pub merging: Merging,
    /// What keys look like.
    pub keys: EvictionKeys,
    /// Element types of keys and of values.
    pub elements: [ElementType; 2],
    /// Order of their axes.
    pub order: RowOrder,
    /// Seed of the data.
    pub seed: u64,
    /// Whether the case belongs to the set that tests run on software drivers.
    pub quick: bool,
}

/// All cases: budgets of one token and of all, all head dimensions and ways of merging, equal keys.
pub fn eviction_cases() -> Vec<EvictionCase> {
    use ElementType::{Bf16, F16, F32};
    use Merging::{Averaged, Pivotal, Weighted};
    let sizes = [
        ("one-token", 64, 1, 1, Averaged, [F32, F32]),
        ("keep-1", 64, 200, 1, Pivotal, [F16, F32]),
        ("keep-20-percent", 128, 300, 60, Pivotal, [F16, F16]),
        ("keep-half", 80, 257, 128, Weighted, [F32, Bf16]),
        ("evict-1", 96, 130, 129, Averaged, [F32, F16]),
        ("budget-100", 256, 129, 129, Averaged, [Bf16, F16]),
        ("equal-keys", 64, 40, 20, Averaged, [F32, F32]),
        ("keep-600", 128, 2500, 600, Pivotal, [F16, F16]),
        ("all-into-one", 64, 1500, 300, Weighted, [F16, Bf16]),
        ("opposite-keys", 64, 40, 21, Averaged, [F32, F32]),
    ];
    let orders = [RowOrder::TokenMajor, RowOrder::HeadMajor];
    let case = |(i, (name, head_dim, tokens, kept, merging, elements)): (usize, (&str, _, _, _, _, _))| EvictionCase {
        name: format!("evict-{name}"),
        shape: AttentionShape::new(2, 2, head_dim).expect("the registry's shapes have kernels"),
        tokens,
        kept,
        merging,
        keys: match name {
            "equal-keys" | "all-into-one" => EvictionKeys::Equal,
            "opposite-keys" => EvictionKeys::Opposite,
            _ => EvictionKeys::Random,
        },
        elements,
        order: orders[i % 2],
        seed: 5000 + i as u64,
        quick: matches!(name, "keep-20-percent" | "budget-100" | "equal-keys" | "opposite-keys"),
    };
    sizes.into_iter().enumerate().map(case).collect()
}

impl EvictionCase {
    fn layout(&self) -> RowLayout {
        match self.order {
            RowOrder::TokenMajor => RowLayout::token_major(self.tokens, &self.shape),
            RowOrder::HeadMajor => RowLayout::head_major(self.tokens, &self.shape),
        }
    }

    /// Tokens spread over the context, different for each KV head. If keys are not random, the first ones.
    fn kept_tokens(&self) -> Vec<u32> {
        let heads = 0..self.shape.kv_heads();
        let token = |head: usize, i: usize| match self.keys {
            EvictionKeys::Equal | EvictionKeys::Opposite => i,
            EvictionKeys::Random => (i * self.tokens + head % self.tokens) / self.kept,
        };
        heads.flat_map(|head| (0..self.kept).map(move |i| (token(head, i)).min(self.tokens - 1) as u32)).collect()
    }

    fn rows(&self) -> [CpuTensor; 2] {
        let elements = self.layout().elements_needed(&self.shape);
        let head_dim = self.shape.head_dim();
        let mut keys = exact_numbers(elements, self.seed);
        if self.keys == EvictionKeys::Equal {
            keys.fill(1.0);
            for head in 0..self.shape.kv_heads() {
                keys[self.layout().row(self.tokens - 1, head)..][..head_dim].fill(0.0);
            }
        }
        if self.keys == EvictionKeys::Opposite {
            for (token, head) in (0..self.tokens).flat_map(|token| (0..self.shape.kv_heads()).map(move |h| (token, h)))
            {
                let key = &mut keys[self.layout().row(token, head)..][..head_dim];
                let is_kept = token < self.kept;
                // The channel that is small in one kept key and large in some evicted ones, which are nearest to that
                // key.
                let channel = if is_kept { token } else { (7 * token + head) % self.kept };
                key.fill(if is_kept { 1.0 } else { -1.0 });
                key[channel] *= if is_kept { 0.25 } else { 4.0 };
            }
            let zeros = self.layout().row(self.kept - 1, self.shape.kv_heads() - 1);
            keys[zeros..][..head_dim].fill(0.0);
        }
        let values = exact_numbers(elements, self.seed + 100);
        [CpuTensor::from_f32(keys, self.elements[0]), CpuTensor::from_f32(values, self.elements[1])]
    }
}

/// Gathers the kept keys and values, which must have the same bits, finds the others, and merges the evicted ones into
/// them.
pub(in crate::conformance) async fn run<B: Backend>(backend: &B, case: &EvictionCase) -> Result<Report> {
    let (shape, layout, heads) = (case.shape, case.layout(), case.shape.kv_heads());
    let [keys, values] = case.rows();
    let kept = case.kept_tokens();
    let below = case.tokens as u32;
    let on_device = [backend.upload(keys.elements()).await?, backend.upload(values.elements()).await?];
    let kept_on_device = backend.upload_indices(&kept, heads, below).await?;
    let mut failures = Vec::new();
    for (what, tensor, host) in [("kept keys", &on_device[0], &keys), ("kept values", &on_device[1], &values)] {
        let gathered = backend.gather(&shape, TensorRows { tensor, layout }, &kept_on_device)?;
        let want = cpu::gather(&shape, dense(host, layout), &kept)?.to_f32();
        failures.extend(difference(what, &backend.download(&gathered).await?, &want));
    }

    let of_heads = kept.chunks(case.kept).map(|kept| evicted(kept, case.tokens));
    let gone = of_heads.collect::<Result<Vec<Vec<u32>>>>()?.concat();
    if gone.is_empty() {
        if !matches!(backend.evicted(&kept_on_device), Err(Error::NoTokens { .. })) {
            failures.push(Failure::Refusal { message: "evicting nothing was not refused for that".into() });
        }
        return Ok(Report { check: case.name.clone(), accuracy: None, failures });
    }
    let gone_on_device = backend.evicted(&kept_on_device)?;
    let numbers = |tokens: &[u32]| tokens.iter().map(|&token| token as f32).collect::<Vec<f32>>();
    let found = backend.download_indices(&gone_on_device).await?;
    failures.extend(difference("evicted tokens", &numbers(&found), &numbers(&gone)));
    let input = KeptAndEvicted {
        shape,
        rows: layout,
        keys: &on_device[0],
        values: &on_device[1],
        kept: &kept_on_device,
        evicted: &gone_on_device,
    };
    let merged = backend.merge_tokens(input, case.merging)?;
    let places = backend.download_words(&merged.nearest).await?;
    let similarities = backend.download(&merged.similarities).await?;
    let merged_keys = backend.download(&merged.keys).await?;
    let merged_values = backend.download(&merged.values).await?;

    let tokens = KeptTokens { kept: &kept, evicted: &gone };
    let want = cpu::nearest_kept(&shape, dense(&keys, layout), tokens)?;
    let best: Vec<f32> = want.iter().map(|nearest| nearest.similarity).collect();
    failures.extend(far("similarities", &similarities, &best, 1e-5));
    let nearest: Vec<Nearest> =
        places.iter().zip(&similarities).map(|(&kept, &similarity)| Nearest { kept, similarity }).collect();
    failures.extend(wrong_choice(case, &nearest, &want));
    // Given the assignment, the rows must equal those of the reference. An impossible one has no such rows.
    let impossible = impossible_choice(case.kept, &nearest, &want);
    if nearest.len() == want.len() && impossible.is_none() {
        for (what, rows, got) in [("merged keys", &keys, &merged_keys), ("merged values", &values, &merged_values)] {
            let want = cpu::merge_tokens(&shape, dense(rows, layout), tokens, &nearest, case.merging)?;
            failures.extend(far(what, got, &want, 1e-5));
        }
    }
    failures.extend(impossible);
    let again = backend.merge_tokens(input, case.merging)?;
    failures.extend(difference("keys merged again", &backend.download(&again.keys).await?, &merged_keys));
    Ok(Report { check: case.name.clone(), accuracy: None, failures })
}

fn dense(tensor: &CpuTensor, layout: RowLayout) -> DenseRows<'_> {
    DenseRows { elements: tensor.elements(), layout }
}

/// Evicted tokens whose nearest kept token differs from the reference's. Where sums are rounded, another key of the
/// same similarity may win, in up to one of two hundred cases. Where keys are equal, the first must win, and among
/// opposite ones one is clearly nearest.
fn wrong_choice(case: &EvictionCase, got: &[Nearest], want: &[Nearest]) -> Option<Failure> {
    let allowed = match case.keys {
        EvictionKeys::Equal | EvictionKeys::Opposite => 0,
        EvictionKeys::Random => want.len() / 200,
    };
    if let Some(failure) = Failure::of_length("nearest kept tokens", got.len(), want.len()) {
        return Some(failure);
    }
    let mut wrong = got.iter().zip(want).enumerate().filter(|(_, (got, want))| got.kept != want.kept);
    let (index, (first, wanted)) = wrong.next()?;
    let elements = 1 + wrong.count();
    (elements > allowed).then(|| Failure::Differs {
        what: "nearest kept tokens".into(),
        elements,
        index,
        got: first.kept.into(),
        want: wanted.kept.into(),
    })
}

/// Evicted tokens that were assigned to a kept token which does not exist, one of which is too many whatever the keys.
fn impossible_choice(kept: usize, got: &[Nearest], want: &[Nearest]) -> Option<Failure> {
    let mut impossible = got.iter().enumerate().filter(|(_, got)| got.kept as usize >= kept);
    let (index, first) = impossible.next()?;
    Some(Failure::Differs {
        what: format!("nearest kept tokens of {kept}"),
        elements: 1 + impossible.count(),
        index,
        got: first.kept.into(),
        want: want.get(index).map_or(f64::NAN, |want| want.kept.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_impossible_choice_is_a_failure() {
        let case = eviction_cases().into_iter().find(|case| case.name == "evict-keep-600").expect("a large case");
        let want = vec![Nearest { kept: 3, similarity: 1.0 }; 1000];
        let mut got = want.clone();
        got[7].kept = case.kept as u32;
        assert_eq!(wrong_choice(&case, &got, &want), None, "another of the same similarity may win");
        let failure = impossible_choice(case.kept, &got, &want);
        assert!(matches!(failure, Some(Failure::Differs { elements: 1, index: 7, .. })), "{failure:?}");
        assert_eq!(impossible_choice(case.kept, &want, &want), None);
    }

    #[test]
    fn kept_tokens_ascend() {
        for case in eviction_cases() {
            for kept in case.kept_tokens().chunks(case.kept) {
                assert!(kept.windows(2).all(|pair| pair[0] < pair[1]), "{}", case.name);
            }
        }
    }
}
