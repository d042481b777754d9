//! The keys, values and queries of a case, from its seed.

use rayon::prelude::*;

use super::attend::{AttendCase, DataKind, InputLayout, RowOrder, SinkPlace};
use crate::cpu::CpuTensor;
use crate::format::AttentionShape;
use crate::plan::{ElementType, RowLayout};
use crate::{Error, Result};

/// Nats by which the sink's score exceeds the other scores, taken together as the logarithm of their mean exponential.
/// Over thousands of tokens the others still have a few thousandths of the weight, although each lies far below the
/// sink's.
pub const SINK_NATS: f64 = 14.0;

/// Number of tokens whose mean is the centre of a sequence, for centred keys: fewer than a tile.
pub(super) const CENTRE_TOKENS: usize = 64;

/// Approximate share of the weight that goes to the landmark.
const LANDMARK_SHARE: f64 = 0.15;

/// The parameters of the data of one sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DataRecipe {
    /// Heads of the layer.
    pub shape: AttentionShape,
    /// Tokens of the sequence, at least 1.
    pub tokens: usize,
    /// Queries of each query head, at least 1.
    pub queries: usize,
    /// The kind of keys and values.
    pub kind: DataKind,
    /// The place of the sink.
    pub sink: SinkPlace,
    /// Layout of keys and values in their tensors.
    pub input: InputLayout,
    /// The same seed gives the same data.
    pub seed: u64,
}

/// The dense tensors of one sequence.
#[derive(Clone, Debug)]
pub struct SequenceData {
    /// Layout of the rows of keys and of values.
    pub rows: RowLayout,
    /// The keys.
    pub keys: CpuTensor,
    /// The values.
    pub values: CpuTensor,
    /// The queries, `[queries, query_heads, head_dim]`, already rounded to the element type of the input.
    pub queries: Vec<f32>,
}

/// The data of every sequence of a case, the same on every run.
pub fn sequences(case: &AttendCase) -> Vec<SequenceData> {
    let recipe = |sequence| DataRecipe {
        shape: case.shape,
        tokens: case.tokens(sequence),
        queries: case.queries_of(sequence),
        kind: case.data,
        sink: case.sink,
        input: case.input,
        seed: case.seed.wrapping_mul(1 << 32).wrapping_add(sequence as u64),
    };
    (0..case.sequences.len()).map(|sequence| SequenceData::new(&recipe(sequence))).collect()
}

impl SequenceData {
    /// The data of one sequence.
    pub fn new(recipe: &DataRecipe) -> Self {
        let (shape, tokens) = (&recipe.shape, recipe.tokens);
        let heads: Vec<HeadData> =
            (0..shape.kv_heads()).into_par_iter().map(|kv_head| HeadData::new(recipe, kv_head)).collect();
        let joined = |part: fn(&HeadData) -> &Vec<f32>| heads.iter().flat_map(part).copied().collect::<Vec<f32>>();
        let (keys, rows) = in_order(recipe.input.order, joined(|head| &head.keys), tokens, shape);
        let (values, _) = in_order(recipe.input.order, joined(|head| &head.values), tokens, shape);
        let of_head = shape.group() * shape.head_dim();
        let queries = (0..recipe.queries)
            .flat_map(|query| heads.iter().flat_map(move |head| &head.queries[query * of_head..][..of_head]))
            .copied();
        let queries = CpuTensor::from_f32(queries.collect(), recipe.input.elements);
        Self {
            rows,
            keys: CpuTensor::from_f32(keys, recipe.input.elements),
            values: CpuTensor::from_f32(values, recipe.input.elements),
            queries: queries.to_f32(),
        }
    }
}

/// Parts of a sequence that each have a landmark.
const PARTS: usize = 16;

impl SequenceData {
    /// The same data with a landmark in the middle of every sixteenth of the tokens: the key that queries look for.
    /// Without them the mean of thousands of tokens is that of most of them, and a kernel that leaves tiles out passes.
    pub(super) fn with_landmarks(self, shape: &AttentionShape) -> Self {
        let (mut keys, tokens) = (self.keys.to_f32(), self.rows.tokens);
        for kv_head in 0..shape.kv_heads() {
            let landmark = self.rows.row(tokens - 1, kv_head);
            let places = (0..PARTS).map(|part| (2 * part + 1) * tokens / (2 * PARTS));
            for place in places.filter(|&place| place > 0) {
                keys.copy_within(landmark..landmark + shape.head_dim(), self.rows.row(place, kv_head));
            }
        }
        Self { keys: CpuTensor::from_f32(keys, ElementType::F16), ..self }
    }

    /// Checks that these are the data of `tokens` tokens and one query of `shape`.
    pub(super) fn check(&self, shape: &AttentionShape, tokens: usize) -> Result<()> {
        let elements = |what, given, expected| {
            if given == expected {
                return Ok(());
            }
            let shape = format!("{tokens} tokens of {shape:?}");
            Err(Error::Elements { what, given, expected, shape })
        };
        elements("tokens", self.rows.tokens, tokens)?;
        self.rows.check("keys", self.keys.elements().len(), shape)?;
        self.rows.check("values", self.values.elements().len(), shape)?;
        elements("queries", self.queries.len(), shape.query_heads() * shape.head_dim())
    }
}

/// The data of one KV head and of the query heads that read it.
struct HeadData {
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
}

impl HeadData {
    fn new(recipe: &DataRecipe, kv_head: usize) -> Self {
        let mut random = Random::new(recipe.seed ^ (kv_head as u64) << 16);
        let (head_dim, tokens) = (recipe.shape.head_dim(), recipe.tokens);
        let channels = Channels::new(recipe.kind, head_dim, &mut random);
        let group = Group::new(&channels, kv_head, recipe, &mut random);
        let mut keys = channels.rows(tokens, &mut random);
        let (sink, landmark) = match recipe.sink {
            SinkPlace::First => (0, tokens - 1),
            SinkPlace::Middle => (tokens / 2, tokens - 1),
            SinkPlace::Last => (tokens - 1, 0),
        };
        group.plant(Target::Landmark, landmark, &mut keys, &channels);
        group.plant(Target::Sink, sink, &mut keys, &channels);
        let of_values = if recipe.kind == DataKind::BiasedKeys { DataKind::ChannelOffsets } else { recipe.kind };
        let values = Channels::new(of_values, head_dim, &mut random).rows(tokens, &mut random);
        let mut data = Self { keys, values, queries: group.queries };
        match recipe.kind {
            DataKind::EmptySink => data.values[sink * head_dim..][..head_dim].fill(0.0),
            DataKind::Small => data.make_small(),
            DataKind::Magnitudes => data.spread_magnitudes(kv_head, head_dim),
            DataKind::Ties => data.tie(&vec![1.0; head_dim], &mut random),
            DataKind::UnevenTies => {
                let factors: Vec<f32> = (0..head_dim).map(|channel| 1.0 + channel as f32 / 77.0).collect();
                data.tie(&factors, &mut random);
            }
            _ => {}
        }
        data
    }

    /// Keys and values times 2^-12 and queries times 2^12, which leaves the scores as they are.
    fn make_small(&mut self) {
        const FACTOR: f32 = 4096.0;
        self.keys.iter_mut().chain(&mut self.values).for_each(|x| *x /= FACTOR);
        self.queries.iter_mut().for_each(|x| *x *= FACTOR);
    }

    /// Every run of 32 tokens times a power of ten, each head from another one on.
    fn spread_magnitudes(&mut self, kv_head: usize, head_dim: usize) {
        for rows in [&mut self.keys, &mut self.values] {
            for (run, rows) in rows.chunks_mut(32 * head_dim).enumerate() {
                let power = (run + 5 * kv_head) % 10;
                rows.iter_mut().for_each(|x| *x *= 10f32.powi(power as i32 - 6));
            }
        }
    }

    /// Halves of a step from 0 to 15 steps, with both ends in every eight tokens of a channel and channels of a token.
    /// The largest of a channel is 15 times its factor.
    fn tie(&mut self, factors: &[f32], random: &mut Random) {
        for rows in [&mut self.keys, &mut self.values] {
            for (token, row) in rows.chunks_mut(factors.len()).enumerate() {
                for (channel, (x, factor)) in row.iter_mut().zip(factors).enumerate() {
                    let largest = 15.0 * factor;
                    *x = match (token + channel) % 8 {
                        0 => 0.0,
                        1 => largest,
                        _ => random.below(31) as f32 / 2.0 * (largest / 15.0),
                    };
                }
            }
        }
    }
}

/// Puts `[kv_heads, tokens, head_dim]` rows into the requested order.
fn in_order(order: RowOrder, rows: Vec<f32>, tokens: usize, shape: &AttentionShape) -> (Vec<f32>, RowLayout) {
    let head_major = RowLayout::head_major(tokens, shape);
    match order {
        RowOrder::HeadMajor => (rows, head_major),
        RowOrder::TokenMajor => {
            let row = |token, head| &rows[head_major.row(token, head)..][..shape.head_dim()];
            let reordered =
                (0..tokens).flat_map(|token| (0..shape.kv_heads()).flat_map(move |head| row(token, head)).copied());
            (reordered.collect(), RowLayout::token_major(tokens, shape))
        }
    }
}

/// How the channels of one head are distributed.
struct Channels {
    kind: DataKind,
    offset: Vec<f32>,
    spread: Vec<f32>,
}

impl Channels {
    fn new(kind: DataKind, head_dim: usize, random: &mut Random) -> Self {
        let heavy = random.below(16);
        let mut offset: Vec<f32> = (0..head_dim).map(|_| random.gaussian()).collect();
        let mut spread = vec![1.0; head_dim];
        for channel in (heavy..head_dim).step_by(16) {
            offset[channel] *= 6.0;
            spread[channel] = 3.0;
        }
        match kind {
            DataKind::ChannelOffsets | DataKind::Outliers | DataKind::EmptySink => {}
            DataKind::Small | DataKind::Magnitudes => {}
            // Every element is set.
            DataKind::Ties | DataKind::UnevenTies => {}
            DataKind::BiasedKeys => {
                for (channel, bias) in [(5, 300.0), (head_dim / 2, -300.0), (head_dim - 2, 300.0)] {
                    offset[channel] += bias;
                }
            }
            DataKind::ConstantChannels => {
                for channel in (0..head_dim).step_by(3) {
                    spread[channel] = 0.0;
                    offset[channel] *= (channel % 2) as f32;
                }
            }
            DataKind::ConstantTokens => spread.fill(0.0),
        }
        Self { kind, offset, spread }
    }

    /// Rows `[tokens, head_dim]`.
    fn rows(&self, tokens: usize, random: &mut Random) -> Vec<f32> {
        let mut rows = Vec::with_capacity(tokens * self.offset.len());
        for _ in 0..tokens {
            for (offset, spread) in self.offset.iter().zip(&self.spread) {
                let stretch = if self.kind == DataKind::Outliers && random.below(500) == 0 { 20.0 } else { 1.0 };
                rows.push(offset + spread * stretch * random.gaussian());
            }
        }
        rows
    }

    /// A unit vector over the channels that vary (over all if none does), orthogonal to `other`.
    fn direction(&self, other: Option<&[f32]>, random: &mut Random) -> Vec<f32> {
        let free = self.kind != DataKind::ConstantChannels;
        let mut direction: Vec<f32> =
            self.spread.iter().map(|&spread| if free || spread > 0.0 { random.sign() } else { 0.0 }).collect();
        if let Some(other) = other {
            let along = dot(&direction, other) as f32;
            direction.iter_mut().zip(other).for_each(|(x, o)| *x -= along * o);
        }
        let length = dot(&direction, &direction).sqrt() as f32;
        direction.iter_mut().for_each(|x| *x /= length);
        direction
    }
}

/// The token that a query head looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// The token that outshines all others.
    Sink,
    /// The token at the other end of the sequence, which has a fair share of the weight, so that losing it shows.
    Landmark,
}

/// The queries of the heads that share one KV head.
struct Group {
    /// `[queries, group, head_dim]`.
    queries: Vec<f32>,
    /// The target of each of them.
    targets: Vec<Target>,
    sink_direction: Vec<f32>,
    landmark_direction: Vec<f32>,
}

impl Group {
    fn new(channels: &Channels, kv_head: usize, recipe: &DataRecipe, random: &mut Random) -> Self {
        let group = recipe.shape.group();
        let sink_direction = channels.direction(None, random);
        let landmark_direction = channels.direction(Some(&sink_direction), random);
        let target = |query: usize| {
            let turn = query % group + query / group + kv_head;
            if turn.is_multiple_of(2) { Target::Sink } else { Target::Landmark }
        };
        let mut group = Self {
            queries: Vec::new(),
            targets: (0..recipe.queries * group).map(target).collect(),
            sink_direction,
            landmark_direction,
        };
        for target in group.targets.clone() {
            let query = group.query(target, recipe.shape.head_dim(), random);
            group.queries.extend(query);
        }
        group
    }

    /// A Gaussian query with a component of √head_dim along the direction of its target, which adds about 1 to the
    /// spread of the other scores, and none along the other direction.
    fn query(&self, target: Target, head_dim: usize, random: &mut Random) -> Vec<f32> {
        let mut query: Vec<f32> = (0..head_dim).map(|_| random.gaussian()).collect();
        for (direction, of) in [(&self.sink_direction, Target::Sink), (&self.landmark_direction, Target::Landmark)] {
            let share = if of == target { (head_dim as f32).sqrt() } else { 0.0 };
            let missing = share - dot(&query, direction) as f32;
            query.iter_mut().zip(direction).for_each(|(q, u)| *q += missing * u);
        }
        query
    }

    /// Replaces the key of `token` so that the heads that look for it score it as their target requires: the least of
    /// them exactly, the others a little higher.
    fn plant(&self, target: Target, token: usize, keys: &mut [f32], channels: &Channels) {
        let direction = match target {
            Target::Sink => &self.sink_direction,
            Target::Landmark => &self.landmark_direction,
        };
        let head_dim = direction.len();
        let others = (keys.len() / head_dim - 1).max(1) as f64;
        let nats = match target {
            Target::Sink => SINK_NATS,
            Target::Landmark => (others * LANDMARK_SHARE / (1.0 - LANDMARK_SHARE)).ln(),
        };
        let mut length = 0.0f64;
        for (query, _) in self.queries.chunks(head_dim).zip(&self.targets).filter(|(_, of)| **of == target) {
            let wanted = (level_of_others(query, keys, token) + nats) * (head_dim as f64).sqrt();
            length = length.max((wanted - dot(query, &channels.offset)) / dot(query, direction));
        }
        let key = &mut keys[token * head_dim..][..head_dim];
        for ((key, offset), u) in key.iter_mut().zip(&channels.offset).zip(direction) {
            *key = offset + length as f32 * u;
        }
    }
}

/// Logarithm of the mean exponential of the scores of all tokens but one; 0 if there are no others.
fn level_of_others(query: &[f32], keys: &[f32], token: usize) -> f64 {
    let head_dim = query.len();
    let others = keys.chunks(head_dim).enumerate().filter(|(index, _)| *index != token);
    let scores: Vec<f64> = others.map(|(_, key)| dot(query, key) / (head_dim as f64).sqrt()).collect();
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mean = scores.iter().map(|score| (score - highest).exp()).sum::<f64>() / scores.len() as f64;
    if scores.is_empty() { 0.0 } else { highest + mean.ln() }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// The generator of all conformance data.
pub(super) struct Random(fastrand::Rng);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// A standard normal deviate (Box and Muller).
    pub(super) fn gaussian(&mut self) -> f32 {
        let (radius, angle) = (1.0 - self.0.f64(), std::f64::consts::TAU * self.0.f64());
        ((-2.0 * radius.ln()).sqrt() * angle.cos()) as f32
    }

    fn sign(&mut self) -> f32 {
        if self.0.bool() { 1.0 } else { -1.0 }
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0.usize(..end)
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        self.0.shuffle(items);
    }
}
