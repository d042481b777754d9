//! Where, when and with what something was measured.

use serde::{Deserialize, Serialize};

/// One run of the command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The commit that the command was built from, with a `+` behind it where files had been changed; none where the
    /// build knew of no repository.
    pub commit: Option<String>,
    /// When the run began: `2026-11-22 17:20 UTC`.
    pub date: String,
    /// The command with its arguments.
    pub command: String,
    /// The driver and its version.
    pub driver: String,
    /// How far below the device's best a row may be guarded before it is discarded, in percent; none where the guard is
    /// only reported.
    pub guard_percent: Option<f64>,
}

impl Run {
    /// Adds the date and the command of another run of the same build: `first to last`, and one command after the
    /// other.
    pub fn join(&mut self, other: &Self) {
        let (first, last) = self.date.split_once(" to ").unwrap_or((&self.date, &self.date));
        let (other_first, other_last) = other.date.split_once(" to ").unwrap_or((&other.date, &other.date));
        // Dates are written so that their order is that of the texts.
        let (first, last) = (first.min(other_first), last.max(other_last));
        self.date = if first == last { first.to_owned() } else { format!("{first} to {last}") };
        if !self.command.split("; ").any(|command| command == other.command) {
            self.command = format!("{}; {}", self.command, other.command);
        }
    }
}

/// A time in seconds since 1970 as a date with hours and minutes, UTC.
pub fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years of 365.2425 days that begin in March, so that a leap day is the last of its year.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", rest / 3_600, rest % 3_600 / 60)
}

#[cfg(test)]
mod tests {
    use super::{Run, utc};

    #[test]
    fn runs_are_joined_from_the_first_to_the_last() {
        let run = |date: &str, command: &str| Run {
            commit: None,
            date: date.into(),
            command: command.into(),
            driver: String::new(),
            guard_percent: None,
        };
        let mut all = run("2026-01-02 03:04 UTC", "a");
        all.join(&run("2026-01-02 03:04 UTC", "b"));
        assert_eq!((all.date.as_str(), all.command.as_str()), ("2026-01-02 03:04 UTC", "a; b"));
        for (date, command) in [("2026-01-02 03:10 UTC", "c"), ("2026-01-01 23:00 UTC", "b")] {
            all.join(&run(date, command));
        }
        assert_eq!(all, run("2026-01-01 23:00 UTC to 2026-01-02 03:10 UTC", "a; b; c"));
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_782_399), "2000-02-28 23:59 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(utc(1_709_251_199), "2024-02-29 23:59 UTC");
        assert_eq!(utc(1_795_363_200), "2026-11-22 16:00 UTC");
        assert_eq!(utc(4_107_542_400), "2100-03-01 00:00 UTC");
    }
}
