//! Conformance: the registry of checks that tests and `kvpack check` share.
//!
//! A [`Check`] is plain data: bits, sizes, the order of groups, types, the kind of activations. [`Check::run`] runs it
//! on a [`Backend`]. Products are compared with f64 products over **the stored codes**, dequantised weights with codes,
//! scales and zeros, exactly. Every product runs twice and must give the same bits, and tensors hold more elements
//! than a kernel may write, which must stay as they are.
//!
//! ```
//! use kvpack_weights::conformance::{self, Kind};
//! use kvpack_weights::Cpu;
//!
//! let dequantize = |check: &conformance::Check| check.kind() == Kind::Dequantize && check.is_quick();
//! let check = conformance::checks().into_iter().find(dequantize).unwrap();
//! let report = pollster::block_on(check.run(&Cpu))?;
//! assert!(report.passed(), "{}", report.reason());
//! # Ok::<(), kvpack_device::Error>(())
//! ```

mod cases;
mod check;
#[cfg(test)]
mod finds;
mod layer;
mod report;
mod run;

pub use crate::backend::{Backend, HostTensor, Product};
pub use cases::{checks, dequantize_cases, product_cases};
pub use check::{Check, Kind};
pub use layer::{Activations, InputOrder, LayerCase, ScaleKind};
pub use report::{Accuracy, Failure, Report};
