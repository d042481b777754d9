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

impl PeersReport {
    /// Whether a backend of kvpack runs on this device. Its name begins with the device's: `NVIDIA H200 (CUDA, sm_90)`.
    pub fn is_on_device_of(&self, backend: &str) -> bool {
        let rest = backend.strip_prefix(self.device.as_str()).filter(|_| !self.device.is_empty());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(" ("))
    }

    /// The fastest step of this shape over f16.
    pub fn fastest_f16(&self, shape: &str) -> Option<&PeerRow> {
        let of_shape = self.rows.iter().filter(|row| row.shape == shape && row.format == "f16");
        of_shape.min_by(|a, b| a.step_us.total_cmp(&b.step_us))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_by_its_whole_name() {
        let of = |device: &str| PeersReport {
            device: device.into(),
            driver: String::new(),
            date: String::new(),
            command: String::new(),
            rows: Vec::new(),
        };
        assert!(of("NVIDIA H200").is_on_device_of("NVIDIA H200 (CUDA, sm_90)"));
        assert!(of("NVIDIA H200").is_on_device_of("NVIDIA H200"));
        for other in ["NVIDIA H200 NVL (CUDA, sm_90)", "CPU (AVX2, 8 threads)", "NVIDIA H100 (CUDA, sm_90)"] {
            assert!(!of("NVIDIA H200").is_on_device_of(other) && !of("").is_on_device_of(other), "{other}");
        }
    }
}
