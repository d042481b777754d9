//! The error of every format at every magnitude, against the bound that the format states.

use kvpack::backend::{SpanRead, SpanWrite};
use kvpack::cpu::{CpuStore, dequantize, quantize};
use kvpack::format::{
    AffineFormat, CodeRange, CodebookFormat, Grouping, KeyOrValue, NormRule, RangeRule, Rotation, TensorFormat,
};
use kvpack::plan::{Elements, Page, RowLayout, TokenRange};
use kvpack::{AttentionShape, Bits, SegmentFormat};

use any_backend::random_rows::Random;

const HEAD_DIM: usize = 64;
const TOKENS: usize = 70;

fn magnitudes() -> impl Iterator<Item = f32> {
    (-6..=4).map(|power| 10f32.powi(power))
}

/// Rows `[token][channel]`: noise, noise about an offset ten times as large, one value.
fn kinds_of_rows(magnitude: f32) -> [Vec<f32>; 3] {
    let mut random = Random::new(7);
    let mut rows = |offset: f32, spread: f32| -> Vec<f32> {
        (0..TOKENS * HEAD_DIM).map(|_| magnitude * (offset + spread * random.normal())).collect()
    };
    [rows(0.0, 1.0), rows(1.0, 0.1), rows(-0.7, 0.0)]
}

/// What a store of `format` holds of the rows.
fn stored(format: TensorFormat, which: KeyOrValue, rows: &[f32]) -> Vec<f32> {
    let shape = AttentionShape::new(1, 1, HEAD_DIM).unwrap();
    let format = match which {
        KeyOrValue::Key => SegmentFormat { key: format, value: TensorFormat::F16 },
        KeyOrValue::Value => SegmentFormat { key: TensorFormat::F16, value: format },
    };
    let mut store = CpuStore::new(shape, format).unwrap();
    store.add_shard(1).unwrap();
    store.reserve_ranges(1).unwrap();
    let pages = [Page { shard: 0, index: 0 }];
    let write = SpanWrite {
        rows: RowLayout::head_major(TOKENS, &shape),
        tokens: TokenRange::new(0, TOKENS).unwrap().into(),
        pages: &pages,
        range_slot: 0,
        centre: None,
    };
    quantize(&mut store, Elements::F32(rows), Elements::F32(rows), write).unwrap();
    dequantize(&store, which, SpanRead { pages: &pages, tokens: TOKENS, range_slot: 0, centre: None }).unwrap()
}

fn groupings() -> [Grouping; 6] {
    let [a, b, c] = [32, 64, 128].map(Grouping::ChannelTokens);
    [Grouping::Channel, a, b, c, Grouping::Token, Grouping::TokenChannels(32)]
}

fn affine_formats() -> Vec<AffineFormat> {
    let plain = || Bits::ALL.into_iter().flat_map(|bits| groupings().map(|grouping| AffineFormat::new(bits, grouping)));
    let symmetric = plain().filter(|format| format.bits != Bits::One).map(AffineFormat::symmetric);
    let shrunk = plain().filter(|format| format.bits == Bits::One).map(|format| AffineFormat { shrink: 0.3, ..format });
    let unrotated: Vec<AffineFormat> = plain().chain(symmetric).chain(shrunk).collect();
    let rotated = plain().map(|format| format.rotated(Rotation::hadamard(16)));
    unrotated.into_iter().chain(rotated).collect()
}

/// The rows in the basis in which they are stored.
fn in_stored_basis(format: &AffineFormat, rows: &[f32]) -> Vec<f32> {
    let mut rows = rows.to_vec();
    if let Some(rotation) = format.rotation {
        rows.chunks_exact_mut(HEAD_DIM).for_each(|row| rotation.rotate(row).unwrap());
    }
    rows
}

/// The group of elements that share the range of element `i`, below the number of elements.
fn group(grouping: Grouping, i: usize) -> usize {
    let (token, channel) = (i / HEAD_DIM, i % HEAD_DIM);
    match grouping {
        Grouping::Channel => channel,
        Grouping::ChannelTokens(n) => token / n * HEAD_DIM + channel,
        Grouping::Token => token,
        Grouping::TokenChannels(n) => token * (HEAD_DIM / n) + channel / n,
    }
}

/// No element of any affine format is off by more than `AffineFormat::largest_error` of its group.
#[test]
fn affine_formats_keep_their_bound_at_every_magnitude() {
    for format in affine_formats() {
        let tensor = TensorFormat::Affine(format);
        for magnitude in magnitudes().filter(|m| 3.0 * m <= tensor.largest_element(HEAD_DIM)) {
            for (kind, rows) in kinds_of_rows(magnitude).iter().enumerate() {
                let want = in_stored_basis(&format, rows);
                let got = in_stored_basis(&format, &stored(tensor, KeyOrValue::Key, rows));
                let mut extremes = vec![(f32::MAX, f32::MIN); want.len()];
                for (i, &x) in want.iter().enumerate() {
                    let (min, max) = &mut extremes[group(format.grouping, i)];
                    (*min, *max) = (x.min(*min), x.max(*max));
                }
                // Rotating back and forth rounds too, relative to the largest element of a row.
                let turned = if format.rotation.is_some() { 2e-5 * magnitude } else { 0.0 };
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let (min, max) = extremes[group(format.grouping, i)];
                    let bound = format.largest_error(min, max) + turned;
                    assert!(
                        (got - want).abs() <= bound,
                        "{tensor}, rows {kind} at {magnitude}: {want} of {min} to {max} is stored as {got}, and the \
                         bound is {bound}"
                    );
                }
            }
        }
    }
}

/// The bound is not idle: somewhere an error comes close to it, at every width and magnitude.
#[test]
fn affine_bounds_are_reached() {
    for bits in Bits::ALL {
        for magnitude in magnitudes() {
            let format = AffineFormat::new(bits, Grouping::Token);
            let rows = &kinds_of_rows(magnitude)[0];
            let got = stored(TensorFormat::Affine(format), KeyOrValue::Value, rows);
            let share = |(got, want): (&[f32], &[f32])| {
                let (min, max) = want.iter().fold((f32::MAX, f32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
                let error = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                error / format.largest_error(min, max)
            };
            let closest = got.chunks(HEAD_DIM).zip(rows.chunks(HEAD_DIM)).map(share).fold(0.0, f32::max);
            assert!(closest >= 0.7, "{bits} bits at {magnitude}: {closest} of the bound");
        }
    }
}

/// More bits never lose more, whatever the magnitude.
#[test]
fn eight_bits_are_no_worse_than_four() {
    for grouping in groupings() {
        for rule in [RangeRule::MinMax, RangeRule::Symmetric] {
            for magnitude in magnitudes() {
                for rows in &kinds_of_rows(magnitude)[..2] {
                    let error = |bits| {
                        let format = AffineFormat { ranges: rule, ..AffineFormat::new(bits, grouping) };
                        let got = stored(TensorFormat::Affine(format), KeyOrValue::Key, rows);
                        squared_distance(&got, rows)
                    };
                    let [eight, four] = [Bits::Eight, Bits::Four].map(error);
                    assert!(eight <= four * 1.0001, "{grouping:?} {rule:?} at {magnitude}: {eight}, 4 bits {four}");
                }
            }
        }
    }
}

/// f16 rounds to 11 bits, and below 2^-14 to multiples of 2^-24.
#[test]
fn f16_keeps_its_bound_at_every_magnitude() {
    for rows in magnitudes().flat_map(kinds_of_rows) {
        for (got, want) in stored(TensorFormat::F16, KeyOrValue::Value, &rows).iter().zip(&rows) {
            let bound = (want.abs() * 2f32.powi(-11)).max(2f32.powi(-25));
            assert!((got - want).abs() <= bound, "{want} is stored as {got}");
        }
    }
}

/// The mean squared error of Lloyd-Max levels, relative to the squared length of a random row.
fn loss_of_levels(format: &CodebookFormat) -> f64 {
    match format.level_bits() {
        None => 1.0,
        Some(Bits::One) => 0.3634,
        Some(Bits::Two) => 0.1175,
        Some(Bits::Three) => 0.0345,
        Some(_) => 0.0095,
    }
}

/// The same of all that is stored: renormalised levels lose `2 (1 − √(1 − loss))`; a sketch leaves π/2 − 1 of what
/// levels lose.
fn loss_of_rows(format: &CodebookFormat) -> f64 {
    let loss = loss_of_levels(format);
    match (format.sketch, format.norms) {
        (Some(_), _) => loss * (std::f64::consts::FRAC_PI_2 - 1.0),
        (None, NormRule::Renormalized) => 2.0 * (1.0 - (1.0 - loss).sqrt()),
        (None, NormRule::Row) => loss,
    }
}

/// Rows of a codebook lose their share of their length where all norms that are stored are at least 2^-14, and at most
/// 2^-14 where one is smaller.
#[test]
fn codebooks_keep_their_bound_at_every_magnitude() {
    let widths = [Bits::One, Bits::Two, Bits::Three, Bits::Four];
    let formats = widths.into_iter().flat_map(|bits| {
        let plain = CodebookFormat::turboquant(bits, HEAD_DIM);
        [plain, plain.renormalized(), CodebookFormat::turboquant_prod(bits, HEAD_DIM)]
    });
    let smallest = f64::from(CodeRange::SMALLEST_STEP);
    for format in formats {
        let tensor = TensorFormat::Codebook(format);
        // The smaller norm of a sketched row is that of what the levels leave.
        let threshold = if format.sketch.is_some() { smallest / loss_of_levels(&format).sqrt() } else { smallest };
        // Between the powers of ten there are rows whose norms are near the threshold.
        let lengths = magnitudes().chain([2e-6, 4e-6, 6e-6, 8e-6, 2e-5, 4e-5]);
        for magnitude in lengths.filter(|m| 3.0 * m <= tensor.largest_element(HEAD_DIM)) {
            let rows = &kinds_of_rows(magnitude)[0];
            let got = stored(tensor, KeyOrValue::Key, rows);
            let mut losses = Vec::new();
            for (row, got) in rows.chunks(HEAD_DIM).zip(got.chunks(HEAD_DIM)) {
                let (length, error) =
                    (squared_distance(row, &[0.0; HEAD_DIM]).sqrt(), squared_distance(row, got).sqrt());
                if length >= threshold {
                    losses.push((error / length).powi(2));
                } else {
                    assert!(error <= smallest, "{tensor}: a row as long as {length} is off by {error}");
                }
            }
            let (mean, stated) = (losses.iter().sum::<f64>() / losses.len() as f64, loss_of_rows(&format));
            assert!(losses.len() < 30 || mean < 1.15 * stated, "{tensor} at {magnitude}: {mean} of {stated}");
        }
    }
}

fn squared_distance(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum()
}
