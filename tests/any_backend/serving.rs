//! A server under a budget that runs out in every call, driven at random, against attention in f64 over what it was
//! given: no call leaves the budget, one that fails has changed nothing, and everything is free at the end.

use kvpack::backend::Backend;
use kvpack::cache::{
    Appended, Budget, Growth, ModelCache, ModelRecipe, PrefixCache, StoreRoom, SwappedSequence, TokenRun,
};
use kvpack::cpu::nmse;
use kvpack::{AttentionShape, Error, Result, SegmentFormat};
use pollster::block_on;

use super::exact::dot;
use super::random_rows::Random;

pub const LAYERS: usize = 2;
pub const SEQUENCES: usize = 5;
/// Sequences beside these that hold prefixes.
pub const PREFIXES: usize = 2;
/// Rows of the largest step.
pub const ROWS: usize = 48;
const KV_ROW: usize = 2 * 64;
const QUERY_ROW: usize = 4 * 64;

pub fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

/// Runs the open step of a cache in all layers: its outputs by layer, `[rows, query_heads, head_dim]`.
pub trait Runner<B: Backend> {
    fn run(&mut self, cache: &mut ModelCache<B>, rows: usize, inputs: &[[Vec<f32>; 3]]) -> Result<Vec<Vec<f32>>>;
}

/// Keys and values of a sequence, `[tokens, kv_heads, head_dim]` by layer.
#[derive(Clone, Default)]
struct Held {
    layers: [[Vec<f32>; 2]; LAYERS],
    tokens: usize,
    /// A number for every token, which no other has.
    numbers: Vec<u32>,
}

impl Held {
    fn truncate(&mut self, tokens: usize) {
        self.layers.iter_mut().flatten().for_each(|rows| rows.truncate(tokens * KV_ROW));
        self.tokens = tokens;
        self.numbers.truncate(tokens);
    }
}

/// What a test runs under.
pub struct Server<B: Backend + Clone, R> {
    cache: ModelCache<B>,
    runner: R,
    held: Vec<Held>,
    swapped: Vec<(SwappedSequence<B::Indices>, Held)>,
    prefixes: PrefixCache,
    /// Sequences of which prefixes were kept.
    kept: Vec<Held>,
    /// Tokens that were appended so far.
    numbered: u32,
    random: Random,
    /// Largest mean square error of a step.
    limit: f64,
    /// Bytes that the cache may hold.
    most: u64,
    growth: Growth,
    /// Calls that were refused for room.
    pub refused: usize,
    pub steps: usize,
    /// Sequences that began with a prefix.
    pub found: usize,
}

/// Pages that a budget has: far fewer than the sequences would fill.
const PAGES: usize = 5;

impl<B: Backend + Clone, R: Runner<B>> Server<B, R> {
    pub fn new(backend: &B, recipe: &str, growth: Growth, seed: u64, make: impl Fn(&ModelCache<B>) -> R) -> Self {
        let limit = match recipe {
            "f16" => 1e-6,
            "int8" => 1e-3,
            _ => 0.2, // four bits, against rows that were not packed
        };
        let recipe = recipe.parse::<ModelRecipe>().unwrap().layer(0, &shape());
        let page = |format: SegmentFormat| (LAYERS * format.page_bytes(&shape())) as u64;
        let formats: Vec<SegmentFormat> = recipe.stores().iter().map(|store| store.format).collect();
        // Where tokens are packed, f16 has parts of prompts while their step is open, or windows.
        let in_f16 = match recipe.appended() {
            Appended::Keep => PAGES,
            Appended::AtOnce(_) => 2,
            Appended::Tiles { .. } => 4,
        };
        let pages_of = |store: usize| if store == 0 { in_f16 } else { PAGES };
        let spans = SEQUENCES + PREFIXES;
        let room: Vec<StoreRoom> =
            (0..formats.len()).map(|store| StoreRoom { pages: pages_of(store), spans }).collect();
        // Centres and range slots are beside the pages.
        let slots = |format: &SegmentFormat| {
            (SEQUENCES + PREFIXES) * (format.range_slot_bytes(&shape()) + SegmentFormat::centre_bytes(&shape()))
        };
        let pages: u64 = formats.iter().enumerate().map(|(i, &format)| pages_of(i) as u64 * page(format)).sum();
        let most = pages + formats.iter().map(|format| (LAYERS * slots(format)) as u64).sum::<u64>();
        let mut cache = ModelCache::new(backend, &vec![(shape(), recipe); LAYERS], SEQUENCES + PREFIXES)
            .unwrap()
            .with_budget(Budget::of_bytes(most).growing(growth));
        if growth == Growth::None {
            block_on(cache.reserve(&room)).unwrap();
        }
        let runner = make(&cache);
        let (held, swapped, random) = (vec![Held::default(); SEQUENCES], Vec::new(), Random::new(seed));
        let (prefixes, kept) = (PrefixCache::new(SEQUENCES..SEQUENCES + PREFIXES), Vec::new());
        let (numbered, refused, steps, found) = (0, 0, 0, 0);
        Self {
            cache,
            runner,
            held,
            swapped,
            prefixes,
            kept,
            numbered,
            random,
            limit,
            most,
            growth,
            refused,
            steps,
            found,
        }
    }

    /// So many operations, then an end: everything is free.
    pub fn serve(&mut self, operations: usize) {
        for _ in 0..operations {
            self.operate();
            let allocated = self.cache.memory().allocated_bytes();
            assert!(allocated <= self.most, "{allocated} bytes, and the budget has {}", self.most);
            for (sequence, held) in self.held.iter().enumerate() {
                assert_eq!(self.cache.length(sequence), Ok(held.tokens));
            }
        }
        (0..SEQUENCES).for_each(|sequence| self.cache.clear(sequence).unwrap());
        self.prefixes.clear(&mut self.cache).unwrap();
        assert_eq!(self.cache.memory().in_use_bytes(), 0, "pages, slots or centres are lost");
        self.cache.trim().unwrap();
        assert_eq!(self.cache.memory().stores().iter().map(|store| store.pages).sum::<usize>(), 0);
    }

    fn operate(&mut self) {
        let (sequence, other) = (self.random.below(SEQUENCES), self.random.below(SEQUENCES));
        match self.random.below(22) {
            0..=8 => self.step(),
            9 => {
                let length = self.random.below(self.held[sequence].tokens + 1);
                self.cache.truncate(sequence, length).unwrap();
                self.held[sequence].truncate(length);
            }
            10 => {
                self.cache.clear(sequence).unwrap();
                self.held[sequence] = Held::default();
            }
            11 if self.held[other].tokens == 0 && sequence != other => {
                self.cache.fork(sequence, other).unwrap();
                self.held[other] = self.held[sequence].clone();
            }
            12 => self.swap_out(sequence),
            13 => self.swap_in(),
            // Without growth a cache stays without the memory that it gave back.
            14 if self.growth != Growth::None => {
                self.cache.trim().unwrap();
            }
            15 => self.abandon(),
            16 | 17 => self.keep_prefix(),
            18..=20 => self.enter(),
            21 => {
                self.prefixes.let_go(&mut self.cache).unwrap();
            }
            _ => {}
        }
    }

    /// Frees the pages that are the sequence's own, and no others.
    fn swap_out(&mut self, sequence: usize) {
        if self.held[sequence].tokens == 0 {
            return;
        }
        let own: usize = self.cache.pages_of(0, sequence).unwrap().iter().map(|pages| pages.own).sum();
        let free = |cache: &ModelCache<B>| cache.free_room(0).unwrap().iter().map(|room| room.pages).sum::<usize>();
        let before = free(&self.cache);
        let swapped = block_on(self.cache.swap_out(sequence)).unwrap();
        assert_eq!(free(&self.cache) - before, own);
        self.swapped.push((swapped, std::mem::take(&mut self.held[sequence])));
    }

    fn swap_in(&mut self) {
        let Some(empty) = self.held.iter().position(|held| held.tokens == 0) else { return };
        let Some((swapped, held)) = self.swapped.pop() else { return };
        let fits = self.cache.fits_swap_in(&swapped).unwrap();
        self.cache.clear(empty).unwrap(); // it may have a centre still
        let before = self.cache.memory();
        match block_on(self.cache.swap_in(empty, &swapped)) {
            Ok(()) => self.held[empty] = held,
            Err(error) => {
                self.is_refused(&error, fits);
                assert_eq!(self.cache.memory(), before);
                self.swapped.insert(0, (swapped, held));
                return;
            }
        }
        assert!(fits);
    }

    /// Keeps a prefix of the longest sequence, which takes no page.
    fn keep_prefix(&mut self) {
        let longest = self.held.iter().enumerate().max_by_key(|(_, held)| held.tokens);
        let Some((sequence, held)) = longest else { return };
        let before = self.cache.memory().in_use_bytes();
        let kept = self.prefixes.keep(&mut self.cache, &held.numbers, sequence).unwrap();
        assert_eq!(kept, held.tokens / 128 * 128);
        assert!(self.cache.memory().in_use_bytes() <= before);
        if kept > 0 {
            self.kept.push(held.clone());
            self.kept.drain(..self.kept.len().saturating_sub(8));
        }
    }

    /// A request that begins like one before finds what is still kept of it.
    fn enter(&mut self) {
        let Some(empty) = self.held.iter().position(|held| held.tokens == 0) else { return };
        if self.kept.is_empty() {
            return;
        }
        let mut held = self.kept[self.random.below(self.kept.len())].clone();
        if self.random.below(3) == 0 {
            held.truncate(self.random.below(held.tokens + 1));
        }
        let asked = [held.numbers.clone(), vec![u32::MAX]].concat();
        let found = self.prefixes.enter(&mut self.cache, &asked, empty).unwrap();
        assert!(found.is_multiple_of(128) && found <= held.tokens);
        held.truncate(found);
        self.held[empty] = held;
        self.found += usize::from(found > 0);
    }

    /// Runs of a step over some of the sequences, one token or several each.
    fn runs(&mut self) -> Vec<TokenRun> {
        let (mut runs, mut rows) = (Vec::new(), 0);
        for sequence in 0..SEQUENCES {
            let tokens = if self.random.below(4) == 0 { 1 + self.random.below(40) } else { 1 };
            if self.random.below(3) > 0 && rows + tokens <= ROWS {
                rows += tokens;
                runs.push(match (tokens, self.random.below(2)) {
                    (1, _) => TokenRun::decode(sequence),
                    (tokens, 0) => TokenRun::chunk(sequence, tokens),
                    (tokens, _) => TokenRun::prompt(sequence, tokens),
                });
            }
        }
        runs
    }

    /// Reserves room for a step, and opens it. False if there is none, which has changed nothing.
    fn begin(&mut self, runs: &[TokenRun]) -> bool {
        let fits = self.cache.fits(runs).unwrap();
        let before = self.cache.memory();
        let begun = block_on(self.cache.reserve_for_append(runs)).and_then(|()| self.cache.begin_append(runs));
        match begun {
            Ok(()) => assert!(fits, "{runs:?}"),
            Err(error) => {
                self.is_refused(&error, fits);
                assert_eq!(self.cache.memory(), before);
                return false;
            }
        }
        true
    }

    fn is_refused(&mut self, error: &Error, fits: bool) {
        assert!(matches!(error, Error::NoRoom { .. }), "{error}");
        assert!(!fits, "{error}");
        self.refused += 1;
    }

    fn abandon(&mut self) {
        let runs = self.runs();
        if !runs.is_empty() && self.begin(&runs) {
            self.cache.abandon();
        }
    }

    fn step(&mut self) {
        let runs = self.runs();
        if runs.is_empty() || !self.begin(&runs) {
            return;
        }
        let rows: usize = runs.iter().map(TokenRun::tokens).sum();
        let inputs: Vec<[Vec<f32>; 3]> = (0..LAYERS).map(|_| self.inputs(rows)).collect();
        let outputs = self.runner.run(&mut self.cache, rows, &inputs).unwrap();
        self.cache.commit().unwrap();
        for run in runs.iter().filter(|run| run.tokens() > 1) {
            match block_on(self.cache.pack_windows(run.sequence())) {
                Ok(()) => {}
                Err(error) => self.is_refused(&error, false),
            }
        }
        for (layer, (inputs, output)) in inputs.iter().zip(&outputs).enumerate() {
            let mut row = 0;
            for run in &runs {
                for token in 0..run.tokens() {
                    let held = &mut self.held[run.sequence()].layers[layer];
                    for (held, new) in held.iter_mut().zip(inputs) {
                        held.extend_from_slice(&new[row * KV_ROW..][..KV_ROW]);
                    }
                    row += 1;
                    if token + 1 < run.tokens() {
                        continue; // the last row of a run, which sees all others, stands for it
                    }
                    let row = row - 1;
                    let query = &inputs[2][row * QUERY_ROW..][..QUERY_ROW];
                    let expected: Vec<f64> =
                        (0..4).flat_map(|head| attend(held, head / 2, &query[head * 64..][..64])).collect();
                    let error = nmse(&output[row * QUERY_ROW..][..QUERY_ROW], &expected);
                    assert!(error < self.limit, "step {}, layer {layer}, {run:?}, row {row}: {error:.1e}", self.steps);
                }
            }
        }
        for run in &runs {
            let held = &mut self.held[run.sequence()];
            held.tokens += run.tokens();
            held.numbers.extend((0..run.tokens() as u32).map(|token| self.numbered + token));
            self.numbered += run.tokens() as u32;
        }
        self.steps += 1;
    }

    /// Keys, values and queries that f16 holds exactly.
    fn inputs(&mut self, rows: usize) -> [Vec<f32>; 3] {
        let random = &mut self.random;
        [KV_ROW, KV_ROW, QUERY_ROW]
            .map(|row| (0..rows * row).map(|_| (random.normal() * 16.0).round() / 16.0).collect())
    }
}

/// Attention in f64 of one query to all tokens of a KV head of two.
fn attend([keys, values]: &[Vec<f32>; 2], kv_head: usize, query: &[f32]) -> Vec<f64> {
    let rows = |of: &'_ Vec<f32>| of.len() / KV_ROW;
    let row = |of: &'_ Vec<f32>, token: usize| of[token * KV_ROW + kv_head * 64..][..64].to_vec();
    let scores: Vec<f64> = (0..rows(keys)).map(|token| dot(&row(keys, token), query) / 8.0).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut output = vec![0.0; 64];
    for (token, weight) in weights.iter().enumerate() {
        output.iter_mut().zip(row(values, token)).for_each(|(out, value)| *out += weight / sum * f64::from(value));
    }
    output
}
