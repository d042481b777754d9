//! Guard pages: pages of a known pattern around those that a check writes. Nothing may change them.

use super::data::Random;
use super::report::Failure;
use crate::backend::{Backend, FilledSpan, FilledStores, NewSpan, SpanSource};
use crate::cpu::CpuTensor;
use crate::format::{AttentionShape, TILE_TOKENS};
use crate::plan::{ElementType, Page, RowLayout, TokenRange};
use crate::{Error, Result};

/// The guards around the spans of stores: in each store a page before, between and behind its spans, and a range slot
/// before and behind theirs.
pub(super) struct Guards {
    /// Two spans in each store, for the two range slots. The guard pages are assigned to them in turns.
    spans: Vec<FilledSpan>,
    /// Their contents before anything else was written.
    held: Vec<(Vec<f32>, Vec<f32>)>,
}

/// Guard pages belong to no sequence, so that their contents are not centred.
const NO_SEQUENCE: usize = usize::MAX;

/// Places spans in empty stores, with guards around them. Pages are shuffled if a seed is given.
pub(super) async fn place<B: Backend>(
    backend: &B,
    stores: &mut FilledStores<B>,
    spans: &[NewSpan],
    shuffled: Option<u64>,
) -> Result<(Vec<FilledSpan>, Guards)> {
    let count = stores.stores().len();
    let of_store = |store| spans.iter().filter(move |span| span.store == store && span.tokens > 0).count();
    let guard =
        |store: usize, pages: usize| NewSpan { store, sequence: NO_SEQUENCE, start: 0, tokens: pages * TILE_TOKENS };
    // A store of n spans has n + 1 guard pages, at least two.
    let first = (0..count).map(|store| guard(store, (of_store(store) + 2) / 2));
    let last = (0..count).map(|store| guard(store, of_store(store).div_ceil(2).max(1)));
    let all: Vec<NewSpan> = first.chain(spans.iter().copied()).chain(last).collect();
    let mut placed = stores.place(backend, &all).await?;
    for store in 0..count {
        let of_store = || all.iter().enumerate().filter(move |(_, span)| span.store == store).map(|(index, _)| index);
        let mut pages: Vec<Page> = of_store().flat_map(|index| placed[index].pages.clone()).collect();
        pages.sort_unstable();
        if let Some(seed) = shuffled {
            Random::new(seed).shuffle(&mut pages);
        }
        deal(&mut placed, &of_store().collect::<Vec<_>>(), pages);
    }
    let last = placed.split_off(count + spans.len());
    let own = placed.split_off(count);
    Ok((own, Guards { spans: placed.into_iter().chain(last).collect(), held: Vec::new() }))
}

/// Assigns the pages of a store to its spans. The first and the last spans are the guards. They get, in turns, one page
/// before each of the other spans, and the remaining pages behind them.
fn deal(placed: &mut [FilledSpan], of_store: &[usize], pages: Vec<Page>) {
    let (Some(&first), Some(&last)) = (of_store.first(), of_store.last()) else { return };
    let wanted: Vec<usize> = placed.iter().map(|span| span.pages.len()).collect();
    of_store.iter().for_each(|&index| placed[index].pages.clear());
    let mut pages = pages.into_iter();
    let mut turn = [first, last].into_iter().cycle();
    for &index in of_store.iter().filter(|&&index| index != first && index != last && wanted[index] > 0) {
        let guard = turn.next().unwrap_or(first);
        placed[guard].pages.extend(pages.next());
        placed[index].pages.extend(pages.by_ref().take(wanted[index]));
    }
    for guard in [first, last] {
        let missing = wanted[guard] - placed[guard].pages.len();
        placed[guard].pages.extend(pages.by_ref().take(missing));
    }
}

impl Guards {
    /// Fills the guard pages with a pattern of elements of this type.
    pub(super) async fn write<B: Backend>(
        &mut self,
        backend: &B,
        stores: &mut FilledStores<B>,
        shape: &AttentionShape,
        elements: ElementType,
    ) -> Result<()> {
        let most = self.spans.iter().map(|span| span.span.tokens).max().unwrap_or(0);
        let wave = |rate: f32| {
            let elements_of_all = most * shape.kv_heads() * shape.head_dim();
            CpuTensor::from_f32((0..elements_of_all).map(|i| 3.0 * (i as f32 * rate).sin()).collect(), elements)
        };
        let keys = backend.upload(wave(0.37).elements()).await?;
        let values = backend.upload(wave(0.53).elements()).await?;
        let rows = RowLayout::token_major(most, shape);
        for span in &self.spans {
            let tokens = TokenRange::new(0, span.span.tokens)?.into();
            stores.quantize(backend, span, SpanSource { rows, tokens, keys: &keys, values: &values })?;
        }
        for span in &self.spans {
            self.held.push(stores.read(backend, span).await?);
        }
        Ok(())
    }

    /// The guard pages that changed.
    pub(super) async fn failures<B: Backend>(&self, backend: &B, stores: &FilledStores<B>) -> Result<Vec<Failure>> {
        if self.held.len() != self.spans.len() {
            return Err(Error::Plan { what: "guard pages", reason: "they were not written".into() });
        }
        let mut failures = Vec::new();
        for (span, held) in self.spans.iter().zip(&self.held) {
            let (keys, values) = stores.read(backend, span).await?;
            for (tensor, now, held) in [("keys", &keys, &held.0), ("values", &values, &held.1)] {
                let changed = |(now, held): &(&f32, &f32)| now.to_bits() != held.to_bits();
                let elements = now.iter().zip(held).filter(changed).count();
                if elements > 0 {
                    failures.push(Failure::Guard { store: span.span.store, tensor, elements });
                }
            }
        }
        Ok(failures)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bits;
    use crate::cpu::Cpu;
    use crate::format::SegmentFormat;
    use pollster::block_on;

    /// Before, between and behind: every span has a guard page on both sides, and no page is assigned twice.
    #[test]
    fn every_span_lies_between_guards() {
        let (cpu, shape) = (Cpu::new(), AttentionShape::new(2, 1, 64).unwrap());
        for (count, shuffled) in [(0, None), (1, None), (2, None), (5, None), (5, Some(3))] {
            let formats = [SegmentFormat::F16, SegmentFormat::per_channel(Bits::Four)];
            let mut stores = FilledStores::new(&cpu, shape, &formats).unwrap();
            let span = |i: usize| NewSpan { store: 1, sequence: i, start: 0, tokens: 100 * i };
            let new: Vec<NewSpan> = (0..count).map(span).collect();
            let (spans, guards) = block_on(place(&cpu, &mut stores, &new, shuffled)).unwrap();
            let of_guards: Vec<&Page> =
                guards.spans.iter().filter(|guard| guard.span.store == 1).flat_map(|guard| &guard.pages).collect();
            let mut all: Vec<u32> = of_guards.iter().map(|page| page.index).collect();
            all.extend(spans.iter().flat_map(|span| &span.pages).map(|page| page.index));
            all.sort_unstable();
            assert_eq!(all, (0..all.len() as u32).collect::<Vec<_>>(), "{count} spans");
            for span in spans.iter().filter(|_| shuffled.is_none()) {
                assert_eq!(span.pages.len(), span.span.tokens.div_ceil(TILE_TOKENS));
                let (Some(first), Some(last)) = (span.pages.first(), span.pages.last()) else { continue };
                let is_guard = |index: u32| of_guards.iter().any(|page| page.index == index);
                assert!(is_guard(first.index - 1) && is_guard(last.index + 1), "{count} spans");
                assert_eq!(span.range_slot, 1 + span.span.sequence);
            }
        }
    }
}
