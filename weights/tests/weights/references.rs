//! Checkpoints in exchange with the packages that define the formats. By hand, since the packages need PyTorch:
//! `scripts/reference-checkpoints.py` has the other side, and says how to run both.

use std::fs;
use std::path::{Path, PathBuf};

use half::f16;
use kvpack_weights::checkpoint::{NewCheckpoint, WrittenFormat};
use kvpack_weights::{Bits, Checkpoint, GroupSize, LinearShape, QuantizedLinear};
use serde_json::Value;

use crate::random_layer;

const LAYER: &str = "layer";

/// The folder of the exchange.
fn folder() -> PathBuf {
    std::env::var_os("KVPACK_REFERENCE_FOLDER")
        .expect("KVPACK_REFERENCE_FOLDER names the folder of the exchange")
        .into()
}

/// The weights in f16, `[N, K]`, next to the checkpoint.
fn expected(checkpoint: &Path) -> PathBuf {
    checkpoint.join("expected.f16")
}

fn write(name: &str, format: WrittenFormat, group: GroupSize, linear: &QuantizedLinear) {
    let folder = folder().join("ours").join(name);
    fs::create_dir_all(&folder).unwrap();
    let mut checkpoint = NewCheckpoint::new(format, group);
    checkpoint.add_layer(LAYER, linear).unwrap();
    checkpoint.write(&folder, &Value::Null).unwrap();
    let bytes: Vec<u8> = linear.dequantize_f16().iter().flat_map(|x| x.to_le_bytes()).collect();
    fs::write(expected(&folder), bytes).unwrap();
}

#[test]
#[ignore = "needs checkpoints of Python packages; scripts/reference-checkpoints.py says how"]
fn checkpoints_are_written_for_reference_packages() {
    let (shape, group) = (LinearShape::new(256, 512).unwrap(), GroupSize::new(128).unwrap());
    for bits in Bits::ALL {
        for (order, shuffled) in [("", false), ("-act-order", true)] {
            let linear = random_layer(bits, shape, group, shuffled, 7);
            write(&format!("gptq-{}{order}", bits.count()), WrittenFormat::GptqV2, group, &linear);
        }
    }
    let linear = random_layer(Bits::Four, shape, group, false, 8);
    write("awq-4", WrittenFormat::AwqGemm, group, &linear);
}

#[test]
#[ignore = "needs checkpoints of Python packages; scripts/reference-checkpoints.py says how"]
fn checkpoints_of_reference_packages_are_read() {
    let folders = fs::read_dir(folder().join("theirs")).unwrap().map(|entry| entry.unwrap().path());
    let mut read = 0;
    for folder in folders {
        let layer = Checkpoint::open(&folder).unwrap().layer(LAYER).unwrap();
        let bytes = fs::read(expected(&folder)).unwrap();
        let expected = bytes.chunks_exact(2).map(|two| f16::from_le_bytes([two[0], two[1]]));
        let given = layer.dequantize_f16();
        assert_eq!(given.len() * 2, bytes.len(), "{}", folder.display());
        let differ = given.iter().zip(expected).filter(|(given, expected)| *given != expected).count();
        assert_eq!(differ, 0, "{} of {} weights in {}", differ, given.len(), folder.display());
        println!("read {}", folder.display());
        read += 1;
    }
    assert!(read > 0, "no checkpoint was read");
}
