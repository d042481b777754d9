//! Throughput, latencies and pages of a queue.

use std::fmt;
use std::time::Duration;

use kvpack::backend::Backend;
use kvpack::cache::{ModelCache, StoreMemory};
use serde::Serialize;

use crate::{Batch, Request};

/// What a queue took.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Requests.
    pub requests: usize,
    /// Steps of the model.
    pub steps: usize,
    /// Seconds from the start of the server to the last token.
    pub seconds: f64,
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Prompt tokens that were there already: beginnings of earlier prompts.
    pub shared_tokens: usize,
    /// Generated tokens.
    pub output_tokens: usize,
    /// Generated tokens per second, over all requests.
    pub tokens_per_second: f64,
    /// Milliseconds from the arrival of a request to its first token.
    pub first_token_ms: Percentiles,
    /// Milliseconds from one token of a request to its next.
    pub token_ms: Percentiles,
    /// Requests in one step.
    pub most_requests_in_a_step: usize,
    /// Requests that were swapped out.
    pub preemptions: usize,
    /// Pages of the cache.
    pub pages: Pages,
}

/// The middle and the tail of a distribution; 0 where it is empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half of the values are no larger.
    pub p50: f64,
    /// 99 of 100 values are no larger.
    pub p99: f64,
}

/// Pages of all layers and formats, of 128 tokens of one layer each.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pages {
    /// Pages that the cache has.
    pub allocated: usize,
    /// Most pages in use after a step.
    pub most_in_use: usize,
    /// Bytes of all pages.
    pub allocated_bytes: u64,
    /// Most bytes in use after a step.
    pub most_in_use_bytes: u64,
    /// Most pages in use after a step, by store, as [`CacheMemory::stores`](kvpack::cache::CacheMemory::stores) has them.
    pub most_by_store: Vec<usize>,
}

/// Collects what figures are made of.
pub(crate) struct Recorder {
    arrivals: Vec<Duration>,
    prompt_tokens: usize,
    /// When each token of a request came.
    tokens: Vec<Vec<Duration>>,
    steps: usize,
    shared: usize,
    preemptions: usize,
    most_requests: usize,
    pages: Pages,
}

impl Recorder {
    pub(crate) fn new(requests: &[Request]) -> Self {
        Self {
            arrivals: requests.iter().map(|request| request.arrival).collect(),
            prompt_tokens: requests.iter().map(|request| request.prompt.len()).sum(),
            tokens: vec![Vec::new(); requests.len()],
            steps: 0,
            shared: 0,
            preemptions: 0,
            most_requests: 0,
            pages: Pages::default(),
        }
    }

    pub(crate) fn step<B: Backend>(&mut self, cache: &ModelCache<B>, batch: &Batch) {
        self.steps += 1;
        self.most_requests = self.most_requests.max(batch.runs().len());
        let memory = cache.memory();
        let sum = |of: fn(&StoreMemory) -> usize| memory.stores().iter().map(of).sum();
        let pages = &mut self.pages;
        pages.allocated = sum(|store| store.pages);
        pages.most_in_use = pages.most_in_use.max(sum(|store| store.pages_in_use));
        pages.allocated_bytes = memory.allocated_bytes();
        pages.most_in_use_bytes = pages.most_in_use_bytes.max(memory.in_use_bytes());
        pages.most_by_store.resize(memory.stores().len(), 0);
        for (most, store) in pages.most_by_store.iter_mut().zip(memory.stores()) {
            *most = (*most).max(store.pages_in_use);
        }
    }

    pub(crate) fn found(&mut self, tokens: usize) {
        self.shared += tokens;
    }

    pub(crate) const fn preempted(&mut self) {
        self.preemptions += 1;
    }

    pub(crate) fn token(&mut self, request: usize, now: Duration) {
        self.tokens[request].push(now);
    }

    pub(crate) fn generated(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }

    pub(crate) fn figures(&self, elapsed: Duration) -> Figures {
        let first = self.tokens.iter().zip(&self.arrivals);
        let first = first.filter_map(|(tokens, arrival)| Some(tokens.first()?.saturating_sub(*arrival)));
        let gaps = self.tokens.iter().flat_map(|tokens| tokens.windows(2).map(|pair| pair[1] - pair[0]));
        let (seconds, output_tokens) = (elapsed.as_secs_f64(), self.generated());
        Figures {
            requests: self.tokens.len(),
            steps: self.steps,
            seconds,
            prompt_tokens: self.prompt_tokens,
            shared_tokens: self.shared,
            output_tokens,
            tokens_per_second: if seconds > 0.0 { output_tokens as f64 / seconds } else { 0.0 },
            first_token_ms: Percentiles::of(first),
            token_ms: Percentiles::of(gaps),
            most_requests_in_a_step: self.most_requests,
            preemptions: self.preemptions,
            pages: self.pages.clone(),
        }
    }
}

impl Percentiles {
    /// Of times, in milliseconds.
    fn of(times: impl Iterator<Item = Duration>) -> Self {
        let mut times: Vec<Duration> = times.collect();
        times.sort_unstable();
        let at = |percent: usize| match times.len() {
            0 => 0.0,
            count => times[(count * percent).div_ceil(100).max(1) - 1].as_secs_f64() * 1e3,
        };
        Self { p50: at(50), p99: at(99) }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let Pages { allocated, most_in_use, allocated_bytes, most_in_use_bytes, .. } = self.pages;
        let rows = [
            ("requests", format!("{}, at most {} in a step", self.requests, self.most_requests_in_a_step)),
            ("prompt tokens", format!("{}, {} of them shared", self.prompt_tokens, self.shared_tokens)),
            ("output tokens", format!("{} in {} steps, {:.3} s", self.output_tokens, self.steps, self.seconds)),
            ("tokens/s", format!("{:.1}", self.tokens_per_second)),
            (
                "time to first token",
                format!("p50 {:.1} ms, p99 {:.1} ms", self.first_token_ms.p50, self.first_token_ms.p99),
            ),
            ("time per token", format!("p50 {:.2} ms, p99 {:.2} ms", self.token_ms.p50, self.token_ms.p99)),
            ("preemptions", self.preemptions.to_string()),
            (
                "pages in use",
                format!(
                    "at most {most_in_use} of {allocated} ({:.2} of {:.2} MiB)",
                    mib(most_in_use_bytes),
                    mib(allocated_bytes)
                ),
            ),
        ];
        rows.iter().try_for_each(|(name, value)| writeln!(f, "{name:<20} {value}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let of = |count: u64| Percentiles::of((1..=count).map(Duration::from_millis));
        assert_eq!(of(0), Percentiles::default());
        assert_eq!(of(1), Percentiles { p50: 1.0, p99: 1.0 });
        assert_eq!(of(100), Percentiles { p50: 50.0, p99: 99.0 });
        assert_eq!(of(1000), Percentiles { p50: 500.0, p99: 990.0 });
    }
}
