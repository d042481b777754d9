//! The blocked Walsh-Hadamard transform.

use anyhow::Result;
use kvpack::cpu;
use kvpack::format::{Direction, Rotation};

use super::Outputs;
use super::file::GoldenFile;

/// `hadamard`: rotated, and rotated back (the transform is its own inverse).
pub fn hadamard(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    let [_, head_dim] = file.input("x")?.axes()?;
    let rotation = Rotation::hadamard(file.number("order")? as usize);
    [("hadamard", Direction::Forth), ("hadamard back", Direction::Back)]
        .into_iter()
        .map(|(name, direction)| {
            let mut rows = file.input("x")?.f32()?;
            cpu::hadamard(&mut rows, head_dim, rotation, direction)?;
            Ok((name, Outputs::from([("y", rows.into_iter().map(f64::from).collect())])))
        })
        .collect()
}
