//! The plots of a report, as SVG.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::report::{ModelReport, RecipeRow};
use crate::model::CHUNK_TOKENS;

const SIZE: (u32, u32) = (860, 420);
/// Divergences below this are drawn as this: the axis is logarithmic.
const SMALLEST: f64 = 1e-7;

/// KL divergence against bits per element, a point for each recipe.
pub fn divergence_by_bits(report: &ModelReport) -> Result<String> {
    let points: Vec<(f64, f64, &str)> =
        report.rows.iter().map(|row| (row.bits_per_element, clamped(row.divergence), row.recipe.as_str())).collect();
    let most_bits = points.iter().map(|point| point.0).fold(1.0, f64::max) * 1.25;
    let range = divergence_range(points.iter().map(|point| point.1));
    draw(|area| {
        let mut chart = ChartBuilder::on(area)
            .caption("KL divergence from the f16 cache, by bits per element", ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(0f64..most_bits, range.log_scale())?;
        let mesh = &mut chart.configure_mesh();
        mesh.x_desc("bits per element").y_desc("KL, nats").y_label_formatter(&|y| format!("{y:.0e}")).draw()?;
        for (i, (bits, divergence, recipe)) in points.iter().enumerate() {
            let color = Palette99::pick(i).to_rgba();
            let at = (*bits, *divergence);
            chart.draw_series([Circle::new(at, 4, color.filled())])?;
            chart.draw_series([Text::new(
                (*recipe).to_owned(),
                (bits + most_bits * 0.008, *divergence),
                ("sans-serif", 13),
            )])?;
        }
        Ok(())
    })
}

/// KL divergence by position, a line for each recipe that diverges.
pub fn divergence_by_position(report: &ModelReport) -> Result<String> {
    let lines: Vec<&RecipeRow> = report.rows.iter().filter(|row| row.divergence > SMALLEST).collect();
    let chunks = lines.iter().map(|row| row.divergence_by_chunk.len()).max().unwrap_or(1);
    let range = divergence_range(lines.iter().flat_map(|row| &row.divergence_by_chunk).map(|&x| clamped(x)));
    draw(|area| {
        let mut chart = ChartBuilder::on(area)
            .caption("KL divergence from the f16 cache, by position in the text", ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(0f64..(chunks * CHUNK_TOKENS) as f64 * 1.25, range.log_scale())?;
        let mesh = &mut chart.configure_mesh();
        mesh.x_desc("tokens").y_desc("KL, nats").y_label_formatter(&|y| format!("{y:.0e}")).draw()?;
        for (i, row) in lines.iter().enumerate() {
            let color = Palette99::pick(i).to_rgba();
            let middle = |chunk: usize| (chunk as f64 + 0.5) * CHUNK_TOKENS as f64;
            let line = row.divergence_by_chunk.iter().enumerate().map(|(chunk, &x)| (middle(chunk), clamped(x)));
            chart
                .draw_series(LineSeries::new(line, color))?
                .label(&row.recipe)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color));
        }
        chart.configure_series_labels().position(SeriesLabelPosition::MiddleRight).draw()?;
        Ok(())
    })
}

fn clamped(divergence: f64) -> f64 {
    if divergence.is_finite() { divergence.max(SMALLEST) } else { SMALLEST }
}

fn divergence_range(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values.fold((1.0, SMALLEST), |(low, high): (f64, f64), x| (low.min(x), high.max(x)));
    low.min(high) / 2.0..high * 2.0
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

fn draw(paint: impl FnOnce(&Area<'_>) -> Drawn) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let painted =
            area.fill(&WHITE).map_err(Into::into).and_then(|()| paint(&area)).and_then(|()| Ok(area.present()?));
        painted.map_err(|error| anyhow!("cannot draw a plot: {error}"))?;
    }
    Ok(svg)
}
