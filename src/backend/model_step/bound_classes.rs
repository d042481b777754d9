//! The bound resources of several classes of steps.

/// The resources bound for some classes of steps, the most recently used last. Batches that alternate between sizes
/// find theirs again.
#[derive(Debug)]
pub(crate) struct BoundClasses<T> {
    kept: Vec<T>,
    most: usize,
}

impl<T> BoundClasses<T> {
    /// Room for `most` classes, at least one.
    pub(crate) const fn new(most: usize) -> Self {
        Self { kept: Vec::new(), most: if most == 0 { 1 } else { most } }
    }

    /// The class in use.
    pub(crate) fn newest(&self) -> Option<&T> {
        self.kept.last()
    }

    /// The class in use, to change it.
    pub(crate) fn newest_mut(&mut self) -> Option<&mut T> {
        self.kept.last_mut()
    }

    /// The classes, the most recently used first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.kept.iter().rev()
    }

    /// Takes out a class that fits.
    pub(crate) fn take(&mut self, fits: impl Fn(&T) -> bool) -> Option<T> {
        self.kept.iter().rposition(fits).map(|place| self.kept.remove(place))
    }

    /// Drops the classes that can no longer fit any step.
    pub(crate) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        self.kept.retain(keep);
    }

    /// Adds the class in use. If there are too many, the least recently used one is dropped.
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

    /// Classes that take turns are found as long as there is room for all. The oldest one is dropped.
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
