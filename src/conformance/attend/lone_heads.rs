//! 1-bit keys with one query head for each KV head, over spans that are not short: kernels may multiply their bits.

use super::build::{affine, shape};
use super::case::{AttendCase, Queries, SinkPlace};
use crate::format::{Bits, Grouping, SegmentFormat};
use crate::plan::{ElementType, QueryRun, Scoring, Visible};

/// Ragged lengths, windows with everything that scores may become, and values of other widths.
pub(super) fn lone_heads() -> Vec<AttendCase> {
    let one_bit = SegmentFormat::per_channel(Bits::One);
    let case = |name: &str, format| AttendCase::new(&format!("lone-head-{name}"), shape(1, 128), format);
    let mut lengths = case("lengths", SegmentFormat::calibquant(Bits::One)).lengths(&[2561, 2200, 129, 1]);
    lengths.sink = SinkPlace::Middle;
    lengths.input.elements = ElementType::F16;

    let mut windowed = case("windowed", one_bit).lengths(&[2300, 2100, 300]);
    let scoring = Scoring::of(&windowed.shape);
    windowed.scoring = scoring
        .with_soft_cap(6.0)
        .and_then(|scoring| scoring.with_sinks(&[0.0, 9.0]))
        .expect("the registry's numbers are finite and above 0");
    let windows = [2250, 100, 130].into_iter().enumerate();
    windowed.queries =
        Queries::Runs(windows.map(|(sequence, left)| QueryRun::new(sequence, 1, Visible::Window { left })).collect());

    let values = SegmentFormat { value: affine(Bits::Four, Grouping::Channel), ..one_bit };
    vec![lengths, windowed, case("values-4bit", values).lengths(&[2177, 2049])]
}
