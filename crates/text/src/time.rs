//! Converts times in seconds since 1970 to ISO 8601 in UTC, in whole seconds.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the seconds since 1970.
pub fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Formats a time as `2025-10-22T06:53:42Z`. Times outside the years 1 to 9999 (a file may claim any) are shown as the
/// nearest time within them.
pub fn iso8601(seconds: i64) -> String {
    const YEAR_1: i64 = -62_135_596_800;
    const YEAR_9999_ENDS: i64 = 253_402_300_799;
    let seconds = seconds.clamp(YEAR_1, YEAR_9999_ENDS);
    let (year, month, day) = civil(seconds.div_euclid(86_400));
    let of_day = seconds.rem_euclid(86_400);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Returns year, month and day of a day counted from 1970-01-01. This is Howard Hinnant's `civil_from_days`, in which a
/// year begins in March, so that the leap day is its last.
fn civil(day: i64) -> (i64, i64, i64) {
    let z = day + 719_468;
    let era = z.div_euclid(146_097);
    let of_era = z.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, of_year - (153 * shifted + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::iso8601;

    #[test]
    fn known_moments() {
        assert_eq!(iso8601(0), "1970-01-01T00:00:00Z");
        assert_eq!(iso8601(1_761_116_022), "2025-10-22T06:53:42Z");
        assert_eq!(iso8601(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(iso8601(4_107_542_399), "2100-02-28T23:59:59Z");
        assert_eq!(iso8601(-1), "1969-12-31T23:59:59Z");
        assert_eq!(iso8601(i64::MAX), "9999-12-31T23:59:59Z");
        assert_eq!(iso8601(i64::MIN), "0001-01-01T00:00:00Z");
    }
}
