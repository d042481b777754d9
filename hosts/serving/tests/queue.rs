//! A queue that overflows its budget, with a model that has no weights: keys, values and queries are functions of the
//! token and its position, and the next token is a function of what attention returns.

use std::error::Error as StdError;
use std::time::Duration;

use kvpack::AttentionShape;
use kvpack::cache::{Budget, Growth, ModelCache, ModelRecipe, StoreRoom};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, RowLayout};
use kvpack_serving::{Batch, Error, Model, Prompt, Request, Scheduler, Served, Settings};
use pollster::block_on;

const LAYERS: usize = 2;
const END: u32 = 61;
const SETTINGS: Settings = Settings { sequences: 3, prefixes: 0, rows: 260, chunk: 128 };

struct Weightless {
    shape: AttentionShape,
    /// Fails in this call of `forward`.
    fails_at: Option<usize>,
    calls: usize,
}

impl Weightless {
    fn new() -> Self {
        Self { shape: AttentionShape::new(2, 1, 64).unwrap(), fails_at: None, calls: 0 }
    }

    fn rows(&self, batch: &Batch, which: usize, heads: usize, layer: usize) -> CpuTensor {
        let tokens = batch.tokens().into_iter().zip(batch.positions());
        let row = |(token, position): (u32, usize)| {
            (0..heads * 64).map(move |i| {
                let seed = (which * 31 + layer * 7 + token as usize * 13) as f32;
                2.0 * (i as f32 * 0.37 + seed).sin() * (i as f32 * 0.011 + position as f32 * 0.7 + seed).cos()
            })
        };
        CpuTensor::F32(tokens.flat_map(row).collect())
    }
}

impl Model<Cpu> for Weightless {
    fn forward(
        &mut self,
        cache: &mut ModelCache<Cpu>,
        batch: &Batch,
    ) -> Result<Vec<u32>, Box<dyn StdError + Send + Sync>> {
        self.calls += 1;
        let rows = batch.tokens().len();
        let mut sums = vec![0f32; rows];
        for layer in 0..LAYERS {
            let [keys, values] = [1, 2].map(|which| self.rows(batch, which, 1, layer));
            block_on(cache.store(layer, RowLayout::token_major(rows, &self.shape), &keys, &values))?;
            if self.fails_at == Some(self.calls) {
                return Err("the device is gone".into());
            }
            let output = block_on(cache.attend(layer, &self.rows(batch, 3, 2, layer), ElementType::F32))?.to_f32();
            for (sum, row) in sums.iter_mut().zip(output.chunks(128)) {
                *sum += row.iter().zip(0u8..).map(|(x, at)| x * f32::from(at % 5)).sum::<f32>();
            }
        }
        Ok(batch.answering_rows().into_iter().map(|row| (sums[row] * 37.0).rem_euclid(60.0) as u32).collect())
    }

    fn end(&self) -> Option<u32> {
        Some(END)
    }
}

fn cache(recipe: &str, sequences: usize) -> ModelCache<Cpu> {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let recipe: ModelRecipe = recipe.parse().unwrap();
    let layers: Vec<_> = (0..LAYERS).map(|layer| (shape, recipe.layer(layer, &shape))).collect();
    ModelCache::new(&Cpu::new(), &layers, sequences).unwrap()
}

/// A cache that has these pages and takes no more.
fn with_pages(recipe: &str, sequences: usize, rooms: &[StoreRoom]) -> ModelCache<Cpu> {
    let mut cache = cache(recipe, sequences).with_budget(Budget::unlimited().growing(Growth::None));
    block_on(cache.reserve(rooms)).unwrap();
    cache
}

/// Eight requests, the prompts of which begin alike.
fn requests() -> Vec<Request> {
    let request = |at: usize| {
        let prompt = Prompt::Length { tokens: 150 + 40 * at, shared: 140, seed: at + 1 };
        Request { arrival: Duration::from_millis(at as u64 / 3), prompt: prompt.drawn(60).unwrap(), output: 60 + at }
    };
    (0..8).map(request).collect()
}

fn alone(recipe: &str) -> Vec<Vec<u32>> {
    let alone = |request: Request| {
        let request = Request { arrival: Duration::ZERO, ..request };
        let served = serve(cache(recipe, 1), Settings { sequences: 1, ..SETTINGS }, vec![request]).unwrap();
        assert_eq!(served.figures.preemptions, 0);
        served.texts[0].clone()
    };
    requests().into_iter().map(alone).collect()
}

fn serve(cache: ModelCache<Cpu>, settings: Settings, requests: Vec<Request>) -> Result<Served, Error> {
    Scheduler::new(cache, settings, requests)?.serve(&mut Weightless::new(), |_| {})
}

/// What was stored of a request does not depend on the others, whatever its recipe does with parts of prompts.
#[test]
fn texts_are_those_of_requests_alone() {
    let parts = StoreRoom { pages: 6, spans: 6 };
    let packed = |pages| StoreRoom { pages, spans: 12 };
    for (recipe, rooms) in [
        ("f16", vec![packed(9)]),
        ("saw-int4", vec![parts, packed(8)]),
        ("kivi:4", vec![packed(7), packed(4)]),
        ("calibquant:4", vec![packed(7), packed(6), packed(3)]),
    ] {
        let served = serve(with_pages(recipe, 3, &rooms), SETTINGS, requests()).unwrap();
        assert!(served.texts == alone(recipe), "{recipe}");
        let figures = served.figures;
        assert!(figures.preemptions > 0 && figures.shared_tokens == 0, "{recipe}: {figures}");
        assert_eq!(figures.output_tokens, (60..68).sum::<usize>());
        assert!(figures.pages.most_in_use <= figures.pages.allocated);
        let distinct: std::collections::BTreeSet<_> = served.texts.iter().flatten().collect();
        assert!(distinct.len() > 20, "{recipe}: texts of {} tokens cannot tell wrong ones", distinct.len());
    }
}

/// Prompts that begin alike share pages where tokens are packed as they arrive, and nothing else changes.
#[test]
fn prompts_share_their_beginnings() {
    for (recipe, rooms) in [
        ("f16", vec![StoreRoom { pages: 9, spans: 12 }]),
        ("saw-int4", vec![StoreRoom { pages: 6, spans: 6 }, StoreRoom { pages: 8, spans: 12 }]),
    ] {
        let cache = with_pages(recipe, 5, &rooms);
        let served = serve(cache, Settings { prefixes: 2, ..SETTINGS }, requests()).unwrap();
        assert!(served.texts == alone(recipe), "{recipe}");
        assert!(served.figures.shared_tokens >= 3 * 128 && served.figures.preemptions > 0, "{}", served.figures);
    }
}

#[test]
fn what_cannot_be_served_is_refused() {
    let settings = |change: fn(&mut Settings)| {
        let mut settings = SETTINGS;
        change(&mut settings);
        serve(cache("f16", 3), settings, requests()).unwrap_err().to_string()
    };
    assert!(settings(|of| of.rows = 129).contains("need 130"));
    assert!(settings(|of| of.prefixes = 1).contains("4 are needed"));
    assert!(settings(|of| of.chunk = 0).contains("at least 1"));
    let mut empty = requests();
    empty[2].prompt.clear();
    assert!(matches!(serve(cache("f16", 3), SETTINGS, empty), Err(Error::Request { request: 2, .. })));
    let mut late = requests();
    late.reverse();
    assert!(matches!(serve(cache("f16", 3), SETTINGS, late), Err(Error::Settings { .. })));
    // The last request needs four pages.
    let small = with_pages("f16", 3, &[StoreRoom { pages: 3, spans: 3 }]);
    assert!(matches!(serve(small, SETTINGS, requests()), Err(Error::Budget { .. })));
    let failing = &mut Weightless { fails_at: Some(3), ..Weightless::new() };
    let served = Scheduler::new(cache("f16", 3), SETTINGS, requests()).unwrap().serve(failing, |_| {});
    assert!(served.unwrap_err().to_string().contains("the device is gone"));
}
