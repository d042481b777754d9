//! The plots of a report on a model.

use anyhow::Result;
use plotters::prelude::*;

use super::super::plots::{LossAxis, Point, by_bits, draw};
use super::report::{ModelReport, RecipeRow};
use crate::model::CHUNK_TOKENS;

const DIVERGENCE: LossAxis = LossAxis { name: "KL, nats", smallest: 1e-7 };

/// KL divergence against bits per element, a point for each recipe.
pub fn divergence_by_bits(report: &ModelReport) -> Result<String> {
    let point = |row: &RecipeRow| Point { name: row.recipe.clone(), bits: row.bits_per_element, loss: row.divergence };
    let points: Vec<Point> = report.rows.iter().map(point).collect();
    by_bits("KL divergence from the f16 cache, by bits per element", DIVERGENCE, &points)
}

/// KL divergence by position, a line for each recipe that diverges.
pub fn divergence_by_position(report: &ModelReport) -> Result<String> {
    let lines: Vec<&RecipeRow> = report.rows.iter().filter(|row| row.divergence > DIVERGENCE.smallest).collect();
    let chunks = lines.iter().map(|row| row.divergence_by_chunk.len()).max().unwrap_or(1);
    let range = DIVERGENCE.range(lines.iter().flat_map(|row| &row.divergence_by_chunk).copied());
    draw(lines.len(), |area| {
        let mut chart = ChartBuilder::on(area)
            .caption("KL divergence from the f16 cache, by position in the text", ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(0f64..(chunks * CHUNK_TOKENS) as f64 * 1.25, range.log_scale())?;
        let mesh = &mut chart.configure_mesh();
        mesh.x_desc("tokens").y_desc(DIVERGENCE.name).y_label_formatter(&|y| format!("{y:.0e}")).draw()?;
        for (i, row) in lines.iter().enumerate() {
            let color = Palette99::pick(i).to_rgba();
            let middle = |chunk: usize| (chunk as f64 + 0.5) * CHUNK_TOKENS as f64;
            let line =
                row.divergence_by_chunk.iter().enumerate().map(|(chunk, &x)| (middle(chunk), DIVERGENCE.clamped(x)));
            chart
                .draw_series(LineSeries::new(line, color))?
                .label(&row.recipe)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color));
        }
        chart.configure_series_labels().position(SeriesLabelPosition::MiddleRight).draw()?;
        Ok(())
    })
}
