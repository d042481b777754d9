//! Checks of the kernel that merges attention states of several parts, against the CPU reference.

use super::data::Random;
use super::pack::difference;
use super::report::{Failure, Report};
use super::select::far;
use crate::backend::{Attention, AttentionStates, StateParts};
use crate::cpu::{Cpu, CpuTensor};
use crate::format::AttentionShape;
use crate::plan::ElementType;
use crate::{Backend, Error, Result};

/// The parts of a case that have no tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmptyParts {
    /// None.
    None,
    /// For every row other ones, at most all but one. Their outputs are NaN.
    Some,
    /// All.
    All,
}

/// A case of merging states: parts one after the other, in tensors that are longer.
#[derive(Clone, Debug, PartialEq)]
pub struct MergeCase {
    /// Unique name: lower case letters, digits and dashes.
    pub name: String,
    /// Heads of the layer.
    pub shape: AttentionShape,
    /// Parts.
    pub parts: usize,
    /// Rows of queries.
    pub rows: usize,
    /// Element type of the result.
    pub output: ElementType,
    /// The parts without tokens.
    pub empty: EmptyParts,
    /// The largest log-sum-exp, in both directions.
    pub largest: f32,
    /// Seed of the data.
    pub seed: u64,
    /// Whether the case belongs to the set that tests run on software drivers.
    pub quick: bool,
}

/// All cases: one part, two, and as many as ranks; every type of elements; parts without tokens; log-sum-exps so far
/// apart that one part has all the weight.
pub fn merge_cases() -> Vec<MergeCase> {
    use ElementType::{Bf16, F16, F32};
    use EmptyParts::{All, None, Some};
    let sizes = [
        ("one-part", (4, 2, 64), (1, 3), F32, None, 8.0),
        ("two-parts", (8, 2, 128), (2, 5), F32, Some, 8.0),
        ("three-parts", (14, 2, 80), (3, 2), F16, None, 8.0),
        ("seven-parts", (4, 4, 256), (7, 1), Bf16, Some, 8.0),
        ("many-parts", (2, 1, 96), (64, 9), F32, Some, 30.0),
        ("many-rows", (32, 8, 128), (4, 300), F16, Some, 8.0),
        ("far-apart", (3, 1, 64), (5, 7), F32, Some, 1e4),
        ("no-tokens", (2, 2, 64), (3, 2), F32, All, 8.0),
    ];
    let case = |(i, (name, (query_heads, kv_heads, head_dim), (parts, rows), output, empty, largest))| MergeCase {
        name: format!("merge-{name}"),
        shape: AttentionShape::new(query_heads, kv_heads, head_dim).expect("the registry's shapes have kernels"),
        parts,
        rows,
        output,
        empty,
        largest,
        seed: 9000 + i,
        quick: !matches!(name, "many-rows" | "many-parts"),
    };
    (0u64..).zip(sizes).map(case).collect()
}

impl MergeCase {
    /// Outputs and log-sum-exps of all parts, and of one more row.
    fn states(&self) -> (Vec<f32>, Vec<f32>) {
        let mut random = Random::new(self.seed);
        let (heads, head_dim) = (self.rows * self.shape.query_heads(), self.shape.head_dim());
        let spare = self.shape.query_heads();
        let mut lse: Vec<f32> =
            (0..self.parts * heads + spare).map(|_| random.gaussian() * self.largest / 4.0).collect();
        let mut outputs: Vec<f32> = (0..lse.len() * head_dim).map(|_| random.gaussian()).collect();
        for part in 0..self.parts {
            for head in 0..heads {
                let is_empty = match self.empty {
                    EmptyParts::None => false,
                    EmptyParts::Some => head % self.parts != part && (head + part) % 3 > 0,
                    EmptyParts::All => true,
                };
                if is_empty {
                    let at = part * heads + head;
                    lse[at] = f32::NEG_INFINITY;
                    outputs[at * head_dim..][..head_dim].fill(f32::NAN);
                }
            }
        }
        (outputs, lse)
    }

    /// What one step of the type of the result may differ by.
    const fn tolerance(&self) -> f64 {
        match self.output {
            ElementType::F32 => 2e-6,
            ElementType::F16 => 1e-3,
            ElementType::Bf16 => 8e-3,
        }
    }
}

/// Merges into tensors that are a row longer, with log-sum-exps and without: both outputs have the same bits, and what
/// lies behind the rows is as it was.
pub(super) async fn run<B: Backend>(backend: &B, case: &MergeCase) -> Result<Report> {
    let (heads, head_dim) = (case.rows * case.shape.query_heads(), case.shape.head_dim());
    let longer = heads + case.shape.query_heads();
    let (outputs, lse) = case.states();
    let (mut want, mut want_lse) =
        (CpuTensor::from_f32(vec![0.5; longer * head_dim], case.output), CpuTensor::F32(vec![0.5; longer]));
    let (unwritten, unwritten_lse) = (want.clone(), want_lse.clone());
    let of_cpu = AttentionStates { outputs: CpuTensor::F32(outputs.clone()), lse: CpuTensor::F32(lse.clone()) };
    let parts = StateParts { states: &of_cpu, parts: case.parts, rows: case.rows };
    Cpu::new().merge_parts(&case.shape, parts, &mut want, Some(&mut want_lse))?;

    let outputs = backend.upload(outputs.as_slice().into()).await?;
    let lse = backend.upload(lse.as_slice().into()).await?;
    let states = AttentionStates { outputs, lse };
    let parts = StateParts { states: &states, parts: case.parts, rows: case.rows };
    let mut merged = backend.upload(unwritten.elements()).await?;
    let mut merged_lse = backend.upload(unwritten_lse.elements()).await?;
    backend.merge_parts(&case.shape, parts, &mut merged, Some(&mut merged_lse))?;
    let got = backend.download(&merged).await?;
    let mut alone = backend.upload(unwritten.elements()).await?;
    backend.merge_parts(&case.shape, parts, &mut alone, None)?;

    let mut failures = Vec::new();
    failures.extend(far("merged outputs", &got, &want.to_f32(), case.tolerance()));
    let got_lse = backend.download(&merged_lse).await?;
    failures.extend(far("merged log-sum-exps", &got_lse, &want_lse.to_f32(), 2e-6));
    let behind = (&got[heads * head_dim..], &unwritten.to_f32()[heads * head_dim..]);
    failures.extend(difference("elements behind the merged outputs", behind.0, behind.1));
    failures.extend(difference("outputs without log-sum-exps", &backend.download(&alone).await?, &got));
    let more = StateParts { parts: case.parts + 1, rows: case.rows + 1, ..parts };
    if !matches!(backend.merge_parts(&case.shape, more, &mut alone, None), Err(Error::Elements { .. })) {
        failures.push(Failure::Refusal { message: "more parts than there are were not refused for that".into() });
    }
    Ok(Report { check: case.name.clone(), accuracy: None, failures })
}
