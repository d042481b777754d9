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
    use super::utc;

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
