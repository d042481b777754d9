//! A limit on the total bytes of all stores of a backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// The bytes there are and those in use, shared by the stores of a backend.
#[derive(Clone, Debug)]
pub(super) struct MemoryLimit {
    bytes: u64,
    used: Arc<AtomicU64>,
}

impl MemoryLimit {
    pub(super) fn new(bytes: u64) -> Self {
        Self { bytes, used: Arc::default() }
    }

    /// Bytes that are left of it, and that the machine has.
    pub(super) fn available(&self) -> u64 {
        self.bytes.saturating_sub(self.used.load(Ordering::Relaxed)).min(machine_bytes())
    }
}

/// Bytes of memory that the system says are available, or as many as can be addressed where it says nothing.
fn machine_bytes() -> u64 {
    let available = |line: &str| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok();
    let told = std::fs::read_to_string("/proc/meminfo").ok();
    let kilobytes = told.and_then(|told| told.lines().find_map(available));
    kilobytes.map_or(isize::MAX as u64, |kilobytes| kilobytes.saturating_mul(1024))
}

/// The bytes that one store takes from a limit. They are given back when the store is dropped.
#[derive(Debug)]
pub(super) struct MemoryShare {
    limit: MemoryLimit,
    held: u64,
}

impl MemoryShare {
    pub(super) fn unlimited() -> Self {
        Self::of(MemoryLimit::new(u64::MAX))
    }

    pub(super) fn of(limit: MemoryLimit) -> Self {
        Self { limit, held: 0 }
    }

    pub(super) fn take(&mut self, what: &'static str, bytes: u64) -> Result<()> {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.limit.bytes);
        match self.limit.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => {
                self.held += bytes;
                Ok(())
            }
            Err(used) => Err(Error::OutOfMemory {
                what,
                bytes,
                message: format!("the memory limit is {} bytes, of which {used} are in use", self.limit.bytes),
            }),
        }
    }

    /// Takes over what another share of the same limit holds.
    pub(super) fn take_over(&mut self, mut other: Self) {
        self.held += std::mem::take(&mut other.held);
    }

    /// A share of the same limit that holds nothing.
    pub(super) fn another(&self) -> Self {
        Self::of(self.limit.clone())
    }

    pub(super) fn give_back(&mut self, bytes: u64) {
        self.limit.used.fetch_sub(bytes, Ordering::Relaxed);
        self.held -= bytes;
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.give_back(self.held);
    }
}
