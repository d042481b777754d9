//! Random keys, values and queries that look like real ones: outlier channels, a constant channel, a sink token.

use kvpack::AttentionShape;
use kvpack::format::TILE_TOKENS;
use kvpack::plan::RowLayout;

/// A small deterministic generator (xorshift).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// 0 .. n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.word() >> 11) as usize % n
    }

    /// −1 .. 1.
    pub fn unit(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// About a normal distribution of variance 1.
    pub fn normal(&mut self) -> f32 {
        (0..3).map(|_| self.unit()).sum()
    }
}

/// Keys and values of one sequence, `[kv_heads, tokens, head_dim]`, and a query `[query_heads, head_dim]`.
pub struct Rows {
    pub shape: AttentionShape,
    pub tokens: usize,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    pub query: Vec<f32>,
}

impl Rows {
    /// Random rows. Channel 3 of the keys has an offset of −12, channel 5 of keys and values is constant, and token 0
    /// is a sink: its score with every query is 14 above the rest.
    pub fn new(shape: AttentionShape, tokens: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let head_dim = shape.head_dim();
        let rows = |random: &mut Random, offset: f32| -> Vec<f32> {
            let element = |i: usize, x: f32| match i % head_dim {
                3 => x + offset,
                5 => 0.75,
                _ => x,
            };
            (0..shape.kv_heads() * tokens * head_dim).map(|i| element(i, random.normal())).collect()
        };
        let mut keys = rows(&mut random, -12.0);
        let values = rows(&mut random, 0.5);
        let mut query: Vec<f32> = (0..shape.query_heads() * head_dim).map(|_| random.normal()).collect();
        // The sink: one channel in which all queries agree.
        query.chunks_exact_mut(head_dim).for_each(|query| query[0] = 2.0);
        keys.chunks_exact_mut(tokens * head_dim).for_each(|head| head[0] += 7.0 * (head_dim as f32).sqrt());
        Self { shape, tokens, keys, values, query }
    }

    /// A token without weight has values far above all others. Beside it lie two with the largest score: one in its block
    /// of KIVI's weights of a byte, the other in its lane of `attend_drafts`. Each other token weighs about 2^-13 of one
    /// of these, so that 16,384 weigh about as much as both. Whoever scales weights by the largest value of a block, a
    /// lane or a step loses the rest.
    pub fn with_outliers(shape: AttentionShape, tokens: usize, seed: u64) -> Self {
        const OUTLIER: usize = 3 * TILE_TOKENS;
        const LARGEST: [usize; 2] = [OUTLIER + 1, OUTLIER + 8];
        let mut random = Random::new(seed);
        let head_dim = shape.head_dim();
        // What a query of 2 in channel 0 turns into a score of 1 in powers of two.
        let one = (head_dim as f32).sqrt() / 2.0 / std::f32::consts::LOG2_E;
        let mut keys = vec![0.0; shape.kv_heads() * tokens * head_dim];
        for (row, key) in keys.chunks_exact_mut(head_dim).enumerate() {
            key[0] = match row % tokens {
                OUTLIER => -40.0 * one,
                token if LARGEST.contains(&token) => 0.0,
                _ => -13.1 * one,
            };
        }
        let values = (0..keys.len()).map(|i| match i / head_dim % tokens {
            OUTLIER => 3e4 * random.unit().signum(),
            token if LARGEST.contains(&token) => random.unit(),
            _ => 0.125 + 0.0625 * random.unit(),
        });
        Self { shape, tokens, values: values.collect(), query: vec![0.0; shape.query_heads() * head_dim], keys }
    }

    /// A sink without values: token 0, 17 nats above all others. Their weights are what the output is made of.
    pub fn with_empty_sink(shape: AttentionShape, tokens: usize, seed: u64) -> Self {
        const NATS: f32 = 17.0;
        let mut rows = Self::new(shape, tokens, seed);
        let head_dim = shape.head_dim();
        rows.keys.fill(0.0);
        for head in 0..shape.kv_heads() {
            let first = head * tokens * head_dim;
            rows.keys[first] = NATS / 2.0 * (head_dim as f32).sqrt();
            rows.values[first..first + head_dim].fill(0.0);
        }
        rows
    }

    pub fn layout(&self) -> RowLayout {
        RowLayout::head_major(self.tokens, &self.shape)
    }
}
