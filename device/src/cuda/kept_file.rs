//! Files of compiled kernels: whole, or not read at all. The driver crashes on an empty binary, and may never return
//! from a truncated one.
//!
//! A file is the binary, so that NVIDIA's tools read it, and behind it a seal: the magic bytes, and the length and the
//! hash of the binary, as little-endian u64.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// The first bytes of a seal, and its version.
const MAGIC: [u8; 8] = *b"kvcubin\x01";

/// Most temporary files that writers with the number of this process may have left in a folder.
const MOST_LEFT: u64 = 1 << 16;

/// The seal of a binary.
fn seal(binary: &[u8]) -> [u8; 24] {
    let mut seal = [0; 24];
    seal[..8].copy_from_slice(&MAGIC);
    seal[8..16].copy_from_slice(&(binary.len() as u64).to_le_bytes());
    seal[16..].copy_from_slice(&hash(binary, 0).to_le_bytes());
    seal
}

/// The binary of a file, if it is there and whole.
pub(super) fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let (binary, found) = bytes.split_last_chunk()?;
    let length = (!binary.is_empty() && *found == seal(binary)).then_some(binary.len())?;
    bytes.truncate(length);
    Some(bytes)
}

/// Writes a binary and its seal to a temporary file in the same folder, brings them to the disk, and renames the file:
/// neither another process nor a machine that loses power leaves half a file under the name.
pub(super) fn write(path: &Path, binary: &[u8]) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let (beside, mut file) = create_beside(path)?;
    let written = file.write_all(binary).and_then(|()| file.write_all(&seal(binary))).and_then(|()| file.sync_all());
    drop(file);
    let renamed = written.and_then(|()| fs::rename(&beside, path));
    if renamed.is_err() {
        fs::remove_file(&beside).unwrap_or(());
    }
    renamed
}

/// A new file that no other writer has. Threads share the number of the process, and so do containers that share a
/// folder, whose first processes all have number 1: names go on until one is free.
fn create_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let beside = path.with_extension(format!("{}-{number}.part", process::id()));
        match File::options().write(true).create_new(true).open(&beside) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && number < MOST_LEFT => {}
            opened => return opened.map(|file| (beside, file)),
        }
    }
}

/// FNV-1a, the same on every platform and in every version of Rust.
pub(super) fn hash(bytes: &[u8], seed: u64) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bytes.iter().fold(start, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// A folder of a test's own.
    fn folder(of: &str) -> PathBuf {
        std::env::temp_dir().join(format!("kvpack-kept-file-{of}-{}", process::id()))
    }

    #[test]
    fn damaged_files_are_refused() {
        let folder = folder("damaged");
        let path = folder.join("attend.cubin");
        let binary: Vec<u8> = (0..100).collect();
        write(&path, &binary).unwrap();
        assert_eq!(read(&path), Some(binary.clone()));
        let whole = fs::read(&path).unwrap();
        let refuses = |bytes: &[u8], how: &str| {
            fs::write(&path, bytes).unwrap();
            assert_eq!(read(&path), None, "{how}");
        };
        (0..whole.len()).for_each(|length| refuses(&whole[..length], &format!("{length} of its bytes")));
        refuses(&[whole.as_slice(), &[0]].concat(), "one byte more");
        refuses(&binary, "no seal");
        for at in 0..whole.len() {
            let mut altered = whole.clone();
            altered[at] ^= 4;
            refuses(&altered, &format!("byte {at} altered"));
        }
        // Zeros are what some file systems leave after a crash.
        refuses(&vec![0; whole.len()], "zeros");
        write(&path, &[]).unwrap();
        assert_eq!(read(&path), None, "an empty binary");
        write(&path, &binary).unwrap();
        assert_eq!(read(&path), Some(binary), "written again");
        fs::remove_dir_all(folder).unwrap();
    }

    /// Ranks are threads of one process, and compile the same kernels at once.
    #[test]
    fn writers_at_once_publish_whole_files() {
        let folder = folder("writers");
        let path = folder.join("attend.cubin");
        // What another container's process of the same number has left.
        fs::create_dir_all(&folder).unwrap();
        (0..64).for_each(|n| fs::write(path.with_extension(format!("{}-{n}.part", process::id())), b"left").unwrap());
        let of_writer = |writer: u8| vec![writer; 100_000];
        write(&path, &of_writer(0)).unwrap();
        thread::scope(|scope| {
            for writer in 1..=4 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..8 {
                        write(path, &of_writer(writer)).unwrap();
                        let found = read(path).expect("the file is whole");
                        assert_eq!(found, of_writer(found[0]));
                    }
                });
            }
        });
        let left = |entry: io::Result<fs::DirEntry>| fs::read(entry.unwrap().path()).unwrap().as_slice() != b"left";
        assert_eq!(fs::read_dir(&folder).unwrap().filter_map(|entry| left(entry).then_some(())).count(), 1);
        fs::remove_dir_all(folder).unwrap();
    }
}
