//! What is bound for classes of steps, side by side.

/// What was bound for some classes of steps, the one that was used last at the end: batches that alternate between
/// sizes find what they had.
#[derive(Debug)]
pub(crate) struct BoundClasses<T> {
    kept: Vec<T>,
    most: usize,
}

impl<T> BoundClasses<T> {
    /// Room for so many classes, at least one.
    pub(crate) const fn new(most: usize) -> Self {
        Self { kept: Vec::new(), most: if most == 0 { 1 } else { most } }
    }

    /// The classes, the one that was used last first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.kept.iter().rev()
    }

    /// Takes out one that fits.
    pub(crate) fn take(&mut self, fits: impl Fn(&T) -> bool) -> Option<T> {
        self.kept.iter().rposition(fits).map(|place| self.kept.remove(place))
    }

    /// Drops those that will fit no step any more.
    pub(crate) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        self.kept.retain(keep);
    }

    /// Puts in the one that is used now, in place of the one that was not for the longest time where
    /// there are too many.
    pub(crate) fn put(&mut self, class: T) -> &T {
        if self.kept.len() >= self.most {
            self.kept.remove(0);
        }
        self.kept.push(class);
        &self.kept[self.kept.len() - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Classes in turn are found as long as there is room for all of them; the one that is left out is the oldest.
    #[test]
    fn the_oldest_makes_room() {
        let mut classes = BoundClasses::new(3);
        let mut made = Vec::new();
        let mut step = |number: u32| {
            let class = classes.take(|class| *class == number).unwrap_or_else(|| {
                made.push(number);
                number
            });
            assert_eq!(*classes.put(class), number);
        };
        [1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 1, 3].into_iter().for_each(&mut step);
        assert_eq!(made, [1, 2, 3, 4, 1]);
        classes.retain(|class| *class != 4);
        assert_eq!(classes.iter().copied().collect::<Vec<_>>(), [3, 1]);
    }
}
