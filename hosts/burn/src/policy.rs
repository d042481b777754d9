//! `policy`: prompts of which a policy keeps some tokens. What a step of decoding takes, what the choice costs next to
//! reading the prompt, and what the cache holds (VL-Cache Tables 2 and 4, Figure 6; LOOK-M Table 4).

use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use kvpack::cache::{Budget, Growth, ModelCache, ModelRecipe, StoreRoom, TokenRun};
use kvpack::plan::TokenRange;
use kvpack::policy::Spans;
use kvpack::wgpu::Wgpu;
use kvpack_serving::Contexts;
use pollster::block_on;
use serde::Serialize;

use crate::host::Host;
use crate::prompt::{ReadPrompt, Reader};
use crate::shape::Shape;
use crate::steps::{self, FIRST, StepTime, filled};
use crate::{Result, own, report};

/// Text behind the image.
const TEXT: usize = 50;

/// Decoding, memory and prefill where a policy keeps a share of the prompt, with random weights.
///
/// A prompt is an image and 50 tokens of text. It is read once; every sequence of a batch then keeps what the policy
/// chooses of it.
#[derive(clap::Args)]
pub struct PolicyArgs {
    /// The shape of the model.
    #[arg(long, value_enum, default_value = "8b")]
    shape: Shape,
    /// The shape `small` and the smallest sizes, on any machine.
    #[arg(long)]
    quick: bool,
    /// Sequences.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    batches: Vec<usize>,
    /// Tokens of a prompt.
    #[arg(long, value_delimiter = ',', default_value = "1024,8192")]
    tokens: Vec<usize>,
    /// Recipes with policies; all are compared with f16, the whole prompt kept.
    #[arg(long, value_delimiter = ';', default_value = "vlcache:0.1/f16;vlcache:0.1/saw-int4;lookm:0.2/f16")]
    recipes: Vec<String>,
    /// Tokens that are generated, for the time from end to end.
    #[arg(long, default_value_t = 100)]
    output: usize,
    /// Steps that are timed.
    #[arg(long, default_value_t = 12)]
    steps: usize,
    /// Writes the rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Row {
    batch: usize,
    tokens: usize,
    /// `burn` for burn's own attention, in f32.
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

/// What a prompt and a sequence take, in ms, and what all sequences hold.
#[derive(Clone, Copy, Default)]
struct Costs {
    read_ms: f64,
    statistics_ms: f64,
    compress_ms: f64,
    cache_mib: f64,
}

impl PolicyArgs {
    /// Runs the study.
    pub fn run(&self, device: &Device, backend: &Wgpu) -> Result<bool> {
        let (shape, batches, lengths) = match self.quick {
            true => (Shape::Small, vec![2], vec![512]),
            false => (self.shape, self.batches.clone(), self.tokens.clone()),
        };
        let longest = lengths.iter().max().copied().ok_or("no lengths were given")?;
        let most = batches.iter().max().copied().ok_or("no batches were given")?;
        let mut host = Host::new(backend, shape.decoder(device)?, most, None)?;
        let mut reader = Reader::new(backend, host.decoder(), longest)?;
        report::heading(backend, "policy", shape.name());
        println!(
            "| batch × tokens | recipe | step ms | attention alone ms | × | cache MiB | read ms | statistics ms | \
             compress ms | overhead | end to end × |"
        );
        println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
        let mut rows: Vec<Row> = Vec::new();
        for &tokens in &lengths {
            for recipe in &self.recipes {
                let parsed: ModelRecipe = recipe.parse()?;
                let read = self.observed(backend, (&host, &mut reader), &parsed, tokens)?;
                for &batch in &batches {
                    if rows.iter().all(|row| (row.batch, row.tokens) != (batch, tokens)) {
                        self.whole(device, (backend, &mut host), (batch, tokens), &read, &mut rows)?;
                    }
                    let (costs, time) = self.compressed(backend, (&mut host, &reader), (&parsed, &read, batch))?;
                    self.push(&mut rows, (batch, tokens, recipe), costs, time);
                    report::write(self.json.as_deref(), backend, ("policy", shape.name()), &rows)?;
                }
            }
        }
        Ok(true)
    }

    /// A prompt, read for a policy.
    fn observed(
        &self,
        backend: &Wgpu,
        (host, reader): (&Host, &mut Reader),
        recipe: &ModelRecipe,
        tokens: usize,
    ) -> Result<ReadPrompt> {
        let policy = recipe.policy().ok_or_else(|| format!("recipe '{recipe}' has no policy"))?.clone();
        let cache = ModelCache::new(backend, &host.config().cache_layers(recipe), 1)?;
        let spans = || Spans::new(tokens, &[TokenRange::new(0, tokens.saturating_sub(TEXT).max(1))?]);
        // The first time kernels are compiled, and burn tries its own.
        drop(reader.read(host.decoder(), &cache, (policy.clone(), spans()?))?);
        reader.read(host.decoder(), &cache, (policy, spans()?))
    }

    /// Decoding with the whole prompt: in f16, and with burn's own attention.
    fn whole(
        &self,
        device: &Device,
        (backend, host): (&Wgpu, &mut Host),
        (batch, tokens): (usize, usize),
        read: &ReadPrompt,
        rows: &mut Vec<Row>,
    ) -> Result<()> {
        let of = Contexts { sequences: batch, tokens, more: FIRST + self.steps + 1 };
        let mut cache = filled(backend, host, &"f16".parse()?, of, None)?;
        let costs = Costs { read_ms: millis(read.read), cache_mib: mib(&cache), ..Costs::default() };
        let time = steps::decode(host, &mut cache, self.steps)?;
        drop(cache);
        self.push(rows, (batch, tokens, "f16"), costs, time);
        let time = own::decode(device, host, (batch, tokens), self.steps)?;
        let costs = Costs { cache_mib: 2.0 * costs.cache_mib, ..costs }; // in f32
        self.push(rows, (batch, tokens, "burn"), costs, time);
        Ok(())
    }

    /// Decoding with what the policy keeps.
    fn compressed(
        &self,
        backend: &Wgpu,
        (host, reader): (&mut Host, &Reader),
        (recipe, read, batch): (&ModelRecipe, &ReadPrompt, usize),
    ) -> Result<(Costs, StepTime)> {
        let exact = Budget::unlimited().growing(Growth::Exact);
        let mut cache = ModelCache::new(backend, &host.config().cache_layers(recipe), batch)?.with_budget(exact);
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
        let mut times = Vec::new();
        for sequence in 0..batch {
            reader.wait()?;
            let start = Instant::now();
            block_on(cache.compress(sequence, &read.observed))?;
            reader.wait()?;
            times.push(millis(start.elapsed()));
        }
        let later: Vec<TokenRun> =
            (0..batch).map(|sequence| TokenRun::chunk(sequence, FIRST + self.steps + 1)).collect();
        block_on(cache.reserve_for_append(&later))?;
        let (read_ms, statistics_ms) = (millis(read.read), millis(read.statistics));
        let costs = Costs { read_ms, statistics_ms, compress_ms: steps::middle(&times), cache_mib: mib(&cache) };
        Ok((costs, steps::decode(host, &mut cache, self.steps)?))
    }

    fn push(&self, rows: &mut Vec<Row>, (batch, tokens, recipe): (usize, usize, &str), costs: Costs, time: StepTime) {
        let Costs { read_ms, statistics_ms, compress_ms, cache_mib } = costs;
        let all = |read: f64, step: f64| batch as f64 * read + self.output as f64 * step;
        let whole = rows.iter().find(|row| (row.batch, row.tokens) == (batch, tokens) && row.recipe == "f16");
        let (whole_read, whole_step) = whole.map_or((read_ms, time.step_ms), |row| (row.read_ms, row.time.step_ms));
        let row = Row {
            batch,
            tokens,
            recipe: recipe.into(),
            read_ms,
            statistics_ms,
            compress_ms,
            overhead: (statistics_ms + compress_ms) / read_ms,
            cache_mib,
            time,
            decode: whole_step / time.step_ms,
            end_to_end: all(whole_read, whole_step) / all(read_ms + statistics_ms + compress_ms, time.step_ms),
        };
        println!(
            "| {batch} × {tokens} | {recipe} | {:.2} | {} | {:.2} | {cache_mib:.1} | {read_ms:.1} | {statistics_ms:.2} \
             | {compress_ms:.2} | {:.2} % | {:.2} |",
            time.step_ms,
            time.attention_ms.map_or("–".into(), |ms| format!("{ms:.2}")),
            row.decode,
            row.overhead * 100.0,
            row.end_to_end
        );
        rows.push(row);
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Pages that sequences of a cache hold.
fn mib(cache: &ModelCache<Wgpu>) -> f64 {
    let of = |layer| cache.memory_of(layer).map_or(0, |memory| memory.in_use_bytes());
    (0..cache.layers()).map(of).sum::<u64>() as f64 / f64::from(1 << 20)
}
