//! Runs one case of attention on one backend.

use super::accuracy::{Expected, rounding_failure};
use super::case::{AttendCase, DataKind};
use super::reference;
use super::stored::{Stored, StoredSpan};
use crate::backend::{AttendOptions, AttentionStates, RowCentres};
use crate::conformance::data::{self, SequenceData};
use crate::conformance::report::{Accuracy, Failure, Limits, Mismatch, Report};
use crate::cpu::{Cpu, CpuTensor};
use crate::format::KeyOrValue;
use crate::plan::{AttendPlan, ElementType};
use crate::{Backend, Result};

/// Stores the data of a case through `backend` and compares the stored data with the CPU reference's bit for bit.
/// Attends twice, which must return the same bits, and compares the output with an f64 attention over the stored data.
/// A 16-bit output is compared with the output of the same step in f32.
pub(in crate::conformance) async fn run<B: Backend>(backend: &B, case: &AttendCase) -> Result<Report> {
    let data = data::sequences(case);
    let tensors = upload(backend, &data).await?;
    let mut failures = search_non_finite(backend, case, &data, &tensors).await?;

    let stored = Stored::fill(backend, case, &data, &tensors).await?;
    let spans = stored.read_back(backend).await?;
    failures.extend(differences(&spans, &of_reference(case, &data).await?));

    let plan = stored.plan(case)?;
    let queries = backend.upload(query_tensor(case, &data, &plan).elements()).await?;
    let output = backend.attend(&plan, &stored.stores(), &queries, case.options).await?;
    let output = backend.download(&output).await?;
    let again = backend.attend(&plan, &stored.stores(), &queries, case.options).await?;
    failures.extend(unrepeated(&output, &backend.download(&again).await?));

    let in_f32 = match case.options.output {
        ElementType::F32 => output,
        rounded => {
            let options = AttendOptions { output: ElementType::F32, ..case.options };
            let in_f32 = backend.attend(&plan, &stored.stores(), &queries, options).await?;
            let in_f32 = backend.download(&in_f32).await?;
            failures.extend(rounding_failure(&output, &in_f32, rounded, case.shape.head_dim()));
            in_f32
        }
    };
    let expected = reference::of_case(case, &data, &spans, &plan)?;
    let error = expected.error_of(&in_f32, case.shape.head_dim());
    let limits = limits_of(backend, case)?;
    failures.extend(expected.failures("output", &in_f32, &error, &limits));
    failures.extend(stored.guard_failures(backend).await?);
    Ok(Report { check: case.name.clone(), accuracy: Some(Accuracy { error, limits }), failures })
}

/// Compares two kinds of attention states with f64: those of the queries of a case, and those merged from states over
/// the first store and over the others.
pub(in crate::conformance) async fn run_states<B: Backend>(backend: &B, case: &AttendCase) -> Result<Report> {
    let data = data::sequences(case);
    let tensors = upload(backend, &data).await?;
    let stored = Stored::fill(backend, case, &data, &tensors).await?;
    let spans = stored.read_back(backend).await?;
    let plan = stored.plan(case)?;
    let queries = backend.upload(query_tensor(case, &data, &plan).elements()).await?;
    let expected = reference::of_case(case, &data, &spans, &plan)?;
    let limits = limits_of(backend, case)?;
    let of = |plan: AttendPlan| {
        let (stores, queries) = (stored.stores(), &queries);
        async move {
            let states = backend.attend_states(&plan, &stores, queries, case.options).await?;
            if !case.centred {
                return Ok(states);
            }
            let slots = plan
                .runs()
                .iter()
                .flat_map(|planned| std::iter::repeat_n(planned.run.sequence as u32, planned.run.queries));
            let centres = RowCentres { slots: &slots.collect::<Vec<_>>(), scale: plan.scoring().scale() };
            backend.uncentre_lse(stores[0], queries, centres, states).await
        }
    };
    let whole = of(plan).await?;
    // Sinks count once, in one of the parts.
    let first = of(stored.plan_over(case, &case.scoring, |store| store == 0)?).await?;
    let without_sinks = case.scoring.clone().without_sinks();
    let others = of(stored.plan_over(case, &without_sinks, |store| store > 0)?).await?;
    let merged = backend.merge(&case.shape, &first, &others).await?;

    let (error, mut failures) = judge_states(backend, case, &expected, "output", &whole, &limits).await?;
    failures.extend(judge_states(backend, case, &expected, "merged output", &merged, &limits).await?.1);
    failures.extend(stored.guard_failures(backend).await?);
    Ok(Report { check: case.name.clone(), accuracy: Some(Accuracy { error, limits }), failures })
}

fn limits_of<B: Backend>(backend: &B, case: &AttendCase) -> Result<Limits> {
    let formats = case.segments.iter().map(|segment| &segment.format);
    let limits = Limits::of_step(backend, case.options.query, formats)?;
    let limits = if case.scoring.sinks().is_some() { limits.with_sinks() } else { limits };
    Ok(if case.data == DataKind::Small { limits.with_smallest_steps() } else { limits })
}

/// The errors of states, and the failures against the limits.
async fn judge_states<B: Backend>(
    backend: &B,
    case: &AttendCase,
    expected: &Expected,
    what: &str,
    states: &AttentionStates<B::Tensor>,
    limits: &Limits,
) -> Result<(crate::conformance::OutputError, Vec<Failure>)> {
    let outputs = backend.download(&states.outputs).await?;
    let lse = backend.download(&states.lse).await?;
    let error = expected.error_of(&outputs, case.shape.head_dim());
    let mut failures = expected.failures(what, &outputs, &error, limits);
    failures.extend(expected.lse_failure(what, &lse));
    Ok((error, failures))
}

async fn upload<B: Backend>(backend: &B, data: &[SequenceData]) -> Result<Vec<(B::Tensor, B::Tensor)>> {
    let mut tensors = Vec::with_capacity(data.len());
    for sequence in data {
        let keys = backend.upload(sequence.keys.elements()).await?;
        tensors.push((keys, backend.upload(sequence.values.elements()).await?));
    }
    Ok(tensors)
}

/// The queries of all runs of a plan, in the element type of the case.
fn query_tensor(case: &AttendCase, data: &[SequenceData], plan: &AttendPlan) -> CpuTensor {
    let queries = plan.runs().iter().flat_map(|planned| &data[planned.run.sequence].queries);
    CpuTensor::from_f32(queries.copied().collect(), case.input.elements)
}

/// The first difference between two runs of the same step.
fn unrepeated(first: &[f32], second: &[f32]) -> Option<Failure> {
    if let Some(failure) = Failure::of_length("output of a second run", second.len(), first.len()) {
        return Some(failure);
    }
    let mut differing = first.iter().zip(second).enumerate().filter(|(_, (a, b))| a.to_bits() != b.to_bits());
    let (index, _) = differing.next()?;
    Some(Failure::Unrepeated { elements: 1 + differing.count(), index })
}

/// The same data stored by the CPU reference.
async fn of_reference(case: &AttendCase, data: &[SequenceData]) -> Result<Vec<StoredSpan>> {
    let cpu = Cpu::default();
    let tensors = upload(&cpu, data).await?;
    Stored::fill(&cpu, case, data, &tensors).await?.read_back(&cpu).await
}

/// The differences between the stored data of a backend and of the reference: up to one failure for keys and one for
/// values.
fn differences(got: &[StoredSpan], want: &[StoredSpan]) -> Vec<Failure> {
    let keys = first_difference(got, want, |span| &span.keys).map(|(elements, first)| ("keys", elements, first));
    let values = first_difference(got, want, |span| &span.values).map(|(elements, first)| ("values", elements, first));
    [keys, values]
        .into_iter()
        .flatten()
        .map(|(tensor, elements, first)| Failure::Stored { tensor, elements, first })
        .collect()
}

/// The number of elements that differ, and the first of them. +0 and −0 are equal.
fn first_difference(
    got: &[StoredSpan],
    want: &[StoredSpan],
    tensor: impl Fn(&StoredSpan) -> &Vec<f32>,
) -> Option<(usize, Mismatch)> {
    let mut first = None;
    let mut elements = 0;
    for (span, (got, want)) in got.iter().zip(want).enumerate() {
        let pairs = tensor(got).iter().zip(tensor(want)).enumerate();
        for (index, (&value, &wanted)) in pairs.filter(|(_, (a, b))| a != b) {
            elements += 1;
            first.get_or_insert(Mismatch { sequence: got.span.sequence, span, index, got: value, want: wanted });
        }
    }
    first.map(|first| (elements, first))
}

/// The largest valid element: that of f16.
const LARGEST: f32 = 65504.0;

/// Checks `first_non_finite` on the clean keys and values of every sequence, and on those of the first sequence with a
/// bad element in the middle.
async fn search_non_finite<B: Backend>(
    backend: &B,
    case: &AttendCase,
    data: &[SequenceData],
    tensors: &[(B::Tensor, B::Tensor)],
) -> Result<Vec<Failure>> {
    let mut failures = Vec::new();
    for (index, (sequence, (keys, values))) in data.iter().zip(tensors).enumerate() {
        for (which, tensor) in [(KeyOrValue::Key, keys), (KeyOrValue::Value, values)] {
            if let Some(found) = backend.first_non_finite(which, tensor, &sequence.rows, &case.shape, LARGEST).await? {
                let message = format!("{which} of sequence {index} is finite, {found:?} was reported");
                failures.push(Failure::NonFinite { message });
            }
        }
    }
    for (which, value) in [(KeyOrValue::Key, f32::NAN), (KeyOrValue::Value, f32::NEG_INFINITY)] {
        failures.extend(search_planted(backend, case, &data[0], which, value).await?);
    }
    Ok(failures)
}

/// Replaces one element of the middle token and the last one after it, and expects the first to be found.
async fn search_planted<B: Backend>(
    backend: &B,
    case: &AttendCase,
    sequence: &SequenceData,
    which: KeyOrValue,
    value: f32,
) -> Result<Option<Failure>> {
    let (token, kv_head, channel) = (sequence.rows.tokens / 2, case.shape.kv_heads() - 1, case.shape.head_dim() / 3);
    let mut tensor = match which {
        KeyOrValue::Key => sequence.keys.clone(),
        KeyOrValue::Value => sequence.values.clone(),
    };
    overwrite(&mut tensor, sequence.rows.elements_needed(&case.shape) - 1, f32::INFINITY);
    overwrite(&mut tensor, sequence.rows.row(token, kv_head) + channel, value);
    let tensor = backend.upload(tensor.elements()).await?;
    let found = backend.first_non_finite(which, &tensor, &sequence.rows, &case.shape, LARGEST).await?;
    let right = found.is_some_and(|found| {
        (found.token, found.kv_head, found.channel) == (token, kv_head, channel)
            && (found.value == value || (found.value.is_nan() && value.is_nan()))
    });
    Ok((!right).then(|| Failure::NonFinite {
        message: format!("{value} lies at token {token}, KV head {kv_head}, channel {channel}; reported: {found:?}"),
    }))
}

fn overwrite(tensor: &mut CpuTensor, index: usize, value: f32) {
    tensor.elements_mut().write_f32(index, &[value]);
}
