//! Inputs near sound ones: seeds from the corpus, changed at random. It needs no instrumented build, so that it runs on
//! stable Rust.

use std::path::{Path, PathBuf};

/// Numbers that break what trusts them.
const HOSTILE: [u64; 6] = [0, 1, u64::MAX, 1 << 63, 1 << 32, (1 << 57) + 2];

/// Bytes of the largest sound golden file that is changed.
const LARGEST_GOLDEN: u64 = 20_000;

/// The seeds of a target. Of golden files there are sound ones in the repository, for every op.
///
/// # Panics
/// When the corpus cannot be read.
pub fn seeds(target: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = listed(&root.join("fuzz/corpus").join(target));
    if target == "golden" {
        let is_small = |file: &PathBuf| file.metadata().is_ok_and(|of| of.len() < LARGEST_GOLDEN);
        for folder in ["tests/golden", "weights/tests/golden"] {
            files.extend(listed(&root.join(folder)).into_iter().filter(is_small));
        }
    }
    files
}

fn listed(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry of a folder").path()).collect();
    files.sort();
    files
}

/// Flips bits, overwrites numbers with hostile ones, repeats or moves parts, or cuts the end off.
pub fn change(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    for _ in 0..random.usize(1..4) {
        if bytes.is_empty() {
            return;
        }
        // Headers decide most, and they come first.
        let end = if random.bool() { bytes.len() } else { bytes.len().min(2000) };
        let at = random.usize(..end);
        match random.u8(..10) {
            0 => bytes.truncate(at),
            1 | 2 => {
                let number = HOSTILE[random.usize(..HOSTILE.len())].to_le_bytes();
                let length = number.len().min(bytes.len() - at);
                bytes[at..at + length].copy_from_slice(&number[..length]);
            }
            3 => bytes[at] = b"0123456789-.\"{}[],:+=/"[random.usize(..22)],
            4 | 5 => {
                // A number in a text, all its digits.
                let digits = bytes[at..].iter_mut().skip_while(|byte| !byte.is_ascii_digit());
                let with = b"0189"[random.usize(..4)];
                digits.take_while(|byte| byte.is_ascii_digit()).for_each(|byte| *byte = with);
            }
            6 => {
                // A part twice.
                let part = bytes[at..(at + random.usize(1..40)).min(bytes.len())].to_vec();
                let to = random.usize(..=bytes.len());
                bytes.splice(to..to, part);
            }
            7 => {
                // A part less.
                bytes.drain(at..(at + random.usize(1..20)).min(bytes.len()));
            }
            _ => bytes[at] ^= 1 << random.u8(..8),
        }
    }
}

/// The end of one seed behind the beginning of another.
pub fn splice(first: &[u8], second: &[u8], random: &mut fastrand::Rng) -> Vec<u8> {
    let (from, to) = (random.usize(..=first.len()), random.usize(..=second.len()));
    [&first[..from], &second[to..]].concat()
}
