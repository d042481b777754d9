//! How a rank tells the others where its slots are.

use std::sync::OnceLock;

use crate::{Error, Result};

/// The first bytes of a handle, and the version of what follows.
const MAGIC: [u8; 8] = *b"kvpeer\0\x01";

/// Bytes of a handle of the driver.
pub(super) const IPC_BYTES: usize = 64;

const BYTES: usize = 8 + 4 * 4 + 2 * 8 + IPC_BYTES;

/// Where the slots of a rank are. The caller carries it to the other ranks, as bytes if they are other processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerHandle {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// Words of a slot.
    pub(super) capacity: u32,
    /// The process, and the slots among its own.
    pub(super) process: u64,
    pub(super) id: u64,
    /// For other processes, where the driver can share memory between them.
    pub(super) ipc: Option<[u8; IPC_BYTES]>,
}

impl PeerHandle {
    /// The handle as bytes, for another process of this host.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BYTES);
        bytes.extend_from_slice(&MAGIC);
        let words = [self.rank, self.ranks, self.capacity, u32::from(self.ipc.is_some())];
        words.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        [self.process, self.id].iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        bytes.extend_from_slice(&self.ipc.unwrap_or([0; IPC_BYTES]));
        bytes
    }

    /// The handle that these bytes are.
    ///
    /// # Errors
    /// [`Error::Plan`] when they are none, or one of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let wrong = || Error::Plan {
            what: "handle of a rank",
            reason: format!("{} bytes that PeerHandle::to_bytes of this version did not write", bytes.len()),
        };
        let body = bytes.strip_prefix(&MAGIC).filter(|_| bytes.len() == BYTES).ok_or_else(wrong)?;
        let word = |at: usize| body.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
        let long = |at: usize| body.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
        let ipc: Option<[u8; IPC_BYTES]> = body.get(32..).and_then(|b| b.try_into().ok());
        let fields = (word(0), word(4), word(8), word(12), long(16), long(24), ipc);
        let (Some(rank), Some(ranks), Some(capacity), Some(shared), Some(process), Some(id), Some(ipc)) = fields else {
            return Err(wrong());
        };
        Ok(Self { rank, ranks, capacity, process, id, ipc: (shared != 0).then_some(ipc) })
    }
}

/// A number that no other process has, whatever its namespace.
pub(super) fn this_process() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(|| fastrand::u64(..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_back() {
        let mut handle = PeerHandle { rank: 1, ranks: 2, capacity: 4128, process: 7, id: 9, ipc: Some([3; IPC_BYTES]) };
        assert_eq!(PeerHandle::from_bytes(&handle.to_bytes()), Ok(handle.clone()));
        handle.ipc = None;
        assert_eq!(PeerHandle::from_bytes(&handle.to_bytes()), Ok(handle.clone()));
        let mut bytes = handle.to_bytes();
        assert!(PeerHandle::from_bytes(&bytes[1..]).is_err() && PeerHandle::from_bytes(&bytes[..20]).is_err());
        bytes[7] = 9;
        assert!(matches!(PeerHandle::from_bytes(&bytes), Err(Error::Plan { .. })));
    }
}
