//! The corpus through the fuzz targets, as it is and with a few bytes changed.

use std::time::{Duration, Instant};

use kvpack_fuzz::{TARGETS, Target, mutate, sequence, weights};

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

/// The corpus has a sequence of every recipe that kvpack reads: bytes of another version would all be refused.
/// `KVPACK_UPDATE=1` rewrites them.
#[test]
fn the_sequences_of_the_corpus_enter() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/sequence");
    for recipe in 0..sequence::RECIPES.len() {
        let (file, sound) = (folder.join(format!("sound-{recipe}")), sequence::sound(recipe));
        if std::env::var_os("KVPACK_UPDATE").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&file, &sound).unwrap();
        }
        assert!(sequence::enters(&sound), "{}", sequence::RECIPES[recipe]);
        let kept = std::fs::read(&file).unwrap();
        assert!(sequence::enters(&kept), "{}: run with KVPACK_UPDATE=1", file.display());
    }
}

/// The corpus has a checkpoint of every format, all of which are read. `KVPACK_UPDATE=1` rewrites them.
#[test]
fn the_weights_of_the_corpus_are_read() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/weights");
    for (name, sound) in weights::sound() {
        let file = folder.join(name);
        if std::env::var_os("KVPACK_UPDATE").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&file, &sound).unwrap();
        }
        assert!(weights::read(&sound), "{name}");
        let kept = std::fs::read(&file).unwrap();
        assert!(weights::read(&kept), "{}: run with KVPACK_UPDATE=1", file.display());
    }
}
