//! Random steps over a store of f16 and a packed one, for the same on every backend.

use std::sync::Arc;

use futures::executor::block_on;
use half::{bf16, f16};
use kvpack::backend::{FlaggedToken, SpanBytes, SpanPlace, SpanRead, SpanWrite, WriteInput};
use kvpack::cpu::CpuTensor;
use kvpack::format::{AffineFormat, CodebookFormat, Grouping, Rotation, TILE_TOKENS, TensorFormat};
use kvpack::plan::{
    ElementType, KeyMean, LayerWrites, Page, PageCopy, RowLayout, StoreCapacity, TokenRange, TokenWrite,
    WindowCapacity, WindowMove, WriteLayout, WriteTable,
};
use kvpack::{AttentionShape, Backend, Bits, SegmentFormat};

use crate::random_rows::Random;

/// Pages of the shards of both stores.
pub const SHARDS: [u32; 3] = [4, 5, 2];
const SLOTS: usize = 12;
/// Slots of centres, where keys are stored less one, and how many of them a step makes at most.
const CENTRES: [usize; 2] = [5, 3];
/// Tokens of the dense keys and values.
pub const ROWS: usize = 24;
const STEPS: usize = 6;

/// What random steps go to.
#[derive(Clone, Debug)]
pub struct Case {
    pub shape: AttentionShape,
    pub format: SegmentFormat,
    pub elements: ElementType,
    pub rows: RowLayout,
    pub layout: Arc<WriteLayout>,
    pub steps: Vec<Step>,
}

/// One step with its keys and values.
#[derive(Clone, Debug)]
pub struct Step {
    pub writes: LayerWrites,
    pub keys: CpuTensor,
    pub values: CpuTensor,
}

/// Every family of formats of keys and values.
pub fn formats(head_dim: usize) -> Vec<SegmentFormat> {
    let affine = |bits, grouping| AffineFormat::new(bits, grouping);
    let plain = |bits, grouping| TensorFormat::Affine(affine(bits, grouping));
    let both = |tensor| SegmentFormat { key: tensor, value: tensor };
    let rotated = |bits, grouping| TensorFormat::Affine(affine(bits, grouping).rotated(Rotation::randomized(16, 3)));
    let renormalized = |bits| TensorFormat::Codebook(CodebookFormat::turboquant(bits, head_dim).renormalized());
    vec![
        both(plain(Bits::Eight, Grouping::Token)),
        both(plain(Bits::Four, Grouping::TokenChannels(16))),
        both(rotated(Bits::Four, Grouping::Token)),
        SegmentFormat::per_channel(Bits::Four),
        SegmentFormat::per_channel(Bits::Two),
        SegmentFormat::per_channel(Bits::One),
        SegmentFormat {
            key: plain(Bits::Two, Grouping::ChannelTokens(32)),
            value: plain(Bits::Two, Grouping::TokenChannels(16)),
        },
        SegmentFormat {
            key: plain(Bits::Three, Grouping::ChannelTokens(64)),
            value: plain(Bits::Three, Grouping::Channel),
        },
        SegmentFormat {
            key: rotated(Bits::Four, Grouping::Channel),
            value: rotated(Bits::Two, Grouping::ChannelTokens(32)),
        },
        SegmentFormat {
            key: TensorFormat::Affine(affine(Bits::Eight, Grouping::Channel).symmetric()),
            value: TensorFormat::F16,
        },
        SegmentFormat::turboquant(Bits::Three, head_dim),
        SegmentFormat { key: renormalized(Bits::Two), value: renormalized(Bits::Four) },
        SegmentFormat::turboquant_prod(Bits::Two, head_dim),
        SegmentFormat::turboquant_prod(Bits::One, head_dim),
    ]
}

impl Case {
    pub fn new(shape: AttentionShape, format: SegmentFormat, elements: ElementType, seed: u64) -> Self {
        Self::with_centres(shape, format, elements, seed, [0, 0])
    }

    /// The same where keys are stored less centres, of which steps make some.
    pub fn centred(shape: AttentionShape, format: SegmentFormat, elements: ElementType, seed: u64) -> Self {
        Self::with_centres(shape, format, elements, seed, CENTRES)
    }

    fn with_centres(
        shape: AttentionShape,
        format: SegmentFormat,
        elements: ElementType,
        seed: u64,
        [centre_slots, centres]: [usize; 2],
    ) -> Self {
        let mut random = Random::new(seed);
        let single = format.takes_single_tokens();
        let store = |format, tokens| StoreCapacity {
            format,
            shard_pages: SHARDS.to_vec(),
            range_slots: SLOTS,
            tokens,
            copies: 3,
            centres,
            centre_slots,
        };
        let stores = vec![store(SegmentFormat::F16, ROWS), store(format, if single { ROWS } else { 0 })];
        let windows = vec![WindowCapacity { from: 0, to: 1, windows: 4, newer: 0 }];
        let layout = Arc::new(WriteLayout::new(shape, ROWS, stores, windows).unwrap());
        let rows = match seed % 2 {
            0 => RowLayout::token_major(ROWS, &shape),
            _ => RowLayout::head_major(ROWS, &shape),
        };
        let steps = (0..STEPS).map(|step| Step {
            writes: writes(&layout, step, &mut random),
            keys: tensor(&rows, &shape, elements, &mut random),
            values: tensor(&rows, &shape, elements, &mut random),
        });
        Self { shape, format, elements, rows, steps: steps.collect(), layout }
    }

    /// The stores of the layout, whose pages and slots all hold something.
    pub fn stores<B: Backend>(&self, backend: &B) -> [B::Store; 2] {
        let rows = RowLayout::token_major(TILE_TOKENS, &self.shape);
        let mut random = Random::new(77);
        [SegmentFormat::F16, self.format].map(|format| {
            let mut store = backend.create_store(self.shape, format).unwrap();
            SHARDS.iter().for_each(|&pages| block_on(backend.add_shard(&mut store, pages)).unwrap());
            block_on(backend.reserve_ranges(&mut store, SLOTS)).unwrap();
            for (range_slot, page) in pages().enumerate() {
                let mut upload = || {
                    let rows: Vec<f32> = (0..rows.elements_needed(&self.shape)).map(|_| random.normal()).collect();
                    block_on(backend.upload(rows.as_slice().into())).unwrap()
                };
                let tokens = TokenRange::new(0, TILE_TOKENS).unwrap().into();
                let write = SpanWrite { rows, tokens, pages: &[page], range_slot, centre: None };
                backend.quantize(&mut store, &upload(), &upload(), write).unwrap();
            }
            if self.centre_slots() > 0 {
                block_on(backend.reserve_centres(&mut store, self.centre_slots())).unwrap();
            }
            store
        })
    }

    /// Writes all steps through [`write_step`](kvpack::backend::Packing::write_step).
    pub fn written<B: Backend>(&self, backend: &B) -> ([B::Store; 2], Vec<FlaggedToken>) {
        let [mut open, mut packed] = self.stores(backend);
        let flags = backend.create_non_finite_flags(3).unwrap();
        let mut table = WriteTable::new(&self.layout);
        for step in &self.steps {
            table.set(&step.writes).unwrap();
            let upload = |tensor: &CpuTensor| block_on(backend.upload(tensor.elements())).unwrap();
            let (keys, values) = (&upload(&step.keys), &upload(&step.values));
            let input = WriteInput { keys, values, rows: self.rows, flags: &flags, layer: 2 };
            backend.write_step(&mut [&mut open, &mut packed], Some(input), &table).unwrap();
        }
        let found = block_on(backend.read_non_finite_flags(&flags)).unwrap();
        backend.clear_non_finite_flags(&flags).unwrap();
        assert_eq!(block_on(backend.read_non_finite_flags(&flags)).unwrap(), []);
        ([open, packed], found)
    }

    fn centre_slots(&self) -> usize {
        self.layout.stores()[0].centre_slots
    }

    /// The centres of a store, in f32 on every backend.
    pub fn centres<B: Backend>(&self, backend: &B, store: &B::Store) -> Vec<SpanBytes> {
        let place = |slot| SpanPlace { centre: Some(slot), ..SpanPlace::default() };
        (0..self.centre_slots())
            .map(|slot| block_on(backend.read_spans(&[(store, place(slot))])).unwrap().remove(0))
            .collect()
    }

    /// What both stores decode to, page by page, with the range slots in turn.
    pub fn decoded<B: Backend>(&self, backend: &B, stores: &[B::Store; 2]) -> Vec<u32> {
        let mut decoded = Vec::new();
        for store in stores {
            for (at, page) in pages().enumerate() {
                let read = SpanRead { pages: &[page], tokens: TILE_TOKENS, range_slot: at, centre: None };
                let (keys, values) = backend.dequantize(store, read).unwrap();
                for rows in [keys, values] {
                    // +0 and −0 are alike.
                    decoded.extend(block_on(backend.download(&rows)).unwrap().iter().map(|x| (x + 0.0).to_bits()));
                }
            }
        }
        decoded
    }
}

/// All pages of a store.
pub fn pages() -> impl Iterator<Item = Page> {
    let shards = SHARDS.iter().enumerate();
    shards.flat_map(|(shard, &pages)| (0..pages).map(move |index| Page { shard: shard as u32, index }))
}

/// So many different pages.
fn some_pages(count: usize, random: &mut Random) -> Vec<Page> {
    let mut all: Vec<Page> = pages().collect();
    (0..count).map(|_| all.swap_remove(random.below(all.len()))).collect()
}

fn writes(layout: &WriteLayout, step: usize, random: &mut Random) -> LayerWrites {
    let mut writes = LayerWrites::of(layout);
    // Now and then a step has nothing of a kind, and one has nothing at all.
    let count = |most: usize, random: &mut Random| if step == 3 { 0 } else { random.below(most + 1) };
    for (store, of) in writes.stores.iter_mut().zip(layout.stores()) {
        let copied = some_pages(2 * count(of.copies, random), random);
        store.copies.extend(copied.chunks(2).map(|pair| PageCopy { from: pair[0], to: pair[1] }));
        if of.centres > 0 {
            let mut slots: Vec<usize> = (0..of.centre_slots).collect();
            for _ in 0..count(of.centres, random) {
                let (slot, start) = (slots.swap_remove(random.below(slots.len())), random.below(ROWS));
                let tokens = TokenRange::new(start, start + 1 + random.below(ROWS - start)).unwrap();
                store.centres.push(KeyMean { tokens, slot });
            }
        }
        // Tokens of few pages, so that some share words.
        let (pages, mut slots) = (some_pages(2, random), Vec::new());
        for _ in 0..count(of.tokens, random) {
            let (page, slot) = (pages[random.below(2)], random.below(TILE_TOKENS));
            if !slots.contains(&(page, slot)) {
                slots.push((page, slot));
                let centre = (of.centre_slots > 0).then(|| random.below(of.centre_slots));
                store.tokens.push(TokenWrite { token: random.below(ROWS), page, slot, centre });
            }
        }
    }
    let moved = count(layout.windows()[0].windows, random);
    let (from, to) = (some_pages(moved, random), some_pages(moved, random));
    let place = |page: &Page| pages().position(|other| other == *page).unwrap();
    let window = |(&from, to): (&Page, &Page)| WindowMove { from, to: *to, range_slot: place(to) };
    writes.windows[0].extend(from.iter().zip(&to).map(window));
    writes
}

/// Keys or values, of which some cannot be stored, and some only as values beside centred keys.
fn tensor(rows: &RowLayout, shape: &AttentionShape, elements: ElementType, random: &mut Random) -> CpuTensor {
    let mut x: Vec<f32> = (0..rows.elements_needed(shape)).map(|_| random.normal() * 3.0).collect();
    // Some that f16 pages hold, and packed ones do not.
    let bad = [f32::NAN, 3e4, 4e4, f32::INFINITY, -2.5e3, -f32::INFINITY, -4e4, 1e5, -f32::NAN];
    for bad in bad.into_iter().take(random.below(10)) {
        let at = random.below(x.len());
        x[at] = bad;
    }
    match elements {
        ElementType::F32 => CpuTensor::F32(x),
        ElementType::F16 => CpuTensor::F16(x.into_iter().map(f16::from_f32).collect()),
        ElementType::Bf16 => CpuTensor::Bf16(x.into_iter().map(bf16::from_f32).collect()),
    }
}
