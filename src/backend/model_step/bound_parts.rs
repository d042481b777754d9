//! What is bound for the parts of steps, and which step it serves.

use std::sync::Arc;

use super::{BoundClasses, ByPart, PartLayers, StepLayers};
use crate::Result;
use crate::backend::{OpenStep, StoredLayers};
use crate::plan::WriteLayout;

/// What a backend binds for all steps of one class of a part.
pub(crate) trait BoundClass: Sized {
    /// A step of a part, planned.
    type Planned;

    /// Whether it serves a step.
    fn serves(&self, planned: &Self::Planned) -> bool;

    /// Takes on a step that it [serves](BoundClass::serves).
    fn take_on(&mut self, planned: Self::Planned);
}

/// What is bound for a class of steps, and the part that it is bound for: layers that share their page tables.
#[derive(Debug)]
pub(crate) struct BoundPart<C> {
    layout: Arc<WriteLayout>,
    /// The indices of the layers. Layers that were split off from one group share a layout, but not their stores.
    numbers: Vec<usize>,
    pub(crate) class: C,
}

impl<C> BoundPart<C> {
    /// Whether it was bound to the stores of a part.
    pub(crate) fn is_over<S, F>(&self, part: &OpenStep<'_, S, F>) -> bool {
        Arc::ptr_eq(&self.layout, part.table.layout()) && self.numbers == part.layers
    }

    /// Whether it was bound to other stores of a layer of the part: before they grew, or when the layer was in another
    /// part.
    fn is_over_older<S, F>(&self, part: &OpenStep<'_, S, F>) -> bool {
        !self.is_over(part) && self.numbers.iter().any(|number| part.layers.contains(number))
    }
}

/// What is bound for the parts of a model's steps, by the first layer of the part among those of the step.
#[derive(Debug)]
pub(crate) struct BoundParts<C>(Vec<BoundClasses<BoundPart<C>>>);

impl<C> BoundParts<C> {
    /// Nothing yet. The parts have `layers` layers together. Of each layer `most` classes of steps are kept.
    pub(crate) fn new(layers: usize, most: usize) -> Self {
        Self((0..layers).map(|_| BoundClasses::new(most)).collect())
    }

    /// Drops all.
    pub(crate) fn clear(&mut self) {
        self.0.iter_mut().for_each(|classes| classes.retain(|_| false));
    }

    /// The class that served a part last.
    pub(crate) fn newest(&self, first_layer: usize) -> Option<&BoundPart<C>> {
        self.0.get(first_layer)?.newest()
    }

    /// The same, to change it.
    pub(crate) fn newest_mut(&mut self, first_layer: usize) -> Option<&mut BoundPart<C>> {
        self.0.get_mut(first_layer)?.newest_mut()
    }

    /// Takes out the class that served a part last.
    #[cfg(feature = "wgpu")]
    pub(crate) fn take_newest(&mut self, first_layer: usize) -> Option<C> {
        Some(self.0.get_mut(first_layer)?.take(|_| true)?.class)
    }

    /// The classes of a part, the newest first.
    pub(crate) fn of(&self, first_layer: usize) -> impl Iterator<Item = &BoundPart<C>> {
        self.0.get(first_layer).into_iter().flat_map(BoundClasses::iter)
    }

    /// All classes of all parts.
    #[cfg(feature = "cuda")]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &BoundPart<C>> {
        self.0.iter().flat_map(BoundClasses::iter)
    }
}

impl<C: BoundClass> BoundParts<C> {
    /// Serves a planned step of a part: by a class that is bound for it, or by one that `bind` makes. Whether it was
    /// made. What was bound to stores that are no more goes first.
    ///
    /// # Errors
    /// Those of `bind`.
    pub(crate) fn serve<S, F>(
        &mut self,
        (part, first_layer): (&OpenStep<'_, S, F>, usize),
        planned: C::Planned,
        bind: impl FnOnce(&Self, C::Planned) -> Result<C>,
    ) -> Result<bool> {
        let serves = |bound: &BoundPart<C>| bound.is_over(part) && bound.class.serves(&planned);
        if let Some(mut bound) = self.0[first_layer].take(serves) {
            bound.class.take_on(planned);
            self.0[first_layer].put(bound);
            return Ok(false);
        }
        self.0.iter_mut().for_each(|classes| classes.retain(|bound| !bound.is_over_older(part)));
        let class = bind(self, planned)?;
        let (layout, numbers) = (part.table.layout().clone(), part.layers.to_vec());
        self.0[first_layer].put(BoundPart { layout, numbers, class });
        Ok(true)
    }

    /// The parts of a step, each with the class that serves it and what `with` adds, by their place.
    pub(crate) fn written<'a, S, F, E>(
        &'a self,
        parts: &[OpenStep<'a, S, F>],
        (layers, by_part): (StepLayers, &PartLayers),
        mut with: impl FnMut(usize, &OpenStep<'a, S, F>) -> E,
    ) -> ByPart<WrittenPart<'a, C, E>> {
        let of = |(at, (part, layers)): (usize, (&OpenStep<'a, S, F>, &[usize]))| {
            let bound = self.newest(layers[0])?;
            Some(WrittenPart { bound, stored: part.stored, with: with(at, part) })
        };
        ByPart::new(parts.iter().zip(by_part.iter()).enumerate().filter_map(of).collect(), layers)
    }
}

/// A part of a step whose tables are on their way to the device.
#[derive(Debug)]
pub(crate) struct WrittenPart<'a, C, E> {
    bound: &'a BoundPart<C>,
    stored: &'a StoredLayers,
    /// What the backend needs besides.
    pub(crate) with: E,
}

impl<C, E: Clone> Clone for WrittenPart<'_, C, E> {
    fn clone(&self) -> Self {
        Self { bound: self.bound, stored: self.stored, with: self.with.clone() }
    }
}

impl<'a, C, E> WrittenPart<'a, C, E> {
    /// What is bound for it.
    pub(crate) const fn class(&self) -> &'a C {
        &self.bound.class
    }

    /// Notes that a layer has stored its tokens, by its place in the part.
    pub(crate) fn mark(&self, place: usize) {
        self.bound.numbers.get(place).into_iter().for_each(|&number| self.stored.mark(number));
    }

    /// Notes that all its layers have.
    #[cfg(feature = "cuda")]
    pub(crate) fn mark_all(&self) {
        self.bound.numbers.iter().for_each(|&number| self.stored.mark(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::QueryPrecision;
    use crate::format::{AttentionShape, SegmentFormat};
    use crate::plan::{AttendPlan, Page, QueryRun, SpanView, StoreCapacity, StoreView, WriteTable};

    /// Serves steps of one size, and counts them.
    #[derive(Debug, PartialEq, Eq)]
    struct OfSize {
        size: usize,
        steps: usize,
    }

    impl BoundClass for OfSize {
        type Planned = usize;

        fn serves(&self, planned: &usize) -> bool {
            self.size == *planned
        }

        fn take_on(&mut self, _: usize) {
            self.steps += 1;
        }
    }

    fn layout() -> Arc<WriteLayout> {
        let of = StoreCapacity {
            format: SegmentFormat::F16,
            shard_pages: vec![1],
            range_slots: 0,
            tokens: 1,
            copies: 0,
            centres: 0,
            centre_slots: 0,
        };
        Arc::new(WriteLayout::new(AttentionShape::new(2, 2, 64).unwrap(), 1, vec![of], vec![]).unwrap())
    }

    fn plan() -> AttendPlan {
        let pages = [Page { shard: 0, index: 0 }];
        let span = SpanView { sequence: 0, start: 0, tokens: 3, gathered: None, pages: &pages, range_slot: 0 };
        let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span] };
        AttendPlan::new(AttentionShape::new(2, 2, 64).unwrap(), &[QueryRun::decode(0)], &[store]).unwrap()
    }

    /// Serves a step of these layers, which have the stores of a table; whether something was bound.
    fn serve(bound: &mut BoundParts<OfSize>, (layers, table): (&[usize], &WriteTable), size: usize) -> bool {
        let (plan, stored) = (plan(), StoredLayers::none_of(4));
        let stores = layers.iter().map(|_| vec![&()]).collect();
        let part = OpenStep {
            layers,
            table,
            staged: &[],
            plan: &plan,
            query: QueryPrecision::default(),
            stores,
            flags: &(),
            stored: &stored,
        };
        bound.serve((&part, layers[0]), size, |_, size| Ok(OfSize { size, steps: 1 })).unwrap()
    }

    /// What is bound serves steps of its size as long as its layers are in one part and their stores are the same.
    #[test]
    fn classes_serve_until_their_part_or_its_stores_change() {
        let table = || WriteTable::new(&layout());
        let (old, grown) = (table(), table());
        let mut bound = BoundParts::new(4, 2);
        assert!(serve(&mut bound, (&[0, 1], &old), 8));
        assert!(serve(&mut bound, (&[2, 3], &old), 8), "other layers over the same layout");
        assert!(!serve(&mut bound, (&[0, 1], &old), 8));
        assert!(serve(&mut bound, (&[0, 1], &old), 16));
        assert!(!serve(&mut bound, (&[0, 1], &old), 8), "both sizes are kept");
        assert_eq!(bound.newest(0).unwrap().class, OfSize { size: 8, steps: 3 });
        assert!(serve(&mut bound, (&[1], &old), 8), "the layers parted");
        assert!(bound.newest(0).is_none(), "what was bound for both layers is dropped");
        assert!(serve(&mut bound, (&[0, 1], &old), 8), "they joined");
        assert!(serve(&mut bound, (&[0, 1], &grown), 8), "a layout of the same numbers is another");
        assert_eq!(bound.of(0).count(), 1, "what was bound to stores that are no more is dropped");
        assert!(!serve(&mut bound, (&[2, 3], &old), 8), "layers of another part keep theirs");
        bound.clear();
        assert!(serve(&mut bound, (&[2, 3], &old), 8));
    }

    /// A class that cannot be bound leaves those that serve other steps.
    #[test]
    fn what_cannot_be_bound_changes_nothing_else() {
        let table = WriteTable::new(&layout());
        let mut bound = BoundParts::new(4, 2);
        assert!(serve(&mut bound, (&[0], &table), 8));
        let (plan, stored) = (plan(), StoredLayers::none_of(4));
        let part = OpenStep {
            layers: &[0],
            table: &table,
            staged: &[],
            plan: &plan,
            query: QueryPrecision::default(),
            stores: vec![vec![&()]],
            flags: &(),
            stored: &stored,
        };
        let refused = crate::Error::Plan { what: "class", reason: "no memory".into() };
        assert!(bound.serve((&part, 0), 16, |_, _| Err(refused)).is_err());
        assert!(!serve(&mut bound, (&[0], &table), 8));
    }
}
