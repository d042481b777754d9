//! Plots, as SVG.

use std::ops::Range;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

const WIDTH: u32 = 860;
const HEIGHT: u32 = 420;
/// The legend beside a plot, and the height of its lines.
const LEGEND_WIDTH: u32 = 330;
const LEGEND_LINE: u32 = 19;

/// What was lost at how many bits: one method.
pub struct Point {
    /// The method.
    pub name: String,
    /// Bits per element.
    pub bits: f64,
    /// What it lost; drawn no lower than the smallest of the axis.
    pub loss: f64,
}

/// A logarithmic axis of losses.
#[derive(Clone, Copy)]
pub struct LossAxis {
    /// What it says.
    pub name: &'static str,
    /// Losses below this are drawn as this.
    pub smallest: f64,
}

impl LossAxis {
    /// A loss that can be drawn.
    pub fn clamped(&self, loss: f64) -> f64 {
        if loss.is_finite() { loss.max(self.smallest) } else { self.smallest }
    }

    /// A range that holds all losses.
    pub fn range(&self, losses: impl Iterator<Item = f64>) -> Range<f64> {
        let (low, high) = losses
            .map(|loss| self.clamped(loss))
            .fold((1.0, self.smallest), |(low, high): (f64, f64), x| (low.min(x), high.max(x)));
        low.min(high) / 2.0..high * 2.0
    }
}

/// A loss against bits per element, a point for each method.
///
/// # Errors
/// What plotters says.
pub fn by_bits(caption: &str, axis: LossAxis, points: &[Point]) -> Result<String> {
    let most_bits = points.iter().map(|point| point.bits).fold(1.0, f64::max) * 1.05;
    let range = axis.range(points.iter().map(|point| point.loss));
    draw(points.len(), |area| {
        let (plot, legend) = area.split_horizontally(WIDTH - LEGEND_WIDTH);
        let mut chart = ChartBuilder::on(&plot)
            .caption(caption, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(0f64..most_bits, range.log_scale())?;
        let mesh = &mut chart.configure_mesh();
        mesh.x_desc("bits per element").y_desc(axis.name).y_label_formatter(&|y| format!("{y:.0e}")).draw()?;
        for (i, point) in points.iter().enumerate() {
            let color = Palette99::pick(i).to_rgba();
            let line = 50 + (LEGEND_LINE * i as u32) as i32;
            let at = (point.bits, axis.clamped(point.loss));
            // Colours come again after so many points.
            if i < Palette99::COLORS.len() {
                chart.draw_series([Circle::new(at, 4, color.filled())])?;
                legend.draw(&Circle::new((8, line), 4, color.filled()))?;
            } else {
                chart.draw_series([TriangleMarker::new(at, 6, color.filled())])?;
                legend.draw(&TriangleMarker::new((8, line), 6, color.filled()))?;
            }
            legend.draw(&Text::new(point.name.clone(), (18, line - 6), ("sans-serif", 13)))?;
        }
        Ok(())
    })
}

pub type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
pub type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// Draws with room for a legend of so many lines.
///
/// # Errors
/// What plotters says.
pub fn draw(legend: usize, paint: impl FnOnce(&Area<'_>) -> Drawn) -> Result<String> {
    let mut svg = String::new();
    {
        let height = HEIGHT.max(100 + LEGEND_LINE * legend as u32);
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let painted =
            area.fill(&WHITE).map_err(Into::into).and_then(|()| paint(&area)).and_then(|()| Ok(area.present()?));
        painted.map_err(|error| anyhow!("cannot draw a plot: {error}"))?;
    }
    Ok(svg)
}
