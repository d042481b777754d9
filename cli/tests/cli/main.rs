//! The `kvpack` binary from outside.

mod commands;
mod common;
mod demo;
mod golden;
mod help;
mod hostile_dumps;
mod hostile_models;
mod quantize;
mod query_precision;
mod rust_version;
mod shader;
mod standard_output;
#[cfg(unix)]
mod written_files;
