//! What can be wrong with requests, or stop a server.

/// Why requests cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A line of a file of requests.
    #[error(
        "line {line} of the requests: {reason}. A line is a JSON object such as \
         {{\"arrival_s\": 0.5, \"prompt\": \"Once\", \"output_tokens\": 64}}, or with \"prompt_tokens\": 200 instead of a text"
    )]
    Line {
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },

    /// A request that no server could serve.
    #[error("request {request}: {reason}")]
    Request {
        /// Its place in the queue.
        request: usize,
        /// What is wrong with it.
        reason: String,
    },

    /// Settings that do not fit each other or the cache.
    #[error("settings of the scheduler: {reason}")]
    Settings {
        /// What is wrong with them.
        reason: String,
    },

    /// The budget has no room for one request alone.
    #[error("the budget of the cache has no room for request {request}, which runs alone; reserve more pages")]
    Budget {
        /// Its place in the queue.
        request: usize,
    },

    /// A budget has no room for one of several equal requests.
    #[error("a budget of {bytes} bytes holds no request, as one takes {needed} bytes; give the cache more memory")]
    NoRequest {
        /// Bytes of the budget.
        bytes: u64,
        /// Bytes that a request took alone.
        needed: u64,
    },

    /// Requests that a budget was to hold at a time, and did not.
    #[error("{batch} requests of {recipe} did not fit at a time: {preempted} were preempted")]
    Preempted {
        /// How their keys and values are stored.
        recipe: String,
        /// Their number.
        batch: usize,
        /// How many were swapped out.
        preempted: usize,
    },

    /// The model returned another number of tokens than runs of the batch ask for.
    #[error("the model returned {given} tokens for a batch that asks for {needed}")]
    Tokens {
        /// Tokens that it returned.
        given: usize,
        /// Tokens that were asked for.
        needed: usize,
    },

    /// What the cache refused.
    #[error(transparent)]
    Cache(#[from] kvpack::Error),

    /// What the model reported.
    #[error(transparent)]
    Model(Box<dyn std::error::Error + Send + Sync>),
}
