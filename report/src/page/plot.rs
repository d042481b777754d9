//! Plots as SVG: lines of labelled points over a linear or logarithmic axis, with lines to hold them against.
//!
//! Colours are classes (`s0` to `s7`) that a stylesheet gives a light and a dark value.

use std::fmt::Write;

use super::escaped::escaped;

const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 86.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 48.0;

/// Colours and lines, light or dark as the reader's system is.
pub(super) const STYLE: &str = include_str!("plot.css");

/// Colours that there are; more series begin again.
pub const COLOURS: usize = 8;

/// How values lie along an axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Evenly, from 0 on.
    #[default]
    Linear,
    /// By their logarithms, with powers of ten along the axis.
    Logarithmic,
    /// By their logarithms, with powers of two along the axis: bits.
    PowersOfTwo,
}

/// What a plot shows.
#[derive(Clone, Debug, Default)]
pub struct Plot {
    /// The text for those who cannot see it.
    pub title: String,
    /// What the horizontal axis measures.
    pub x: String,
    /// What the vertical axis measures.
    pub y: String,
    /// How values lie along the horizontal axis.
    pub x_scale: Scale,
    /// How values lie along the vertical axis.
    pub y_scale: Scale,
    /// Lines of points.
    pub series: Vec<Series>,
    /// Lines without points, to hold them against.
    pub references: Vec<Reference>,
}

/// A line of points.
#[derive(Clone, Debug)]
pub struct Series {
    /// The text in the legend.
    pub name: String,
    /// The colour, from 0.
    pub colour: usize,
    /// The points.
    pub points: Vec<Point>,
}

/// One point.
#[derive(Clone, Debug)]
pub struct Point {
    /// Where.
    pub x: f64,
    /// Where; drawn at the lower edge if it is not positive.
    pub y: f64,
    /// What stands in it.
    pub label: String,
    /// The text that appears when it is pointed at, line by line.
    pub tip: String,
    /// True if the line of its series goes through it.
    pub on_line: bool,
    /// True if no other point is better in both.
    pub front: bool,
}

/// A line without points.
#[derive(Clone, Debug)]
pub struct Reference {
    /// The text in the legend.
    pub name: String,
    /// True for a dashed line.
    pub dashed: bool,
    /// The line.
    pub points: Vec<(f64, f64)>,
}

/// Marks the points that no other point beats: less of x and less of y.
pub fn mark_front(series: &mut [Series]) {
    let all: Vec<(f64, f64)> = series.iter().flat_map(|series| series.points.iter().map(|p| (p.x, p.y))).collect();
    for point in series.iter_mut().flat_map(|series| &mut series.points) {
        let beats = |&(x, y): &(f64, f64)| x <= point.x && y <= point.y && (x < point.x || y < point.y);
        point.front = !all.iter().any(beats);
    }
}

/// The largest figure of an axis: one beyond is none of a device, and lies on the edge.
const LARGEST: f64 = 1e30;

/// The smallest.
const SMALLEST: f64 = 1e-30;

/// An axis: where a value lies between two edges.
struct Axis {
    low: f64,
    high: f64,
    scale: Scale,
    from: f64,
    to: f64,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, scale: Scale, (from, to): (f64, f64)) -> Self {
        let logarithmic = scale != Scale::Linear;
        let values = values.filter(|&x| x.is_finite() && (!logarithmic || x > 0.0));
        let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), x| (low.min(x), high.max(x)));
        let (low, high) = if low > high { (1.0, 10.0) } else { (low.max(SMALLEST), high.min(LARGEST)) };
        let (low, high) = if logarithmic { (low / 1.4, high * 1.4) } else { (0.0, high * 1.06) };
        Self { low, high, scale, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Logarithmic | Scale::PowersOfTwo => {
                (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
            }
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    fn holds(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }

    /// Values that are written next to the axis.
    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::PowersOfTwo => {
                let powers = self.low.log2().ceil() as i32..=self.high.log2().floor() as i32;
                powers.map(|power| 2f64.powi(power)).collect()
            }
            Scale::Logarithmic => {
                let decades = (self.high / self.low).log10();
                let steps: &[f64] = if decades > 3.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
                let ticks = powers.flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
                ticks.filter(|&tick| tick >= self.low && tick <= self.high).collect()
            }
            Scale::Linear => {
                let span = self.high - self.low;
                let power = 10f64.powf((span / 5.0).log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter().find(|step| span / step <= 9.0);
                let step = step.unwrap_or(span);
                (0..=(self.high / step) as usize).map(|i| i as f64 * step).collect()
            }
        }
    }
}

/// A number on an axis.
fn short(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        // Short, so that the axis' own text has room beside it on a phone.
        ..0.01 => format!("{x:.0e}"),
        1e6.. => format!("{}M", x / 1e6),
        1e3.. => format!("{}k", x / 1e3),
        ..1.0 => format!("{}", (x * 1e4).round() / 1e4),
        _ => format!("{}", (x * 100.0).round() / 100.0),
    }
}

impl Plot {
    /// The plot as an SVG element, to stand in a page that has the stylesheet.
    pub fn svg(&self) -> String {
        let title = escaped(&self.title);
        let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">");
        self.draw(&mut svg);
        svg += "</svg>";
        svg
    }

    /// The plot as a file of its own, with its legend and colours.
    pub fn file(&self) -> String {
        let legend = self.legend();
        let columns = if legend.iter().all(|(_, name)| name.chars().count() <= 30) { 2 } else { 1 };
        let lines = legend.len().div_ceil(columns) as f64;
        let height = HEIGHT + 22.0 * lines + 10.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" font-family=\"sans-serif\" font-size=\"14\">\n<title>{}</title>\n<style>\n{STYLE}</style>\n\
             <rect class=\"ground\" width=\"{WIDTH}\" height=\"{height}\"/>\n",
            escaped(&self.title)
        );
        self.draw(&mut svg);
        for (i, (class, name)) in legend.iter().enumerate() {
            let (x, y) = (LEFT + (i % columns) as f64 * 255.0, HEIGHT + 14.0 + 22.0 * (i / columns) as f64);
            writeln!(
                svg,
                "<line class=\"{class}\" x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\"/><text x=\"{}\" y=\"{}\">{}</text>",
                x + 24.0,
                x + 32.0,
                y + 5.0,
                escaped(name)
            )
            .ok();
        }
        svg += "</svg>\n";
        svg
    }

    /// What the lines are: the class of each and its name.
    pub fn legend(&self) -> Vec<(String, String)> {
        let series =
            self.series.iter().map(|series| (format!("line s{}", series.colour % COLOURS), series.name.clone()));
        let references = self.references.iter().map(|reference| (reference.class().into(), reference.name.clone()));
        series.chain(references).collect()
    }

    fn draw(&self, svg: &mut String) {
        let points = || self.series.iter().flat_map(|series| &series.points);
        // What is measured decides how wide the plot is; lines to hold it against may leave it at the sides.
        let x = Axis::new(points().map(|p| p.x), self.x_scale, (LEFT, WIDTH - RIGHT));
        let lines = self.references.iter().flat_map(|reference| &reference.points).filter(|p| x.holds(p.0));
        let y = Axis::new(points().map(|p| p.y).chain(lines.map(|p| p.1)), self.y_scale, (HEIGHT - BOTTOM, TOP));
        self.draw_axes(svg, &x, &y);
        for reference in &self.references {
            let inside = reference.points.iter().filter(|p| x.holds(p.0) && y.holds(p.1));
            draw_line(svg, reference.class(), inside.map(|&(px, py)| (x.at(px), y.at(py))));
        }
        for series in &self.series {
            let on_line = series.points.iter().filter(|point| point.on_line);
            let class = format!("line s{}", series.colour % COLOURS);
            draw_line(svg, &class, on_line.map(|point| (x.at(point.x), y.at(point.y))));
        }
        for series in &self.series {
            for point in &series.points {
                let (cx, cy) = (x.at(point.x), y.at(point.y));
                let radius = if point.label.is_empty() { 4 } else { 9 };
                let (front, colour) = (if point.front { " front" } else { "" }, series.colour % COLOURS);
                writeln!(
                    svg,
                    "<g class=\"point s{colour}{front}\" tabindex=\"0\" data-tip=\"{tip}\"><circle cx=\"{cx:.1}\" \
                     cy=\"{cy:.1}\" r=\"{radius}\"/><text x=\"{cx:.1}\" y=\"{:.1}\">{}</text></g>",
                    cy + 4.0,
                    escaped(&point.label),
                    tip = escaped(&point.tip),
                )
                .ok();
            }
        }
    }

    fn draw_axes(&self, svg: &mut String, x: &Axis, y: &Axis) {
        let bottom = HEIGHT - BOTTOM;
        for tick in x.ticks() {
            let at = x.at(tick);
            writeln!(
                svg,
                "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
                 <text class=\"tick\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                bottom + 18.0,
                short(tick)
            )
            .ok();
        }
        for tick in y.ticks() {
            let at = y.at(tick);
            writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"tick\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                at + 4.5,
                short(tick)
            )
            .ok();
        }
        let (middle_x, middle_y) = ((LEFT + WIDTH - RIGHT) / 2.0, (TOP + bottom) / 2.0);
        writeln!(
            svg,
            "<text class=\"axis\" x=\"{middle_x}\" y=\"{}\" text-anchor=\"middle\">{}</text>\
             <text class=\"axis\" x=\"20\" y=\"{middle_y}\" text-anchor=\"middle\" \
             transform=\"rotate(-90 20 {middle_y})\">{}</text>",
            HEIGHT - 8.0,
            escaped(&self.x),
            escaped(&self.y)
        )
        .ok();
    }
}

impl Reference {
    fn class(&self) -> &'static str {
        if self.dashed { "reference dashed" } else { "reference" }
    }
}

fn draw_line(svg: &mut String, class: &str, points: impl Iterator<Item = (f64, f64)>) {
    let mut points: Vec<(f64, f64)> = points.collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    if points.len() > 1 {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        writeln!(svg, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" ")).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(x: f64, y: f64) -> Point {
        Point { x, y, label: "4".into(), tip: "a < b".into(), on_line: true, front: false }
    }

    #[test]
    fn the_front_is_what_nothing_beats() {
        let points = vec![point(1.0, 5.0), point(2.0, 3.0), point(2.0, 4.0), point(3.0, 3.0)];
        let mut series = [Series { name: "a".into(), colour: 0, points }];
        mark_front(&mut series);
        let front: Vec<bool> = series[0].points.iter().map(|point| point.front).collect();
        assert_eq!(front, [true, true, false, false]);
    }

    #[test]
    fn axes_hold_what_is_drawn() {
        let axis = Axis::new([0.01, 10.0].into_iter(), Scale::Logarithmic, (0.0, 100.0));
        assert!(axis.at(0.01) > 0.0 && axis.at(10.0) < 100.0);
        assert_eq!(axis.at(0.0), 0.0, "nothing lies below the axis");
        assert_eq!(axis.ticks(), [0.01, 0.1, 1.0, 10.0]);
        let axis = Axis::new([1.0, 16.0].into_iter(), Scale::Linear, (0.0, 1.0));
        assert_eq!(axis.ticks(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]);
        for values in [[1.7e308, 1.0], [5e-324, 1.7e308], [5e-324; 2], [1.7e308; 2]] {
            for scale in [Scale::Linear, Scale::Logarithmic, Scale::PowersOfTwo] {
                let axis = Axis::new(values.into_iter(), scale, (0.0, 1.0));
                assert!(axis.ticks().len() < 1000 && axis.at(values[0]).is_finite(), "{values:?}");
            }
        }
    }

    #[test]
    fn texts_are_escaped() {
        let series = vec![Series { name: "a".into(), colour: 9, points: vec![point(1.0, 1.0), point(2.0, 2.0)] }];
        let svg = Plot { series, ..Plot::default() }.svg();
        assert!(svg.contains("data-tip=\"a &lt; b\"") && svg.contains("<polyline class=\"line s1\""), "{svg}");
    }
}
