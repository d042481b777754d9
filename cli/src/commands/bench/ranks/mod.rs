//! One sequence over several GPUs: the steps of context-parallel attention, with a process for each GPU.
//!
//! Each process fills a cache with its share of the tokens and drives the attention and the exchange of a step itself,
//! as [`kvpack::ranks`] does, in a CUDA graph.

mod meeting;
mod rank;
mod share;

use anyhow::{Result, ensure};
use kvpack::cuda::cudarc::driver::CudaContext;
use kvpack::cuda::{Cuda, KernelCache, driver_present};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};
use kvpack_report::{ExchangeRow, RanksFound, RanksReport, RanksRow};

use super::output::Style;
use super::timed::figure;
use crate::invocation::Invocation;
use crate::outcome::Outcome;
use crate::print::{self, say};
use crate::provenance;
use meeting::Meeting;
use rank::Process;

/// What outputs may differ by from those of one GPU.
const MOST_NMSE: f64 = 1e-6;

/// Tokens of the longest sequence.
const MOST_TOKENS: usize = 4 << 20;

/// Tokens of the sequences.
fn lengths() -> [usize; 5] {
    [64 << 10, 128 << 10, 512 << 10, 1 << 20, MOST_TOKENS]
}

/// How they are stored.
fn formats() -> [(&'static str, SegmentFormat); 4] {
    [
        ("f16", SegmentFormat::F16),
        ("calibquant:4", SegmentFormat::calibquant(Bits::Four)),
        ("calibquant:2", SegmentFormat::calibquant(Bits::Two)),
        ("calibquant:1", SegmentFormat::calibquant(Bits::One)),
    ]
}

/// Numbers of GPUs that share a sequence: the powers of two up to `ranks`.
fn worlds(ranks: usize) -> Vec<usize> {
    std::iter::successors(Some(1), |world| Some(world * 2)).take_while(|&world| world <= ranks).collect()
}

/// Runs the suite on `ranks` GPUs, or as the process of rank `rank`.
///
/// # Errors
/// [`Error::Adapter`] without enough GPUs; when a device or a process fails; [`Wrong`](crate::outcome::Wrong) for
/// outputs that differ from those of one GPU.
pub fn run(ranks: usize, rank: Option<usize>, driver: String, style: Style) -> Result<Outcome> {
    ensure!(
        ranks.is_power_of_two() && ranks <= share::PARTS,
        "--ranks {ranks}: give 1, 2, 4 or 8; a sequence is cut into {} parts",
        share::PARTS
    );
    let shape = AttentionShape::new(32, 8, 128)?;
    if let Some(rank) = rank {
        let backend = Cuda::open(rank, KernelCache::of_user())?;
        let process = Process::new(Meeting { rank, ranks }, backend, shape)?;
        return pollster::block_on(process.run()).map(|()| Outcome::Passed);
    }
    check_gpus(ranks)?;
    let command = |rank: usize| {
        let mut command = Invocation::current().again();
        command.args(["bench", "--suite", "ranks", "--ranks", &ranks.to_string(), "--rank", &rank.to_string()]);
        command
    };
    let found: RanksFound = serde_json::from_str(&meeting::run(ranks, command)?[0])?;
    let report = RanksReport {
        run: provenance::run(driver, None),
        query_heads: shape.query_heads(),
        kv_heads: shape.kv_heads(),
        head_dim: shape.head_dim(),
        found,
    };
    if style == Style::Json {
        print::json(&report)?;
    } else {
        print_tables(&report)?;
    }
    Ok(Outcome::Passed)
}

/// Checks that there are as many GPUs.
fn check_gpus(ranks: usize) -> kvpack::Result<()> {
    let found = match driver_present() {
        true => CudaContext::device_count().map_or(0, |count| count.max(0) as usize),
        false => 0,
    };
    if found >= ranks {
        return Ok(());
    }
    let most = [8, 4, 2, 1].into_iter().find(|&most| most <= found);
    let reason = match driver_present() {
        true => {
            let hint = most.map_or_else(String::new, |most| format!("; give --ranks {most}"));
            format!("{ranks} ranks need {ranks} NVIDIA GPUs, and this machine has {found}{hint}")
        }
        false => format!(
            "{ranks} ranks need {ranks} NVIDIA GPUs, and the CUDA driver (libcuda) was not found; install NVIDIA's driver"
        ),
    };
    Err(Error::Adapter { reason })
}

fn print_tables(RanksReport { found, .. }: &RanksReport) -> Result<()> {
    say!("{:>5} {:>16} {:>9} {:>22}", "ranks", "exchange", "bytes", "µs")?;
    for ExchangeRow { ranks, transport, bytes, us, spread } in &found.exchanges {
        say!("{ranks:>5} {transport:>16} {bytes:>9} {:>22}", figure(*us, *spread, 2))?;
    }
    say!(
        "\n{:>8} {:<13} {:>5} {:>9} {:>22} {:>22} {:>9} {:>10} {:>7}",
        "tokens",
        "format",
        "ranks",
        "transport",
        "µs",
        "attention alone, µs",
        "predicted",
        "efficiency",
        "NMSE"
    )?;
    for row in &found.rows {
        let RanksRow { tokens, format, ranks, transport, us, spread, attend_us, attend_spread, .. } = row;
        let (step, attend) = (figure(*us, *spread, 1), figure(*attend_us, *attend_spread, 1));
        let efficiency = row.efficiency.map_or("-".into(), |share| format!("{:.1} %", share * 100.0));
        let (nmse, predicted) = (row.nmse.map_or("-".into(), |nmse| format!("{nmse:.0e}")), row.predicted_us);
        let line = format!("{tokens:>8} {format:<13} {ranks:>5} {transport:>9} {step:>22} {attend:>22}");
        say!("{line} {predicted:>9.1} {efficiency:>10} {nmse:>7}")?;
    }
    say!(
        "\n{}, a process for each GPU. A step: attention of one query, exchange and merge, in a CUDA graph.",
        found.backend
    )?;
    say!("Efficiency: the time on one GPU over that on all of them, times their number. NMSE: against one GPU.")?;
    say!("-: one GPU does not hold the sequence.")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_cut_into_whole_tiles_of_parts() {
        assert!(lengths().iter().all(|tokens| tokens.is_multiple_of(share::PARTS * kvpack::TILE_TOKENS)));
        assert_eq!(worlds(4), [1, 2, 4]);
        assert_eq!(worlds(1), [1]);
    }
}
