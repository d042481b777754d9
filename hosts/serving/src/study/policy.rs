//! `policy`: prompts of which a policy keeps some tokens. What a step of decoding takes, what the choice costs next to
//! reading the prompt, and what the cache holds (VL-Cache Tables 2 and 4, Figure 6; LOOK-M Table 4).

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvpack::backend::Backend;
use kvpack::cache::{Budget, Growth, ModelCache, ModelRecipe, ObservedPrompt, StoreRoom, TokenRun};
use kvpack::plan::TokenRange;
use kvpack::policy::Spans;
use kvpack_report::page::Plot;
use pollster::block_on;
use serde::{Deserialize, Serialize};

use super::report::{self, StudyReport};
use super::{FURTHER_TOKENS, Measure, RandomModel, ReadPrompt, StepTime, StudyOptions, f16_bytes, median};
use crate::Contexts;

/// Prompts and recipes of the study `policy`.
#[derive(Clone, Debug, clap::Args)]
pub struct PolicyOptions {
    /// Sequences.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    batches: Vec<usize>,
    /// Tokens of a prompt.
    #[arg(long, value_delimiter = ',', default_value = "1024,8192,32768,131072")]
    tokens: Vec<usize>,
    /// Recipes with policies; all are compared with f16, the whole prompt kept.
    #[arg(long, value_delimiter = ';', default_value = "vlcache:0.1/f16;vlcache:0.1/saw-int4;lookm:0.2/f16")]
    recipes: Vec<String>,
    /// Tokens that are generated, for the time from end to end.
    #[arg(long, default_value_t = 100)]
    output: usize,
    /// Draws the plot of a file that --json wrote, and measures nothing.
    #[arg(long, value_name = "FILE", requires = "plot")]
    from: Option<PathBuf>,
}

impl PolicyOptions {
    /// The same in the sizes of a model.
    #[must_use]
    pub fn sized(self, model: &RandomModel) -> Self {
        if model.quick { Self { batches: vec![2], tokens: vec![512], ..self } } else { self }
    }

    /// The largest number of sequences.
    pub fn most(&self) -> usize {
        self.batches.iter().copied().max().unwrap_or(1)
    }

    /// Draws the plot of earlier rows where that is all that was asked for. False where there is something to measure.
    ///
    /// # Errors
    /// What is wrong with the files.
    pub fn draws_only(&self, options: &StudyOptions) -> std::io::Result<bool> {
        let Some(path) = &self.from else { return Ok(false) };
        report::draw(options, &plot(&report::rows_of(path)?)).map(|()| true)
    }
}

/// Text behind the image.
const TEXT: usize = 50;

#[derive(Serialize, Deserialize)]
struct Row {
    batch: usize,
    tokens: usize,
    /// The library's name for its own attention.
    recipe: String,
    #[serde(flatten)]
    costs: Costs,
    /// Statistics and compressing as a share of reading.
    overhead: f64,
    #[serde(flatten)]
    time: StepTime,
    /// f16 over this.
    decode: f64,
    /// All prompts read and compressed one after the other, and the output: f16 over this. Computed from the above.
    end_to_end: f64,
}

/// What a prompt and a sequence take, and what all sequences hold.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct Costs {
    /// Of one prompt.
    read_ms: f64,
    /// Of one prompt.
    statistics_ms: f64,
    /// Of one sequence.
    compress_ms: f64,
    /// Of all sequences.
    cache_mib: f64,
}

/// Decoding with the whole prompt.
struct Whole {
    cache_mib: f64,
    /// In f16.
    time: StepTime,
    /// With the library's own attention, where that fits.
    own: Option<StepTime>,
}

/// Times decoding, memory and prefill where a policy keeps a share of the prompt.
///
/// A prompt is an image and 50 tokens of text. It is read once; every sequence of a batch then keeps what the policy
/// chooses of it.
///
/// # Errors
/// What is wrong with the recipes, and what the host reports.
pub fn policy<H: Measure>(host: &mut H, report: &StudyReport<'_>, options: &PolicyOptions) -> Result<(), H::Error> {
    let longest = options.tokens.iter().copied().max().unwrap_or(1);
    let mut reader = host.reader(longest)?;
    let costs = ["×", "cache MiB", "read ms", "statistics ms", "compress ms", "overhead", "end to end ×"];
    report::heading(&["batch × tokens", "recipe"], &[H::COLUMNS.names(), &costs].concat());
    let mut rows = Vec::new();
    for &tokens in &options.tokens {
        of_length(host, (&mut reader, report), (options, tokens), &mut rows)?;
    }
    Ok(())
}

/// Prompts of one length.
fn of_length<H: Measure>(
    host: &mut H,
    (reader, report): (&mut H::Reader, &StudyReport<'_>),
    (options, tokens): (&PolicyOptions, usize),
    rows: &mut Vec<Row>,
) -> Result<(), H::Error> {
    let of_prompt = f16_bytes(&host.layers(&"f16".parse()?)?, tokens);
    let mut wholes = Vec::new();
    for &batch in &options.batches {
        let fits = host.has_room(of_prompt * batch as u64 * 21 / 20);
        wholes.push(if fits { Some(whole(host, (batch, tokens), report.steps())?) } else { None });
    }
    if !host.has_room(of_prompt + of_prompt / 4 + host.bytes_of_reading(tokens)) {
        println!("| {tokens} | a prompt does not fit |");
        return Ok(());
    }
    let mut read: Option<ReadPrompt<H::Backend>> = None;
    for recipe in &options.recipes {
        let recipe: ModelRecipe = recipe.parse()?;
        let read = observed(host, reader, (&recipe, tokens), &mut read)?;
        for (&batch, whole) in options.batches.iter().zip(&wholes) {
            let is_first = rows.iter().all(|row| (row.batch, row.tokens) != (batch, tokens));
            match whole {
                Some(whole) if is_first => push_whole::<H>(rows, (batch, tokens, options.output), read, whole),
                None if is_first => println!("| {batch} × {tokens} | f16 | does not fit |"),
                _ => {}
            }
            if whole.is_some() {
                let (costs, time) = compressed(host, reader, (&recipe, read, batch), report.steps())?;
                push::<H>(rows, (batch, tokens, &recipe.to_string()), (costs, time), options.output);
                // Whoever stops the program keeps what was measured.
                report.write(rows, || plot(rows))?;
            }
        }
    }
    Ok(())
}

/// Decoding with the whole prompt.
fn whole<H: Measure>(host: &mut H, (batch, tokens): (usize, usize), steps: usize) -> Result<Whole, H::Error> {
    let of = Contexts { sequences: batch, tokens, more: steps + FURTHER_TOKENS };
    let mut cache = host.filled(&"f16".parse()?, of, None)?;
    let (cache_mib, time) = (mib(&cache), host.decode(&mut cache, steps)?);
    drop(cache);
    Ok(Whole { cache_mib, time, own: host.decode_own((batch, tokens), steps)? })
}

/// The prompt, read for a policy: as before if what was measured will do.
fn observed<'a, H: Measure>(
    host: &mut H,
    reader: &mut H::Reader,
    (recipe, tokens): (&ModelRecipe, usize),
    read: &'a mut Option<ReadPrompt<H::Backend>>,
) -> Result<&'a ReadPrompt<H::Backend>, H::Error> {
    let Some(policy) = recipe.policy().cloned() else {
        let reason = "it keeps all tokens of a prompt; begin it with a policy, as in vlcache:0.1/f16".into();
        return Err(kvpack::Error::Recipe { given: recipe.to_string(), reason }.into());
    };
    let before = read.take().and_then(|mut read| read.observed.decide_by(policy.clone()).is_ok().then_some(read));
    if let Some(before) = before {
        return Ok(read.insert(before));
    }
    let cache = ModelCache::new(host.backend(), &host.layers(recipe)?, 1)?;
    let spans = || Spans::new(tokens, &[TokenRange::new(0, tokens.saturating_sub(TEXT).max(1))?]);
    // The first time kernels are compiled; long prompts take longer than that.
    if tokens <= 1 << 15 {
        drop(host.read(reader, &cache, (policy.clone(), spans()?))?);
    }
    Ok(read.insert(host.read(reader, &cache, (policy, spans()?))?))
}

/// Decoding with what the policy keeps.
fn compressed<H: Measure>(
    host: &mut H,
    reader: &mut H::Reader,
    (recipe, read, batch): (&ModelRecipe, &ReadPrompt<H::Backend>, usize),
    steps: usize,
) -> Result<(Costs, StepTime), H::Error> {
    let exact = Budget::unlimited().growing(Growth::Exact);
    let mut cache = ModelCache::new(host.backend(), &host.layers(recipe)?, batch)?.with_budget(exact);
    reserve(&mut cache, &read.observed)?;
    // Sequence 0 is stored twice: the first time kernels are compiled.
    block_on(cache.compress(0, &read.observed))?;
    cache.clear(0)?;
    let mut times = Vec::new();
    for sequence in 0..batch {
        H::wait(reader)?;
        let start = Instant::now();
        block_on(cache.compress(sequence, &read.observed))?;
        H::wait(reader)?;
        times.push(millis(start.elapsed()));
    }
    let later: Vec<TokenRun> = (0..batch).map(|sequence| TokenRun::chunk(sequence, steps + FURTHER_TOKENS)).collect();
    block_on(cache.reserve_for_append(&later))?;
    let costs = Costs {
        read_ms: millis(read.read),
        statistics_ms: millis(read.statistics),
        compress_ms: median(&times).unwrap_or(f64::NAN),
        cache_mib: mib(&cache),
    };
    Ok((costs, host.decode(&mut cache, steps)?))
}

/// Reserves what every sequence of a cache keeps of a prompt. All keep as much, and layers that keep more than others
/// say how much is reserved.
fn reserve<B: Backend + Clone>(cache: &mut ModelCache<B>, observed: &ObservedPrompt<B>) -> kvpack::Result<()> {
    let mut rooms: Vec<StoreRoom> = Vec::new();
    for of_layer in block_on(cache.room_for_compress(observed))? {
        rooms.resize(of_layer.len(), StoreRoom::default());
        for (room, needed) in rooms.iter_mut().zip(of_layer) {
            room.pages = room.pages.max(cache.sequences() * needed.pages);
            room.spans = room.spans.max(cache.sequences() * needed.spans);
        }
    }
    block_on(cache.reserve(&rooms))
}

/// The rows of the whole prompt: kvpack's f16, and the library's own attention, for which the prompt is read as fast.
fn push_whole<H: Measure>(
    rows: &mut Vec<Row>,
    (batch, tokens, output): (usize, usize, usize),
    read: &ReadPrompt<H::Backend>,
    whole: &Whole,
) {
    let costs = Costs { read_ms: millis(read.read), cache_mib: whole.cache_mib, ..Costs::default() };
    push::<H>(rows, (batch, tokens, "f16"), (costs, whole.time), output);
    if let Some(time) = whole.own {
        let costs = Costs { cache_mib: whole.cache_mib * H::OWN_BYTES as f64 / 2.0, ..costs };
        push::<H>(rows, (batch, tokens, H::OWN), (costs, time), output);
    }
}

/// Prints and keeps a row. That of f16 comes before the others of its size.
fn push<H: Measure>(
    rows: &mut Vec<Row>,
    (batch, tokens, recipe): (usize, usize, &str),
    (costs, time): (Costs, StepTime),
    output: usize,
) {
    let Costs { read_ms, statistics_ms, compress_ms, cache_mib } = costs;
    let whole = rows.iter().find(|row| (row.batch, row.tokens) == (batch, tokens) && row.recipe == "f16");
    let (whole_read, whole_step) = whole.map_or((read_ms, time.step_ms), |row| (row.costs.read_ms, row.time.step_ms));
    let all = |read: f64, step: f64| batch as f64 * read + output as f64 * step;
    let (overhead, decode) = ((statistics_ms + compress_ms) / read_ms, whole_step / time.step_ms);
    let end_to_end = all(whole_read, whole_step) / all(read_ms + statistics_ms + compress_ms, time.step_ms);
    let numbers = vec![
        format!("{decode:.2}"),
        format!("{cache_mib:.1}"),
        format!("{read_ms:.1}"),
        format!("{statistics_ms:.2}"),
        format!("{compress_ms:.2}"),
        format!("{:.2} %", overhead * 100.0),
        format!("{end_to_end:.2}"),
    ];
    report::row(&[vec![format!("{batch} × {tokens}"), recipe.into()], H::COLUMNS.cells(&time), numbers].concat());
    rows.push(Row { batch, tokens, recipe: recipe.into(), costs, overhead, time, decode, end_to_end });
}

/// Steps against prompts of several lengths, or against the cache that is kept of prompts of one length.
fn plot(rows: &[Row]) -> Plot {
    let first = rows.first().map(|row| row.tokens);
    if rows.iter().any(|row| Some(row.tokens) != first) {
        let of = |row: &Row| (format!("{} × {}", row.batch, row.recipe), row.tokens as f64, row.time.step_ms);
        return report::lines("Steps of decoding", ("tokens of a prompt", "ms"), rows.iter().map(of));
    }
    // A line for each batch and method, whatever share it keeps.
    let name = |recipe: &str| match recipe.split_once(':').zip(recipe.split_once('/')) {
        Some(((policy, _), (_, method))) => format!("{policy}/{method}"),
        None => recipe.to_owned(),
    };
    let of = |row: &Row| (format!("{} × {}", row.batch, name(&row.recipe)), row.costs.cache_mib, row.time.step_ms);
    report::lines("Steps of decoding", ("MiB of the cache", "ms"), rows.iter().map(of))
}

/// The tokens of a prompt that is read whole.
pub fn prompt_text(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|at| at.wrapping_mul(2_654_435_761) >> 8 & 0xff).collect()
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Pages that sequences of a cache hold.
fn mib<B: Backend>(cache: &ModelCache<B>) -> f64 {
    let of = |layer| cache.memory_of(layer).map_or(0, |memory| memory.in_use_bytes());
    (0..cache.layers()).map(of).sum::<u64>() as f64 / f64::from(1 << 20)
}
