//! What a README opens with: one plot, and the steps where kvpack gains most and least.

use super::{Device, backend_name, number, plain_width, step_tokens, wrapped};
use crate::page::{Plot, Subject, decode_step};
use crate::{BenchReport, PeerRow, PeersReport, ShapeReport};

/// The step that is drawn.
const DRAWN: &str = "g4-b8-32k";

/// The steps of the table and the backend of each; in the last two kvpack gains least.
const STEPS: [(&str, &str); 6] = [
    ("g4-b8-32k", "CUDA"),
    ("g4-b8-32k", "WGSL"),
    ("g1-b8-8k", "CUDA"),
    ("g4-b1-128k", "CUDA"),
    ("g4-b1-4k", "CUDA"),
    ("g8-b8-32k", "WGSL"),
];

/// Bits of the columns of the table.
const WIDTHS: [u32; 5] = [16, 8, 4, 2, 1];

impl Device {
    /// Microseconds of a decode step against bits: a line for every backend, the fastest f16 step of another
    /// library, and the time that the bytes alone take. `None` where that step was not measured.
    pub fn plot(&self) -> Option<Plot> {
        let mut measured: Vec<BenchReport> = Vec::new();
        for report in &self.reports {
            for shape in report.shapes.iter().filter(|shape| shape.shape == DRAWN) {
                let known = measured.iter_mut().find(|known| known.backend == report.backend);
                match known.and_then(|known| known.shapes.first_mut()) {
                    Some(known) => known.rows.extend(shape.rows.iter().cloned()),
                    None => measured.push(BenchReport { shapes: vec![shape.clone()], ..report.clone() }),
                }
            }
        }
        measured.sort_by_key(|report| backend_name(&report.backend));
        let subjects = measured.iter().map(|report| Subject { name: backend_name(&report.backend), report });
        let subjects: Vec<Subject<'_, BenchReport>> = subjects.collect();
        let peers = subjects.iter().filter_map(|subject| self.fastest_f16_peer(&subject.report.backend, DRAWN));
        let peers: Vec<(&PeersReport, &PeerRow)> = peers.take(1).collect();
        (!subjects.is_empty()).then(|| decode_step(DRAWN, &subjects, &peers))
    }

    /// The plot, which lies at `file`, with its caption. Nothing where it was not measured.
    pub fn captioned(&self, file: &str) -> String {
        let drawn = self.reports.iter().find_map(|report| {
            let shape = report.shapes.iter().find(|shape| shape.shape == DRAWN)?;
            Some((report, shape))
        });
        let Some((report, shape)) = drawn else { return String::new() };
        let card = report.backend.split(" (").next().unwrap_or_default();
        let run = report.run.as_ref();
        let peers = self.fastest_f16_peer(&report.backend, DRAWN).map_or(String::new(), |(peers, _)| {
            format!(" Dashed: the fastest f16 attention of another library{}.", self.when(peers))
        });
        let caption = format!(
            "*Latency of one decode step against bits per element: {} sequences of {} tokens, {} query heads over {} \
             KV heads × {}. {card}, commit `{}`, {}. Lower is better.{peers} Solid grey: the time to read the bytes at \
             the measured bandwidth.*",
            shape.sequences,
            step_tokens(shape),
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            run.and_then(|run| run.commit.as_deref()).unwrap_or_default(),
            run.map(|run| run.date.split(' ').next().unwrap_or_default()).unwrap_or_default(),
        );
        format!(
            "![µs of a decode step against bits: CUDA, WGSL, and the best f16 peer]({file})\n\n{}",
            wrapped(&caption)
        )
    }

    /// Steps against the fastest peer in f16, where kvpack wins and where it loses. Nothing where no peer was measured.
    pub fn against_peers(&self) -> String {
        let rows: Vec<String> = STEPS.iter().filter_map(|&(shape, by)| self.against_peer(shape, by)).collect();
        if rows.is_empty() {
            return String::new();
        }
        let header = "| tokens | heads | by | best f16 peer | f16 | 8-bit | 4-bit | 2-bit | 1-bit |\n";
        let columns = "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        format!("{header}{columns}{}\n", rows.join("\n"))
    }

    pub(super) fn against_peer(&self, name: &str, by: &str) -> Option<String> {
        let reports = || self.reports.iter().filter(|report| backend_name(&report.backend) == by);
        let shape = reports().flat_map(|report| &report.shapes).find(|shape| shape.shape == name)?;
        let (_, peer) = reports().find_map(|report| self.fastest_f16_peer(&report.backend, name))?;
        let cell = |width: u32| {
            let row = shape.rows.iter().find(|row| plain_width(&row.format) == Some(width));
            let figures = row.and_then(|row| row.outcome.figures());
            figures.map_or("–".into(), |figures| {
                format!("{} ×{:.1}", number(figures.step_us, 1), peer.step_us / figures.step_us)
            })
        };
        let cells = WIDTHS.map(cell).join(" | ");
        let ShapeReport { sequences, query_heads, kv_heads, .. } = shape;
        let tokens = step_tokens(shape);
        Some(format!(
            "| {sequences}\u{a0}×\u{a0}{tokens} | {query_heads}/{kv_heads} | {by} | {} | {cells} |",
            number(peer.step_us, 1)
        ))
    }

    /// The fastest step of another library over f16, on the device of `backend`.
    fn fastest_f16_peer(&self, backend: &str, shape: &str) -> Option<(&PeersReport, &PeerRow)> {
        let peers = self.peers.iter().filter(|peers| peers.is_on_device_of(backend));
        let rows = peers.filter_map(|peers| Some((peers, peers.fastest_f16(shape)?)));
        rows.min_by(|a, b| a.1.step_us.total_cmp(&b.1.step_us))
    }

    /// When other libraries were measured: in the run whose first and last reports enclose their date, or on that date.
    fn when(&self, peers: &PeersReport) -> String {
        let dates = || self.reports.iter().filter_map(|report| report.run.as_ref()).map(|run| run.date.as_str());
        // Dates are written so that their order is that of the texts.
        let is_same_run = dates().min().is_some_and(|first| first <= peers.date.as_str())
            && dates().max().is_some_and(|last| peers.date.as_str() <= last);
        if is_same_run { " in the same run".into() } else { format!(", measured {}", peers.date) }
    }
}
