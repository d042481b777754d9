//! What other libraries took for the same steps on the same device.

use serde::{Deserialize, Serialize};

/// Steps of other libraries, as `scripts/peers.py` writes them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename = "peers")]
pub struct PeersReport {
    /// The device, by the name of its driver.
    pub device: String,
    /// The driver and its version.
    pub driver: String,
    /// When they were measured.
    pub date: String,
    /// The command.
    pub command: String,
    /// The steps.
    pub rows: Vec<PeerRow>,
}

/// One step of another library.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerRow {
    /// The library with its version.
    pub peer: String,
    /// The shape, by its name in the registry of `kvpack bench`.
    pub shape: String,
    /// What it stores.
    pub format: String,
    /// Microseconds of a whole step, the median.
    pub step_us: f64,
}
