//! Who runs, who waits, who is preempted.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvpack::Error as KvError;
use kvpack::backend::Backend;
use kvpack::cache::{Growth, ModelCache, PrefixCache, SwappedSequence, TokenRun};
use pollster::block_on;

use crate::figures::{Figures, Recorder};
use crate::{Batch, BatchRun, Error, Model, Request};

/// Sizes of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Requests that run at a time. They take the first sequences of the cache.
    pub sequences: usize,
    /// Prompts whose beginnings are kept for others, in the sequences behind; 0 shares nothing.
    pub prefixes: usize,
    /// Rows of a step: a token for each running request, and one part of a prompt at least.
    pub rows: usize,
    /// Tokens of a part of a prompt, the same whatever else runs. Multiples of 128 fill pages.
    pub chunk: usize,
}

/// What a server has done so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Requests that are done.
    pub done: usize,
    /// All requests.
    pub requests: usize,
    /// Requests that run.
    pub running: usize,
    /// Tokens generated so far.
    pub generated: usize,
}

/// What came of a queue.
#[derive(Clone, Debug)]
pub struct Served {
    /// The generated tokens of every request.
    pub texts: Vec<Vec<u32>>,
    /// Throughput, latencies and pages.
    pub figures: Figures,
}

/// A server of a queue of requests.
pub struct Scheduler<B: Backend> {
    cache: ModelCache<B>,
    settings: Settings,
    prefixes: PrefixCache,
    requests: Vec<Request>,
    /// Prompt and generated tokens of every request.
    texts: Vec<Vec<u32>>,
    /// Requests that have not arrived yet begin here.
    next: usize,
    waiting: VecDeque<Waiting<B>>,
    running: Vec<Running>,
    /// Nobody is admitted between a preemption and the end of a request.
    full: bool,
    recorder: Recorder,
}

/// A request that has a sequence.
#[derive(Clone, Copy)]
struct Running {
    request: usize,
    slot: usize,
}

/// A request that has none, and its sequence if it had one before.
struct Waiting<B: Backend> {
    request: usize,
    swapped: Option<SwappedSequence<B::Indices>>,
}

impl<B: Backend + Clone> Scheduler<B> {
    /// A server of these requests, which are in the order of their arrival. The budget of the cache is what it has
    /// reserved, if its growth is [`Growth::None`](kvpack::cache::Growth::None).
    ///
    /// # Errors
    /// [`Error::Settings`] and [`Error::Request`].
    pub fn new(cache: ModelCache<B>, settings: Settings, requests: Vec<Request>) -> Result<Self, Error> {
        let Settings { sequences, prefixes, rows, chunk } = settings;
        let wrong = |reason: String| Err(Error::Settings { reason });
        if sequences == 0 || chunk == 0 {
            return wrong(format!("{sequences} sequences and chunks of {chunk} tokens; both must be at least 1"));
        }
        if rows + 1 < sequences + chunk {
            return wrong(format!(
                "{rows} rows; {sequences} sequences and a chunk of {chunk} need {}",
                sequences + chunk - 1
            ));
        }
        if cache.sequences() < sequences + prefixes {
            let needed = sequences + prefixes;
            return wrong(format!("the cache has {} sequences, {needed} are needed", cache.sequences()));
        }
        for (request, of) in requests.iter().enumerate() {
            if of.prompt.is_empty() || of.output == 0 {
                return Err(Error::Request { request, reason: "its prompt or its output has no token".into() });
            }
        }
        if !requests.is_sorted_by_key(|request| request.arrival) {
            return wrong("the requests are not in the order of their arrival".into());
        }
        Ok(Self {
            cache,
            settings,
            prefixes: PrefixCache::new(sequences..sequences + prefixes),
            texts: requests.iter().map(|request| request.prompt.clone()).collect(),
            recorder: Recorder::new(&requests),
            requests,
            next: 0,
            waiting: VecDeque::new(),
            running: Vec::new(),
            full: false,
        })
    }

    /// Serves all requests. `progress` is told after every step.
    ///
    /// # Errors
    /// [`Error::Budget`], and what the cache and the model report.
    pub fn serve(mut self, model: &mut impl Model<B>, mut progress: impl FnMut(Progress)) -> Result<Served, Error> {
        let start = Instant::now();
        loop {
            self.arrive(start.elapsed());
            if self.running.is_empty() && self.waiting.is_empty() {
                let Some(next) = self.requests.get(self.next) else { break };
                std::thread::sleep(next.arrival.saturating_sub(start.elapsed()));
                continue;
            }
            self.admit()?;
            let batch = self.next_batch()?;
            let tokens = self.step(model, &batch)?;
            self.recorder.step(&self.cache, &batch);
            self.take(&batch, &tokens, model.end(), start.elapsed())?;
            progress(self.progress());
        }
        self.prefixes.clear(&mut self.cache)?;
        let figures = self.recorder.figures(start.elapsed());
        let texts = self.texts.iter().zip(&self.requests).map(|(text, of)| text[of.prompt.len()..].to_vec()).collect();
        Ok(Served { texts, figures })
    }

    fn progress(&self) -> Progress {
        let held = self.running.len() + self.waiting.len();
        Progress {
            done: self.next - held,
            requests: self.requests.len(),
            running: self.running.len(),
            generated: self.recorder.generated(),
        }
    }

    fn arrive(&mut self, now: Duration) {
        while self.requests.get(self.next).is_some_and(|request| request.arrival <= now) {
            self.waiting.push_back(Waiting { request: self.next, swapped: None });
            self.next += 1;
        }
    }

    /// Gives free sequences to those that wait: the beginning of their prompt that is known, or what was swapped out.
    fn admit(&mut self) -> Result<(), Error> {
        while !self.full {
            let taken = |slot: &usize| self.running.iter().any(|running| running.slot == *slot);
            let free = (0..self.settings.sequences).find(|slot| !taken(slot));
            let (Some(slot), Some(Waiting { request, swapped })) = (free, self.waiting.front()) else { break };
            let request = *request;
            let admitted = match swapped {
                Some(swapped) => block_on(self.cache.swap_in(slot, swapped)),
                None if self.settings.prefixes == 0 => Ok(()),
                None => {
                    let found = self.prefixes.enter(&mut self.cache, &self.requests[request].prompt, slot);
                    found.map(|found| self.recorder.found(found))
                }
            };
            match admitted {
                Ok(()) => self.waiting.pop_front(),
                // Nothing has changed: it waits, unless there are pages to give.
                Err(KvError::NoRoom { .. }) if self.makes_room()? => continue,
                Err(KvError::NoRoom { .. }) if self.running.is_empty() => return Err(Error::Budget { request }),
                Err(KvError::NoRoom { .. }) => break,
                Err(error) => return Err(error.into()),
            };
            self.running.push(Running { request, slot });
        }
        Ok(())
    }

    /// Whether memory came free that no request needs: that of a format which had more pages before, or a prefix.
    fn makes_room(&mut self) -> Result<bool, Error> {
        // A cache that never grows would not get it back.
        let grows = self.cache.budget().growth() != Growth::None;
        Ok((grows && self.cache.trim()? > 0) || self.prefixes.let_go(&mut self.cache)?)
    }

    /// A batch that has room: prefixes that were not used for longest go first, then the newest request.
    fn next_batch(&mut self) -> Result<Batch, Error> {
        loop {
            let batch = self.batch()?;
            let runs = batch.token_runs();
            if self.cache.fits(&runs)? {
                block_on(self.cache.reserve_for_append(&runs))?;
                return Ok(batch);
            }
            if !self.makes_room()? {
                self.preempt()?;
            }
        }
    }

    /// The next tokens of everyone: decoded tokens first, then parts of prompts that have rows left.
    fn batch(&self) -> Result<Batch, Error> {
        let (mut decoded, mut parts) = (Vec::new(), Vec::new());
        for &Running { request, slot } in &self.running {
            let (start, text) = (self.cache.length(slot)?, &self.texts[request]);
            let left = self.requests[request].prompt.len().saturating_sub(start);
            let run = match left {
                0 => TokenRun::decode(slot),
                left => TokenRun::prompt(slot, left.min(self.settings.chunk)),
            };
            let end = start + run.tokens();
            let answers = end == text.len();
            let of = BatchRun { request, run, start, tokens: text[start..end].to_vec(), answers };
            if left == 0 { decoded.push(of) } else { parts.push(of) }
        }
        let mut runs = decoded;
        let mut rows = runs.len();
        for part in parts {
            // A part is never cut shorter: what it is stored as must not depend on others.
            if rows + part.tokens.len() <= self.settings.rows {
                rows += part.tokens.len();
                runs.push(part);
            }
        }
        Ok(Batch::new(runs))
    }

    /// Takes the newest request to the host.
    fn preempt(&mut self) -> Result<(), Error> {
        let Some(Running { request, slot }) = self.running.pop() else {
            return Err(Error::Settings { reason: "a step without requests has no room".into() });
        };
        if self.running.is_empty() {
            return Err(Error::Budget { request });
        }
        let swapped = if self.cache.length(slot)? > 0 { Some(block_on(self.cache.swap_out(slot))?) } else { None };
        self.waiting.push_front(Waiting { request, swapped });
        self.full = true;
        self.recorder.preempted();
        Ok(())
    }

    /// Runs a step of all layers, and commits it.
    fn step(&mut self, model: &mut impl Model<B>, batch: &Batch) -> Result<Vec<u32>, Error> {
        self.cache.begin_append(&batch.token_runs())?;
        match model.forward(&mut self.cache, batch) {
            Ok(tokens) => {
                self.cache.commit()?;
                Ok(tokens)
            }
            Err(error) => {
                self.cache.abandon(); // no layer is ahead of the others, and the pages are free again
                Err(Error::Model(error))
            }
        }
    }

    /// Takes the tokens of a step, keeps prompts that are stored now, and lets requests go that are done.
    fn take(&mut self, batch: &Batch, tokens: &[u32], end: Option<u32>, now: Duration) -> Result<(), Error> {
        let answering: Vec<&BatchRun> = batch.runs().iter().filter(|of| of.answers).collect();
        if answering.len() != tokens.len() {
            return Err(Error::Tokens { given: tokens.len(), needed: answering.len() });
        }
        for (of, &token) in answering.iter().zip(tokens) {
            let (request, slot) = (of.request, of.run.sequence());
            let prompt = &self.requests[request].prompt;
            if self.settings.prefixes > 0 && self.cache.length(slot)? == prompt.len() {
                self.prefixes.keep(&mut self.cache, prompt, slot)?;
            }
            self.texts[request].push(token);
            self.recorder.token(request, now);
            let generated = self.texts[request].len() - prompt.len();
            if generated == self.requests[request].output || Some(token) == end {
                self.cache.clear(slot)?;
                self.running.retain(|running| running.request != request);
                self.full = false;
            }
        }
        Ok(())
    }
}
