//! A scheduler for engines on kvpack: a queue of requests, served from one [`ModelCache`](kvpack::cache::ModelCache).
//!
//! | file | holds |
//! | --- | --- |
//! | `request` | requests, and the JSON lines that they are read from |
//! | `batch` | the tokens of a step, and the model that computes them |
//! | `schedule` | who runs, who waits, who is preempted |
//! | `figures` | throughput, latencies and pages, as a table and as JSON |
//! | `budget` | as many requests of one length at a time as a budget holds |
//! | `contexts` | random keys and values in place of prompts |
//! | `decoder` | the shape of a decoder and its tensors by name, for hosts without a GGUF reader |
//! | `tiny` | a small decoder with random weights, for tests |
//! | `study` | studies of whole models, with the feature `studies` |
//!
//! A request joins and leaves in any step. Its prompt is computed in parts, next to decoded tokens of others. Prompts
//! that begin alike share pages. When pages run out, the newest request is swapped out to the host, and later continues
//! bit for bit. The parts of a prompt do not depend on other requests, so neither do the texts.
//!
//! No tensor library is used here: a host implements [`Model`].

mod batch;
mod budget;
mod contexts;
pub mod decoder;
mod error;
mod figures;
mod request;
mod schedule;
#[cfg(feature = "studies")]
pub mod study;
pub mod tiny;

pub use batch::{Batch, BatchRun, Model};
pub use budget::{EqualRequests, generated_in_f16};
pub use contexts::{Contexts, similarities};
pub use error::Error;
pub use figures::{Figures, Pages, Percentiles};
pub use request::{Prompt, Request, read_requests};
pub use schedule::{Progress, Scheduler, Served, Settings};
