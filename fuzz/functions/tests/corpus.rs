//! The corpus through the fuzz targets, as it is and with a few bytes changed.

use std::time::{Duration, Instant};

use kvpack_fuzz::{TARGETS, Target, mutate};

/// Changed copies of every file.
const CHANGED: usize = 12;
/// What all of it may take on a slow and busy machine: a file that keeps a function busy takes longer.
const MOST_TIME: Duration = Duration::from_secs(600);

/// How many seeds the target takes as they are.
fn replay(name: &str, target: Target, deadline: Instant) -> usize {
    let mut random = fastrand::Rng::with_seed(name.len() as u64);
    let files = mutate::seeds(name);
    let mut taken = 0;
    for file in &files {
        let bytes = std::fs::read(file).unwrap();
        taken += usize::from(target(&bytes));
        for number in 0..CHANGED {
            let mut changed = bytes.clone();
            mutate::change(&mut changed, &mut random);
            // A panic says which copy it was.
            println!("{} {}, change {number}", name, file.display());
            target(&changed);
            assert!(Instant::now() < deadline, "the corpus takes longer than {MOST_TIME:?}; make it smaller");
        }
    }
    taken
}

#[test]
fn the_corpus_is_harmless() {
    let deadline = Instant::now() + MOST_TIME;
    for (name, target) in TARGETS {
        // Behind what is refused nothing is tried.
        assert!(replay(name, target, deadline) >= 1, "{name} refuses every seed");
    }
}
