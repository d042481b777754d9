//! One sequence over several devices.
//!
//! A context that outgrows one device is split over *ranks*, one device each. Every rank attends to the tokens that it
//! stores, and the attention states of all ranks are merged exactly.
//!
//! | type | is |
//! | --- | --- |
//! | [`Placement`] | which rank stores which positions: a pure function |
//! | [`ContextParallel`] | one rank's cache, and the exchange with the others |
//! | [`SharedPrompt`] | a prompt of which a part stays: statistics of a policy over the keys of all ranks |
//! | [`HeadParallel`] | KV heads by rank, without an exchange |
//! | [`Transport`] | carries tensors between ranks: [`ThreadTransport`], `cuda::peer::Peer`, `cuda::nccl::Nccl`, or your own |
//! | [`StepTime`] | what a step takes on one rank and on several, computed from measurements: whether splitting pays |

mod agreement;
mod compress_again;
mod context_parallel;
mod evictions;
mod head_parallel;
mod purpose;
mod rejoin;
mod shared_prompt;
mod statistics;
mod step_time;
mod threads;
mod transport;

pub use crate::plan::{MOST_RANKS, Placement, RankShare};
pub use context_parallel::ContextParallel;
pub use head_parallel::HeadParallel;
pub use rejoin::Rejoined;
pub use shared_prompt::SharedPrompt;
pub use step_time::{ExchangeTime, ReadTime, SplitTime, StepTime};
pub use threads::ThreadTransport;
pub use transport::{Reduction, StateExchange, TensorOf, Transport};
