//! The tokens of a step, and the model that computes them.

use kvpack::backend::Backend;
use kvpack::cache::{ModelCache, TokenRun};

/// The tokens of a step: runs of different lengths and sequences, whose rows follow each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    runs: Vec<BatchRun>,
}

/// Consecutive tokens of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRun {
    /// The request, by its place in the queue.
    pub request: usize,
    /// Its tokens as the cache stores them.
    pub run: TokenRun,
    /// The position of the first.
    pub start: usize,
    /// The tokens themselves.
    pub tokens: Vec<u32>,
    /// Whether the model returns the token that follows the last of them.
    pub answers: bool,
}

impl Batch {
    /// These runs.
    pub const fn new(runs: Vec<BatchRun>) -> Self {
        Self { runs }
    }

    /// The next token of every sequence of a cache.
    ///
    /// # Errors
    /// That the cache has fewer sequences than there are tokens.
    pub fn decoding<B: Backend>(cache: &ModelCache<B>, tokens: &[u32]) -> kvpack::Result<Self> {
        let of = |(sequence, &token): (usize, &u32)| {
            let (run, start) = (TokenRun::decode(sequence), cache.length(sequence)?);
            Ok(BatchRun { request: sequence, run, start, tokens: vec![token], answers: true })
        };
        tokens.iter().enumerate().map(of).collect::<kvpack::Result<_>>().map(Self::new)
    }

    /// The runs.
    pub fn runs(&self) -> &[BatchRun] {
        &self.runs
    }

    /// The runs as the cache stores them.
    pub fn token_runs(&self) -> Vec<TokenRun> {
        self.runs.iter().map(|of| of.run).collect()
    }

    /// The token of every row.
    pub fn tokens(&self) -> Vec<u32> {
        self.runs.iter().flat_map(|of| of.tokens.iter().copied()).collect()
    }

    /// The position of every row.
    pub fn positions(&self) -> Vec<usize> {
        self.runs.iter().flat_map(|of| of.start..of.start + of.tokens.len()).collect()
    }

    /// The rows whose next token is asked for.
    pub fn answering_rows(&self) -> Vec<usize> {
        let mut end = 0;
        let last = self.runs.iter().map(|of| {
            end += of.tokens.len();
            (of.answers, end - 1)
        });
        last.filter(|(answers, _)| *answers).map(|(_, row)| row).collect()
    }
}

/// A model of a host, whose attention is the cache's.
pub trait Model<B: Backend> {
    /// Runs a batch through all layers. The cache has the step of the batch open; the model stores the keys and values
    /// of every layer and attends. Returns the next token of every run that answers, in the order of the runs.
    ///
    /// # Errors
    /// What the device or the cache reports. The scheduler then abandons the step.
    fn forward(
        &mut self,
        cache: &mut ModelCache<B>,
        batch: &Batch,
    ) -> Result<Vec<u32>, Box<dyn std::error::Error + Send + Sync>>;

    /// The token that ends a text, if the model has one.
    fn end(&self) -> Option<u32>;
}
