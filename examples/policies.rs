//! Documents in a server on wgpu: a policy keeps some tokens of one, and a mixture stores the chunks of another at
//! several precisions. Their parts pass through the model while another sequence decodes.
//!
//!     cargo run --release --example policies
//!
//! What measures attention, chooses tokens and packs them is recorded into the engine's own passes: the library submits
//! nothing and waits for nothing. Every query of a part is compared with attention in f64 over the document so far, and
//! every query behind it with attention over what is kept. docs/engines.md explains the calls.

use std::error::Error;

use kvpack::backend::{Device, TensorRows};
use kvpack::cache::{ChunkSpans, ChunkStores, ModelCache, ModelRecipe, ObservedParts, PartQueries, TokenRun};
use kvpack::cpu::{DenseSegment, exact_attention, nmse};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::policy::Spans;
use kvpack::wgpu::{Indices, LayerTensors, ModelStep, Recorded, Tensor, Wgpu};
use kvpack::{AttentionShape, Error as KvError};

const LAYERS: usize = 2;
/// The sequence of the document, and the one that decodes meanwhile.
const DOCUMENT: usize = 0;
const OTHER: usize = 1;
/// Tokens of the document, of which the last are a question, and its parts.
const TOKENS: usize = 400;
const QUESTION: usize = 20;
const CHUNK: usize = 96;
/// Rows of the largest step.
const ROWS: usize = CHUNK + 1;

/// Heads of what a layer projects.
const KEY: usize = 2;
const VALUE: usize = KEY + 1;
const QUERY: usize = 8;

/// How a document is stored once all its parts are there.
enum Document {
    Policy(Box<ObservedParts<Wgpu>>),
    Mixture(ChunkSpans<Indices>),
}

struct Server {
    backend: Wgpu,
    cache: ModelCache<Wgpu>,
    steps: ModelStep,
    /// What the model's kernels write and read, layer by layer, and the log-sum-exps that all layers write in turn.
    tensors: Vec<LayerTensors>,
    lse: Tensor,
    worst: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    pollster::block_on(async {
        for recipe in ["snapkv:0.25/saw-int4", "vlcache:0.25/calibquant:4", "cocktail"] {
            let mut server = Server::new(recipe).await?;
            let document = server.begin(&recipe.parse()?).await?;
            server.serve(document).await?;
            let kept = server.cache.tokens(0, DOCUMENT)?;
            println!("{recipe}: layer 0 holds {kept} tokens; worst NMSE against f64: {:.1e}", server.worst);
            server.cache.clear(DOCUMENT)?;
            server.cache.clear(OTHER)?;
            if server.worst > 1e-4 || server.cache.memory().in_use_bytes() > 0 {
                return Err("an output is wrong, or pages are lost".into());
            }
        }
        Ok(())
    })
}

impl Server {
    async fn new(recipe: &str) -> Result<Self, Box<dyn Error>> {
        // SAFETY: wgpu's experimental features may have undefined behaviour; cooperative matrices are among them.
        let backend = Wgpu::open(None, unsafe { wgpu::ExperimentalFeatures::enabled() }).await?;
        let (shape, recipe) = (AttentionShape::new(8, 2, 64)?, recipe.parse::<ModelRecipe>()?);
        let layers: Vec<_> = (0..LAYERS).map(|layer| (shape, recipe.layer(layer, &shape))).collect();
        let mut cache = ModelCache::new(&backend, &layers, 2)?;
        let parts = [TokenRun::unpacked(DOCUMENT, TOKENS), TokenRun::decode(OTHER)];
        cache.reserve_for_append(&parts).await?;
        let tensors = |_| LayerTensors::zeroed(backend.device(), &shape, ROWS, ElementType::F32);
        let tensors = (0..LAYERS).map(tensors).collect::<Result<Vec<_>, _>>()?;
        let lse = Tensor::zeroed(backend.device(), ROWS * shape.query_heads(), ElementType::F32)?;
        let steps = ModelStep::new(&backend, RowLayout::token_major(ROWS, &shape), tensors.clone())?;
        let steps = steps.with_log_sum_exps(vec![lse.clone(); LAYERS])?;
        Ok(Self { backend, cache, steps, tensors, lse, worst: 0.0 })
    }

    /// What is known before the first part: the policy and where the text is, or the store of every chunk.
    async fn begin(&mut self, recipe: &ModelRecipe) -> Result<Document, Box<dyn Error>> {
        if let Some(policy) = recipe.policy() {
            // All of it but the question is an image.
            let spans = Spans::new(TOKENS, &[TokenRange::new(0, TOKENS - QUESTION)?])?;
            let prompt = self.cache.observe_parts(DOCUMENT, policy.clone(), spans).await?;
            return Ok(Document::Policy(Box::new(prompt)));
        }
        let mixture = recipe.mixture().ok_or("the recipe has a policy or a mixture")?;
        let context = TokenRange::new(0, TOKENS - QUESTION)?;
        // Of an encoder's embeddings of the chunks with that of the question: see Mixture::search.
        let similarities: Vec<f32> = (0..context.len() / 32).map(|chunk| (chunk as f32 * 0.7).sin()).collect();
        let chunks = ChunkStores::new(context, 32, mixture.stores_of(&similarities)?)?;
        let spans = chunks.upload(&self.backend, self.cache.shape(0)?.kv_heads(), TOKENS).await?;
        self.cache.reserve_for_prefill(&spans.prompt()).await?;
        Ok(Document::Mixture(spans))
    }

    async fn serve(&mut self, mut document: Document) -> Result<(), Box<dyn Error>> {
        if let Document::Policy(prompt) = &document
            && !prompt.needs_counts()
        {
            self.cache.reserve_for_parts(prompt).await?;
        }
        while self.cache.length(DOCUMENT)? < TOKENS {
            let left = TOKENS - self.cache.length(DOCUMENT)?;
            let runs = [TokenRun::unpacked(DOCUMENT, left.min(CHUNK)), TokenRun::decode(OTHER)];
            self.step(&runs, Some(&mut document)).await?;
        }
        // VL-Cache: budgets depend on counts, which arrive while others decode.
        if let Document::Policy(prompt) = &mut document
            && prompt.needs_counts()
        {
            prompt.begin_counts(&self.cache)?;
            while !prompt.counts_have_arrived()? {
                self.step(&[TokenRun::decode(OTHER)], None).await?;
            }
            prompt.finish_counts().await?;
            self.cache.reserve_for_parts(prompt).await?;
            let mut encoder = self.backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            self.backend.record(|| self.cache.compress_parts(prompt))?.encode(&mut pass);
            drop(pass);
            self.backend.queue().submit([encoder.finish()]);
        }
        for _ in 0..5 {
            self.step(&[TokenRun::decode(DOCUMENT), TokenRun::decode(OTHER)], None).await?;
        }
        Ok(())
    }

    /// A step of all layers, in one pass and one submission. With the last part of a document, what packs it.
    async fn step(&mut self, runs: &[TokenRun], document: Option<&mut Document>) -> Result<(), Box<dyn Error>> {
        let starts: Vec<usize> = runs.iter().map(|run| self.cache.length(run.sequence())).collect::<Result<_, _>>()?;
        self.cache.reserve_for_append(runs).await?;
        self.cache.begin_append(runs)?;
        if let Err(error) = self.encode(runs, &starts, document) {
            self.cache.abandon();
            return Err(error.into());
        }
        for layer in 0..LAYERS {
            self.check(layer, runs, &starts).await?;
        }
        Ok(())
    }

    fn encode(
        &mut self,
        runs: &[TokenRun],
        starts: &[usize],
        mut document: Option<&mut Document>,
    ) -> Result<(), KvError> {
        let rows: usize = runs.iter().map(TokenRun::tokens).sum();
        let open = self.cache.open_steps()?;
        let step = self.steps.write(&open)?;
        let mut encoder = self.backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        // --- part
        for layer in 0..LAYERS {
            project(self.backend.queue(), &self.tensors[layer], layer, runs, starts); // the model's kernels
            step.encode_store(layer, &mut pass)?;
            step.encode_attend(layer, &mut pass)?;
            if let Some(Document::Policy(prompt)) = document.as_deref_mut() {
                let layout = RowLayout::token_major(rows, &AttentionShape::new(QUERY, QUERY, 64)?);
                let queries = TensorRows { tensor: &self.tensors[layer].queries, layout };
                let queries = PartQueries { queries, log_sum_exps: Some(&self.lse) };
                self.backend.record(|| prompt.observe(&self.cache, layer, queries))?.encode(&mut pass);
            }
        }
        drop(open);
        self.cache.commit()?;
        let ends = starts[0] + runs[0].tokens() == TOKENS;
        if let Some(packing) = document.filter(|_| ends).map(|of| self.pack(of)).transpose()?.flatten() {
            packing.encode(&mut pass);
        }
        // --- end
        drop(pass);
        self.backend.queue().submit([encoder.finish()]);
        Ok(())
    }

    /// What packs a document, unless budgets wait for counts.
    fn pack(&mut self, document: &mut Document) -> Result<Option<Recorded>, KvError> {
        // --- packing
        match document {
            Document::Policy(prompt) if prompt.needs_counts() => Ok(None),
            Document::Policy(prompt) => self.backend.record(|| self.cache.compress_parts(prompt)).map(Some),
            Document::Mixture(spans) => {
                self.backend.record(|| self.cache.pack_parts(DOCUMENT, &spans.prompt())).map(Some)
            }
        }
        // --- end
    }

    /// Compares the first and the last output of every run with attention in f64 over what its sequence holds. A part
    /// of the document sees what the model gave.
    async fn check(&mut self, layer: usize, runs: &[TokenRun], starts: &[usize]) -> Result<(), Box<dyn Error>> {
        let output = self.backend.download(&self.tensors[layer].output).await?;
        let shape = *self.cache.shape(layer)?;
        let mut first = 0;
        for (run, &start) in runs.iter().zip(starts) {
            for query in [0, run.tokens() - 1] {
                let (sequence, position) = (run.sequence(), start + query);
                let [keys, values] = match run.tokens() {
                    1 => self.held(layer, sequence).await?,
                    _ => [KEY, VALUE].map(|which| {
                        let head = |head: usize| {
                            let row = move |at| row(which, sequence, at, layer)[head * 64..][..64].to_vec();
                            (0..=position).flat_map(row)
                        };
                        (0..shape.kv_heads()).flat_map(head).collect()
                    }),
                };
                let tokens = keys.len() / shape.kv_heads() / 64;
                let segment = DenseSegment { keys: &keys, values: &values, tokens, calibration: None };
                let expected = exact_attention(&shape, &[segment], &row(QUERY, sequence, position, layer))?.outputs;
                let given = &output[(first + query) * expected.len()..][..expected.len()];
                self.worst = self.worst.max(nmse(given, &expected));
            }
            first += run.tokens();
        }
        Ok(())
    }

    /// Keys and values that a sequence holds in a layer, decoded, `[kv_heads, tokens, head_dim]`.
    async fn held(&self, layer: usize, sequence: usize) -> Result<[Vec<f32>; 2], KvError> {
        let mut heads = vec![[Vec::new(), Vec::new()]; KEY];
        for span in self.cache.dequantize(layer, sequence)? {
            for (which, tensor) in [&span.keys, &span.values].into_iter().enumerate() {
                let rows = self.backend.download(tensor).await?;
                let of_heads = rows.chunks(rows.len() / KEY);
                heads.iter_mut().zip(of_heads).for_each(|(head, rows)| head[which].extend_from_slice(rows));
            }
        }
        Ok([0, 1].map(|which| heads.iter().flat_map(|head| head[which].iter().copied()).collect()))
    }
}

/// Stands for the projections of a layer, which an engine would encode into the same pass.
fn project(queue: &wgpu::Queue, tensors: &LayerTensors, layer: usize, runs: &[TokenRun], starts: &[usize]) {
    let LayerTensors { keys, values, queries, .. } = tensors;
    for (which, tensor) in [(KEY, keys), (VALUE, values), (QUERY, queries)] {
        let positions = runs
            .iter()
            .zip(starts)
            .flat_map(|(run, start)| (0..run.tokens()).map(move |token| (run.sequence(), start + token)));
        let rows: Vec<f32> = positions.flat_map(|(sequence, at)| row(which, sequence, at, layer)).collect();
        queue.write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(&rows));
    }
}

/// The model's row of a sequence at a position, in numbers that f16 holds.
fn row(which: usize, sequence: usize, position: usize, layer: usize) -> Vec<f32> {
    let heads = if which == QUERY { QUERY } else { KEY };
    let seed = which + 10 * (sequence + 2 * layer);
    let element = |i: usize| (((seed * 7919 + position * 31 + i * i) as f32).sin() * 64.0).round() / 64.0;
    (0..heads * 64).map(element).collect()
}
