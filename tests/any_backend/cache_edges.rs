//! Where lengths meet the ends of tiles, windows and number ranges: a cache that went there must be one that never did.

use half::f16;
use kvpack::backend::{Backend, FlaggedToken};
use kvpack::cache::{KvCache, ModelRecipe, Recipe};
use kvpack::cpu::CpuTensor;
use kvpack::format::KeyOrValue;
use kvpack::plan::{ElementType, Elements, QueryRun, RowLayout};
use kvpack::{AttentionShape, Error, SegmentFormat, TILE_TOKENS};
use pollster::block_on;

/// The shape of all caches here.
pub fn shape() -> AttentionShape {
    AttentionShape::new(2, 1, 64).unwrap()
}

/// The recipe of this name.
pub fn recipe(text: &str) -> Recipe {
    text.parse::<ModelRecipe>().unwrap().layer(0, &shape())
}

/// A cache and the tokens that it should hold.
pub struct Edge<B: Backend> {
    /// The cache, of one sequence.
    pub cache: KvCache<B>,
}

impl<B: Backend> Edge<B> {
    /// An empty cache.
    pub fn new(backend: B, recipe: Recipe) -> Self {
        Self { cache: KvCache::new(backend, shape(), 1, recipe).unwrap() }
    }

    /// Appends tokens `first .. first + count` of one endless sequence.
    pub fn extend(&mut self, first: usize, count: usize) -> kvpack::Result<()> {
        let row = shape().kv_heads() * shape().head_dim();
        let wave = |rate: f32| {
            let elements: Vec<f32> = (first * row..(first + count) * row).map(|i| (i as f32 * rate).sin()).collect();
            block_on(self.cache.backend().upload(elements.as_slice().into()))
        };
        let (keys, values) = (wave(0.37)?, wave(0.53)?);
        block_on(self.cache.extend(0, RowLayout::token_major(count, &shape()), &keys, &values))
    }

    /// The same one by one, as decoding does.
    pub fn append(&mut self, first: usize, count: usize) -> kvpack::Result<()> {
        let row = shape().kv_heads() * shape().head_dim();
        for token in first..first + count {
            let wave = |rate: f32| {
                let elements: Vec<f32> = (token * row..(token + 1) * row).map(|i| (i as f32 * rate).sin()).collect();
                block_on(self.cache.backend().upload(elements.as_slice().into()))
            };
            let (keys, values) = (wave(0.37)?, wave(0.53)?);
            block_on(self.cache.append(RowLayout::token_major(1, &shape()), &keys, &values))?;
        }
        Ok(())
    }

    /// What a fixed query gets.
    pub fn attend(&self) -> kvpack::Result<Vec<f32>> {
        let query: Vec<f32> = (0..shape().query_heads() * shape().head_dim()).map(|i| (i as f32 * 0.7).cos()).collect();
        let query = block_on(self.cache.backend().upload(query.as_slice().into()))?;
        let output = block_on(self.cache.attend(&query, ElementType::F32))?;
        block_on(self.cache.backend().download(&output))
    }

    /// Tokens and formats of the spans, in token order.
    pub fn spans(&self) -> Vec<(usize, SegmentFormat)> {
        self.cache.dequantize(0).unwrap().iter().map(|span| (span.tokens, span.format)).collect()
    }

    /// Pages in use, in f16 and packed.
    pub fn pages(&self) -> [usize; 2] {
        let memory = self.cache.memory();
        [memory.f16().pages_in_use, memory.packed().iter().map(|store| store.pages_in_use).sum()]
    }
}

/// Truncates to the ends of tiles and next to them, and goes on: pages, outputs and room are those of a cache that
/// never held more.
pub fn truncation_leaves_nothing<B: Backend + Clone>(backend: &B) {
    for name in ["f16", "int8"] {
        for kept in [127, TILE_TOKENS, 129, 2 * TILE_TOKENS, 3 * TILE_TOKENS - 1, 3 * TILE_TOKENS] {
            let mut longer = Edge::new(backend.clone(), recipe(name));
            longer.extend(0, 400).unwrap();
            longer.cache.truncate(0, kept).unwrap();
            let mut never = Edge::new(backend.clone(), recipe(name));
            never.extend(0, kept).unwrap();
            assert_eq!(longer.pages(), never.pages(), "{name}, {kept} tokens");
            assert_eq!(longer.attend().unwrap(), never.attend().unwrap(), "{name}, {kept} tokens");
            for cache in [&mut longer, &mut never] {
                cache.append(kept, 2).unwrap();
                cache.extend(kept + 2, 150).unwrap();
            }
            assert_eq!(longer.pages(), never.pages(), "{name}, {kept} tokens and more");
            assert_eq!(longer.attend().unwrap(), never.attend().unwrap(), "{name}, {kept} tokens and more");
        }
    }
}

/// The largest elements that a cache takes come back. Of the next larger ones a zero is stored, and the token is told.
pub fn the_largest_elements_are_taken<B: Backend + Clone>(backend: &B) {
    let rows = RowLayout::token_major(2, &shape());
    let largest = 65504.0;
    for (value, taken) in [(largest, true), (-largest, true), (65504.004, false), (-65505.0, false)] {
        let mut elements = vec![0.25; 2 * 64];
        elements[70] = value;
        let upload = |elements: &[f32]| block_on(backend.upload(elements.into())).unwrap();
        let (sound, edge) = (upload(&[0.25; 2 * 64]), upload(&elements));
        elements[70] = if taken { value } else { 0.0 };
        for (tensor, keys, values) in [(KeyOrValue::Value, &sound, &edge), (KeyOrValue::Key, &edge, &sound)] {
            let mut cache = KvCache::new(backend.clone(), shape(), 1, Recipe::f16()).unwrap();
            block_on(cache.extend(0, rows, keys, values)).unwrap();
            let span = &cache.dequantize(0).unwrap()[0];
            let download = |rows: &B::Tensor| block_on(backend.download(rows)).unwrap();
            let of = |which| if which == tensor { elements.clone() } else { vec![0.25; 2 * 64] };
            assert_eq!(download(&span.keys), of(KeyOrValue::Key), "{value}");
            assert_eq!(download(&span.values), of(KeyOrValue::Value), "{value}");

            let told = if taken { vec![] } else { vec![FlaggedToken { layer: 0, tensor, token: 1 }] };
            assert_eq!(block_on(cache.non_finite()).unwrap(), told, "{value}");
            cache.clear_non_finite().unwrap();
            assert_eq!(block_on(cache.non_finite()).unwrap(), [], "{value}");
        }
    }
}

/// A decode step into an output of the caller's stores what `append` does and writes what `attend` yields, in the
/// output's own element type; with an output of another length, or without keys, the cache is as it was.
pub fn steps_write_into_outputs<B: Backend + Clone>(backend: &B) {
    let wave = |elements: usize, rate: f32| -> Vec<f32> { (0..elements).map(|i| (i as f32 * rate).sin()).collect() };
    let upload = |elements: Elements<'_>| block_on(backend.upload(elements)).unwrap();
    let f32s = |elements: &[f32]| upload(elements.into());
    let download = |tensor: &B::Tensor| block_on(backend.download(tensor)).unwrap();
    let of_output = shape().query_heads() * shape().head_dim();
    let rows = RowLayout::token_major(1, &shape());
    for name in ["f16", "int8", "kivi:2"] {
        let [mut stepped, mut called] = [0, 1].map(|_| Edge::new(backend.clone(), recipe(name)));
        for cache in [&mut stepped, &mut called] {
            cache.extend(0, 255).unwrap();
        }
        let [keys, values] = [0.9, 0.4].map(|rate| f32s(&wave(shape().head_dim(), rate)));
        let queries = f32s(&wave(of_output, 0.7));
        let mut outputs = [f32s(&vec![9.0; of_output]), upload(Elements::F16(&vec![f16::ONE; of_output]))];
        let (mut short, few) = (f32s(&vec![9.0; of_output - 1]), f32s(&[0.5; 63]));
        let mut step = |output: &mut B::Tensor, keys: &B::Tensor| {
            block_on(stepped.cache.append_attend_into(rows, keys, &values, &queries, output))
                .map(|()| stepped.cache.tokens(0))
        };
        for output in &mut outputs {
            assert!(matches!(step(&mut short, &keys), Err(Error::Elements { what: "output", .. })), "{name}");
            assert!(matches!(step(output, &few), Err(Error::Elements { what: "keys", .. })), "{name}");
            let held = step(output, &keys).unwrap();
            block_on(called.cache.append(rows, &keys, &values)).unwrap();
            assert_eq!(held, called.cache.tokens(0), "{name}");
        }
        assert_eq!(download(&short), vec![9.0; of_output - 1], "{name}");
        assert_eq!(stepped.pages(), called.pages(), "{name}");
        // The first output is that of a token less.
        called.cache.truncate(0, 256).unwrap();
        let first = block_on(called.cache.attend(&queries, ElementType::F32)).unwrap();
        assert_eq!(download(&outputs[0]), download(&first), "{name}");
        let last = block_on(stepped.cache.attend(&queries, ElementType::F16)).unwrap();
        assert_eq!(download(&outputs[1]), download(&last), "{name}");
        block_on(stepped.cache.attend_into(&[QueryRun::decode(0)], &queries, &mut outputs[0])).unwrap();
        let last = block_on(stepped.cache.attend(&queries, ElementType::F32)).unwrap();
        assert_eq!(download(&outputs[0]), download(&last), "{name}");
    }
}

/// f32 rows of the host.
pub fn host(elements: Vec<f32>) -> CpuTensor {
    CpuTensor::F32(elements)
}
