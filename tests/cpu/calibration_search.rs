//! The grid search for CalibQuant's (τ1, τ2).

use kvpack::cpu::CalibrationSample;
use kvpack::plan::{Elements, RowLayout, TokenRange};
use kvpack::{AttentionShape, Bits, Calibration, Error, SegmentFormat};

use any_backend::random_rows::{Random, Rows};

fn sample<'a>(rows: &'a Rows, queries: &'a [f32], packed: (usize, usize)) -> CalibrationSample<'a> {
    CalibrationSample {
        shape: rows.shape,
        keys: Elements::F32(&rows.keys),
        values: Elements::F32(&rows.values),
        rows: rows.layout(),
        packed: TokenRange::new(packed.0, packed.1).unwrap(),
        queries: Elements::F32(queries),
    }
}

fn rows() -> Rows {
    Rows::new(AttentionShape::new(4, 2, 64).unwrap(), 300, 11)
}

/// More queries than are attended at a time.
fn queries() -> Vec<f32> {
    let mut random = Random::new(12);
    (0..20 * 4 * 64).map(|_| random.normal()).collect()
}

#[test]
fn the_best_candidate_has_the_smallest_error() {
    let (rows, queries) = (rows(), queries());
    let found = Calibration::search(&sample(&rows, &queries, (10, 280)), SegmentFormat::calibquant(Bits::One)).unwrap();
    assert_eq!(found.errors.len(), 16);
    assert_eq!(found.errors[0].0, Calibration::IDENTITY);
    let best = found.errors.iter().find(|(calibration, _)| *calibration == found.best).unwrap();
    assert_eq!(best.1, found.best_error());
    assert!(found.errors.iter().all(|(_, error)| error.is_finite() && *error >= best.1));
}

/// f16 loses next to nothing, so any calibration but the identity makes it worse.
#[test]
fn nothing_to_correct_gives_the_identity() {
    let (rows, queries) = (rows(), queries());
    let found = Calibration::search(&sample(&rows, &queries, (10, 280)), SegmentFormat::F16).unwrap();
    assert_eq!(found.best, Calibration::IDENTITY);
    assert!(found.identity_error() < 1e-5);
}

/// With a single token nothing but its value can come out: all candidates tie.
#[test]
fn ties_go_to_the_identity() {
    let rows = Rows::new(AttentionShape::new(1, 1, 64).unwrap(), 1, 13);
    let found =
        Calibration::search(&sample(&rows, &rows.query, (0, 1)), SegmentFormat::per_channel(Bits::Two)).unwrap();
    assert_eq!((found.best, found.best_error()), (Calibration::IDENTITY, 0.0));
}

#[test]
fn wrong_samples_are_typed_errors() {
    let (rows, queries) = (rows(), queries());
    let format = SegmentFormat::calibquant(Bits::One);
    let good = sample(&rows, &queries, (0, 300));
    let error = |sample| Calibration::search(&sample, format).unwrap_err();
    let beyond = TokenRange::new(0, 301).unwrap();
    assert!(matches!(error(CalibrationSample { packed: beyond, ..good }), Error::Plan { .. }));
    assert!(matches!(error(CalibrationSample { queries: Elements::F32(&[]), ..good }), Error::NoTokens { .. }));
    let odd = Elements::F32(&queries[1..]);
    assert!(matches!(error(CalibrationSample { queries: odd, ..good }), Error::Elements { what: "queries", .. }));
    let short = Elements::F32(&rows.values[1..]);
    assert!(matches!(error(CalibrationSample { values: short, ..good }), Error::Elements { what: "values", .. }));
    let none = RowLayout::head_major(0, &rows.shape);
    assert!(matches!(error(CalibrationSample { rows: none, ..good }), Error::NoTokens { .. }));
}

#[test]
fn samples_that_are_not_finite_are_refused() {
    for place in 0..3 {
        let (mut rows, mut queries) = (rows(), queries());
        [&mut rows.keys, &mut rows.values, &mut queries][place][70] = [f32::NAN, f32::INFINITY, f32::NAN][place];
        let refused = Calibration::search(&sample(&rows, &queries, (10, 280)), SegmentFormat::calibquant(Bits::One));
        assert!(matches!(&refused, Err(Error::Plan { reason, .. }) if reason.contains("element 70")), "{refused:?}");
    }
}
