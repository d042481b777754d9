//! kvpack in the browser: the page `web/index.html`, and a small interface for engines in JavaScript.
//!
//! The modules `check`, `bench` and `quality` are the page's three measurements over any [`Backend`](kvpack::Backend):
//! WebGPU, or the CPU reference in wasm where there is no WebGPU. `page` and `engine` hand them to JavaScript and
//! exist in wasm alone.

pub mod bench;
pub mod check;
#[cfg(target_family = "wasm")]
mod engine;
#[cfg(target_family = "wasm")]
mod javascript;
#[cfg(target_family = "wasm")]
mod page;
pub mod quality;
