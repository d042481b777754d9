//! The naive model: every token as it was handed in, and where it must lie.

use std::collections::BTreeSet;

use half::f16;
use kvpack::cache::{Appended, Recipe, StoreId};
use kvpack::format::{Grouping, KeyOrValue};
use kvpack::{AttentionShape, TILE_TOKENS};

use super::decoded::decoded;

/// A span: rows `[tokens][kv_heads · head_dim]`.
#[derive(Clone)]
pub struct ModelSpan {
    pub store: StoreId,
    pub window: bool,
    /// A packed window that goes on where a span of full tiles ends: to the cache, the two are one span.
    pub joined: bool,
    /// The position of every token, `[kv_heads][tokens]`.
    pub positions: Vec<Vec<usize>>,
    /// Where a gathered span's prompt begins and ends.
    pub gathered: Option<(usize, usize)>,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    /// Keys and values that were cut off its end, and by which the ranges of a packed span were made.
    pub forgotten: [Vec<f32>; 2],
    /// The same, cut off its beginning.
    pub slid: [Vec<f32>; 2],
    /// A number for every page, the same where sequences share it.
    pub pages: Vec<usize>,
}

impl ModelSpan {
    /// A span without tokens.
    pub fn empty(store: StoreId, kv_heads: usize) -> Self {
        Self {
            store,
            window: true,
            joined: false,
            positions: vec![Vec::new(); kv_heads],
            gathered: None,
            keys: Vec::new(),
            values: Vec::new(),
            forgotten: [Vec::new(), Vec::new()],
            slid: [Vec::new(), Vec::new()],
            pages: Vec::new(),
        }
    }

    pub fn tokens(&self) -> usize {
        self.positions[0].len()
    }

    fn end(&self) -> Option<usize> {
        if self.gathered.is_some() { None } else { self.positions[0].last().map(|last| last + 1) }
    }

    fn truncate(&mut self, tokens: usize, row: usize) {
        for (rows, forgotten) in [&mut self.keys, &mut self.values].into_iter().zip(&mut self.forgotten) {
            let cut = rows.split_off(tokens * row);
            forgotten.splice(0..0, cut);
        }
        self.positions.iter_mut().for_each(|head| head.truncate(tokens));
        self.pages.truncate(tokens.div_ceil(TILE_TOKENS));
    }

    fn forget_first(&mut self, tokens: usize, row: usize) {
        for (rows, slid) in [&mut self.keys, &mut self.values].into_iter().zip(&mut self.slid) {
            slid.extend(rows.drain(..tokens * row));
        }
        self.positions.iter_mut().for_each(|head| drop(head.drain(..tokens)));
        self.pages.drain(..tokens.div_ceil(TILE_TOKENS));
    }
}

#[derive(Clone, Default)]
pub struct ModelSequence {
    pub spans: Vec<ModelSpan>,
    pub length: usize,
    /// What its keys are stored without, `[kv_heads · head_dim]`, once it has it.
    pub centre: Option<Vec<f32>>,
}

impl ModelSequence {
    pub fn tokens(&self) -> usize {
        self.spans.iter().map(ModelSpan::tokens).sum()
    }
}

pub struct Model {
    pub shape: AttentionShape,
    pub recipe: Recipe,
    pub sequences: Vec<ModelSequence>,
    /// The number of the next page.
    pub next_page: usize,
}

impl Model {
    pub fn row_elements(&self) -> usize {
        self.shape.kv_heads() * self.shape.head_dim()
    }

    fn new_page(&mut self) -> usize {
        self.next_page += 1;
        self.next_page
    }

    /// How many spans hold a page.
    fn holders(&self, page: usize) -> usize {
        self.spans().filter(|span| span.pages.contains(&page)).count()
    }

    fn spans(&self) -> impl Iterator<Item = &ModelSpan> {
        self.sequences.iter().flat_map(|sequence| &sequence.spans)
    }

    /// Distinct pages of every store.
    pub fn pages(&self) -> Vec<usize> {
        let of = |store: usize| self.spans().filter(move |span| span.store.index() == store);
        let pages = |store| of(store).flat_map(|span| &span.pages).collect::<BTreeSet<_>>().len();
        (0..self.recipe.stores().len()).map(pages).collect()
    }

    /// Keys that a sequence is given as it stores them: less the mean of the first 64 that it was ever given, where the
    /// recipe says so.
    pub fn centred(&mut self, sequence: usize, keys: &[f32]) -> Vec<f32> {
        if !self.recipe.is_centred() {
            return keys.to_vec();
        }
        let row = self.row_elements();
        let centre = self.sequences[sequence].centre.get_or_insert_with(|| {
            let count = (keys.len() / row).min(64);
            let sum = |channel: usize| (0..count).fold(0.0, |sum, token| sum + keys[token * row + channel]);
            (0..row).map(|channel| sum(channel) * (1.0 / count as f32)).collect()
        });
        keys.iter().enumerate().map(|(i, key)| key - centre[i % row]).collect()
    }

    /// The store that a span which names `store` goes to.
    pub fn resolved(&self, store: StoreId) -> StoreId {
        if self.recipe.stores().len() == 1 { StoreId::F16 } else { store }
    }

    /// Adds a span of a prompt: for every KV head the tokens at these positions.
    /// Lets a sequence hold what another did, in pages of its own.
    pub fn restore(&mut self, sequence: usize, mut held: ModelSequence) {
        for page in held.spans.iter_mut().flat_map(|span| &mut span.pages) {
            self.next_page += 1;
            *page = self.next_page;
        }
        self.sequences[sequence] = held;
    }

    pub fn push_span(&mut self, sequence: usize, mut span: ModelSpan) {
        span.pages = (0..span.tokens().div_ceil(TILE_TOKENS)).map(|_| self.new_page()).collect();
        span.window = false;
        self.sequences[sequence].spans.push(span);
    }

    pub fn push_token(&mut self, sequence: usize, keys: &[f32], values: &[f32]) {
        let (row, kv_heads) = (self.row_elements(), self.shape.kv_heads());
        let length = self.sequences[sequence].length;
        let (store, tiles) = match self.recipe.appended() {
            Appended::AtOnce(to) if length >= self.recipe.sink() => (to, false),
            Appended::Tiles { .. } => (StoreId::F16, true),
            _ => (StoreId::F16, false),
        };
        let spans = &mut self.sequences[sequence].spans;
        let is_full = |span: &ModelSpan| !span.window || span.tokens() == TILE_TOKENS;
        let needs_span =
            |span: &ModelSpan| span.store != store || span.end() != Some(length) || (tiles && is_full(span));
        if spans.last().is_none_or(needs_span) {
            spans.push(ModelSpan::empty(store, kv_heads));
        }
        let last = self.sequences[sequence].spans.last().unwrap();
        let open = (!last.tokens().is_multiple_of(TILE_TOKENS)).then(|| *last.pages.last().unwrap());
        if open.is_none_or(|open| self.holders(open) > 1) {
            // A new page, or a copy of a shared one.
            let page = self.new_page();
            let last = self.sequences[sequence].spans.last_mut().unwrap();
            last.pages.truncate(last.keys.len() / (TILE_TOKENS * row));
            last.pages.push(page);
        }
        let of = &mut self.sequences[sequence];
        of.length += 1;
        let last = of.spans.last_mut().unwrap();
        last.positions.iter_mut().for_each(|head| head.push(length));
        last.keys.extend_from_slice(keys);
        last.values.extend_from_slice(values);
        // A span that takes single tokens has no ranges that depend on others.
        last.forgotten = [Vec::new(), Vec::new()];
        last.slid = [Vec::new(), Vec::new()];
    }

    /// Packs, oldest first, up to `most` full windows that have enough tokens after them.
    pub fn pack_windows(&mut self, sequence: usize, most: usize) {
        let (Appended::Tiles { to, newer }, sink) = (self.recipe.appended(), self.recipe.sink()) else { return };
        let length = self.sequences[sequence].length;
        let mut packed = 0;
        let mut joinable = None;
        for span in &mut self.sequences[sequence].spans {
            let due = span.window
                && span.tokens() == TILE_TOKENS
                && span.positions[0][0] >= sink
                && length - (span.positions[0][0] + TILE_TOKENS) >= newer;
            if due && packed < most {
                // A window is packed from what it holds: f16.
                span.keys.iter_mut().chain(&mut span.values).for_each(|x| *x = f16::from_f32(*x).to_f32());
                (span.store, span.window) = (to, false);
                span.joined = joinable == Some(span.positions[0][0]);
                // What a window forgot before it was packed made no ranges.
                (span.forgotten, span.slid) = (Default::default(), Default::default());
                self.next_page += 1;
                span.pages = vec![self.next_page];
                packed += 1;
            }
            joinable = span.end().filter(|_| span.store == to && span.tokens().is_multiple_of(TILE_TOKENS));
        }
    }

    /// Keeps the first `length` positions; false, and nothing has changed, if that cuts a gathered span.
    pub fn truncate(&mut self, sequence: usize, length: usize) -> bool {
        let row = self.row_elements();
        let of = &mut self.sequences[sequence];
        let cuts = |span: &ModelSpan| span.gathered.is_some_and(|(base, end)| base < length && length < end);
        if of.spans.iter().any(cuts) {
            return false;
        }
        of.spans.retain_mut(|span| match span.gathered {
            Some((base, _)) => base < length,
            None => {
                let kept = span.positions[0].iter().filter(|position| **position < length).count();
                span.truncate(kept, row);
                kept > 0
            }
        });
        of.length = of.length.min(length);
        true
    }

    /// Forgets whole pages of the positions `start .. end`: those of spans that begin there, from their beginning.
    pub fn forget(&mut self, sequence: usize, start: usize, end: usize) {
        let row = self.row_elements();
        let spans = &mut self.sequences[sequence].spans;
        for parts in spans.chunk_by_mut(|_, next| next.joined) {
            let first = parts[0].positions[0][0];
            if parts[0].gathered.is_some() || first < start || first >= end {
                continue;
            }
            let ends_before = parts.last().and_then(ModelSpan::end).is_some_and(|last| last <= end);
            let mut left = if ends_before { usize::MAX } else { (end - first) / TILE_TOKENS * TILE_TOKENS };
            for part in &mut *parts {
                let tokens = part.tokens().min(left);
                part.forget_first(tokens, row);
                left -= tokens;
            }
            if let Some(part) = parts.iter_mut().find(|part| part.tokens() > 0) {
                part.joined = false;
            }
        }
        spans.retain(|span| span.tokens() > 0);
    }

    /// What a sequence must decode to, `[tokens][kv_heads · head_dim]`.
    pub fn decoded(&self, sequence: usize, which: KeyOrValue) -> Vec<f32> {
        let decode = |span: &ModelSpan| {
            let at = usize::from(which == KeyOrValue::Value);
            let rows = [&span.keys, &span.values][at];
            let format = *self.recipe.stores()[span.store.index()].format.tensor(which);
            let slid = if format.grouping() == Some(Grouping::Channel) { &span.slid[at] } else { &Vec::new() };
            let all = [rows.as_slice(), &span.forgotten[at], slid].concat();
            let mut decoded = decoded(&format, &all, &self.shape);
            decoded.truncate(rows.len());
            if let (KeyOrValue::Key, Some(centre)) = (which, &self.sequences[sequence].centre) {
                decoded.iter_mut().enumerate().for_each(|(i, key)| *key += centre[i % centre.len()]);
            }
            decoded
        };
        self.sequences[sequence].spans.iter().flat_map(decode).collect()
    }
}
