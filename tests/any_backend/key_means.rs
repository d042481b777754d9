//! Centres computed from some keys of a tensor, for the same on every backend.

use futures::executor::block_on;
use half::f16;
use kvpack::backend::{LARGEST_CENTRED_KEY, NewCentre, SpanBytes, SpanPlace};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::{AttentionShape, Backend, SegmentFormat};

use crate::random_rows::Random;

/// Means of the first keys, of some in the middle and of the last, in both layouts, of f32 and of f16.
pub fn means<B: Backend>(backend: &B) -> Vec<SpanBytes> {
    let shape = AttentionShape::new(2, 2, 80).unwrap();
    let mut random = Random::new(5);
    let mut means = Vec::new();
    for rows in [RowLayout::token_major(30, &shape), RowLayout::head_major(30, &shape)] {
        let keys: Vec<f32> = (0..rows.elements_needed(&shape)).map(|_| random.normal() * 9.0).collect();
        let halves: Vec<f16> = keys.iter().map(|&x| f16::from_f32(x)).collect();
        for keys in [keys.as_slice().into(), halves.as_slice().into()] {
            let keys = block_on(backend.upload(keys)).unwrap();
            let mut store = backend.create_store(shape, SegmentFormat::F16).unwrap();
            block_on(backend.reserve_centres(&mut store, 3)).unwrap();
            for (slot, (start, end)) in [(0, 8), (5, 21), (29, 30)].into_iter().enumerate() {
                let tokens = TokenRange::new(start, end).unwrap();
                backend
                    .key_mean(&mut store, &keys, NewCentre { rows, tokens, slot, largest: LARGEST_CENTRED_KEY })
                    .unwrap();
            }
            let place = |slot| SpanPlace { centre: Some(slot), ..SpanPlace::default() };
            means.extend((0..3).map(|slot| block_on(backend.read_spans(&[(&store, place(slot))])).unwrap().remove(0)));
        }
    }
    means
}
