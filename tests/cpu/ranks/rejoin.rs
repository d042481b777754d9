//! Ranks that failed at different places, and what they then agree on.

use kvpack::Error;
use kvpack::cache::{DenseLayer, TokenRun};
use kvpack::cpu::Cpu;
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::policy::{LayerSelection, Selection};
use kvpack::ranks::{ContextParallel, Placement, Rejoined, ThreadTransport};
use pollster::block_on;

use super::LONG;
use super::failures::rows;
use super::script::{SEQUENCES, shape};
use any_backend::model_steps::recipe;
use any_backend::random_rows::Random;

const RANKS: usize = 3;

type OnThread = ContextParallel<ThreadTransport>;

/// What ranks did before they failed, and what they then agree on.
struct Parting {
    what: &'static str,
    /// On the ranks that committed the last step, and on the one that did not.
    work: [fn(&mut OnThread); 2],
    truncated: &'static [usize],
    lost: &'static [usize],
    lengths: [usize; SEQUENCES],
}

/// Stores tokens without attending, so that no rank waits for another.
fn store(rank: &mut OnThread, sequence: usize, tokens: usize) {
    let runs = [TokenRun::chunk(sequence, tokens)];
    let keys = rows(&mut Random::new(4), tokens, 2);
    block_on(rank.cache_mut().reserve_for_append(&runs)).unwrap();
    rank.begin_append(&runs).unwrap();
    block_on(rank.store(0, RowLayout::token_major(tokens, &shape()), &keys, &keys)).unwrap();
}

const fn nothing(_: &mut OnThread) {}

fn forks(rank: &mut OnThread) {
    rank.clear(1).unwrap();
    rank.fork(0, 1).unwrap();
}

/// The same for every sequence, in another order on every second rank.
fn in_any_order(rank: &mut OnThread) {
    let is_even = rank.rank().is_multiple_of(2);
    if is_even {
        rank.truncate(1, 256).unwrap();
    }
    rank.truncate(0, 128).unwrap();
    rank.fork(0, 2).unwrap();
    if !is_even {
        rank.truncate(1, 256).unwrap();
    }
}

/// One rank cannot keep a prompt, and the others take it back.
fn one_refuses(rank: &mut OnThread) {
    let tensor = || rows(&mut Random::new(5), 20, 2);
    let dense = DenseLayer { rows: RowLayout::token_major(20, &shape()), keys: tensor(), values: tensor() };
    let prompt = if rank.rank() == 1 { Vec::new() } else { vec![dense] };
    let selection = Selection::new(vec![LayerSelection::all(20, 2).unwrap()]).unwrap();
    let refused = block_on(rank.keep(1, prompt, &selection));
    assert!(matches!(refused, Err(Error::Plan { .. } | Error::Selection { .. })), "{refused:?}");
}

/// A step that not all ranks committed, and what some ranks did after it: tokens of one text stay where all have them,
/// and no sequence goes on with parts of two texts, however long they are.
const PARTINGS: [Parting; 10] = [
    Parting { what: "a step", work: [nothing, nothing], truncated: &[0], lost: &[], lengths: [200, 300, 0] },
    Parting {
        what: "a new process",
        work: [nothing, |rank| [0, 1].into_iter().for_each(|sequence| rank.clear(sequence).unwrap())],
        truncated: &[0, 1],
        lost: &[],
        lengths: [0; 3],
    },
    Parting { what: "a fork", work: [forks, nothing], truncated: &[0], lost: &[1], lengths: [200, 0, 0] },
    Parting {
        what: "a fork of the same length",
        work: [
            |rank| {
                forks(rank);
                rank.truncate(1, 300).unwrap();
            },
            nothing,
        ],
        truncated: &[0],
        lost: &[1],
        lengths: [200, 0, 0],
    },
    Parting {
        what: "a truncation and other tokens",
        work: [
            |rank| {
                rank.truncate(1, 256).unwrap();
                store(rank, 1, 44);
                rank.commit().unwrap();
            },
            nothing,
        ],
        truncated: &[0, 1],
        lost: &[],
        lengths: [200, 256, 0],
    },
    Parting {
        what: "two truncations",
        work: [|rank| [256, 200].into_iter().for_each(|length| rank.truncate(1, length).unwrap()), nothing],
        truncated: &[0],
        lost: &[1],
        lengths: [200, 0, 0],
    },
    Parting {
        what: "forgotten pages",
        work: [|rank| rank.forget(1, TokenRange::new(0, 256).unwrap()).unwrap(), nothing],
        truncated: &[0],
        lost: &[1],
        lengths: [200, 0, 0],
    },
    Parting {
        what: "another sequence swapped in",
        work: [
            |rank| {
                let swapped = block_on(rank.cache_mut().swap_out(0)).unwrap();
                rank.clear(1).unwrap();
                block_on(rank.cache_mut().swap_in(1, &swapped)).unwrap();
            },
            nothing,
        ],
        truncated: &[0],
        lost: &[1],
        lengths: [0; 3],
    },
    Parting {
        what: "the same in another order",
        work: [in_any_order, in_any_order],
        truncated: &[],
        lost: &[],
        lengths: [128, 256, 128],
    },
    Parting {
        what: "a prompt that one rank refused",
        work: [one_refuses, one_refuses],
        truncated: &[0],
        lost: &[],
        lengths: [200, 300, 0],
    },
];

#[test]
fn ranks_agree_on_what_all_have() {
    let layers = [(shape(), recipe("saw-int4"))];
    for parting in &PARTINGS {
        let connect = || ThreadTransport::connect(vec![Cpu::new(); RANKS], LONG).unwrap();
        let ends: Vec<_> = connect().into_iter().zip(connect()).zip(connect()).collect();
        let run = |((first, second), third)| {
            let placement = Placement::new(RANKS).unwrap();
            let mut rank = block_on(OnThread::new(first, &layers, SEQUENCES, placement)).unwrap();
            for (sequence, tokens) in [(0, 200), (1, 300)] {
                store(&mut rank, sequence, tokens);
                rank.commit().unwrap();
            }
            let is_behind = rank.rank() == 1;
            store(&mut rank, 0, 200);
            if is_behind {
                rank.abandon();
            } else {
                rank.commit().unwrap();
            }
            parting.work[usize::from(is_behind)](&mut rank);
            let rejoined = block_on(rank.rejoin(second)).unwrap();
            let lengths: Vec<usize> = (0..SEQUENCES).map(|of| rank.cache().length(of).unwrap()).collect();
            // Then they agree on everything.
            assert_eq!(block_on(rank.rejoin(third)).unwrap(), Rejoined::default(), "{}", parting.what);
            (rejoined, lengths)
        };
        let of_ranks: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = ends.into_iter().map(|ends| scope.spawn(|| run(ends))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (rejoined, lengths) in of_ranks {
            let expected = Rejoined { truncated: parting.truncated.to_vec(), lost: parting.lost.to_vec() };
            assert_eq!((rejoined, &lengths[..]), (expected, &parting.lengths[..]), "{}", parting.what);
        }
    }
}
