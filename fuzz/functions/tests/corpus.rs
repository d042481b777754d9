//! The corpus through the fuzz targets, as it is and with a few bytes changed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvpack_fuzz::{TARGETS, Target};

/// Changed copies of every file.
const CHANGED: usize = 12;
/// What all of it may take on a slow and busy machine: a file that keeps a function busy takes longer.
const MOST_TIME: Duration = Duration::from_secs(600);

/// Bytes of the largest sound golden file that is changed.
const LARGEST_GOLDEN: u64 = 20_000;

/// The seeds of a target. Of golden files there are sound ones in the repository, for every op.
fn files(target: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = listed(&root.join("fuzz/corpus").join(target));
    if target == "golden" {
        let sound = listed(&root.join("tests/golden")).into_iter();
        files.extend(sound.filter(|file| file.metadata().unwrap().len() < LARGEST_GOLDEN));
    }
    files
}

fn listed(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Flips bits, overwrites numbers with hostile ones, or cuts the end off.
fn change(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    const HOSTILE: [u64; 6] = [0, 1, u64::MAX, 1 << 63, 1 << 32, (1 << 57) + 2];
    for _ in 0..random.usize(1..4) {
        if bytes.is_empty() {
            return;
        }
        // Headers decide most, and they come first.
        let end = if random.bool() { bytes.len() } else { bytes.len().min(2000) };
        let at = random.usize(..end);
        match random.u8(..8) {
            0 => bytes.truncate(at),
            1 | 2 => {
                let number = HOSTILE[random.usize(..HOSTILE.len())].to_le_bytes();
                let length = number.len().min(bytes.len() - at);
                bytes[at..at + length].copy_from_slice(&number[..length]);
            }
            3 => bytes[at] = b"0123456789-.\"{}[],:"[random.usize(..19)],
            4 | 5 => {
                // A number in a text, all its digits.
                let digits = bytes[at..].iter_mut().skip_while(|byte| !byte.is_ascii_digit());
                let with = b"0189"[random.usize(..4)];
                digits.take_while(|byte| byte.is_ascii_digit()).for_each(|byte| *byte = with);
            }
            _ => bytes[at] ^= 1 << random.u8(..8),
        }
    }
}

fn replay(name: &str, target: Target, deadline: Instant) -> usize {
    let mut random = fastrand::Rng::with_seed(name.len() as u64);
    let files = files(name);
    for file in &files {
        let bytes = std::fs::read(file).unwrap();
        target(&bytes);
        for number in 0..CHANGED {
            let mut changed = bytes.clone();
            change(&mut changed, &mut random);
            // A panic says which copy it was.
            println!("{} {}, change {number}", name, file.display());
            target(&changed);
            assert!(Instant::now() < deadline, "the corpus takes longer than {MOST_TIME:?}; make it smaller");
        }
    }
    files.len()
}

#[test]
fn the_corpus_is_harmless() {
    let deadline = Instant::now() + MOST_TIME;
    for (name, target) in TARGETS {
        assert!(replay(name, target, deadline) >= 1, "no seeds for {name}");
    }
}
