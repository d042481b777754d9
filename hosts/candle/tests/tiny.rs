//! Small models with random weights, written as GGUF files: their logits against the command's CPU backend, and queues
//! that overflow their budget.

use std::collections::BTreeMap;
use std::path::Path;

use candle_host::{CpuRig, CpuSteps, Host, checks, weights};
use kvpack::cache::{Budget, Growth, ModelCache, ModelRecipe, TokenRun};
use kvpack::cpu::{Cpu, nmse};
use kvpack_cli::{Attention, Model, PackedAttention};
use kvpack_serving::tiny::{self, FAMILIES, LogitsFile, PARTS, RECIPES};
use kvpack_serving::{Batch, BatchRun, Figures, Request, Scheduler, Settings};
use kvpack_weights::Bits;
use pollster::block_on;

fn model(family: &str) -> Model {
    checks::model(family).unwrap()
}

/// The command's logits after the prompt of all tests.
fn of_command(model: &Model, recipe: &ModelRecipe) -> Vec<f32> {
    let mut attention = PackedAttention::new(&Cpu::new(), &model.config, recipe).unwrap();
    let (tokens, mut position, mut last) = (tiny::prompt(), 0, Vec::new());
    for part in PARTS {
        let attention: &mut dyn Attention = &mut attention;
        let stream = model.forward(&tokens[position..position + part], position, attention).unwrap();
        last = model.logits(&stream.narrow(0, part - 1, 1).unwrap()).unwrap().get(0).unwrap().to_vec1().unwrap();
        position += part;
    }
    last
}

/// Tokens of one sequence among those of another, so that rows and positions have to be told apart.
fn batch(tokens: &[u32], runs: &[(TokenRun, usize)]) -> Batch {
    let of = |&(run, start): &(TokenRun, usize)| {
        let tokens = tokens[start..start + run.tokens()].to_vec();
        BatchRun { request: run.sequence(), run, start, tokens, answers: true }
    };
    Batch::new(runs.iter().map(of).collect())
}

/// The host's logits of sequence 1 after the prompt of all tests, while sequence 0 gets tokens of its own.
fn of_host(model: Model, recipe: &ModelRecipe, part: fn(usize, usize) -> TokenRun) -> Vec<f32> {
    let mut cache = ModelCache::new(&Cpu::new(), &model.config.cache_layers(recipe).unwrap(), 2).unwrap();
    let mut host = Host::new(model, CpuSteps);
    let (tokens, mut position, mut last) = (tiny::prompt(), 0, Vec::new());
    for (at, tokens_of_part) in PARTS.into_iter().enumerate() {
        let run = if tokens_of_part == 1 { TokenRun::decode(1) } else { part(1, tokens_of_part) };
        let other = (TokenRun::chunk(0, 3), 3 * at);
        let runs = batch(&tokens, &[other, (run, position)]);
        block_on(cache.reserve_for_append(&runs.token_runs())).unwrap();
        cache.begin_append(&runs.token_runs()).unwrap();
        last = host.logits(&mut cache, &runs).unwrap().get(1).unwrap().to_vec1().unwrap();
        cache.commit().unwrap();
        if run == TokenRun::chunk(1, tokens_of_part) {
            block_on(cache.pack_windows(1)).unwrap();
        }
        position += tokens_of_part;
    }
    last
}

fn error(given: &[f32], expected: &[f32]) -> f64 {
    nmse(given, &expected.iter().map(|&x| f64::from(x)).collect::<Vec<_>>())
}

/// In a batch with another sequence, the logits are those that `kvpack generate` and `eval` compute.
#[test]
fn logits_are_those_of_the_command() {
    for family in FAMILIES {
        for recipe in RECIPES {
            let parsed: ModelRecipe = recipe.parse().unwrap();
            let expected = of_command(&model(family), &parsed);
            let error = error(&of_host(model(family), &parsed, TokenRun::chunk), &expected);
            assert!(error <= 1e-6, "{family}, {recipe}: NMSE {error:.1e}");
        }
    }
}

/// Parts of prompts see themselves in f16. What `hosts/burn` compares itself with is what comes of them here.
#[test]
fn logits_for_other_hosts_are_up_to_date() {
    let mut logits = BTreeMap::new();
    for family in FAMILIES {
        let of_recipe = |recipe: &str| of_host(model(family), &recipe.parse().unwrap(), TokenRun::prompt);
        let of_family: BTreeMap<_, _> = RECIPES.iter().map(|recipe| (recipe.to_string(), of_recipe(recipe))).collect();
        let exact = of_command(&model(family), &"f16".parse().unwrap());
        assert!(error(&of_family["f16"], &exact) <= 1e-6, "{family}");
        for recipe in &RECIPES[1..] {
            let error = error(&of_family[*recipe], &exact);
            assert!((1e-7..0.3).contains(&error), "{family}, {recipe}: NMSE {error:.1e} to f16");
        }
        logits.insert(family.to_owned(), of_family);
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../serving/golden/tiny_logits.json");
    if std::env::var_os("KVPACK_UPDATE").is_some() {
        let written_by = "KVPACK_UPDATE=1 cargo test --locked -p candle-host".to_owned();
        let text = serde_json::to_string(&LogitsFile { written_by, logits }).unwrap();
        std::fs::write(file, text + "\n").unwrap();
        return;
    }
    let expected = LogitsFile::expected().unwrap().logits;
    for (family, of_family) in &logits {
        for (recipe, given) in of_family {
            let error = error(given, &expected[family][recipe]);
            assert!(error <= 1e-5, "{family}, {recipe}: NMSE {error:.1e}; KVPACK_UPDATE=1 writes the file again");
        }
    }
}

/// A model in codes computes what its dequantised weights do, and differs from the model that it was rounded from.
#[test]
fn weights_in_codes_are_those_that_they_stand_for() {
    assert!(weights::check(&CpuRig::default()).unwrap());
    let recipe: ModelRecipe = "f16".parse().unwrap();
    let given = |bits| {
        let model = weights::in_codes(&CpuRig::default(), model("qwen2"), bits).unwrap();
        assert_eq!(model.config.name.ends_with("4 bits"), bits == Some(Bits::Four), "{}", model.config.name);
        of_host(model, &recipe, TokenRun::prompt)
    };
    let dense = given(None);
    let [eight, four] = [Bits::Eight, Bits::Four].map(|bits| error(&given(Some(bits)), &dense));
    assert!((1e-8..1e-3).contains(&eight) && (10.0 * eight..0.3).contains(&four), "{eight:e}, {four:e}");
    assert!(weights::bits("5").unwrap_err().contains("2, 3, 4 and 8") && weights::bits("4") == Ok(Bits::Four));
}

fn serve(family: &str, recipe: &str, settings: Settings, budget: Budget) -> (Vec<Vec<u32>>, Figures) {
    let serve = |requests: Vec<Request>, settings: Settings, budget| {
        let model = model(family);
        let layers = model.config.cache_layers(&recipe.parse().unwrap()).unwrap();
        let cache = ModelCache::new(&Cpu::new(), &layers, settings.sequences + settings.prefixes).unwrap();
        let mut host = Host::new(model, CpuSteps);
        let scheduler = Scheduler::new(cache.with_budget(budget), settings, requests).unwrap();
        let served = scheduler.serve(&mut host, |_| {}).unwrap();
        (served.texts, served.figures)
    };
    if settings.sequences > 1 {
        return serve(checks::requests(), settings, budget);
    }
    let alone = checks::requests().into_iter().map(|of| Request { arrival: std::time::Duration::ZERO, ..of });
    let texts = alone.map(|request| serve(vec![request], settings, budget).0.remove(0)).collect();
    (texts, Figures::default())
}

/// Texts do not depend on what else is served, on preemptions, or on shared beginnings.
#[test]
fn a_queue_that_overflows_its_budget_gives_the_same_texts() {
    for (family, recipe, prefixes) in
        [("llama", "f16", 2), ("qwen2", "saw-int4", 2), ("gemma3", "kivi:4", 0), ("llama", "calibquant:4", 0)]
    {
        let settings = |sequences, prefixes| Settings { sequences, prefixes, rows: 260, chunk: 128 };
        let unlimited = Budget::unlimited().growing(Growth::Exact);
        let (expected, _) = serve(family, recipe, settings(1, 0), unlimited);
        let (texts, figures) = serve(family, recipe, settings(4, prefixes), unlimited);
        assert!(texts == expected, "{family}, {recipe}, without a budget");
        assert_eq!(figures.preemptions, 0);
        let budget = Budget::of_bytes(figures.pages.allocated_bytes * 6 / 10).growing(Growth::Exact);
        let (texts, figures) = serve(family, recipe, settings(4, prefixes), budget);
        assert!(texts == expected, "{family}, {recipe}, within a budget");
        assert!(figures.preemptions > 0 && figures.pages.allocated_bytes <= budget.bytes(), "{recipe}:\n{figures}");
        assert_eq!(figures.shared_tokens > 0, prefixes > 0, "{recipe}:\n{figures}");
        assert_eq!(figures.output_tokens, (20..28).sum::<usize>());
    }
}
