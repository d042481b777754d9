//! One sequence over several devices.
//!
//! A context that outgrows one device is split over *ranks*, one device each. Every rank attends to the tokens that it
//! holds, and the attention states of all ranks are merged exactly.
//!
//! A [`Transport`] carries tensors between ranks: `cuda::nccl` and `cuda::peer` between GPUs. It is no network of
//! kvpack's own.

mod transport;

pub use transport::{Reduction, StateExchange, TensorOf, Transport};
