//! Numbers of the classes of steps.

/// Number of classes of steps whose numbers are remembered.
const KNOWN_STEPS: usize = 512;

/// Numbers for what is bound, none of which is given twice, and for steps: one whose parts are served by the same
/// classes as those of an earlier step has its number.
#[derive(Debug, Default)]
pub(crate) struct StepClasses {
    /// The classes of steps, by those of their parts, the newest last.
    steps: Vec<(Vec<u64>, u64)>,
    given: u64,
}

impl StepClasses {
    /// A new number.
    pub(crate) const fn give(&mut self) -> u64 {
        self.given += 1;
        self.given
    }

    /// The number of the class of steps whose parts have these classes.
    pub(crate) fn of_step(&mut self, parts: Vec<u64>) -> u64 {
        let known = self.steps.iter().rposition(|(of, _)| *of == parts).map(|place| self.steps.remove(place));
        let step = known.unwrap_or_else(|| (parts, self.give()));
        if self.steps.len() >= KNOWN_STEPS {
            self.steps.remove(0);
        }
        let class = step.1;
        self.steps.push(step);
        class
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step is known by the classes of its parts as long as few others come between, and numbers never come again.
    #[test]
    fn steps_are_known_by_their_parts() {
        let mut classes = StepClasses::default();
        let parts: Vec<u64> = (0..2).map(|_| classes.give()).collect();
        let step = classes.of_step(parts.clone());
        assert!(!parts.contains(&step));
        assert_ne!(classes.of_step(vec![parts[1], parts[0]]), step);
        let new = classes.give();
        assert_eq!(classes.of_step(parts.clone()), step);
        let others: Vec<u64> = (0..KNOWN_STEPS as u64).map(|other| classes.of_step(vec![new, other])).collect();
        let again = classes.of_step(parts);
        assert!(again > step && !others.contains(&again), "a class that was forgotten has another number");
    }
}
