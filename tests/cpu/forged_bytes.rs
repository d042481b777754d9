//! Every number in the bytes of a sequence that a cache reads, forged: what cannot be is refused, and why is told.

use kvpack::backend::Device;
use kvpack::cache::{ModelCache, ModelRecipe, PromptSpan, StoreId, write_checksum};
use kvpack::cpu::Cpu;
use kvpack::plan::{LayerAttention, TokenRange};
use kvpack::{Error, Result};
use pollster::block_on;

use any_backend::compressed::Prompt;
use any_backend::compressed::growing::append;
use any_backend::model_steps::{LAYERS, shape};
use any_backend::swapped_bytes::{self, all_held, cache, filled};

/// Bytes of a sequence, and where its numbers lie.
struct Bytes {
    bytes: Vec<u8>,
    /// The length of the sequence, which its other numbers follow.
    sequence: usize,
}

impl Bytes {
    fn new(cache: &mut ModelCache<Cpu>) -> Self {
        let swapped = block_on(cache.swap_out(0)).unwrap();
        let bytes = block_on(cache.swapped_to_bytes(&swapped)).unwrap();
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        // Magic, version and checksum, the layout, groups, the kind of the first, the numbers of its layers.
        let kind = bytes.len().min(20) + 4 + word(20) + 4;
        let layers = kind + 4 + word(kind);
        let sequence = layers + 4 + 4 * word(layers);
        Self { bytes, sequence }
    }

    /// Where the parts of the sequence lie, by their distance from its length.
    const RELEASED: usize = 8;
    const CENTRE: usize = 16;
    const SPANS: usize = 17;
    const STORE: usize = 21;
    const WINDOW: usize = 22;
    const SPAN_TOKENS: usize = 23;
    /// Of a first span that was gathered.
    const TENSORS: usize = 31 + 1 + 8 + 4;

    fn length(&self) -> u64 {
        u64::from_le_bytes(self.bytes[self.sequence..][..8].try_into().unwrap())
    }

    fn with(&self, at: usize, number: &[u8]) -> Self {
        let mut bytes = self.bytes.clone();
        bytes[self.sequence + at..][..number.len()].copy_from_slice(number);
        Self { bytes, ..*self }
    }

    fn read(&self, cache: &ModelCache<Cpu>) -> Result<()> {
        let mut bytes = self.bytes.clone();
        write_checksum(&mut bytes);
        block_on(cache.swapped_from_bytes(&bytes)).map(drop)
    }

    fn is_refused(&self, cache: &ModelCache<Cpu>, because: &str) {
        match self.read(cache) {
            Err(Error::Buffer { reason, .. }) => assert!(reason.contains(because), "{reason}"),
            other => panic!("{other:?} where '{because}' was expected"),
        }
    }
}

/// What a sequence that holds nothing is, and says again.
#[test]
fn an_empty_sequence_comes_back() {
    for text in ["f16", "saw-int4+centre"] {
        let mut of = cache(&Cpu::new(), text);
        let empty = Bytes::new(&mut of);
        assert_eq!((empty.length(), empty.read(&of)), (0, Ok(())), "{text}");
    }
}

#[test]
fn more_things_than_there_are_bytes_for_are_refused() {
    let mut of = filled(&Cpu::new(), "saw-int4", |_| 50);
    let bytes = Bytes::new(&mut of);
    assert_eq!(bytes.read(&of), Ok(()));
    let most = (bytes.bytes.len() - bytes.sequence - Bytes::STORE) / 19;
    bytes.with(Bytes::SPANS, &(most as u32 + 1).to_le_bytes()).is_refused(&of, "things follow");
}

/// No more tokens are released than there were, and none without a window.
#[test]
fn released_tokens_are_those_behind_a_window() {
    let mut plain = filled(&Cpu::new(), "f16", |_| 50);
    let bytes = Bytes::new(&mut plain);
    assert_eq!(bytes.with(Bytes::RELEASED, &0u64.to_le_bytes()).read(&plain), Ok(()));
    bytes.with(Bytes::RELEASED, &5u64.to_le_bytes()).is_refused(&plain, "released behind a window");

    let recipe: ModelRecipe = "f16".parse().unwrap();
    let local = recipe.layer(0, &shape()).with_attention(LayerAttention::default().with_window(5));
    let mut local = ModelCache::new(&Cpu::new(), &vec![(shape(), local); LAYERS], 2).unwrap();
    append(&mut local, 0, &Prompt::new(shape(), LAYERS, 20, 3));
    let bytes = Bytes::new(&mut local);
    assert_eq!(bytes.with(Bytes::RELEASED, &15u64.to_le_bytes()).read(&local), Ok(()));
    bytes.with(Bytes::RELEASED, &16u64.to_le_bytes()).is_refused(&local, "16 of 20 tokens were released");
    bytes.with(Bytes::RELEASED, &21u64.to_le_bytes()).is_refused(&local, "21 of 20 tokens were released");
}

/// A centre is there where the recipe has one.
#[test]
fn centres_are_those_of_the_recipe() {
    for (text, centre) in [("saw-int4", 1), ("saw-int4+centre", 0)] {
        let mut of = filled(&Cpu::new(), text, |_| 50);
        let bytes = Bytes::new(&mut of);
        bytes.with(Bytes::CENTRE, &[centre]).is_refused(&of, "a centre");
    }
}

/// A span lies in a store of the recipe, and has tokens: as many as a tile in a window, else as the sequence at most.
#[test]
fn spans_hold_what_a_store_can() {
    let mut of = cache(&Cpu::new(), "saw-int4+window=0");
    append(&mut of, 0, &Prompt::new(shape(), LAYERS, 200, 3));
    let bytes = Bytes::new(&mut of);
    assert_eq!((bytes.bytes[bytes.sequence + Bytes::STORE], bytes.read(&of)), (1, Ok(())), "the full window is packed");
    for tokens in [0, 201] {
        bytes.with(Bytes::SPAN_TOKENS, &u64::to_le_bytes(tokens)).is_refused(&of, &format!("{tokens} tokens in"));
    }
    bytes.with(Bytes::STORE, &[9]).is_refused(&of, "128 tokens in store 9");
    let window = bytes.with(Bytes::STORE, &[0, 1]);
    window.with(Bytes::SPAN_TOKENS, &129u64.to_le_bytes()).is_refused(&of, "129 tokens in");
    assert_eq!(Bytes::WINDOW, Bytes::STORE + 1);
}

/// Spans of more than a tile, in a recipe with windows: of a prompt in f16, and packed.
#[test]
fn long_spans_come_back_beside_windows() {
    let mut of = cache(&Cpu::new(), "calibquant:2+window=0");
    let spans = [PromptSpan::f16(TokenRange::new(0, 200).unwrap())];
    block_on(of.reserve_for_prefill(&spans)).unwrap();
    of.begin_prefill(0, 200, &spans).unwrap();
    let prompt = Prompt::new(shape(), LAYERS, 200, 3);
    for layer in 0..LAYERS {
        let dense = prompt.dense(&Cpu::new(), layer);
        block_on(of.store_prompt(layer, dense.rows, &dense.keys, &dense.values, &spans)).unwrap();
    }
    of.commit().unwrap();
    append(&mut of, 0, &Prompt::new(shape(), LAYERS, 256, 3));
    append(&mut of, 0, &Prompt::new(shape(), LAYERS, 5, 4));
    let before = all_held(&of, 0);
    let swapped = block_on(of.swap_out(0)).unwrap();
    let (read, _) = swapped_bytes::through_bytes(&of, &swapped);
    block_on(of.swap_in(0, &read)).unwrap();
    assert!(all_held(&of, 0) == before);
}

/// Layers gather the same tokens, or each its own.
#[test]
fn positions_are_those_of_one_layer_or_of_each() {
    let prompt = Prompt::new(shape(), LAYERS, 30, 3);
    let mut of = cache(&Cpu::new(), "saw-int4");
    let indices = block_on(Cpu::new().upload_indices(&[0, 5, 9, 2, 3, 7], 2, 30)).unwrap();
    let spans = [PromptSpan::gather(&indices, StoreId::PACKED)];
    block_on(of.reserve_for_prefill(&spans)).unwrap();
    of.begin_prefill(0, 30, &spans).unwrap();
    for layer in 0..LAYERS {
        let dense = prompt.dense(&Cpu::new(), layer);
        block_on(of.store_prompt(layer, dense.rows, &dense.keys, &dense.values, &spans)).unwrap();
    }
    of.commit().unwrap();
    let bytes = Bytes::new(&mut of);
    assert_eq!(bytes.read(&of), Ok(()));
    for tensors in [0u32, 2] {
        let forged = bytes.with(Bytes::TENSORS, &tensors.to_le_bytes());
        forged.is_refused(&of, &format!("{tensors} tensors of positions"));
    }
}
