//! A prompt whose chunks are stored in several formats, reordered and not.

use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{ChunkOrder, ChunkStores, KvCache, ModelRecipe, SpanPositions, StoreId, StoredSpan};
use kvpack::cpu::{DenseSegment, exact_attention, nmse};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use pollster::block_on;
use proptest::prelude::*;

use crate::random_rows::Random;

/// Precisions of the chunks of a context, and what is around it.
#[derive(Clone, Debug)]
pub struct Mixed {
    pub recipe: &'static str,
    pub chunk_tokens: usize,
    /// Tokens before the context.
    pub before: usize,
    pub stores: Vec<u8>,
    /// Tokens after the last whole chunk.
    pub after: usize,
    pub seed: u64,
}

/// Formats whose ranges do not reach beyond a chunk, so that chunks are stored alike wherever they lie. Queries have
/// two bytes: weights of one byte are rounded tile by tile, and so by their order, within 1e-4.
const RECIPES: [&str; 4] = [
    "cocktail+query=int16",
    "mix=f16:0.1,saw-int4:0.3,int8+query=int16",
    "mix=f16:0.1,saw-int4:0.3,int8+query=int16+centre",
    "mix=kivi:4:0.5,kivi:2+query=int16",
];

/// Of every key of a centred recipe, in some channels: what a projection with a bias gives all tokens.
const BIAS: f32 = 300.0;

pub fn mixed() -> impl Strategy<Value = Mixed> {
    let stores = prop::collection::vec(0u8..3, 1..14);
    let recipe = prop::sample::select(RECIPES.to_vec());
    let chunk_tokens = prop::sample::select(vec![32usize, 64, 96]);
    (recipe, chunk_tokens, 0usize..40, stores, 0usize..40, any::<u64>()).prop_map(
        |(recipe, chunk_tokens, before, stores, after, seed)| Mixed {
            recipe,
            chunk_tokens,
            before,
            stores,
            after,
            seed,
        },
    )
}

impl Mixed {
    fn tokens(&self) -> usize {
        self.before + self.stores.len() * self.chunk_tokens + self.after
    }

    fn store_ids(&self) -> Vec<StoreId> {
        self.stores.iter().map(|&store| StoreId(store)).collect()
    }

    /// Stores the prompt in the order of precision, and chunk by chunk, and compares attention over both: outputs of
    /// the backend within `limit` (NMSE), and in f64 over what is stored within 1e-10.
    ///
    /// # Panics
    /// When they differ by more.
    pub fn check<B: Backend + Clone>(&self, backend: &B, limit: f64) {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let recipe: ModelRecipe = self.recipe.parse().unwrap();
        let mut random = Random::new(self.seed);
        let mut rows = |count: usize| -> Vec<f32> { (0..count * 64).map(|_| random.normal()).collect() };
        let (mut keys, values, query) = (rows(self.tokens() * 2), rows(self.tokens() * 2), rows(4));
        if recipe.layer(0, &shape).is_centred() {
            keys.chunks_exact_mut(64).for_each(|key| [9, 20, 41].into_iter().for_each(|channel| key[channel] += BIAS));
        }
        let dense = keys.clone();
        let upload = |rows: &[f32]| block_on(backend.upload(rows.into())).unwrap();
        let (keys, values, queries) = (upload(&keys), upload(&values), upload(&query));
        let layout = RowLayout::token_major(self.tokens(), &shape);
        let cache = || KvCache::new(backend.clone(), shape, 1, recipe.layer(0, &shape)).unwrap();

        let context = TokenRange::new(self.before, self.tokens()).unwrap();
        let after_chunks = self.stores.len() * self.chunk_tokens + self.after;
        assert_eq!(context.len(), after_chunks);
        let whole = TokenRange::new(self.before, self.tokens() - self.after).unwrap();
        let chunks = ChunkStores::new(whole, self.chunk_tokens, self.store_ids()).unwrap();
        let spans = block_on(chunks.upload(backend, 2, self.tokens())).unwrap();
        let mut permuted = cache();
        block_on(permuted.prefill(0, layout, &keys, &values, &spans.prompt())).unwrap();

        let mut in_order = cache();
        let spans = block_on(chunks.with_order(ChunkOrder::OfContext).upload(backend, 2, self.tokens())).unwrap();
        block_on(in_order.prefill(0, layout, &keys, &values, &spans.prompt())).unwrap();
        self.check_runs(&in_order);

        self.check_order(&permuted);
        if recipe.layer(0, &shape).is_centred() {
            self.check_centred(&permuted, &dense);
        }
        let output = |cache: &KvCache<B>| {
            let output = block_on(cache.attend(&queries, ElementType::F32)).unwrap();
            block_on(backend.download(&output)).unwrap()
        };
        let [exact, expected] = [&permuted, &in_order].map(|cache| exact(&shape, cache, &query));
        let in_f64: Vec<f32> = exact.iter().map(|&x| x as f32).collect();
        // f32 holds a relative error of 6e-8, which squared is far below the limit.
        assert!(nmse(&in_f64, &expected) <= 1e-10, "{self:?}: {:e}", nmse(&in_f64, &expected));
        let of_output: Vec<f64> = output(&in_order).into_iter().map(f64::from).collect();
        let error = nmse(&output(&permuted), &of_output);
        assert!(error <= limit, "{self:?}: {error:e}");
    }

    /// Every span is consecutive tokens, and neighbouring chunks of one store share a span.
    fn check_runs<B: Backend>(&self, cache: &KvCache<B>) {
        let mut next = 0;
        let positions = block_on(cache.positions(0)).unwrap();
        for positions in &positions {
            let SpanPositions::Run(run) = positions else { panic!("{self:?}: nothing is gathered") };
            assert_eq!(run.start(), next, "{self:?}");
            next = run.end();
        }
        assert_eq!(next, self.tokens());
        let runs = self.stores.chunk_by(PartialEq::eq).count();
        let around = usize::from(self.before > 0) + usize::from(self.after > 0);
        assert!((runs..=runs + around).contains(&positions.len()), "{self:?}: {} spans", positions.len());
    }

    /// Chunks of every precision hold their keys to within a step of what the keys are without the bias.
    fn check_centred<B: Backend>(&self, cache: &KvCache<B>, dense: &[f32]) {
        let positions = block_on(cache.positions(0)).unwrap();
        for (span, positions) in cache.dequantize(0).unwrap().iter().zip(positions) {
            let tokens: Vec<usize> = match positions {
                SpanPositions::Run(run) => (run.start()..run.end()).collect(),
                SpanPositions::PerHead(positions) => positions[..positions.len() / 2].to_vec(),
            };
            let keys = block_on(cache.backend().download(&span.keys)).unwrap();
            for (i, &x) in keys.iter().enumerate() {
                let (head, token, channel) = (i / 64 / tokens.len(), tokens[i / 64 % tokens.len()], i % 64);
                let far = (x - dense[(token * 2 + head) * 64 + channel]).abs();
                // Ranges of rotated 4-bit rows of normal elements; with the bias a step would be 40.
                assert!(far < 1.5, "{self:?}: token {token} of head {head}, channel {channel} is {far} away");
            }
        }
    }

    /// One span for every precision, the last store first, and every position once.
    fn check_order<B: Backend>(&self, cache: &KvCache<B>) {
        let positions = block_on(cache.positions(0)).unwrap();
        let mut all = Vec::new();
        for positions in &positions {
            match positions {
                SpanPositions::Run(run) => all.extend(run.start()..run.end()),
                SpanPositions::PerHead(positions) => {
                    let (first, second) = positions.split_at(positions.len() / 2);
                    assert_eq!(first, second, "all KV heads alike");
                    all.extend_from_slice(first);
                }
            }
        }
        all.sort_unstable();
        assert!(all.into_iter().eq(0..self.tokens()));
        let mut stores = self.stores.clone();
        stores.sort_unstable_by(|a, b| b.cmp(a));
        stores.dedup();
        let gathered = positions.iter().filter(|positions| matches!(positions, SpanPositions::PerHead(_))).count();
        assert_eq!(gathered, stores.len());
        let memory = cache.memory();
        for store in stores.iter().filter(|&&store| store > 0) {
            let chunks = self.stores.iter().filter(|of_chunk| *of_chunk == store).count();
            assert_eq!(memory.stores()[usize::from(*store)].tokens, chunks * self.chunk_tokens);
        }
    }
}

/// f64 attention over what a cache stores.
fn exact<B: Backend>(shape: &AttentionShape, cache: &KvCache<B>, query: &[f32]) -> Vec<f64> {
    let spans: Vec<StoredSpan<B::Tensor>> = cache.dequantize(0).unwrap();
    let download = |tensor: &B::Tensor| block_on(cache.backend().download(tensor)).unwrap();
    let dense: Vec<(Vec<f32>, Vec<f32>)> =
        spans.iter().map(|span| (download(&span.keys), download(&span.values))).collect();
    let segments: Vec<DenseSegment<'_>> = spans
        .iter()
        .zip(&dense)
        .map(|(span, (keys, values))| DenseSegment { keys, values, tokens: span.tokens, calibration: None })
        .collect();
    exact_attention(shape, &segments, query).unwrap().outputs
}
