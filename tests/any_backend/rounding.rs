//! How outputs are rounded to the element types of 16 bits.

use futures::executor::block_on;
use half::{bf16, f16};
use kvpack::plan::{ElementType, Elements, RowLayout};
use kvpack::{AttentionShape, Backend, KvCache, Recipe};

/// The output over a single token is its value, so that what f16 values round to is known: f16 holds them, bf16 takes
/// the nearest, ties to even, as every eighth of them is one.
pub fn outputs_are_rounded_to_even<B: Backend>(backend: B) {
    const SEQUENCES: usize = 32;
    let shape = AttentionShape::new(1, 1, 128).unwrap();
    let elements = SEQUENCES * 128;
    let values: Vec<f16> = (0..elements).map(|i| f16::from_bits(i as u16 % 2 * 0x8000 + i as u16 * 7)).collect();
    assert!(values.iter().all(|value| value.is_finite()));
    let ties = values.iter().filter(|value| value.to_f32().to_bits() & 0xffff == 0x8000).count();
    assert!(ties > elements / 10, "{ties} ties");

    let zeros = vec![bf16::ZERO; elements];
    let upload = |backend: &B, elements: Elements<'_>| block_on(backend.upload(elements)).unwrap();
    let (zeros, stored) = (upload(&backend, zeros.as_slice().into()), upload(&backend, values.as_slice().into()));
    let mut cache = KvCache::new(backend, shape, SEQUENCES, Recipe::f16()).unwrap();
    block_on(cache.append(RowLayout::token_major(SEQUENCES, &shape), &zeros, &stored)).unwrap();
    for output in ElementType::ALL {
        let rounded = |x: f32| match output {
            ElementType::F32 => x,
            ElementType::F16 => f16::from_f32(x).to_f32(),
            ElementType::Bf16 => bf16::from_f32(x).to_f32(),
        };
        let got = block_on(cache.attend(&zeros, output)).unwrap();
        let got = block_on(cache.backend().download(&got)).unwrap();
        let wrong = values.iter().zip(&got).find(|(value, got)| rounded(value.to_f32()) != **got);
        assert_eq!(wrong, None, "{output:?}");
    }
}
