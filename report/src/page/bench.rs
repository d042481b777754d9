//! What decode steps take.

use super::html::Html;
use super::plot::{Plot, Point, Reference, Scale, Series, mark_front};
use super::{Subject, by_family, recipe_and_format, run_in_words, with_backend};
use crate::family::{Family, Named};
use crate::tables::plain_width;
use crate::{BenchReport, BenchRow, Figures, PeerRow, PeersReport, RowOutcome, ShapeReport};

/// Widths of one range per channel that a verdict speaks about.
const VERDICT_WIDTHS: [u32; 3] = [8, 4, 1];

/// Adds what there is to say about some benchmarks, next to what other libraries take.
pub fn sections(html: &mut Html, subjects: &[Subject<'_, BenchReport>], peers: &[Subject<'_, PeersReport>]) {
    html.verdict(&subjects.iter().filter_map(|subject| verdict(subject, peers)).collect::<Vec<_>>());
    for Subject { name, report } in subjects {
        let device = with_backend(name, &report.backend);
        let options = match report.not_default.as_slice() {
            [] => String::new(),
            options => format!(" Not the default: {}.", options.join(", ")),
        };
        html.paragraph(&format!("{device}.{options} {}", run_in_words(report.run.as_ref())));
    }
    let mut shapes: Vec<&str> = Vec::new();
    for shape in subjects.iter().flat_map(|subject| &subject.report.shapes) {
        if !shapes.contains(&shape.shape.as_str()) {
            shapes.push(&shape.shape);
        }
    }
    let caption = "Lower is better. A whole step: query preparation, attention, merge. The solid grey line is the time that \
                   the bytes alone take at the measured read bandwidth; dashed lines are f16 attention of other libraries. \
                   Numbers are the width of a code.";
    let peers: Vec<&PeersReport> = peers.iter().map(|peers| peers.report).collect();
    let plots = shapes.iter().map(|shape| (plot(shape, subjects, &f16_steps(&peers)), caption.to_owned()));
    html.plots(&plots.collect::<Vec<_>>());
    for shape in shapes {
        table(html, shape, subjects, &peers);
    }
}

/// Every step of other libraries over f16, with the report that has it.
fn f16_steps<'a>(peers: &[&'a PeersReport]) -> Vec<(&'a PeersReport, &'a PeerRow)> {
    let steps = peers.iter().flat_map(|peers| peers.rows.iter().map(move |row| (*peers, row)));
    steps.filter(|(_, row)| row.format == "f16").collect()
}

/// How many times faster than f16 the widths are, over all shapes: against kvpack's own f16 step, and against the
/// fastest f16 attention of another library on the same device.
fn verdict(Subject { name, report }: &Subject<'_, BenchReport>, peers: &[Subject<'_, PeersReport>]) -> Option<String> {
    let of_widths = |times: &dyn Fn(&ShapeReport, &Figures) -> Option<f64>| {
        let of_width = |width: u32| {
            let steps = report.shapes.iter().filter_map(|shape| Some((shape, figures_of(shape, width)?)));
            let range = range(steps.filter_map(|(shape, figures)| times(shape, figures)))?;
            Some(format!("{width} bit{} {range}", if width == 1 { "" } else { "s" }))
        };
        let widths: Vec<String> = VERDICT_WIDTHS.into_iter().filter_map(of_width).collect();
        (!widths.is_empty()).then(|| widths.join(", "))
    };
    let own = of_widths(&|_, figures| figures.times_f16)?;
    let against =
        of_widths(&|shape, figures| Some(fastest_f16(peers, &report.backend, &shape.shape)?.step_us / figures.step_us));
    let against = against.map_or(String::new(), |widths| format!(" The fastest f16 of another library: {widths}."));
    let shapes = report.shapes.len();
    let shapes = if shapes == 1 { report.shapes[0].shape.clone() } else { format!("{shapes} shapes") };
    Some(format!("{name}, {shapes}. Times as fast as kvpack's f16: {own}.{against}"))
}

/// The page's first word about speed.
pub fn sentence(subjects: &[Subject<'_, BenchReport>], peers: &[Subject<'_, PeersReport>]) -> Option<String> {
    let timed = |subject: &Subject<'_, BenchReport>| {
        let shapes = subject.report.shapes.iter();
        let steps = shapes.filter_map(|shape| Some((shape.shape.clone(), figures_of(shape, 4)?.clone())));
        steps.map(|step| (subject.report.backend.clone(), step)).collect::<Vec<_>>()
    };
    let steps: Vec<_> = subjects.iter().flat_map(timed).collect();
    let own = steps.iter().max_by(|a, b| a.1.1.times_f16.unwrap_or(0.0).total_cmp(&b.1.1.times_f16.unwrap_or(0.0)))?;
    let (device, (shape, figures)) = own;
    let times = figures.times_f16?;
    let peer = fastest_f16(peers, device, shape).map_or(String::new(), |peer| {
        format!(
            ", and {:.1} times as fast as {}, the fastest f16 attention of another library there",
            peer.step_us / figures.step_us,
            peer.peer
        )
    });
    Some(format!("A decode step over 4 bits is {times:.1} times as fast as over f16 ({shape} on {device}){peer}."))
}

/// The figures of the format that stores keys and values with one range per channel at this width.
fn figures_of(shape: &ShapeReport, width: u32) -> Option<&Figures> {
    shape.rows.iter().find(|row| plain_width(&row.format) == Some(width))?.outcome.figures()
}

/// The fastest f16 step of another library on the device of `backend`.
fn fastest_f16<'a>(peers: &[Subject<'a, PeersReport>], backend: &str, shape: &str) -> Option<&'a PeerRow> {
    let peers = peers.iter().map(|peers| peers.report).filter(|peers| peers.is_on_device_of(backend));
    peers.filter_map(|peers| peers.fastest_f16(shape)).min_by(|a, b| a.step_us.total_cmp(&b.step_us))
}

/// `1.9 to 3.6`.
fn range(times: impl Iterator<Item = f64>) -> Option<String> {
    let (low, high) = times.fold(None, |seen: Option<(f64, f64)>, x| match seen {
        None => Some((x, x)),
        Some((low, high)) => Some((low.min(x), high.max(x))),
    })?;
    let (low, high) = (format!("{low:.1}"), format!("{high:.1}"));
    Some(if low == high { low } else { format!("{low} to {high}") })
}

fn shape_of<'a>(subject: &Subject<'a, BenchReport>, name: &str) -> Option<&'a ShapeReport> {
    subject.report.shapes.iter().find(|shape| shape.shape == name)
}

/// Bits per element of what a step reads, by the bytes of f16 where that was timed too.
fn bits(shape: &ShapeReport, row: &BenchRow) -> f64 {
    let f16 = shape.rows.iter().find(|row| row.format == "f16").map(|row| row.bytes).filter(|&bytes| bytes > 0);
    let elements = 2 * shape.sequences * shape.tokens * shape.kv_heads * shape.head_dim;
    row.bytes as f64 * f16.map_or(8.0 / elements as f64, |f16| 16.0 / f16 as f64)
}

/// Microseconds of a step against bits: lines of families for one subject, and of subjects for several. Steps of other
/// libraries are drawn where a subject was measured on their device.
pub fn plot(name: &str, subjects: &[Subject<'_, BenchReport>], peers: &[(&PeersReport, &PeerRow)]) -> Plot {
    let measured: Vec<_> = subjects.iter().filter_map(|subject| Some((subject, shape_of(subject, name)?))).collect();
    let mut series = match measured.as_slice() {
        [(_, shape)] => by_family(points(shape)),
        // For several devices, each is a line through the formats with one range per channel.
        several => {
            several.iter().enumerate().map(|(colour, (subject, shape))| of_subject(subject, shape, colour)).collect()
        }
    };
    if measured.len() == 1 {
        mark_front(&mut series);
    }
    let edge = |shape: &&ShapeReport| {
        let read = shape.read_gigabytes_per_second? * 1e9;
        let elements =
            shape.rows.iter().find(|row| row.bytes > 0).map(|row| row.bytes as f64 * 8.0 / bits(shape, row))?;
        Some((read, elements))
    };
    let fastest = measured.iter().filter_map(|(_, shape)| edge(shape)).max_by(|a, b| a.0.total_cmp(&b.0));
    let mut references: Vec<Reference> = Vec::new();
    if let Some((read, elements)) = fastest {
        let line =
            (4..=272).map(|i| f64::from(i) / 16.0).map(|bits| (bits, bits * elements / 8.0 / read * 1e6)).collect();
        let name = format!("bytes / bandwidth, {:.0} GB/s", read / 1e9);
        references.push(Reference { name, dashed: false, points: line });
    }
    for (peers, row) in peers.iter().filter(|(_, row)| row.shape == name) {
        if measured.iter().any(|(subject, _)| peers.is_on_device_of(&subject.report.backend)) {
            let points = (4..=272).map(|i| (f64::from(i) / 16.0, row.step_us)).collect();
            let name = format!("{}, {}, {}", row.peer, row.format, peers.device);
            references.push(Reference { name, dashed: true, points });
        }
    }
    let shape = measured.first().map(|(_, shape)| *shape);
    let title = shape.map_or(name.to_owned(), |shape| format!("{name}: {}", shape.described()));
    Plot {
        title,
        x: "bits per element that a step reads".into(),
        y: "µs of a decode step".into(),
        x_scale: Scale::PowersOfTwo,
        y_scale: Scale::Logarithmic,
        series,
        references,
    }
}

fn point(shape: &ShapeReport, row: &BenchRow) -> Option<(Named, Point)> {
    let figures = row.outcome.figures()?;
    let named = Named::format(&row.format).filter(|_| row.parts.len() == 1)?;
    let percent = figures.percent_of_read.map_or(String::new(), |percent| format!(", {percent:.0} % of the bandwidth"));
    let spread = figures.spread.map_or(String::new(), |spread| {
        format!(" ± {:.1} % of {} samples", spread.percent_of(figures.step_us), spread.samples)
    });
    let tip = format!(
        "{}\n{:.1} µs{spread}{percent}\n{:.2} bits per element, {:.2} MB",
        recipe_and_format(row.name(), &row.format),
        figures.step_us,
        bits(shape, row),
        row.bytes as f64 / 1e6
    );
    let label = named.width.to_string();
    let point = Point { x: bits(shape, row), y: figures.step_us, label, tip, on_line: named.plain, front: false };
    Some((named, point))
}

fn points(shape: &ShapeReport) -> Vec<(Family, Point)> {
    let points = shape.rows.iter().filter_map(|row| point(shape, row));
    points.map(|(named, point)| (named.family, point)).collect()
}

fn of_subject(subject: &Subject<'_, BenchReport>, shape: &ShapeReport, colour: usize) -> Series {
    let plain = shape.rows.iter().filter(|row| plain_width(&row.format).is_some());
    let points = plain.filter_map(|row| point(shape, row));
    let points = points.map(|(_, point)| Point { tip: format!("{}\n{}", subject.name, point.tip), ..point }).collect();
    Series { name: subject.name.into(), colour, points }
}

fn table(html: &mut Html, name: &str, subjects: &[Subject<'_, BenchReport>], peers: &[&PeersReport]) {
    let shapes: Vec<Option<&ShapeReport>> = subjects.iter().map(|subject| shape_of(subject, name)).collect();
    let mut formats: Vec<&str> = Vec::new();
    for row in shapes.iter().flatten().flat_map(|shape| &shape.rows) {
        if !formats.contains(&row.format.as_str()) {
            formats.push(&row.format);
        }
    }
    let columns: Vec<String> =
        subjects.iter().map(|subject| format!("{}, µs (% of bandwidth)", subject.name)).collect();
    let mut header = vec![name];
    for column in &columns {
        header.extend([column.as_str(), "× f16"]);
    }
    let cells = |shape: &Option<&ShapeReport>, format: &str| {
        let Some(row) = shape.and_then(|shape| shape.rows.iter().find(|row| row.format == format)) else {
            return ["–".to_owned(), "–".to_owned()];
        };
        match &row.outcome {
            RowOutcome::Timed(figures) => [
                match figures.percent_of_read {
                    Some(percent) => format!("{:.1} ({percent:.0})", figures.step_us),
                    None => format!("{:.1}", figures.step_us),
                },
                figures.times_f16.map_or("–".into(), |times| format!("{times:.2}")),
            ],
            RowOutcome::Discarded { .. } => ["discarded".into(), "–".into()],
            RowOutcome::Skipped { .. } => ["did not fit".into(), "–".into()],
            RowOutcome::Wrong { .. } => ["WRONG".into(), "–".into()],
        }
    };
    let row = |format: &str| {
        let cells = shapes.iter().flat_map(|shape| cells(shape, format));
        let mut rows = shapes.iter().flatten().flat_map(|shape| &shape.rows);
        let name = rows.find(|row| row.format == format).map_or(format, BenchRow::name);
        std::iter::once(recipe_and_format(name, format)).chain(cells).collect::<Vec<_>>()
    };
    let mut rows: Vec<(bool, Vec<String>)> = formats.iter().map(|format| (false, row(format))).collect();
    for peers in peers {
        // In the column of the first subject on their device; steps of another device stand in no column.
        let of_device = |subject: &Subject<'_, BenchReport>| peers.is_on_device_of(&subject.report.backend);
        let Some(column) = subjects.iter().position(of_device) else { continue };
        for peer in peers.rows.iter().filter(|row| row.shape == name) {
            let mut cells = vec!["–".to_owned(); 1 + 2 * subjects.len()];
            cells[0] = recipe_and_format(&format!("{}, {}", peer.peer, peers.device), &peer.format);
            cells[1 + 2 * column] = format!("{:.1}", peer.step_us);
            rows.push((false, cells));
        }
    }
    html.table(&header, rows);
}
