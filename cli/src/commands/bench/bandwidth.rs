//! What readings of a device's read bandwidth are worth.

use kvpack_report::MOST_PERCENT_OF_READ;

/// Readings before and after the rows of a shape.
///
/// A device that slept reads slowly and never too fast, so the best reading is the bandwidth, where another
/// one confirms it.
#[derive(Clone, Debug)]
pub struct Readings {
    /// How far the second best may be below the best, as a fraction; none where other programs share the device, and
    /// the best has to do.
    tolerance: Option<f64>,
    /// Bytes per second, in the order of time.
    readings: Vec<f64>,
}

impl Readings {
    /// A first reading, in bytes per second.
    pub fn new(tolerance: Option<f64>, first: f64) -> Self {
        Self { tolerance, readings: vec![first] }
    }

    /// The best reading so far, confirmed or not.
    pub fn best(&self) -> f64 {
        self.readings.iter().copied().fold(0.0, f64::max)
    }

    /// Adds a reading.
    pub fn add(&mut self, reading: f64) {
        self.readings.push(reading);
    }

    /// Bytes per second; none where no two readings agree.
    pub fn bandwidth(&self) -> Option<f64> {
        let mut sorted = self.readings.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let best = sorted.first().copied()?;
        let Some(tolerance) = self.tolerance else { return Some(best) };
        let second = sorted.get(1).copied()?;
        (second >= best * (1.0 - tolerance)).then_some(best)
    }

    /// True if two readings agree, and no step that reads at `fastest` bytes per second contradicts them.
    pub fn stand_beside(&self, fastest: f64) -> bool {
        self.bandwidth().is_some_and(|best| fastest <= best * MOST_PERCENT_OF_READ / 100.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_counts_where_another_confirms_it() {
        let mut readings = Readings::new(Some(0.03), 2.4e12);
        assert_eq!(readings.bandwidth(), None, "one reading may be that of a sleeping device");
        readings.add(4.48e12);
        assert_eq!(readings.bandwidth(), None, "the two contradict each other");
        assert!(!readings.stand_beside(0.0));
        readings.add(4.46e12);
        assert_eq!(readings.bandwidth(), Some(4.48e12), "and the first is forgotten");
        assert!(readings.stand_beside(4.5e12));
        assert!(!readings.stand_beside(4.6e12), "a step above 101 %");
    }

    #[test]
    fn two_readings_of_a_sleeping_device_do_not_stand_beside_a_step() {
        let mut readings = Readings::new(Some(0.03), 2.40e12);
        readings.add(2.41e12);
        assert!(!readings.stand_beside(4.4e12));
        readings.add(4.48e12);
        readings.add(4.47e12);
        assert!(readings.stand_beside(4.4e12));
    }

    #[test]
    fn a_shared_processor_has_no_agreement_to_offer() {
        let mut readings = Readings::new(None, 8e9);
        readings.add(5e9);
        assert_eq!(readings.bandwidth(), Some(8e9));
    }
}
