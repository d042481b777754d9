//! The cost of a decode step for an engine: append, packing and attention of all layers of a model through the public
//! interface, by the wall clock, compared with the time of its kernels.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod stored;
mod wgpu;

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use indicatif::ProgressBar;
use kvpack::cache::{ModelCache, ModelRecipe, PromptSpan, StoreId, StoreRoom, TokenRun};
use kvpack::cpu::nmse;
use kvpack::plan::{ElementType, Elements, RowLayout, TokenRange};
use kvpack::{AttentionShape, Backend, TILE_TOKENS};
use kvpack_report::{Median, Run, Skipped, Spread};
use serde::Serialize;

use super::output::Style;
use super::timed::{SPREAD, Timed, figure, figure_or_dash, random_rows, skipped};
use crate::outcome::Wrong;
use crate::print::{self, say};
use crate::provenance;

/// The seed of the keys that every step stores.
const KEYS: u64 = 1;

/// The same of values.
const VALUES: u64 = 2;

/// All steps that store them.
const ALL_STEPS: usize = WARM_UP + STEPS + HOST_STEPS + 1;

/// Recipes that are timed; f16 first, so that the others can be compared with it.
const RECIPES: [&str; 5] = ["f16", "saw-int4", "calibquant:4", "calibquant:2", "kivi:2"];

/// The number of timed steps, in which every sequence fills one window.
const STEPS: usize = TILE_TOKENS;

/// Steps of a sample: the device is waited for between samples.
const STEPS_TOGETHER: usize = 32;

/// Steps before them, until kernels are compiled and the device has raised its clock.
const WARM_UP: usize = 64;

/// Steps whose host part is timed alone.
const HOST_STEPS: usize = 16;

/// By how many tokens the lengths of neighbouring sequences differ, so that not all windows are full in one step.
const STAGGER: usize = 37;

/// What encoded steps and the calls of the cache may differ by: they are cut alike, and round alike.
const MOST_NMSE: f64 = 1e-6;

/// A model and its batch.
#[derive(Clone, Copy)]
struct Subject {
    layers: usize,
    sequences: usize,
    tokens: usize,
}

/// A backend on which steps of a model can be timed.
pub trait TimedModel: Backend + Clone {
    /// What an engine keeps for its steps.
    type Engine: ModelEngine<Self>;

    /// An engine for a cache of like layers, which share these tensors.
    ///
    /// # Errors
    /// Whatever the backend reports.
    async fn engine(&self, cache: &ModelCache<Self>, tensors: Tensors<Self>) -> kvpack::Result<Self::Engine>;
}

/// Dense tensors of a step, the same in all layers.
pub struct Tensors<B: Backend> {
    /// Where keys and values lie.
    pub rows: RowLayout,
    /// Keys of the new tokens.
    pub keys: B::Tensor,
    /// Their values.
    pub values: B::Tensor,
    /// Their queries.
    pub queries: B::Tensor,
}

/// Runs steps as an engine does.
pub trait ModelEngine<B: Backend> {
    /// Queues a step, from opening to committing it. True if something was allocated for it.
    ///
    /// # Errors
    /// Whatever the backend reports.
    fn step(&mut self, cache: &mut ModelCache<B>, runs: &[TokenRun]) -> kvpack::Result<bool>;

    /// Waits for all steps.
    ///
    /// # Errors
    /// Whatever the backend reports.
    async fn wait(&self) -> kvpack::Result<()>;

    /// Opens a step, runs it as [`ModelEngine::step`] does, and leaves it open: the output of its last layer, and what
    /// its kernels take, where the device has a clock for them.
    ///
    /// # Errors
    /// Whatever the backend reports.
    async fn measure(&mut self, cache: &mut ModelCache<B>, runs: &[TokenRun]) -> kvpack::Result<Measured>;

    /// The queries of every layer.
    fn queries(&self) -> &B::Tensor;
}

/// What was found in one step.
pub struct Measured {
    /// Output of the last layer.
    pub output: Vec<f32>,
    /// The kernels of all layers: of what they store, and of attention.
    pub kernels: Option<[Median; 2]>,
}

/// What was found, as it is printed in JSON.
#[derive(Serialize)]
#[serde(tag = "kind", rename = "step")]
struct StepReport {
    backend: String,
    run: Run,
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rows: Vec<StepRow>,
    skipped: Vec<Skipped>,
}

/// One model and recipe. All times are microseconds for one layer.
#[derive(Serialize)]
struct StepRow {
    layers: usize,
    sequences: usize,
    tokens: usize,
    recipe: String,
    /// By the wall clock, steps queued one after the other: the mean, because few steps pack windows. A sample is the
    /// mean of some of the steps.
    wall_us: f64,
    wall_spread: Spread,
    /// Of that, what the host does before it could go on.
    host_us: f64,
    host_spread: Spread,
    /// The kernels that store, by the clock of the device.
    store_us: Option<f64>,
    store_spread: Option<Spread>,
    /// The kernels of attention, by the clock of the device.
    attend_us: Option<f64>,
    attend_spread: Option<Spread>,
    /// Of the timed steps, those that something was allocated for.
    bound_anew: usize,
    steps: usize,
    /// Of the step's outputs against those of the cache's own calls.
    nmse: f64,
}

/// Times all rows and prints them.
///
/// # Errors
/// When the backend fails; [`Wrong`] when a step differs from the calls of the cache.
pub fn run<B: TimedModel + Timed>(backend: &B, driver: String, style: Style) -> Result<()> {
    let shape = AttentionShape::new(32, 8, 128)?;
    let subject = |(layers, sequences, tokens)| Subject { layers, sequences, tokens };
    // A software device gets what it can do in a while.
    let subjects: Vec<Subject> = match backend.sizes().largest_shape {
        u64::MAX => [(32, 8, 32_768), (32, 64, 4096), (32, 256, 2048), (32, 1, 4096)].map(subject).into(),
        _ => vec![subject((2, 2, 512))],
    };
    let mut report = StepReport {
        backend: backend.name(),
        run: provenance::run(driver, None),
        query_heads: shape.query_heads(),
        kv_heads: shape.kv_heads(),
        head_dim: shape.head_dim(),
        rows: Vec::new(),
        skipped: Vec::new(),
    };
    let done = time_rows(backend, (shape, &subjects), style, &mut report);
    // What was measured is printed, whatever came after it.
    if style == Style::Json {
        print::json(&report)?;
    } else {
        say!("\n{}, µs for one layer. wall: append, packing and attention as an engine runs them.", report.backend)?;
        say!("attend, store: their kernels by the clock of the device. host: until the engine may go on.")?;
        say!("{SPREAD}")?;
    }
    done
}

/// Times all rows, and prints them as they end unless they are printed as JSON.
fn time_rows<B: TimedModel>(
    backend: &B,
    (shape, subjects): (AttentionShape, &[Subject]),
    style: Style,
    report: &mut StepReport,
) -> Result<()> {
    let progress = ProgressBar::new((subjects.len() * RECIPES.len()) as u64).with_style(print::bar());
    for &subject in subjects {
        for recipe in RECIPES {
            let what = format!("{} × {}, {recipe}", subject.sequences, subject.tokens);
            progress.set_message(what.clone());
            match pollster::block_on(row(backend, shape, subject, recipe)) {
                Ok(row) => {
                    if style != Style::Json {
                        progress.suspend(|| print_row(&row, report.rows.is_empty()))?;
                    }
                    report.rows.push(row);
                }
                Err(error) => report.skipped.push(progress.suspend(|| skipped(what, error))?),
            }
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(())
}

async fn row<B: TimedModel>(backend: &B, shape: AttentionShape, subject: Subject, text: &str) -> Result<StepRow> {
    let Subject { layers, sequences, .. } = subject;
    let recipe = text.parse::<ModelRecipe>()?.layer(layers - 1, &shape);
    let mut cache = ModelCache::new(backend, &vec![(shape, recipe); layers], sequences)?;
    fill(backend, &mut cache, subject).await?;
    let tensors = Tensors {
        rows: RowLayout::token_major(sequences, &shape),
        keys: upload(backend, sequences * shape.kv_heads() * shape.head_dim(), KEYS).await?,
        values: upload(backend, sequences * shape.kv_heads() * shape.head_dim(), VALUES).await?,
        queries: upload(backend, sequences * shape.query_heads() * shape.head_dim(), 3).await?,
    };
    let mut engine = backend.engine(&cache, tensors).await?;
    let runs: Vec<TokenRun> = (0..sequences).map(TokenRun::decode).collect();
    for _ in 0..WARM_UP {
        engine.step(&mut cache, &runs)?;
    }
    engine.wait().await?;

    let mut bound_anew = 0;
    let mut wall = Vec::with_capacity(STEPS / STEPS_TOGETHER);
    for _ in 0..STEPS / STEPS_TOGETHER {
        let start = Instant::now();
        for _ in 0..STEPS_TOGETHER {
            bound_anew += usize::from(engine.step(&mut cache, &runs)?);
        }
        engine.wait().await?;
        wall.push(start.elapsed().as_secs_f64() / STEPS_TOGETHER as f64);
    }
    let mean = wall.iter().sum::<f64>() / wall.len() as f64;

    let mut host = Vec::with_capacity(HOST_STEPS);
    for _ in 0..HOST_STEPS {
        let start = Instant::now();
        engine.step(&mut cache, &runs)?;
        host.push(start.elapsed().as_secs_f64());
        engine.wait().await?;
    }

    let measured = engine.measure(&mut cache, &runs).await?;
    let called = cache.attend(layers - 1, engine.queries(), ElementType::F32).await?;
    let called: Vec<f64> = backend.download(&called).await?.into_iter().map(f64::from).collect();
    cache.commit()?;
    let nmse = nmse(&measured.output, &called);
    let wrong = || Wrong(format!("{text}: NMSE {nmse:.1e} of a step against the calls of the cache"));
    ensure!(nmse <= MOST_NMSE, wrong());
    for layer in [0, layers - 1] {
        stored::check(backend, &cache, layer, sequences).await.with_context(|| text.to_owned())?;
    }

    let of_layer = |median: Median| median.part(layers, 0.0);
    let [store, attend] = [0, 1].map(|of| measured.kernels.map(|kernels| of_layer(kernels[of])));
    let [wall, host] = [wall, host].map(|samples| of_layer(Median::of(samples)));
    let Subject { tokens, .. } = subject;
    let recipe = text.to_owned();
    Ok(StepRow {
        layers,
        sequences,
        tokens,
        recipe,
        wall_us: mean / layers as f64 * 1e6,
        wall_spread: wall.spread,
        host_us: host.us(),
        host_spread: host.spread,
        store_us: store.map(|of| of.us()),
        store_spread: store.map(|of| of.spread),
        attend_us: attend.map(|of| of.us()),
        attend_spread: attend.map(|of| of.spread),
        bound_anew,
        steps: STEPS,
        nmse,
    })
}

/// Stores a prompt in every sequence and layer, and makes room for all steps.
async fn fill<B: TimedModel>(backend: &B, cache: &mut ModelCache<B>, subject: Subject) -> Result<()> {
    let shape = *cache.shape(0)?;
    let recipe = cache.recipe(0)?.clone();
    let to = if recipe.packs() { StoreId::PACKED } else { StoreId::F16 };
    let room = |store: usize| {
        let prompt = if store == to.index() { subject.tokens.div_ceil(TILE_TOKENS) } else { 0 };
        let appended = 2 + ALL_STEPS.div_ceil(TILE_TOKENS);
        StoreRoom { pages: subject.sequences * (prompt + appended), spans: subject.sequences * (1 + appended) }
    };
    let room: Vec<StoreRoom> = (0..recipe.stores().len()).map(room).collect();
    cache.reserve(&room).await?;
    let elements = subject.tokens * shape.kv_heads() * shape.head_dim();
    let (keys, values) = (upload(backend, elements, 4).await?, upload(backend, elements, 5).await?);
    for sequence in 0..subject.sequences {
        let tokens = subject.tokens - sequence * STAGGER % TILE_TOKENS;
        let spans = [PromptSpan::run(TokenRange::new(0, tokens)?, to)];
        cache.begin_prefill(sequence, tokens, &spans)?;
        for layer in 0..subject.layers {
            cache.store_prompt(layer, RowLayout::token_major(tokens, &shape), &keys, &values, &spans).await?;
        }
        cache.commit()?;
    }
    Ok(())
}

/// Random rows on the device.
async fn upload<B: Backend>(backend: &B, elements: usize, seed: u64) -> Result<B::Tensor> {
    Ok(backend.upload(Elements::F16(&random_rows(elements, 128, seed))).await?)
}

fn print_row(row: &StepRow, first: bool) -> Result<()> {
    if first {
        say!(
            "{:>12} {:<14} {:>21} {:>21} {:>21} {:>9} {:>21} {:>9} {:>6}",
            "batch",
            "recipe",
            "wall µs",
            "attend µs",
            "store µs",
            "wall/ker.",
            "host µs",
            "anew",
            "NMSE"
        )?;
    }
    let StepRow { sequences, tokens, recipe, wall_us, store_us, attend_us, bound_anew, steps, nmse, .. } = row;
    let batch = format!("{sequences} × {tokens}");
    let kernels = store_us.zip(*attend_us).map(|(store, attend)| wall_us / (store + attend));
    let ratio = kernels.map_or("-".into(), |ratio| format!("{ratio:.2}"));
    let (wall, host) = (figure(*wall_us, row.wall_spread, 1), figure(row.host_us, row.host_spread, 1));
    let store = figure_or_dash(*store_us, row.store_spread, 1);
    let attend = figure_or_dash(*attend_us, row.attend_spread, 1);
    let rebound = format!("{bound_anew}/{steps}");
    say!(
        "{batch:>12} {recipe:<14} {wall:>21} {attend:>21} {store:>21} {ratio:>9} {host:>21} {rebound:>9} {nmse:>6.0e}"
    )?;
    Ok(())
}
