//! The transport between threads: what it carries, and what it does when a rank is late, gone or calls something else.

use std::time::{Duration, Instant};

use kvpack::backend::{Attention, AttentionStates, StateParts};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::ranks::{Reduction, StateExchange, ThreadTransport, Transport};
use kvpack::{AttentionShape, Error};

use super::{LONG, failed, on_ranks, rank_of};

const SHORT: Duration = Duration::from_millis(200);

fn floats(n: usize, of: impl Fn(usize) -> f32) -> CpuTensor {
    CpuTensor::F32((0..n).map(of).collect())
}

#[test]
fn all_ranks_get_the_same() {
    for ranks in [1, 2, 3, 7] {
        on_ranks(ranks, LONG, |mut transport| {
            let rank = rank_of(&transport);
            for round in 0..20 {
                let part = floats(5, |i| rank * 100.0 + i as f32 + round as f32);
                let mut all = floats(5 * ranks + 3, |_| -1.0);
                transport.all_gather(&part, 4, &mut all).unwrap();
                let mut expected: Vec<f32> =
                    (0..ranks).flat_map(|r| (0..4).map(move |i| (r * 100 + i + round) as f32)).collect();
                expected.resize(5 * ranks + 3, -1.0);
                assert_eq!(all.to_f32(), expected);

                let root = round % ranks;
                let mut tensor = CpuTensor::F16(vec![half::f16::from_f32(rank); 3]);
                transport.broadcast(&mut tensor, 2, root).unwrap();
                assert_eq!(tensor.to_f32(), [root as f32, root as f32, rank]);

                let mut sum = floats(2, |_| rank + 0.5);
                transport.all_reduce(&mut sum, 2, Reduction::Sum).unwrap();
                let total = (0..ranks).map(|r| r as f32 + 0.5).sum();
                assert_eq!(sum.to_f32(), [total, total]);
                let mut max = floats(2, |i| if i == 0 { -rank } else { rank });
                transport.all_reduce(&mut max, 2, Reduction::Max).unwrap();
                assert_eq!(max.to_f32(), [0.0, ranks as f32 - 1.0]);
                transport.wait().unwrap();
            }
            let mut not = floats(1, |_| if rank == 0.0 { f32::NAN } else { rank });
            transport.all_reduce(&mut not, 1, Reduction::Max).unwrap();
            assert!(not.to_f32()[0].is_nan());
        });
    }
}

/// Tensors that are too short or of another type are refused on every rank alike, and the next call works.
#[test]
fn arguments_are_checked_before_anything_is_sent() {
    on_ranks(2, LONG, |mut transport| {
        let part = floats(4, |_| 1.0);
        assert!(matches!(transport.all_gather(&part, 5, &mut floats(10, |_| 0.0)), Err(Error::Elements { .. })));
        assert!(matches!(transport.all_gather(&part, 4, &mut floats(7, |_| 0.0)), Err(Error::Elements { .. })));
        let mut half = CpuTensor::F16(vec![half::f16::ZERO; 8]);
        assert!(matches!(transport.all_gather(&part, 4, &mut half), Err(Error::Buffer { .. })));
        assert!(matches!(transport.all_reduce(&mut half, 4, Reduction::Sum), Err(Error::Buffer { .. })));
        assert!(matches!(transport.all_reduce(&mut half, 9, Reduction::Sum), Err(Error::Elements { .. })));
        assert!(matches!(transport.broadcast(&mut half, 1, 2), Err(Error::Plan { .. })));
        transport.broadcast(&mut half, 0, 0).unwrap();
        transport.all_gather(&part, 4, &mut floats(8, |_| 0.0)).unwrap();
    });
    assert!(matches!(ThreadTransport::connect(Vec::new(), LONG), Err(Error::Limit { .. })));
    assert!(matches!(ThreadTransport::connect(vec![Cpu::new()], Duration::MAX), Err(Error::Limit { .. })));
}

/// States of ranks, also of those that hold nothing and of one whose output is nobody's value.
#[test]
fn states_merge_as_one() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let heads = 3 * 2;
    for ranks in [1, 2, 7] {
        let results = on_ranks(ranks, LONG, |mut transport| {
            let rank = transport.rank();
            let is_empty = rank % 3 == 1;
            let outputs = floats(4 * 2 * 64, |i| if is_empty { f32::NAN } else { (i + rank) as f32 * 0.01 });
            let lse = floats(4 * 2, |i| if is_empty || i == 5 { f32::NEG_INFINITY } else { (i * rank) as f32 * 0.3 });
            let mut gathered = pollster::block_on(transport.room_for_states(&shape, 3)).unwrap();
            let states = AttentionStates { outputs, lse };
            let exchange = StateExchange { shape, rows: 3, states: &states, gathered: &mut gathered };
            let (mut output, mut lse) = (floats(heads * 64 + 1, |_| 7.0), floats(heads, |_| 7.0));
            transport.merge_states(exchange, &mut output, Some(&mut lse)).unwrap();
            let exchange = StateExchange { shape, rows: 3, states: &states, gathered: &mut gathered };
            let mut half = CpuTensor::F16(vec![half::f16::ZERO; heads * 64]);
            transport.merge_states(exchange, &mut half, None).unwrap();
            let exchange = StateExchange { shape, rows: 0, states: &states, gathered: &mut gathered };
            assert!(matches!(transport.merge_states(exchange, &mut half, None), Err(Error::NoTokens { .. })));
            let exchange = StateExchange { shape, rows: 5, states: &states, gathered: &mut gathered };
            assert!(matches!(transport.merge_states(exchange, &mut half, None), Err(Error::Elements { .. })));
            (output.to_f32(), lse.to_f32(), half.to_f32())
        });
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
        let (output, lse, half) = &results[0];
        assert_eq!(output[heads * 64], 7.0, "what lies behind the rows");
        let held: Vec<usize> = (0..ranks).filter(|rank| rank % 3 != 1).collect();
        for (head, &lse) in lse.iter().enumerate() {
            let weight = |rank: usize| f64::from((head * rank) as f32 * 0.3).exp();
            let total: f64 = held.iter().map(|&rank| weight(rank)).sum();
            for channel in 0..64 {
                let at = head * 64 + channel;
                let sum: f64 = held.iter().map(|&rank| weight(rank) * f64::from((at + rank) as f32 * 0.01)).sum();
                let expected = if head == 5 { 0.0 } else { (sum / total) as f32 };
                assert!((output[at] - expected).abs() <= 1e-6 * expected.abs(), "{ranks} ranks, {head}, {channel}");
                assert!((half[at] - expected).abs() <= 1e-3 * expected.abs());
            }
            let expected = if head == 5 { f32::NEG_INFINITY } else { total.ln() as f32 };
            assert!(lse == expected || (lse - expected).abs() < 1e-6);
        }
    }
}

/// The pair is the case of two parts, and one part alone is copied.
#[test]
fn parts_and_pairs_agree() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let part = |seed: usize| AttentionStates {
        outputs: floats(2 * 2 * 64, |i| ((i * 7 + seed) as f32).sin()),
        lse: floats(2 * 2, |i| if seed + i == 3 { f32::NEG_INFINITY } else { ((i + seed) as f32).cos() * 4.0 }),
    };
    let (cpu, first, second) = (Cpu::new(), part(0), part(90));
    let joined = pollster::block_on(cpu.merge(&shape, &first, &second)).unwrap();
    let both = |of: fn(&AttentionStates<CpuTensor>) -> &CpuTensor| {
        CpuTensor::F32([of(&first).to_f32(), of(&second).to_f32()].concat())
    };
    let states = AttentionStates { outputs: both(|of| &of.outputs), lse: both(|of| &of.lse) };
    let (mut output, mut lse) = (floats(2 * 2 * 64, |_| 0.0), floats(4, |_| 0.0));
    let parts = StateParts { states: &states, parts: 2, rows: 2 };
    cpu.merge_parts(&shape, parts, &mut output, Some(&mut lse)).unwrap();
    assert_eq!((output.clone(), lse.clone()), (joined.outputs, joined.lse));
    let alone = StateParts { states: &first, parts: 1, rows: 2 };
    cpu.merge_parts(&shape, alone, &mut output, Some(&mut lse)).unwrap();
    assert_eq!(lse, first.lse);
    assert_eq!(output.to_f32()[..3 * 64], first.outputs.to_f32()[..3 * 64]);
    assert_eq!(output.to_f32()[3 * 64..], [0.0; 64], "an empty state has no output");
    let longer = StateParts { states: &states, parts: 3, rows: 2 };
    assert!(matches!(cpu.merge_parts(&shape, longer, &mut output, None), Err(Error::Elements { .. })));
    let none = StateParts { states: &states, parts: 0, rows: 2 };
    assert!(matches!(cpu.merge_parts(&shape, none, &mut output, None), Err(Error::NoTokens { .. })));
    let half = AttentionStates { outputs: CpuTensor::F16(vec![half::f16::ZERO; 256]), lse: first.lse.clone() };
    let half = StateParts { states: &half, parts: 1, rows: 2 };
    assert!(matches!(cpu.merge_parts(&shape, half, &mut output, None), Err(Error::Buffer { .. })));
}

/// A rank that is late, gone or elsewhere is named on all others within the deadline, and nothing works afterwards.
#[test]
fn a_rank_that_does_not_come_is_named() {
    let results = on_ranks(3, SHORT, |mut transport| {
        let mut tensor = floats(1, |_| 0.0);
        transport.broadcast(&mut tensor, 1, 0).unwrap();
        if transport.rank() == 1 {
            std::thread::sleep(4 * SHORT);
        }
        let begun = Instant::now();
        let late = transport.broadcast(&mut tensor, 1, 0);
        assert!(begun.elapsed() < 10 * SHORT, "{:?}", begun.elapsed());
        let again = transport.all_reduce(&mut tensor, 1, Reduction::Sum);
        assert!(failed(&again) == failed(&late) && failed(&transport.wait()) == failed(&late));
        late
    });
    results.iter().for_each(|result| assert_eq!(failed(result), [1]));

    let results = on_ranks(3, LONG, |mut transport| {
        if transport.rank() == 2 {
            return None;
        }
        let begun = Instant::now();
        let gone = transport.all_reduce(&mut floats(1, |_| 0.0), 1, Reduction::Sum);
        assert!(begun.elapsed() < LONG / 4, "a rank that is gone is not waited for");
        Some(gone)
    });
    results.iter().flatten().for_each(|result| assert_eq!(failed(result), [2]));

    let results = on_ranks(3, LONG, |mut transport| {
        let elements = if transport.rank() == 1 { 1 } else { 2 };
        transport.all_reduce(&mut floats(2, |_| 0.0), elements, Reduction::Sum)
    });
    results.iter().for_each(|result| assert_eq!(failed(result), [1]));
    assert!(results[0].as_ref().unwrap_err().to_string().contains("elements: 1"), "{:?}", results[0]);
}
