//! Kernel `prepare_query`: prepares the query for products with packed keys.

use rayon::prelude::*;

use super::dense::read_row;
use super::store::CpuStore;
use super::tile_lines::{Factor, TileLines};
use crate::format::{Direction, Grouping, KeyOrValue};
use crate::plan::{Elements, StoreWork};

/// The prepared queries of a segment.
///
/// Post-scaling (the paper's eq. 5): with one range per channel, `q · (s⊙c + m) = (q⊙s) · c + q·m`. So the query is
/// multiplied by the scales once per span (where keys have no ranges of spans, once), and `q·m` is one number to add.
/// The softmax scale is folded into both.
pub(super) struct PreparedQueries {
    steps: usize,
    group: usize,
    kv_heads: usize,
    /// `[prepared query][query_head][step]`, in the order of lines.
    factors: Vec<Factor>,
    /// The same in the basis of the keys' sketches; empty without sketches.
    sketch_factors: Vec<Factor>,
    /// `[prepared query][query_head]`: the number added to every score; with ranges per token, the factor of their
    /// minimum.
    biases: Vec<f32>,
}

/// The queries of the heads that share one KV head.
#[derive(Clone, Copy)]
pub(super) struct GroupQueries<'a> {
    /// `[query head of the group][step]`.
    pub(super) factors: &'a [Factor],
    /// `[query head of the group][step]`; empty without sketches.
    pub(super) sketch_factors: &'a [Factor],
    /// Per query head of the group.
    pub(super) biases: &'a [f32],
}

impl PreparedQueries {
    /// Prepares the queries that the segment names, of `[rows, query_heads, head_dim]`.
    pub(super) fn new(segment: &StoreWork, store: &CpuStore, lines: &TileLines, queries: Elements<'_>) -> Self {
        let shape = store.shape();
        let (query_heads, head_dim, steps) = (shape.query_heads(), shape.head_dim(), lines.steps());
        let rows = segment.queries().len() * query_heads;
        let (mut factors, mut biases) = (vec![Factor::default(); rows * steps], vec![0.0; rows]);
        let sketched = store.tensor(KeyOrValue::Key).format.sketched();
        let sketch_rows = if sketched.is_some() { rows } else { 0 };
        let mut sketch_factors = vec![Factor::default(); sketch_rows * steps];
        let prepared = |row: usize| {
            let (of, head) = (&segment.queries()[row / query_heads], row % query_heads);
            let mut query = vec![0.0; head_dim];
            read_row(queries, (of.row as usize * query_heads + head) * head_dim, &mut query);
            query.iter_mut().for_each(|x| *x *= segment.scoring().scale());
            // H is orthonormal: rotated queries and keys have the products of plain ones.
            if let Some(rotation) = store.tensor(KeyOrValue::Key).format.rotation() {
                rotation.turn_checked(Direction::Forward, &mut query);
            }
            query
        };
        sketch_factors.par_chunks_exact_mut(steps).enumerate().for_each(|(row, factor)| {
            let mut query = prepared(row);
            let rotations = sketched.into_iter().flat_map(|format| format.sketch_rotations(head_dim));
            rotations.for_each(|rotation| rotation.turn_checked(Direction::Forward, &mut query));
            lines.permute(&query, factor);
        });
        factors.par_chunks_exact_mut(steps).zip(&mut biases).enumerate().for_each(|(row, (factor, bias))| {
            let (of, head) = (&segment.queries()[row / query_heads], row % query_heads);
            let mut query = prepared(row);
            let keys = store.tensor(KeyOrValue::Key);
            let ranges = keys.head_ranges(of.range_slot as usize, head / shape.group());
            *bias = match keys.format.grouping() {
                Some(Grouping::Token) => sum(query.iter().map(|&q| f64::from(q))),
                _ => sum(query.iter().zip(ranges).map(|(&q, range)| f64::from(q) * f64::from(range.min))),
            };
            query.iter_mut().zip(ranges).for_each(|(q, range)| *q *= range.scale);
            lines.permute(&query, factor);
        });
        Self { steps, group: shape.group(), kv_heads: shape.kv_heads(), factors, sketch_factors, biases }
    }

    /// The heads of a prepared query that read one KV head.
    pub(super) fn group(&self, query: usize, kv_head: usize) -> GroupQueries<'_> {
        let row = (query * self.kv_heads + kv_head) * self.group;
        GroupQueries {
            factors: &self.factors[row * self.steps..][..self.group * self.steps],
            sketch_factors: self.sketch_factors.get(row * self.steps..).unwrap_or_default(),
            biases: &self.biases[row..][..self.group],
        }
    }
}

fn sum(terms: impl Iterator<Item = f64>) -> f32 {
    terms.sum::<f64>() as f32
}
