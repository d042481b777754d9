//! The facts in a report about its run.

use std::time::{SystemTime, UNIX_EPOCH};

use kvpack_report::{Run, utc};

use crate::invocation::Invocation;

/// The commit that this command was built from; see build.rs.
const COMMIT: Option<&str> = option_env!("KVPACK_BUILT_FROM");

/// What `--version` prints: the version, and the commit where it is known.
pub const VERSION: &str = env!("KVPACK_VERSION");

/// This run, which uses `driver` and discards rows that are guarded below `tolerance`, a fraction.
pub fn run(driver: String, tolerance: Option<f64>) -> Run {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Run {
        commit: COMMIT.map(str::to_owned),
        date: utc(now.as_secs()),
        command: command(Invocation::current().words().map(|word| word.to_string_lossy().into_owned())),
        driver,
        guard_percent: tolerance.map(|tolerance| tolerance * 100.0),
    }
}

/// A command line as one would type it, without the folders of the program.
fn command(mut arguments: impl Iterator<Item = String>) -> String {
    let program = arguments.next().unwrap_or_default();
    let program = program.rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
    let quoted = |argument: String| match argument.chars().any(|c| c.is_whitespace() || "'\"$&|;<>*?()".contains(c)) {
        true => format!("'{}'", argument.replace('\'', r"'\''")),
        false => argument,
    };
    std::iter::once(program).chain(arguments.map(quoted)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::command;

    #[test]
    fn commands_can_be_typed_again() {
        let arguments = ["/a/b/kvpack", "bench", "--format", "bit per channel", "--shape", "it's"].map(str::to_owned);
        assert_eq!(command(arguments.into_iter()), r"kvpack bench --format 'bit per channel' --shape 'it'\''s'");
    }
}
