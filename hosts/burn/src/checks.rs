//! A small model with random weights: its logits against those of the command's CPU backend, and a queue that overflows
//! its budget.

use std::time::Duration;

use burn::tensor::Device;
use kvpack::cache::{Budget, Growth, ModelCache};
use kvpack::cpu::nmse;
use kvpack::wgpu::Wgpu;
use kvpack_serving::tiny::{self, FAMILIES, LogitsFile, RECIPES, Tiny};
use kvpack_serving::{Figures, Prompt, Request, Scheduler, Settings};

use crate::Result;
use crate::decoder::Decoder;
use crate::host::Host;

/// The largest error of logits where nothing is packed: sums in f32 are taken in another order.
const LARGEST: f64 = 1e-7;

/// The same where some keys are therefore rounded to the neighbouring code, and queries to bytes.
const LARGEST_PACKED: f64 = 2e-4;

fn host(device: &Device, backend: &Wgpu, family: &str, rows: usize) -> Result<Host> {
    let mut tiny = Tiny::new(family)?;
    Host::new(backend, Decoder::load(device, tiny.config.clone(), &mut tiny)?, rows, None)
}

fn cache(backend: &Wgpu, family: &str, recipe: &str, sequences: usize) -> Result<ModelCache<Wgpu>> {
    Ok(ModelCache::new(backend, &Tiny::new(family)?.config.cache_layers(&recipe.parse()?), sequences)?)
}

/// Compares logits after a prompt that is read in parts.
pub fn logits(device: &Device, backend: &Wgpu) -> Result<bool> {
    let expected = LogitsFile::expected()?.logits;
    let mut passed = true;
    for family in FAMILIES {
        let mut host = host(device, backend, family, 128)?;
        // Families differ in what is not attention.
        let recipes = if family == "llama" { &RECIPES[..] } else { &RECIPES[..1] };
        for recipe in recipes {
            let largest = if *recipe == "f16" { LARGEST } else { LARGEST_PACKED };
            let mut cache = cache(backend, family, recipe, 1)?;
            let given = tiny::last_logits(&mut cache, |cache, batch| -> Result<Vec<f32>> {
                host.logits(cache, batch)?.pop().ok_or_else(|| "the model returned no logits".into())
            })?;
            let expected: Vec<f64> = expected[family][*recipe].iter().map(|&x| f64::from(x)).collect();
            let error = nmse(&given, &expected);
            let close = error <= largest;
            passed &= close;
            let verdict = if close { "ok" } else { "FAILED" };
            println!(
                "{family}, {recipe}: NMSE {error:.1e} against logits of the CPU backend (at most {largest:.0e}): {verdict}"
            );
        }
    }
    Ok(passed)
}

/// Eight requests, the prompts of which begin alike. All have arrived, so that the speed of a device does not decide
/// which of them run together.
fn requests() -> Vec<Request> {
    let request = |at: usize| {
        let prompt = Prompt::Length { tokens: 140 + 30 * at, shared: 135, seed: at + 1 };
        Request { arrival: Duration::ZERO, prompt: prompt.drawn(63).unwrap_or_default(), output: 6 + at % 4 }
    };
    (0..8).map(request).collect()
}

/// Memory that four requests at a time overflow. The longest one takes most of it.
const BUDGET: Budget = Budget::of_bytes(250 << 10).growing(Growth::Exact);

/// Serves eight requests one by one, and together within the budget.
pub fn queue(device: &Device, backend: &Wgpu) -> Result<bool> {
    let (family, recipe) = ("llama", "saw-int4");
    let settings = |sequences, prefixes| Settings { sequences, prefixes, rows: 260, chunk: 128 };
    let mut host = host(device, backend, family, 260)?;
    let mut serve = |requests: Vec<Request>, settings: Settings, budget: Budget| -> Result<(Vec<Vec<u32>>, Figures)> {
        let cache = cache(backend, family, recipe, settings.sequences + settings.prefixes)?.with_budget(budget);
        let served = Scheduler::new(cache, settings, requests)?.serve(&mut host, |_| {})?;
        Ok((served.texts, served.figures))
    };
    let mut expected = Vec::new();
    for request in requests() {
        expected.extend(serve(vec![request], settings(1, 0), Budget::unlimited())?.0);
    }
    let (texts, figures) = serve(requests(), settings(4, 2), BUDGET)?;
    let same = texts == expected;
    let tried = figures.preemptions > 0 && figures.shared_tokens > 0 && figures.most_requests_in_a_step > 2;
    let fits = figures.pages.allocated_bytes <= BUDGET.bytes();
    let verdict = |passed: bool| if passed { "ok" } else { "FAILED" };
    println!(
        "eight requests to {family}, {recipe}, more than the budget holds: texts as of each alone: {}",
        verdict(same)
    );
    println!("preempted and shared, more than two in a step: {}; within the budget: {}", verdict(tried), verdict(fits));
    println!("{figures}");
    Ok(same && tried && fits)
}
