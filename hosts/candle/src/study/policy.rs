//! `study policy`: prompts of which a policy keeps some tokens. What a step of decoding takes, what the choice costs
//! next to reading the prompt, and what the cache holds (VL-Cache Tables 2 and 4, Figure 6; LOOK-M Table 4).

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kvpack::backend::Backend;
use kvpack::cache::{Budget, Growth, ModelCache, ModelRecipe, StoreRoom, TokenRun};
use kvpack::plan::TokenRange;
use kvpack::policy::Spans;
use kvpack_cli::Model;
use kvpack_report::page::Plot;
use kvpack_serving::Contexts;
use pollster::block_on;
use serde::{Deserialize, Serialize};

use super::report::{self, ms};
use super::{Common, f16_bytes, has_room};
use crate::attention::Steps;
use crate::filled::{self, StepTime};
use crate::host::Host;
use crate::own;
use crate::prompt::{self, ReadPrompt};
use crate::rig::Rig;

/// Decoding, memory and prefill where a policy keeps a share of the prompt.
///
/// A prompt is an image and 50 tokens of text. It is read once; every sequence of a batch then keeps what the policy
/// chooses of it.
#[derive(clap::Args)]
pub struct PolicyArgs {
    #[command(flatten)]
    common: Common,
    /// Sequences.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    batches: Vec<usize>,
    /// Tokens of a prompt.
    #[arg(long, value_delimiter = ',', default_value = "1024,8192,32768,131072")]
    tokens: Vec<usize>,
    /// Recipes with policies; all are compared with f16, the whole prompt kept.
    #[arg(long, value_delimiter = ';', default_value = "vlcache:0.1/f16;vlcache:0.1/saw-int4")]
    recipes: Vec<String>,
    /// Tokens that are generated, for the time from end to end.
    #[arg(long, default_value_t = 100)]
    output: usize,
    /// Steps that are timed.
    #[arg(long, default_value_t = 12)]
    steps: usize,
    /// Draws the plot of a file that --json wrote, and measures nothing.
    #[arg(long, value_name = "FILE", requires = "plot")]
    from: Option<PathBuf>,
}

/// Text behind the image.
const TEXT: usize = 50;

#[derive(Serialize, Deserialize)]
struct Row {
    batch: usize,
    tokens: usize,
    recipe: String,
    /// Of one prompt.
    read_ms: f64,
    /// Of one prompt.
    statistics_ms: f64,
    /// Of one sequence.
    compress_ms: f64,
    /// Both of these as a share of reading.
    overhead: f64,
    /// Of all sequences.
    cache_mib: f64,
    #[serde(flatten)]
    time: StepTime,
    /// f16 over this.
    decode: f64,
    /// All prompts read and compressed one after the other, and the output: f16 over this. Computed from the above.
    end_to_end: f64,
}

/// Decoding with the whole prompt in f16.
struct Dense {
    cache_mib: f64,
    time: StepTime,
    /// A step with candle's own attention, where that fits.
    own_ms: Option<f64>,
}

/// What does not change with the batch.
struct Prompt {
    read: Duration,
    tokens: usize,
}

impl PolicyArgs {
    pub fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        if let Some(path) = &self.from {
            return report::draw(&self.common, &plot(&report::rows_of(path)?));
        }
        let (batches, lengths) = match self.common.quick {
            true => (vec![2], vec![512]),
            false => (self.batches.clone(), self.tokens.clone()),
        };
        let model = self.common.model(rig)?;
        let name = model.config.name.clone();
        let (longest, most) = (lengths.iter().max().copied(), batches.iter().max().copied());
        let (longest, most) = longest.zip(most).context("no lengths or no batches were given")?;
        let mut reader = rig.steps(&model, 1, longest)?;
        let steps = rig.steps(&model, model.config.layers, most)?;
        let mut host = Host::new(model, steps);
        report::heading(rig, "policy", &name);
        println!(
            "| batch × tokens | recipe | step ms | attention ms | × | cache MiB | read ms | statistics ms | compress ms \
             | overhead | end to end × |"
        );
        println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
        let mut rows = Vec::new();
        for &tokens in &lengths {
            self.of_length(rig, (&mut host, &mut reader), (&batches, tokens), &mut rows)?;
        }
        report::write(rig, &self.common, ("policy", &name), &rows, || plot(&rows))
    }

    fn of_length<R: Rig>(
        &self,
        rig: &R,
        (host, reader): (&mut Host<R::Steps>, &mut R::Steps),
        (batches, tokens): (&[usize], usize),
        rows: &mut Vec<Row>,
    ) -> Result<()> {
        let of_prompt = f16_bytes(&host.model().config, tokens);
        let mut dense = Vec::new();
        for &batch in batches {
            let more = self.steps + 8;
            let of = Contexts { sequences: batch, tokens, more };
            let fits = has_room(rig, of_prompt * batch as u64 * 21 / 20);
            dense.push(match fits {
                true => {
                    let mut cache = filled::filled(rig, host, &"f16".parse()?, of, None)?;
                    let (cache_mib, time) = (mib(&cache), filled::decode(rig, host, &mut cache, self.steps)?);
                    drop(cache);
                    let fits = has_room(rig, of_prompt * batch as u64 * 5 / 4);
                    let own = fits.then(|| own::decode(rig, host.model(), (batch, tokens), self.steps));
                    Some(Dense { cache_mib, time, own_ms: own.transpose()? })
                }
                false => None,
            });
        }
        if !has_room(rig, of_prompt + of_prompt / 4 + activations(host.model(), tokens)) {
            println!("| {tokens} | a prompt does not fit |");
            return Ok(());
        }
        let mut read: Option<ReadPrompt<R>> = None;
        for recipe in &self.recipes {
            let recipe: ModelRecipe = recipe.parse()?;
            let prompt = self.observed(rig, (host.model(), reader), (&recipe, tokens), &mut read)?;
            let observed = read.as_ref().context("no prompt was read")?;
            for (&batch, dense) in batches.iter().zip(&dense) {
                if rows.iter().all(|row| (row.batch, row.tokens) != (batch, tokens)) {
                    push_dense(rows, (batch, &prompt), (dense.as_ref(), self.output));
                }
                if dense.is_some() {
                    self.compressed(rig, host, (&recipe, observed, batch), &prompt, rows)?;
                }
            }
        }
        Ok(())
    }

    /// The prompt, read for a policy: as before if what was measured will do.
    fn observed<R: Rig>(
        &self,
        rig: &R,
        (model, reader): (&Model, &mut R::Steps),
        (recipe, tokens): (&ModelRecipe, usize),
        read: &mut Option<ReadPrompt<R>>,
    ) -> Result<Prompt> {
        let policy = recipe.policy().with_context(|| format!("recipe '{recipe}' has no policy"))?.clone();
        let usable = read.as_mut().is_some_and(|read| read.observed.decide_by(policy.clone()).is_ok());
        if !usable {
            *read = None;
            let cache = ModelCache::new(rig.backend(), &model.config.cache_layers(recipe)?, 1)?;
            let spans = || Spans::new(tokens, &[TokenRange::new(0, tokens.saturating_sub(TEXT).max(1))?]);
            // The first time kernels are compiled; long prompts take longer than that.
            if tokens <= 1 << 15 {
                drop(prompt::read(rig, model, reader, &cache, (policy.clone(), spans()?))?);
            }
            *read = Some(prompt::read(rig, model, reader, &cache, (policy, spans()?))?);
        }
        let took = read.as_ref().map_or(Duration::ZERO, |read| read.read);
        Ok(Prompt { read: took, tokens })
    }

    fn compressed<R: Rig>(
        &self,
        rig: &R,
        host: &mut Host<R::Steps>,
        (recipe, read, batch): (&ModelRecipe, &ReadPrompt<R>, usize),
        prompt: &Prompt,
        rows: &mut Vec<Row>,
    ) -> Result<()> {
        let layers = host.model().config.cache_layers(recipe)?;
        let mut cache =
            ModelCache::new(rig.backend(), &layers, batch)?.with_budget(Budget::unlimited().growing(Growth::Exact));
        let mut times = Vec::new();
        // All sequences keep as much, and layers that keep more than others say how much is reserved.
        let mut rooms: Vec<StoreRoom> = Vec::new();
        for of_layer in block_on(cache.room_for_compress(&read.observed))? {
            rooms.resize(of_layer.len(), StoreRoom::default());
            for (room, needed) in rooms.iter_mut().zip(of_layer) {
                room.pages = room.pages.max(batch * needed.pages);
                room.spans = room.spans.max(batch * needed.spans);
            }
        }
        block_on(cache.reserve(&rooms))?;
        // Sequence 0 is stored twice: the first time kernels are compiled.
        block_on(cache.compress(0, &read.observed))?;
        cache.clear(0)?;
        for sequence in 0..batch {
            host.steps().wait()?;
            let start = Instant::now();
            block_on(cache.compress(sequence, &read.observed))?;
            host.steps().wait()?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        let later: Vec<TokenRun> = (0..batch).map(|sequence| TokenRun::chunk(sequence, self.steps + 8)).collect();
        block_on(cache.reserve_for_append(&later))?;
        let mib = mib(&cache);
        let time = filled::decode(rig, host, &mut cache, self.steps)?;
        let whole = rows.iter().find(|row| (row.batch, row.tokens) == (batch, prompt.tokens) && row.recipe == "f16");
        let (read_ms, statistics_ms) = (millis(prompt.read), millis(read.statistics));
        let compress_ms = filled::middle(&mut times).context("nothing was compressed")?;
        let end = |read: f64, step: f64| batch as f64 * read + self.output as f64 * step;
        let all = end(read_ms + statistics_ms + compress_ms, time.step_ms);
        rows.push(Row {
            batch,
            tokens: prompt.tokens,
            recipe: recipe.to_string(),
            read_ms,
            statistics_ms,
            compress_ms,
            overhead: (statistics_ms + compress_ms) / read_ms,
            cache_mib: mib,
            time,
            decode: whole.map_or(f64::NAN, |whole| whole.time.step_ms / time.step_ms),
            end_to_end: whole.map_or(f64::NAN, |whole| end(whole.read_ms, whole.time.step_ms) / all),
        });
        rows.iter().last().into_iter().for_each(print);
        Ok(())
    }
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
    let of = |row: &Row| (format!("{} × {}", row.batch, name(&row.recipe)), row.cache_mib, row.time.step_ms);
    report::lines("Steps of decoding", ("MiB of the cache", "ms"), rows.iter().map(of))
}

/// The rows of the whole prompt: candle's own attention, for which the prompt is read as fast, and kvpack's in f16.
fn push_dense(rows: &mut Vec<Row>, (batch, prompt): (usize, &Prompt), (dense, output): (Option<&Dense>, usize)) {
    let Some(&Dense { cache_mib, time, own_ms }) = dense else {
        println!("| {batch} × {} | f16 | does not fit |", prompt.tokens);
        return;
    };
    let read_ms = millis(prompt.read);
    let all = |step: f64| batch as f64 * read_ms + output as f64 * step;
    let own = own_ms.map(|step_ms| ("candle", StepTime { step_ms, device_ms: None, attention_ms: None }));
    for (recipe, of) in own.into_iter().chain([("f16", time)]) {
        let row = Row {
            batch,
            tokens: prompt.tokens,
            recipe: recipe.into(),
            read_ms,
            statistics_ms: 0.0,
            compress_ms: 0.0,
            overhead: 0.0,
            cache_mib,
            time: of,
            decode: time.step_ms / of.step_ms,
            end_to_end: all(time.step_ms) / all(of.step_ms),
        };
        print(&row);
        rows.push(row);
    }
}

fn print(row: &Row) {
    println!(
        "| {} × {} | {} | {:.2} | {} | {:.2} | {:.1} | {:.1} | {:.2} | {:.2} | {:.2} % | {:.2} |",
        row.batch,
        row.tokens,
        row.recipe,
        row.time.step_ms,
        ms(row.time.attention_ms),
        row.decode,
        row.cache_mib,
        row.read_ms,
        row.statistics_ms,
        row.compress_ms,
        row.overhead * 100.0,
        row.end_to_end
    );
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Pages that sequences of a cache hold.
fn mib<B: Backend>(cache: &ModelCache<B>) -> f64 {
    let of = |layer| cache.memory_of(layer).map_or(0, |memory| memory.in_use_bytes());
    (0..cache.layers()).map(of).sum::<u64>() as f64 / f64::from(1 << 20)
}

/// Bytes that a layer takes to read a prompt whole.
fn activations(model: &Model, tokens: usize) -> u64 {
    (tokens * (4 * model.config.feed_forward + 12 * model.config.width) * 2) as u64
}
