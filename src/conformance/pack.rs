//! Checks of packing: the kernels that write pages are compared with the CPU reference bit for bit.

use super::attend::{DataKind, InputLayout, RowOrder, SinkPlace};
use super::data::{CENTRE_TOKENS, DataRecipe, Random, SequenceData};
use super::guards::{self, Guards};
use super::report::{Failure, Report};
use crate::backend::{FilledSpan, FilledStores, NewSpan, SpanSource, WindowMove};
use crate::cpu::Cpu;
use crate::format::{
    AffineFormat, AttentionShape, Bits, Grouping, HEAD_DIMS, Rotation, SegmentFormat, TILE_TOKENS, TensorFormat,
};
use crate::plan::{ElementType, Page, Rows, TokenRange};
use crate::{Backend, Result};

/// A case of packing: tokens written into one store in every possible way.
#[derive(Clone, Debug, PartialEq)]
pub struct PackCase {
    /// Unique name: lower case letters, digits and dashes.
    pub name: String,
    /// Heads of the layer.
    pub shape: AttentionShape,
    /// The format that is written.
    pub format: SegmentFormat,
    /// The kind of rows.
    pub data: DataKind,
    /// Their layout in the tensors.
    pub input: InputLayout,
    /// Whether keys are centred with the mean of the first of them.
    pub centred: bool,
    /// Seed of the data.
    pub seed: u64,
    /// Whether the case belongs to the set that tests run on software drivers.
    pub quick: bool,
}

/// Tokens of the tensors that are packed.
const TOKENS: usize = 420;
/// The consecutive tokens that are packed. They begin in the middle of a tile of the tensors.
const RUN: std::ops::Range<usize> = 37..337;
/// Tokens gathered for each KV head, in random order, some of them twice.
const GATHERED: usize = 129;
/// Tokens appended one by one, into two pages.
const APPENDED: usize = 140;
/// f16 pages that are packed as windows.
const WINDOWS: usize = 2;

/// All cases of packing. Names are unique; the order is stable.
pub fn pack_cases() -> Vec<PackCase> {
    let affine = |bits, grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
    let both = |format| SegmentFormat { key: format, value: format };
    let kivi = SegmentFormat {
        key: affine(Bits::Two, Grouping::ChannelTokens(32)),
        value: affine(Bits::Two, Grouping::TokenChannels(16)),
    };
    let rotated = AffineFormat::new(Bits::Three, Grouping::Token).symmetric().rotated(Rotation::randomized(16, 7));
    let formats = [
        ("f16", SegmentFormat::F16, 64),
        ("4bit-channel", SegmentFormat::per_channel(Bits::Four), 128),
        ("1bit-calibquant", SegmentFormat::calibquant(Bits::One), 80),
        ("2bit-kivi", kivi, 96),
        ("8bit-token", both(affine(Bits::Eight, Grouping::Token)), 256),
        ("4bit-saw-int4", SegmentFormat::saw_int4(), 64),
        ("3bit-symmetric-rotated", both(TensorFormat::Affine(rotated)), 80),
        ("3bit-turboquant", SegmentFormat::turboquant(Bits::Three, 128), 128),
        ("2bit-renormalized", SegmentFormat::turboquant_renormalized(Bits::Two, 64), 64),
        ("3bit-turboquant-prod", SegmentFormat::turboquant_prod(Bits::Three, 96), 96),
        ("1bit-qjl", SegmentFormat::qjl(128), 128),
    ];
    let kinds = [DataKind::ChannelOffsets, DataKind::Outliers, DataKind::ConstantChannels, DataKind::ConstantTokens];
    let orders = [RowOrder::TokenMajor, RowOrder::HeadMajor];
    let case = |(i, (name, format, head_dim)): (usize, (&str, SegmentFormat, usize))| PackCase {
        name: format!("pack-{name}"),
        shape: AttentionShape::new(4, 2, head_dim).expect("the registry's shapes have kernels"),
        format,
        data: kinds[i % kinds.len()],
        input: InputLayout { elements: ElementType::ALL[i % ElementType::ALL.len()], order: orders[i / 2 % 2] },
        centred: false,
        seed: 2000 + i as u64,
        quick: matches!(name, "4bit-channel" | "2bit-kivi" | "4bit-saw-int4" | "3bit-turboquant-prod"),
    };
    debug_assert!(formats.iter().all(|(_, _, head_dim)| HEAD_DIMS.contains(head_dim)));
    let plain: Vec<PackCase> = formats.into_iter().enumerate().map(case).collect();
    // The same cases with centred keys, for formats that allow it.
    let centred = |case: &PackCase| PackCase {
        name: format!("{}-centred", case.name),
        centred: true,
        data: DataKind::BiasedKeys,
        quick: matches!(case.name.as_str(), "pack-f16" | "pack-4bit-saw-int4" | "pack-3bit-turboquant-prod"),
        ..case.clone()
    };
    let of_plain: Vec<PackCase> = plain.iter().filter(|case| case.format.key.takes_centre()).map(centred).collect();
    // The same of values of all magnitudes.
    let magnitudes = |case: &PackCase| PackCase {
        name: format!("{}-magnitudes", case.name),
        data: DataKind::Magnitudes,
        quick: matches!(case.name.as_str(), "pack-8bit-token" | "pack-2bit-renormalized" | "pack-3bit-turboquant-prod"),
        ..case.clone()
    };
    let of_magnitudes: Vec<PackCase> = plain.iter().map(magnitudes).collect();
    // The same of values in the middle between two levels.
    let ties = |case: &PackCase| {
        let (name, case) = (format!("{}-ties", case.name), case.clone());
        match case.name.as_str() {
            "pack-4bit-channel" => {
                let input = InputLayout { elements: ElementType::F32, ..case.input };
                Some(PackCase { name, data: DataKind::UnevenTies, input, ..case })
            }
            "pack-2bit-kivi" | "pack-4bit-saw-int4" => Some(PackCase { name, data: DataKind::Ties, ..case }),
            _ => None,
        }
    };
    let of_ties: Vec<PackCase> = plain.iter().filter_map(ties).collect();
    [plain, of_plain, of_magnitudes, of_ties].concat()
}

/// Writes the tokens through `backend` and through the CPU reference, and compares the stored data.
pub(super) async fn run<B: Backend>(backend: &B, case: &PackCase) -> Result<Report> {
    let data = SequenceData::new(&DataRecipe {
        shape: case.shape,
        tokens: TOKENS,
        queries: 1,
        kind: case.data,
        sink: SinkPlace::Middle,
        input: case.input,
        seed: case.seed,
    });
    let packed = Packed::fill(backend, case, &data).await?;
    let cpu = Cpu::default();
    let reference = Packed::fill(&cpu, case, &data).await?;
    let mut failures = Vec::new();
    for ((what, span), (_, of_reference)) in packed.spans.iter().zip(&reference.spans) {
        let got = packed.stores.read(backend, span).await?;
        let want = reference.stores.read(&cpu, of_reference).await?;
        for (tensor, got, want) in [("keys", &got.0, &want.0), ("values", &got.1, &want.1)] {
            failures.extend(difference(&format!("{tensor} of {what}"), got, want));
        }
    }
    failures.extend(packed.guards.failures(backend, &packed.stores).await?);
    Ok(Report { check: case.name.clone(), accuracy: None, failures })
}

/// The written data.
struct Packed<B: Backend> {
    stores: FilledStores<B>,
    guards: Guards,
    /// The spans to compare, and how they were written.
    spans: Vec<(&'static str, FilledSpan)>,
}

impl<B: Backend> Packed<B> {
    async fn fill(backend: &B, case: &PackCase, data: &SequenceData) -> Result<Self> {
        let span = |store, tokens| NewSpan { store, sequence: 0, start: 0, tokens };
        let appended = if case.format.takes_single_tokens() { APPENDED } else { 0 };
        let mut new = vec![span(0, RUN.len()), span(0, GATHERED), span(0, appended), span(0, TILE_TOKENS)];
        new.extend([span(0, TILE_TOKENS); WINDOWS]);
        new.push(span(1, WINDOWS * TILE_TOKENS));
        let stores = FilledStores::new(backend, case.shape, &[case.format, SegmentFormat::F16])?;
        let mut stores = if case.centred { stores.with_centres(1) } else { stores };
        let (mut spans, mut guards) = guards::place(backend, &mut stores, &new, Some(case.seed)).await?;
        guards.write(backend, &mut stores, &case.shape, case.input.elements).await?;

        let keys = backend.upload(data.keys.elements()).await?;
        let values = backend.upload(data.values.elements()).await?;
        if case.centred {
            stores.set_centre(backend, 0, &keys, (data.rows, TokenRange::new(0, CENTRE_TOKENS)?))?;
        }
        let source = |tokens| SpanSource { rows: data.rows, tokens, keys: &keys, values: &values };
        stores.quantize(backend, &spans[0], source(Rows::Run(TokenRange::new(RUN.start, RUN.end)?)))?;
        let gathered = gathered_tokens(case);
        let indices = backend.upload_indices(&gathered, case.shape.kv_heads(), TOKENS as u32).await?;
        stores.quantize(backend, &spans[1], source(Rows::Gather(&indices)))?;
        if appended > 0 {
            stores.append(backend, &spans[2], data.rows, [&keys, &values], TOKENS - appended)?;
        }

        // A copy has the ranges of the span to which its page belongs.
        let (from, to) = (spans[0].pages[1], spans[3].pages[0]);
        stores.copy_page(backend, 0, from, to)?;
        spans[3].range_slot = spans[0].range_slot;

        let windows = &spans[4 + WINDOWS];
        let tokens = TokenRange::new(0, WINDOWS * TILE_TOKENS)?.into();
        stores.quantize(backend, windows, source(tokens))?;
        let moves: Vec<WindowMove> = windows
            .pages
            .iter()
            .zip(&spans[4..])
            .map(|(&from, span): (&Page, _)| WindowMove { from, to: span.pages[0], range_slot: span.range_slot })
            .collect();
        stores.pack_windows(backend, [1, 0], &moves)?;

        let ways =
            ["a run", "a gather", "appended tokens", "a copied page", "a packed window", "a second packed window"];
        let compared = ways.into_iter().zip(spans).filter(|(_, span)| span.span.tokens > 0).collect();
        Ok(Self { stores, guards, spans: compared })
    }
}

/// Tokens for each KV head, in random order.
fn gathered_tokens(case: &PackCase) -> Vec<u32> {
    let mut random = Random::new(case.seed);
    (0..case.shape.kv_heads() * GATHERED).map(|_| random.below(TOKENS) as u32).collect()
}

/// The differences between two dense tensors. +0 and −0 are equal.
pub(super) fn difference(what: &str, got: &[f32], want: &[f32]) -> Option<Failure> {
    if let Some(failure) = Failure::of_length(what, got.len(), want.len()) {
        return Some(failure);
    }
    let mut wrong = got.iter().zip(want).enumerate().filter(|(_, (got, want))| got != want);
    let (index, (&first, &wanted)) = wrong.next()?;
    let (elements, got, want) = (1 + wrong.count(), first.into(), wanted.into());
    Some(Failure::Differs { what: what.into(), elements, index, got, want })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn formats_fit_and_every_element_type_is_packed() {
        let cases = pack_cases();
        cases.iter().for_each(|case| case.format.check(&case.shape).unwrap());
        for elements in ElementType::ALL {
            assert!(cases.iter().any(|case| case.input.elements == elements));
        }
        let appended: BTreeSet<bool> = cases.iter().map(|case| case.format.takes_single_tokens()).collect();
        assert_eq!(appended.len(), 2, "some formats take single tokens, others do not");
    }
}
