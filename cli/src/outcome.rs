//! How a command ends.

use crate::print::{StdoutError, note, one_line};

/// How a command that could run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything is as it should be: exit code 0.
    Passed,
    /// A check failed: exit code 1.
    Failed,
}

/// Something was computed wrong, and nothing further was done with it: exit code 1.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Wrong(pub String);

/// The exit code of a command that found something wrong.
pub const WRONG: u8 = 1;

/// The exit code of a program that SIGPIPE ended, as shells give it: it stopped because nobody read on.
const NOBODY_READS: u8 = 141;

/// The exit code of a command; an error is printed on standard error and gives exit code 2, or 1 where it is [`Wrong`].
/// A closed standard output is no error.
pub fn exit_code(result: anyhow::Result<Outcome>) -> u8 {
    match result {
        Ok(Outcome::Passed) => 0,
        Ok(Outcome::Failed) => WRONG,
        Err(error) if matches!(error.downcast_ref(), Some(StdoutError::Closed)) => NOBODY_READS,
        Err(error) if error.is::<Wrong>() => {
            note!("WRONG {}", one_line(&format!("{error:#}")));
            WRONG
        }
        Err(error) => {
            // The library quotes no file, but devices, in several lines.
            let text = format!("{error:#}");
            note!("error: {}", if error.is::<kvpack::Error>() { text.into() } else { one_line(&text) });
            2
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, ensure};

    use super::*;

    #[test]
    fn what_is_wrong_is_no_wrong_usage() {
        let check = |right: bool| -> anyhow::Result<Outcome> {
            ensure!(right, Wrong("append stored nothing".into()));
            Ok(Outcome::Passed)
        };
        assert_eq!(exit_code(check(true)), 0);
        assert_eq!(exit_code(check(false)), 1);
        assert_eq!(exit_code(check(false).context("4-bit per token")), 1);
        assert_eq!(exit_code(Err(anyhow::anyhow!("no such file"))), 2);
    }
}
