//! How the processes of a run meet: each says a line to the command that started it, and hears those of all.

use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use crate::outcome::{WRONG, Wrong};

/// Begins the last line of a rank, which holds what it found.
const FOUND: &str = "found ";

/// Separates the lines of the ranks, which have none of their own.
const BETWEEN: char = '\t';

/// How long a process that has closed its output may take to end.
const GONE: Duration = Duration::from_secs(5);

/// The end of a rank.
pub struct Meeting {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
}

impl Meeting {
    /// Waits for all ranks, and returns their lines, in their order.
    ///
    /// # Errors
    /// When the command or another rank has ended.
    pub fn meet(&self, line: &str) -> Result<Vec<String>> {
        say(line)?;
        let mut heard = String::new();
        stdin().lock().read_line(&mut heard)?;
        let lines: Vec<String> = heard.trim_end_matches('\n').split(BETWEEN).map(str::to_owned).collect();
        ensure!(lines.len() == self.ranks, "another rank has ended");
        Ok(lines)
    }

    /// The line of one rank.
    ///
    /// # Errors
    /// As [`Meeting::meet`].
    pub fn of(&self, rank: usize, line: &str) -> Result<String> {
        self.meet(line)?.into_iter().nth(rank).context("there is no such rank")
    }

    /// Ends the rank.
    ///
    /// # Errors
    /// When the command has ended.
    pub fn end(&self, found: &str) -> Result<()> {
        say(&format!("{FOUND}{found}"))
    }
}

fn say(line: &str) -> Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{}", line.replace(['\n', BETWEEN], " "))?;
    Ok(out.flush()?)
}

/// A process of a rank. It ends with this value.
struct Rank {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // It has ended already where all went well.
        self.process.kill().unwrap_or(());
        self.process.wait().map(|_| ()).unwrap_or(());
    }
}

/// Starts a process for every rank, which gets the arguments of `command` for its number, and carries their lines until
/// all have ended. What each found, in their order.
///
/// # Errors
/// When a process cannot be started, or one ends early; [`Wrong`] when one ends early because outputs are wrong.
pub fn run(ranks: usize, command: impl Fn(usize) -> Command) -> Result<Vec<String>> {
    let start = |rank: usize| {
        let mut process = command(rank)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("the process of rank {rank} could not be started"))?;
        let (to, from) = process.stdin.take().zip(process.stdout.take()).context("a process without pipes")?;
        Ok(Rank { process, to, from: BufReader::new(from) })
    };
    let mut all = (0..ranks).map(start).collect::<Result<Vec<_>>>()?;
    loop {
        let mut lines = Vec::with_capacity(ranks);
        for (rank, of) in all.iter_mut().enumerate() {
            let mut line = String::new();
            if of.from.read_line(&mut line)? == 0 {
                return Err(ended_early(rank, &mut all));
            }
            lines.push(line.trim_end_matches('\n').to_owned());
        }
        if lines.iter().all(|line| line.starts_with(FOUND)) {
            return Ok(lines.into_iter().map(|line| line[FOUND.len()..].to_owned()).collect());
        }
        let line = lines.join(&BETWEEN.to_string());
        for of in &mut all {
            writeln!(of.to, "{line}")?;
            of.to.flush()?;
        }
    }
}

/// Why the process of `rank` ended early. A rank whose outputs are wrong takes the others along, so all are asked.
fn ended_early(rank: usize, all: &mut [Rank]) -> anyhow::Error {
    // It has closed its end of the pipe, and is about to be gone.
    let runs = |of: &mut Rank| matches!(of.process.try_wait(), Ok(None));
    let deadline = Instant::now() + GONE;
    while Instant::now() < deadline && all.get_mut(rank).is_some_and(runs) {
        sleep(Duration::from_millis(5));
    }
    let code = |of: &mut Rank| of.process.try_wait().ok().flatten().and_then(|status| status.code());
    let is_wrong = |of: &mut Rank| code(of) == Some(WRONG.into());
    match all.iter_mut().position(is_wrong) {
        Some(rank) => Wrong(format!("the outputs of rank {rank}; its reason is above")).into(),
        None => anyhow!("the process of rank {rank} ended early; its reason is above"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn lines_are_carried_until_all_have_ended() {
        let found = run(2, |rank| shell(&format!("echo from {rank}; read line; echo \"found $line\""))).unwrap();
        assert_eq!(found, ["from 0\tfrom 1"; 2]);
    }

    #[test]
    fn a_rank_that_ends_early_ends_all() {
        let error = run(2, |rank| shell(if rank == 1 { "exit 3" } else { "echo hello; sleep 60" })).unwrap_err();
        assert!(error.to_string().contains("rank 1 ended early") && !error.is::<Wrong>(), "{error}");
    }

    #[test]
    fn a_rank_with_wrong_outputs_is_no_wrong_usage() {
        let error = run(2, |rank| shell(if rank == 1 { "exit 1" } else { "echo hello; sleep 60" })).unwrap_err();
        assert!(error.is::<Wrong>() && error.to_string().contains("rank 1"), "{error}");
        // The other one notices it first.
        let error = run(2, |rank| shell(if rank == 1 { "exit 1" } else { "sleep 0.5; exit 2" })).unwrap_err();
        assert!(error.is::<Wrong>(), "{error}");
    }
}
