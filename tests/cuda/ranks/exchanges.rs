//! Operations of the transports, and merges against f64.

use std::time::Duration;

use futures::executor::block_on;
use half::{bf16, f16};
use kvpack::backend::{Attention, AttentionStates, Device, StateParts};
use kvpack::cpu::nmse;
use kvpack::cuda::peer::{PeerHandle, PeerSlots};
use kvpack::cuda::{Cuda, Tensor};
use kvpack::format::HEAD_DIMS;
use kvpack::plan::{ElementType, Elements};
use kvpack::ranks::{Reduction, StateExchange, Transport};
use kvpack::{AttentionShape, Error};

use super::{DEADLINE, WORDS, are_gpus, backend, over_peers, two_gpus};
use any_backend::random_rows::Random;

const TYPES: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];

/// A tensor of these numbers, which all types hold exactly.
fn upload(backend: &Cuda, numbers: &[f32], element_type: ElementType) -> Tensor {
    let halves: Vec<f16> = numbers.iter().map(|&x| f16::from_f32(x)).collect();
    let bfloats: Vec<bf16> = numbers.iter().map(|&x| bf16::from_f32(x)).collect();
    let elements = match element_type {
        ElementType::F32 => Elements::F32(numbers),
        ElementType::F16 => Elements::F16(&halves),
        ElementType::Bf16 => Elements::Bf16(&bfloats),
    };
    Tensor::upload(backend.stream(), elements).unwrap()
}

fn numbers(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((rank * 31 + i * 7) % 251) as f32 - 125.0).collect()
}

fn check_operations<T: Transport<Backend = Cuda>>(transport: &mut T) {
    let (backend, rank, ranks) = (transport.backend().clone(), transport.rank(), transport.ranks());
    let download = |tensor: &Tensor| block_on(backend.download(tensor)).unwrap();
    // Of one launch, of several, of fewer again: slots are used in turn.
    for count in [1, 7, 4096, WORDS + 3, 3 * WORDS, 2, 255] {
        for element_type in TYPES {
            let part = upload(&backend, &numbers(rank, count), element_type);
            let mut all = upload(&backend, &vec![9.0; ranks * count + 1], element_type);
            transport.all_gather(&part, count, &mut all).unwrap();
            transport.wait().unwrap();
            let expected: Vec<f32> = (0..ranks).flat_map(|rank| numbers(rank, count)).chain([9.0]).collect();
            assert!(download(&all) == expected, "all-gather of {count} {element_type:?} on rank {rank}");

            let mut tensor = upload(&backend, &numbers(rank, count), element_type);
            transport.broadcast(&mut tensor, count, ranks - 1).unwrap();
            assert!(download(&tensor) == numbers(ranks - 1, count), "broadcast of {count} {element_type:?}");
        }
        for reduction in [Reduction::Sum, Reduction::Max] {
            let mut tensor = upload(&backend, &numbers(rank, count), ElementType::F32);
            transport.all_reduce(&mut tensor, count, reduction).unwrap();
            let of = |i: usize| (0..ranks).map(move |rank| numbers(rank, count)[i]);
            let some = [0, count / 2, count - 1];
            let expected = some.map(|i| match reduction {
                Reduction::Sum => of(i).sum::<f32>(),
                Reduction::Max => of(i).fold(f32::NEG_INFINITY, f32::max),
            });
            let got = download(&tensor);
            assert_eq!(some.map(|i| got[i]), expected, "{reduction:?} of {count} on rank {rank}");
        }
    }
    let mut with_nan = upload(&backend, &[if rank == 0 { f32::NAN } else { 1.0 }, 2.0], ElementType::F32);
    transport.all_reduce(&mut with_nan, 2, Reduction::Max).unwrap();
    let got = download(&with_nan);
    assert!(got[0].is_nan() && got[1] == 2.0, "{got:?}");
    check_refusals(transport);
}

/// What does not fit is refused before anything is sent, and the transport goes on.
fn check_refusals<T: Transport<Backend = Cuda>>(transport: &mut T) {
    let (backend, ranks) = (transport.backend().clone(), transport.ranks());
    let part = upload(&backend, &[1.0; 8], ElementType::F32);
    let mut short = upload(&backend, &[1.0; 8], ElementType::F32);
    let refused = transport.all_gather(&part, 9, &mut upload(&backend, &vec![1.0; 9 * ranks], ElementType::F32));
    assert!(matches!(refused, Err(Error::Elements { .. })), "{refused:?}");
    let refused = transport.all_gather(&part, 8, &mut upload(&backend, &vec![1.0; 8 * ranks - 1], ElementType::F32));
    assert!(matches!(refused, Err(Error::Elements { .. })), "{refused:?}");
    let mut halves = upload(&backend, &vec![1.0; 8 * ranks], ElementType::F16);
    assert!(matches!(transport.all_gather(&part, 8, &mut halves), Err(Error::Buffer { .. })));
    assert!(matches!(transport.all_reduce(&mut halves, 8, Reduction::Sum), Err(Error::Buffer { .. })));
    assert!(matches!(transport.broadcast(&mut short, 8, ranks), Err(Error::Plan { .. })));
    transport.broadcast(&mut short, 8, 0).unwrap();
    transport.wait().unwrap();
}

/// States of a rank. Of every third head of a row another rank is empty; the last head of a row is empty everywhere.
fn states(shape: &AttentionShape, rows: usize, rank: usize, ranks: usize) -> (Vec<f32>, Vec<f32>) {
    let (mut random, heads, dim) = (Random::new(rank as u64 + 5), shape.query_heads(), shape.head_dim());
    let (mut outputs, mut lse) = (Vec::new(), Vec::new());
    for at in 0..rows * heads {
        let nobody = at % heads == heads - 1;
        let is_empty = nobody || (at % 3 == 0 && at / 3 % ranks == rank && ranks > 1);
        lse.push(if is_empty { f32::NEG_INFINITY } else { 8.0 * random.normal() });
        outputs.extend((0..dim).map(|_| if is_empty { f32::NAN } else { random.normal() }));
    }
    (outputs, lse)
}

/// The states of all ranks merged in f64.
fn merged(shape: &AttentionShape, rows: usize, ranks: usize) -> (Vec<f64>, Vec<f64>) {
    let all: Vec<_> = (0..ranks).map(|rank| states(shape, rows, rank, ranks)).collect();
    let dim = shape.head_dim();
    let (mut outputs, mut lses) = (Vec::new(), Vec::new());
    for at in 0..rows * shape.query_heads() {
        let weights: Vec<f64> = all.iter().map(|(_, lse)| f64::from(lse[at]).exp()).collect();
        let sum: f64 = weights.iter().sum();
        lses.push(sum.ln());
        for channel in at * dim..(at + 1) * dim {
            let of = |((outputs, _), weight): (&(Vec<f32>, Vec<f32>), &f64)| match *weight {
                0.0 => 0.0,
                weight => weight * f64::from(outputs[channel]),
            };
            let joined: f64 = all.iter().zip(&weights).map(of).sum();
            outputs.push(if sum == 0.0 { 0.0 } else { joined / sum });
        }
    }
    (outputs, lses)
}

fn compare(what: &str, (outputs, lse): (&[f32], &[f32]), (expected, expected_lse): &(Vec<f64>, Vec<f64>), most: f64) {
    let error = nmse(outputs, expected);
    assert!(error < most, "{what}: {error:.1e}");
    for (got, expected) in lse.iter().zip(expected_lse) {
        let alike = f64::from(*got) == *expected || (f64::from(*got) - expected).abs() < 1e-5 * expected.abs().max(1.0);
        assert!(alike, "{what}: log-sum-exp {got} for {expected}");
    }
}

const ACCURACY: [f64; 3] = [1e-12, 1e-6, 1e-4];

fn shapes() -> Vec<AttentionShape> {
    let small = HEAD_DIMS.into_iter().map(|head_dim| AttentionShape::new(4, 2, head_dim).unwrap());
    small.chain([AttentionShape::new(32, 8, 128).unwrap()]).collect()
}

/// Merges states and returns all bits of the results.
fn check_merges<T: Transport<Backend = Cuda>>(transport: &mut T) -> Vec<u32> {
    let (backend, rank, ranks) = (transport.backend().clone(), transport.rank(), transport.ranks());
    let mut bits = Vec::new();
    for shape in shapes() {
        let most_rows = if shape.head_dim() == 128 { 7 } else { 3 };
        let mut gathered = block_on(transport.room_for_states(&shape, most_rows)).unwrap();
        for rows in [most_rows, 1, 2] {
            let heads = rows * shape.query_heads();
            let (outputs, lse) = states(&shape, rows, rank, ranks);
            // After each other in memory, as attention returns them, and apart; both at once on different ranks.
            let both = [&outputs[..], &lse].concat();
            let both = Tensor::upload(backend.stream(), Elements::F32(&both)).unwrap();
            let [apart, lse] = [&outputs, &lse].map(|x| Tensor::upload(backend.stream(), Elements::F32(x)).unwrap());
            let are_apart = rows == 1 || (rows == 2 && rank % 2 == 1);
            let of_rank = match are_apart {
                true => AttentionStates { outputs: apart, lse },
                false => AttentionStates {
                    outputs: both.slice(0, outputs.len()).unwrap(),
                    lse: both.slice(outputs.len(), heads).unwrap(),
                },
            };
            for (element_type, most) in TYPES.into_iter().zip(ACCURACY) {
                let mut output = Tensor::zeroed(backend.stream(), heads * shape.head_dim(), element_type).unwrap();
                let mut lse = Tensor::zeroed(backend.stream(), heads, ElementType::F32).unwrap();
                let exchange = StateExchange { shape, rows, states: &of_rank, gathered: &mut gathered };
                transport.merge_states(exchange, &mut output, Some(&mut lse)).unwrap();
                transport.wait().unwrap();
                let [output, lse] = [&output, &lse].map(|tensor| block_on(backend.download(tensor)).unwrap());
                let what = format!("{shape:?}, {rows} rows, {ranks} ranks, {element_type:?}");
                compare(&what, (&output, &lse), &merged(&shape, rows, ranks), most);
                bits.extend(output.iter().chain(&lse).map(|x| x.to_bits()));
            }
        }
    }
    bits
}

/// All ranks and both runs have the same bits.
fn assert_same(all: &[Vec<Vec<u32>>]) {
    let first = &all[0][0];
    assert!(!first.is_empty() && all.iter().flatten().all(|bits| bits == first), "ranks or runs differ in their bits");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn peers_exchange() {
    let _gpus = two_gpus();
    for ranks in [1, 2, 3, 4] {
        if !are_gpus(ranks, "peer memory between ranks") {
            return;
        }
        over_peers(ranks, DEADLINE, |mut peer| check_operations(&mut peer));
        let run = |_| over_peers(ranks, DEADLINE, |mut peer| check_merges(&mut peer));
        assert_same(&[0, 1].map(run));
    }
}

#[cfg(feature = "nccl")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn nccl_exchanges() {
    use super::over_nccl;
    let _gpus = two_gpus();
    over_nccl(2, DEADLINE, |mut nccl| check_operations(&mut nccl));
    let run = |_| over_nccl(2, DEADLINE, |mut nccl| check_merges(&mut nccl));
    let runs = [0, 1].map(run);
    assert_same(&runs);
    // Both transports merge in the same order.
    let peers = over_peers(2, DEADLINE, |mut peer| check_merges(&mut peer));
    assert!(peers[0] == runs[0][0], "peer memory and NCCL merge to different bits");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn parts_are_merged_as_in_f64() {
    let backend = backend(0);
    for (shape, parts) in shapes().into_iter().zip([1, 2, 5, 64].into_iter().cycle()) {
        let rows = 3;
        let (mut outputs, mut lse) = (Vec::new(), Vec::new());
        for part in 0..parts {
            let of = states(&shape, rows, part, parts);
            outputs.extend(of.0);
            lse.extend(of.1);
        }
        let [outputs, lse] = [outputs, lse].map(|x| Tensor::upload(backend.stream(), Elements::F32(&x)).unwrap());
        let all = AttentionStates { outputs, lse };
        let heads = rows * shape.query_heads();
        for (element_type, most) in TYPES.into_iter().zip(ACCURACY) {
            let mut output = Tensor::zeroed(backend.stream(), heads * shape.head_dim(), element_type).unwrap();
            let mut lse = Tensor::zeroed(backend.stream(), heads, ElementType::F32).unwrap();
            let of = StateParts { states: &all, parts, rows };
            backend.merge_parts(&shape, of, &mut output, Some(&mut lse)).unwrap();
            let [output, lse] = [&output, &lse].map(|tensor| block_on(backend.download(tensor)).unwrap());
            compare(&format!("{shape:?}, {parts} parts"), (&output, &lse), &merged(&shape, rows, parts), most);
        }
    }
}

/// A rank that does not come, and one that leaves: the others get an error, at once or within the deadline, and every
/// call after that too. The device goes on.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_rank_that_does_not_come_is_an_error() {
    let _gpus = two_gpus();
    let deadline = Duration::from_millis(300);
    let begin = std::time::Instant::now();
    let errors = over_peers(2, deadline, |mut peer| {
        let mut tensor = upload(peer.backend(), &[1.0; 8], ElementType::F32);
        peer.all_reduce(&mut tensor, 8, Reduction::Sum).unwrap();
        peer.wait().unwrap();
        if peer.rank() == 1 {
            std::thread::sleep(2 * deadline);
            return Vec::new();
        }
        peer.all_reduce(&mut tensor, 8, Reduction::Sum).unwrap();
        let late = peer.wait().unwrap_err();
        let again = peer.all_reduce(&mut tensor, 8, Reduction::Sum).unwrap_err();
        assert_eq!(
            block_on(peer.backend().download(&upload(peer.backend(), &[3.0], ElementType::F32))).unwrap(),
            [3.0]
        );
        vec![late, again]
    });
    for error in &errors[0] {
        assert!(matches!(error, Error::Transport { failed, .. } if *failed == [1]), "{error}");
    }
    assert_eq!(errors[0].len(), 2);
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    // Whoever leaves says so: nobody waits for the deadline.
    let waited = over_peers(2, DEADLINE, |mut peer| {
        if peer.rank() == 1 {
            return Duration::ZERO;
        }
        let mut tensor = upload(peer.backend(), &[1.0; 8], ElementType::F32);
        let begin = std::time::Instant::now();
        peer.all_reduce(&mut tensor, 8, Reduction::Sum).unwrap();
        assert!(peer.wait().is_err());
        begin.elapsed()
    });
    assert!(waited[0] < DEADLINE / 4, "{waited:?}");
}

/// Handles that do not belong together are refused.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn handles_that_do_not_fit_are_refused() {
    let backend = backend(0);
    let slots = |rank, ranks, words| PeerSlots::new(&backend, (rank, ranks), words).unwrap();
    let refused = |handles: &[PeerHandle]| {
        let own = slots(0, 2, 64);
        let mut all = vec![own.handle()];
        all.extend_from_slice(handles);
        // SAFETY: Nothing is exchanged.
        let error = unsafe { own.connect(&all, DEADLINE) }.unwrap_err();
        assert!(matches!(error, Error::Plan { .. }), "{error}");
    };
    refused(&[]);
    refused(&[slots(1, 2, 128).handle()]);
    refused(&[slots(0, 2, 64).handle()]);
    let gone = slots(1, 2, 64).handle();
    refused(&[gone]);
    assert!(matches!(PeerSlots::new(&backend, (2, 2), 64), Err(Error::Plan { .. })));
    assert!(matches!(PeerSlots::new(&backend, (0, 17), 64), Err(Error::Limit { .. })));
}
