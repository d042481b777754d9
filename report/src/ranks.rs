//! What `kvpack bench --suite ranks` found: one sequence over several GPUs.

use std::fmt::Write;

use kvpack::ranks::{ExchangeTime, ReadTime};
use serde::{Deserialize, Serialize};

use crate::{Run, Skipped, Spread};

/// A run of the suite.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename = "ranks")]
pub struct RanksReport {
    /// The run.
    pub run: Run,
    /// Query heads of the layer.
    pub query_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// What rank 0 found.
    #[serde(flatten)]
    pub found: RanksFound,
}

/// What rank 0 found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RanksFound {
    /// The device of every rank.
    pub backend: String,
    /// Exchanges alone.
    pub exchanges: Vec<ExchangeRow>,
    /// Steps.
    pub rows: Vec<RanksRow>,
    /// Steps over sequences that do not fit.
    #[serde(default)]
    pub skipped: Vec<Skipped>,
}

/// States of random queries, exchanged and merged, or gathered only.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExchangeRow {
    /// GPUs.
    pub ranks: usize,
    /// `peer`, `nccl`, or `nccl all-gather` without the merge.
    pub transport: String,
    /// Outputs and log-sum-exps of one rank.
    pub bytes: usize,
    /// The median.
    pub us: f64,
    /// The samples.
    #[serde(flatten)]
    pub spread: Spread,
}

/// One sequence on some GPUs: a step of one query, from the query to the merged output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RanksRow {
    /// Tokens of the sequence.
    pub tokens: usize,
    /// The recipe of its format.
    pub format: String,
    /// GPUs.
    pub ranks: usize,
    /// `peer`, `nccl`, or `none` on one GPU.
    pub transport: String,
    /// The median.
    pub us: f64,
    /// The samples.
    #[serde(flatten)]
    pub spread: Spread,
    /// Of that, the attention of rank 0, measured alone.
    pub attend_us: f64,
    /// Its samples.
    pub attend_spread: Spread,
    /// That and the exchange alone of the same states.
    pub predicted_us: f64,
    /// Codes and ranges that rank 0 reads.
    pub bytes: u64,
    /// Copies that rank 0 holds, and that steps go round.
    pub copies: usize,
    /// The time on one GPU over that on all of these, times their number; none where one GPU does not hold the
    /// sequence.
    pub efficiency: Option<f64>,
    /// Of the merged output against that of one GPU, where that holds the sequence.
    pub nmse: Option<f64>,
}

/// Columns of the table of steps.
const COLUMNS: [(usize, &str); 4] = [(2, "peer"), (2, "nccl"), (4, "peer"), (4, "nccl")];

impl RanksFound {
    /// What the exchange of the states of one query took alone.
    pub fn exchange_us(&self, ranks: usize, transport: &str) -> Option<f64> {
        self.exchanges.iter().find(|row| row.ranks == ranks && row.transport == transport).map(|row| row.us)
    }

    /// What [`kvpack::ranks`] computes for a row from four measurements: one GPU at the shortest and at the longest
    /// sequence of the format, and the smallest and the largest exchange between two. Microseconds.
    pub fn computed_us(&self, row: &RanksRow) -> Option<f64> {
        let alone = || self.rows.iter().filter(|of| of.format == row.format && of.ranks == 1);
        let ends = (alone().min_by_key(|of| of.tokens)?, alone().max_by_key(|of| of.tokens)?);
        let read = ReadTime::of((ends.0.bytes, ends.0.us / 1e6), (ends.1.bytes, ends.1.us / 1e6)).ok()?;
        let between = || self.exchanges.iter().filter(|of| of.ranks == 2 && of.transport == row.transport);
        let exchanges = (between().min_by_key(|of| of.bytes)?, between().max_by_key(|of| of.bytes)?);
        let bytes = exchanges.0.bytes as u64;
        let of = |exchange: &ExchangeRow| (exchange.bytes as u64, exchange.us / 1e6);
        let exchange = ExchangeTime::of(of(exchanges.0), of(exchanges.1)).ok()?;
        Some((read.seconds(row.bytes) + exchange.seconds(bytes, row.ranks)) * 1e6)
    }
}

impl RanksReport {
    /// Device, driver, commit, date and command.
    pub fn provenance(&self) -> String {
        let Run { commit, date, command, driver, .. } = &self.run;
        let ranks = self.found.rows.iter().map(|row| row.ranks).max().unwrap_or(1);
        let commit = commit.as_deref().unwrap_or("unknown");
        format!("{ranks} × {}; driver {driver}; commit `{commit}`; {date};\n`{command}`.\n", self.found.backend)
    }

    /// Exchanges alone, in Markdown.
    pub fn exchange_table(&self) -> String {
        let mut sizes: Vec<usize> = self.found.exchanges.iter().map(|row| row.bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut table = String::from("| GPUs | exchange |");
        sizes.iter().for_each(|bytes| write!(table, " {:.1} KB |", *bytes as f64 / 1e3).unwrap_or(()));
        table += &format!("\n| ---: | --- |{}\n", " ---: |".repeat(sizes.len()));
        for (ranks, transport, name) in [2, 4].into_iter().flat_map(|ranks| {
            [("peer", "peer memory, merged"), ("nccl", "NCCL, merged"), ("nccl all-gather", "NCCL, one all-gather")]
                .map(|(transport, name)| (ranks, transport, name))
        }) {
            let of = |bytes: &usize| {
                let is_it =
                    |row: &&ExchangeRow| (row.ranks, row.transport.as_str(), row.bytes) == (ranks, transport, *bytes);
                self.found.exchanges.iter().find(is_it).map_or("–".into(), |row| format!("{:.1}", row.us))
            };
            let cells: Vec<String> = sizes.iter().map(of).collect();
            table += &format!("| {ranks} | {name} | {} |\n", cells.join(" | "));
        }
        table
    }

    /// Steps, in Markdown: measured, computed in brackets, efficiency in percent.
    pub fn step_table(&self) -> String {
        let mut table = String::from("| tokens | format | 1 GPU | 2, peers | 2, NCCL | 4, peers | 4, NCCL |\n");
        table += "| --- | --- | ---: | ---: | ---: | ---: | ---: |\n";
        let mut lines: Vec<(usize, &str)> = Vec::new();
        for row in &self.found.rows {
            if !lines.contains(&(row.tokens, &row.format)) {
                lines.push((row.tokens, &row.format));
            }
        }
        for (tokens, format) in lines {
            let find = |ranks: usize, transport: &str| {
                let is_it = |row: &&RanksRow| {
                    (row.tokens, row.format.as_str(), row.ranks, row.transport.as_str())
                        == (tokens, format, ranks, transport)
                };
                self.found.rows.iter().find(is_it)
            };
            let cell = |(ranks, transport): (usize, &str)| {
                find(ranks, transport).map_or("–".into(), |row| {
                    let computed = self.found.computed_us(row).map_or("–".into(), |us| format!("{us:.1}"));
                    let efficiency = row.efficiency.map_or("–".into(), |share| format!("{:.0} %", share * 100.0));
                    format!("{:.1} ({computed}) {efficiency}", row.us)
                })
            };
            let alone = find(1, "none").map_or("–".into(), |row| format!("{:.1}", row.us));
            let length = if tokens < 1 << 20 { format!("{}k", tokens >> 10) } else { format!("{} M", tokens >> 20) };
            let cells: Vec<String> = COLUMNS.into_iter().map(cell).collect();
            table += &format!("| {length} | {format} | {alone} | {} |\n", cells.join(" | "));
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_without_one_gpu_have_no_efficiency() {
        let text = r#"{"kind": "ranks", "run": {"commit": null, "date": "", "command": "", "driver": "",
            "guard_percent": null}, "query_heads": 32, "kv_heads": 8, "head_dim": 128, "backend": "Card",
            "exchanges": [], "rows": [{"tokens": 65536, "format": "f16", "ranks": 2, "transport": "peer", "us": 10.5, "samples": 3,
            "low_us": 10.0, "high_us": 11.0, "attend_us": 9.0, "attend_spread": {"samples": 3, "low_us": 9.0,
            "high_us": 9.0}, "predicted_us": 10.0, "bytes": 1, "copies": 1, "efficiency": null, "nmse": null}]}"#;
        let report: RanksReport = serde_json::from_str(text).unwrap();
        assert!(report.step_table().contains("| 64k | f16 | – | 10.5 (–) – | – |"), "{}", report.step_table());
    }
}
