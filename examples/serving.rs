//! A server in small, on wgpu: requests arrive, find their beginning in a prefix cache, decode next to parts of other
//! prompts, wait on the host where pages run out, and come back.
//!
//!     cargo run --release --example serving
//!
//! The cache has a budget that it never leaves. A long document is compressed by a policy. All layers of a step take
//! one pass and one submission. Every output is compared with attention in f64 over the tokens that its sequence holds.
//! docs/engines.md explains the calls, and shows the lines between the marks.

use std::collections::VecDeque;
use std::error::Error;

use kvpack::backend::Device;
use kvpack::cache::{
    Budget, DenseLayer, Growth, ModelCache, ModelRecipe, PrefixCache, SpanPositions, StoreRoom, SwappedSequence,
    TokenRun,
};
use kvpack::cpu::{DenseSegment, exact_attention, nmse};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::policy::{Policy, Spans};
use kvpack::wgpu::{Indices, LayerTensors, ModelStep, Wgpu};
use kvpack::{AttentionShape, Error as KvError};

const LAYERS: usize = 2;
/// Sequences of the cache: three requests at a time, and as many prefixes.
const SLOTS: usize = 3;
const PREFIXES: usize = 3;
/// Tokens that all prompts but documents begin with.
const SYSTEM_TOKENS: usize = 150;
/// Pages of 128 tokens in every layer.
const PAGES: usize = 7;
/// Rows of a step, and the most that one prompt takes of them.
const ROWS: usize = 64;
const CHUNK: usize = 32;
/// The request whose prompt is a document.
const DOCUMENT: usize = 3;

/// A request of a user: a prompt that begins with the system prompt, or a document, and the number of tokens to
/// generate.
#[derive(Clone, Copy)]
struct Request {
    id: usize,
    prompt: usize,
    output: usize,
}

/// A request that has a sequence.
struct Running {
    request: Request,
    slot: usize,
}

/// A request that has none, and its sequence if it had one before.
struct Waiting {
    request: Request,
    swapped: Option<SwappedSequence<Indices>>,
}

struct Server {
    backend: Wgpu,
    cache: ModelCache<Wgpu>,
    prefixes: PrefixCache,
    policy: Policy,
    /// What the model's kernels write and read, layer by layer.
    tensors: Vec<LayerTensors>,
    /// The steps of all layers.
    steps: ModelStep,
    running: Vec<Running>,
    waiting: VecDeque<Waiting>,
    /// Nobody is admitted between a preemption and the end of a request.
    full: bool,
    preemptions: usize,
    /// Tokens that requests found in the prefix cache.
    found: usize,
    worst: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    pollster::block_on(async {
        let mut server = Server::new().await?;
        for id in 1..9 {
            let prompt = if id == DOCUMENT { 600 } else { SYSTEM_TOKENS + 40 * id };
            server.waiting.push_back(Waiting { request: Request { id, prompt, output: 60 }, swapped: None });
        }
        let mut steps = 0;
        while !server.waiting.is_empty() || !server.running.is_empty() {
            server.turn().await?;
            steps += 1;
        }
        server.prefixes.clear(&mut server.cache)?;
        println!("{}: {steps} steps, {} preemptions", server.backend.name(), server.preemptions);
        println!("{} tokens of prompts were there already", server.found);
        println!("worst NMSE of an output against f64: {:.1e}", server.worst);
        let tried = server.preemptions > 0 && server.found > 0;
        if server.worst > 1e-3 || !tried || server.cache.memory().in_use_bytes() > 0 {
            return Err("an output is wrong, pages never ran out, no prefix was found, or pages are lost".into());
        }
        Ok(())
    })
}

impl Server {
    async fn new() -> Result<Self, Box<dyn Error>> {
        // SAFETY: wgpu's experimental features may have undefined behaviour; cooperative matrices are among them.
        let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
        let backend = Wgpu::open(None, experimental).await?;
        let shape = AttentionShape::new(8, 2, 64)?;
        // --- budget
        // Tokens at 8 bits as they arrive; of documents the first tokens and the newest.
        let recipe: ModelRecipe = "streaming:8,120/int8".parse()?;
        let layers: Vec<_> = (0..LAYERS).map(|layer| (shape, recipe.layer(layer, &shape))).collect();
        // The budget: what is reserved here, and never more.
        let budget = Budget::unlimited().growing(Growth::None);
        let mut cache = ModelCache::new(&backend, &layers, SLOTS + PREFIXES)?.with_budget(budget);
        // Parts of prompts lie in f16 until their step is committed: a page each.
        let parts = StoreRoom { pages: SLOTS, spans: SLOTS };
        cache.reserve(&[parts, StoreRoom { pages: PAGES, spans: SLOTS }]).await?;
        // --- end
        let tensors = |_| LayerTensors::zeroed(backend.device(), &shape, ROWS, ElementType::F32);
        let tensors = (0..LAYERS).map(tensors).collect::<Result<Vec<_>, _>>()?;
        let steps = ModelStep::new(&backend, RowLayout::token_major(ROWS, &shape), tensors.clone())?;
        // Steps compile nothing after this. Policies do when they first run.
        steps.prepare(&cache).await?;
        steps.prepare_chunks(&cache, CHUNK).await?;
        Ok(Self {
            backend,
            cache,
            prefixes: PrefixCache::new(SLOTS..SLOTS + PREFIXES),
            policy: recipe.policy().cloned().ok_or("the recipe has a policy")?,
            tensors,
            steps,
            running: Vec::new(),
            waiting: VecDeque::new(),
            full: false,
            preemptions: 0,
            found: 0,
            worst: 0.0,
        })
    }

    /// Admits requests, makes room, runs a step, and lets requests go that are done.
    async fn turn(&mut self) -> Result<(), Box<dyn Error>> {
        self.admit().await?;
        let mut runs = self.runs()?;
        // --- room
        while !self.cache.fits(&tokens_of(&runs))? {
            if !self.prefixes.let_go(&mut self.cache)? {
                self.preempt().await?;
                runs = self.runs()?;
            }
        }
        // --- end
        self.step(&runs).await?;
        self.keep_prompts()?;
        for Running { request, slot } in std::mem::take(&mut self.running) {
            if self.cache.length(slot)? == request.prompt + request.output {
                self.cache.clear(slot)?;
                self.full = false;
            } else {
                self.running.push(Running { request, slot });
            }
        }
        Ok(())
    }

    /// Keeps every prompt that is stored for the requests that begin like it. That takes no pages.
    fn keep_prompts(&mut self) -> Result<(), KvError> {
        for Running { request, slot } in &self.running {
            if self.cache.length(*slot)? == request.prompt {
                self.prefixes.keep(&mut self.cache, &prompt_of(request), *slot)?;
            }
        }
        Ok(())
    }

    /// Gives free sequences to those that wait: what the prefix cache has of their prompt, which costs nothing, or what
    /// was taken to the host.
    async fn admit(&mut self) -> Result<(), Box<dyn Error>> {
        while !self.full {
            let taken = |slot: &usize| self.running.iter().any(|running| running.slot == *slot);
            let free = (0..SLOTS).find(|slot| !taken(slot));
            let (Some(slot), Some(Waiting { request, swapped })) = (free, self.waiting.front()) else { break };
            let request = *request;
            // --- admission
            let admitted = match swapped {
                Some(swapped) => self.cache.swap_in(slot, swapped).await,
                None if request.id == DOCUMENT => self.compress(slot, request).await,
                None => {
                    let found = self.prefixes.enter(&mut self.cache, &prompt_of(&request), slot);
                    found.map(|found| self.found += found)
                }
            };
            match admitted {
                Ok(()) => self.waiting.pop_front(),
                // Nothing has changed: it waits, unless prefixes have pages to give.
                Err(KvError::NoRoom { .. }) if self.prefixes.let_go(&mut self.cache)? => continue,
                Err(KvError::NoRoom { .. }) => break,
                Err(error) => return Err(error.into()),
            };
            // --- end
            self.running.push(Running { request, slot });
        }
        Ok(())
    }

    /// The next tokens of everyone: a part of a prompt, or a token. As many as the tensors have rows for; the others
    /// have their turn once these decode.
    fn runs(&self) -> Result<Vec<Run>, KvError> {
        let (mut runs, mut rows) = (Vec::new(), 0);
        for Running { request, slot } in &self.running {
            let start = self.cache.length(*slot)?;
            let run = match request.prompt.saturating_sub(start) {
                0 => TokenRun::decode(*slot),
                left => TokenRun::prompt(*slot, left.min(CHUNK)),
            };
            rows += run.tokens();
            if rows <= ROWS {
                runs.push(Run { id: request.id, start, run });
            }
        }
        Ok(runs)
    }

    /// Takes the newest request to the host.
    async fn preempt(&mut self) -> Result<(), Box<dyn Error>> {
        let Running { request, slot } = self.running.pop().ok_or("the budget has no room for one request")?;
        let swapped = Some(self.cache.swap_out(slot).await?);
        self.waiting.push_front(Waiting { request, swapped });
        (self.full, self.preemptions) = (true, self.preemptions + 1);
        Ok(())
    }

    /// Stores the tokens of a document that the policy keeps. Its keys and values are those of the model's own pass.
    async fn compress(&mut self, slot: usize, request: Request) -> Result<(), KvError> {
        let mut prompt = self.cache.observe(self.policy.clone(), Spans::new(request.prompt, &[])?)?;
        for layer in 0..LAYERS {
            let all = |which| (0..request.prompt).flat_map(|at| row(which, request.id, at, layer)).collect::<Vec<_>>();
            let keys = self.backend.upload(all(KEY).as_slice().into()).await?;
            let values = self.backend.upload(all(VALUE).as_slice().into()).await?;
            let rows = RowLayout::token_major(request.prompt, self.cache.shape(layer)?);
            prompt.observe(layer, DenseLayer { rows, keys, values }, None)?; // this policy measures no queries
        }
        self.cache.compress(slot, &prompt).await.map(drop)
    }

    /// A step of all layers: begun on the host, encoded, submitted, committed.
    async fn step(&mut self, runs: &[Run]) -> Result<(), Box<dyn Error>> {
        // --- step
        self.cache.begin_append(&tokens_of(runs))?;
        if let Err(error) = self.encode(runs) {
            self.cache.abandon(); // no layer is ahead of the others, and the pages are free again
            return Err(error.into());
        }
        self.cache.commit()?;
        // --- end
        for layer in 0..LAYERS {
            self.check(layer, runs).await?;
        }
        Ok(())
    }

    /// All layers in one pass and one submission.
    fn encode(&mut self, runs: &[Run]) -> Result<(), KvError> {
        // --- layers
        let open = self.cache.open_steps()?;
        let step = self.steps.write(&open)?;
        let mut encoder = self.backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for layer in 0..LAYERS {
            project(self.backend.queue(), &self.tensors[layer], layer, runs); // the model's kernels
            step.encode_store(layer, &mut pass)?;
            step.encode_attend(layer, &mut pass)?;
        }
        drop(pass);
        self.backend.queue().submit([encoder.finish()]);
        // --- end
        Ok(())
    }

    /// Compares the newest output of every run with attention in f64 over the tokens that its sequence holds.
    async fn check(&mut self, layer: usize, runs: &[Run]) -> Result<(), KvError> {
        let output = self.backend.download(&self.tensors[layer].output).await?;
        let shape = *self.cache.shape(layer)?;
        let mut end = 0;
        for of in runs {
            let mut heads: Vec<Vec<usize>> = vec![Vec::new(); shape.kv_heads()];
            for span in self.cache.positions(layer, of.run.sequence()).await? {
                for (head, held) in heads.iter_mut().enumerate() {
                    match &span {
                        SpanPositions::Run(run) => held.extend(run.start()..run.end()),
                        SpanPositions::PerHead(all) => {
                            held.extend(&all[head * all.len() / shape.kv_heads()..][..all.len() / shape.kv_heads()]);
                        }
                    }
                }
            }
            let dense = |which| {
                let of_head = |(head, held): (usize, &Vec<usize>)| {
                    let of_token = |&at: &usize| row(which, of.id, at, layer)[head * 64..][..64].to_vec();
                    held.iter().flat_map(of_token).collect::<Vec<f32>>()
                };
                heads.iter().enumerate().flat_map(of_head).collect::<Vec<f32>>()
            };
            let (keys, values) = (dense(KEY), dense(VALUE));
            let segment = DenseSegment { keys: &keys, values: &values, tokens: heads[0].len(), calibration: None };
            end += of.run.tokens();
            let query = row(QUERY, of.id, of.start + of.run.tokens() - 1, layer);
            let expected = exact_attention(&shape, &[segment], &query)?.outputs;
            self.worst = self.worst.max(nmse(&output[(end - 1) * expected.len()..][..expected.len()], &expected));
        }
        Ok(())
    }
}

/// The next tokens of a request, which begin at a position.
struct Run {
    id: usize,
    start: usize,
    run: TokenRun,
}

fn tokens_of(runs: &[Run]) -> Vec<TokenRun> {
    runs.iter().map(|of| of.run).collect()
}

/// Stands for the projections of a layer, which an engine would encode into the same pass.
fn project(queue: &wgpu::Queue, tensors: &LayerTensors, layer: usize, runs: &[Run]) {
    let LayerTensors { keys, values, queries, .. } = tensors;
    for (which, tensor) in [(KEY, keys), (VALUE, values), (QUERY, queries)] {
        let positions = runs.iter().flat_map(|of| (0..of.run.tokens()).map(|token| (of.id, of.start + token)));
        let rows: Vec<f32> = positions.flat_map(|(id, at)| row(which, id, at, layer)).collect();
        queue.write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(&rows));
    }
}

/// Heads of what a layer projects.
const KEY: usize = 2;
const VALUE: usize = KEY + 1;
const QUERY: usize = 8;

/// The tokens of a request's prompt: all but documents begin with the system prompt.
fn prompt_of(request: &Request) -> Vec<u32> {
    (0..request.prompt).map(|position| (1000 * source(request.id, position) + position) as u32).collect()
}

/// What a token of a request was taken from: 0 for the system prompt.
fn source(id: usize, position: usize) -> usize {
    if position < SYSTEM_TOKENS && id != DOCUMENT { 0 } else { id }
}

/// The model's row of a request at a position.
fn row(which: usize, id: usize, position: usize, layer: usize) -> Vec<f32> {
    let id = source(id, position);
    let heads = if which == QUERY { QUERY } else { KEY };
    let seed = (which * 31 + id * 17 + layer * 5) as f32;
    let element = |i: usize| (i as f32 * 0.37 + seed).sin() * (i as f32 * 0.011 + position as f32 * 0.7 + seed).cos();
    (0..heads * 64).map(|i| 2.0 * element(i)).collect()
}
