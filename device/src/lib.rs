//! What a library of GPU kernels needs of wgpu and CUDA, without a kernel: adapters and drivers, capabilities, memory,
//! tensors, kernels from source to launch, errors.
//!
//! [kvpack](https://github.com/kvpack/kvpack) packs and reads the key-value caches of transformers on this layer,
//! `kvpack-weights` multiplies with quantised weights. Neither knows the other. An engine that uses both hands each the
//! same device or stream.
//!
//! | item | is |
//! | --- | --- |
//! | [`Error`] | the error of all these libraries, so that `?` and matches work across them |
//! | [`ElementType`], [`Elements`] | dense tensors in host memory |
//! | [`Check`] | something that a device must do right, by name |
//! | `wgpu` | kernels in WGSL (feature `wgpu`) |
//! | `cuda` | kernels in CUDA C++ (feature `cuda`) |
//!
//! # What may be launched
//!
//! A launch is checked, or it is `unsafe`: [`wgpu::Launch::checked`](crate::wgpu::Launch::checked) compiles a kernel
//! with all run-time checks of wgpu; `wgpu::Launch::trusted` and `cuda::launch::KernelLaunch::run` rely on the
//! caller's argument that the kernel stays within its buffers and ends. A library makes that argument once, for all its
//! plans: `docs/in-bounds.md` is the one of kvpack.

// docs.rs shows the feature that an item needs; only nightly compilers can.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod check;
#[cfg(feature = "cuda")]
pub mod cuda;
mod element;
mod error;
mod heads;
mod key_or_value;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use check::Check;
pub use element::{ElementType, Elements};
pub use error::{Error, Result};
pub use heads::{HEAD_DIMS, MOST_HEADS};
pub use key_or_value::KeyOrValue;
