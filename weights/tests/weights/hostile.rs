//! Checkpoints that are cut off, contradict themselves or ask for absurd sizes: errors, no panics.

use kvpack_weights::checkpoint::{NewCheckpoint, WrittenFormat};
use kvpack_weights::format::gptq::StoredZeros;
use kvpack_weights::format::{Table, gptq};
use kvpack_weights::{Bits, Checkpoint, Error, GroupSize, Groups, LinearShape, QuantizedLinear};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::checkpoints::{Stored, file, gptq_tensors};
use crate::random_layer;

fn layer() -> QuantizedLinear {
    random_layer(Bits::Four, LinearShape::new(32, 64).unwrap(), GroupSize::Inputs(32), true, 1)
}

fn config() -> Value {
    json!({"bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2", "sym": false, "desc_act": true})
}

fn read(tensors: &[Stored]) -> Result<QuantizedLinear, Error> {
    Checkpoint::from_bytes(vec![file(tensors)], &config()).and_then(|checkpoint| checkpoint.layer("l"))
}

#[test]
fn files_that_are_cut_off() {
    let whole = file(&gptq_tensors("l", &layer(), StoredZeros::Plain));
    for length in 0..whole.len() {
        let refused = Checkpoint::from_bytes(vec![whole[..length].to_vec()], &config());
        assert!(matches!(refused, Err(Error::Safetensors { .. })), "{length} bytes");
    }
    let mut longer = whole.clone();
    longer.push(0);
    assert!(matches!(Checkpoint::from_bytes(vec![longer], &config()), Err(Error::Safetensors { .. })));
    assert!(Checkpoint::from_bytes(vec![whole], &config()).is_ok());
    // The same on disk.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("quantize_config.json"), config().to_string()).unwrap();
    for bytes in [&b""[..], b"\xff\xff\xff\xff\xff\xff\xff\xff{}", b"\x02\0\0\0\0\0\0\0", b"\x02\0\0\0\0\0\0\0{}x"] {
        std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        let refused = Checkpoint::open(folder.path());
        assert!(matches!(refused, Err(Error::Safetensors { .. })), "{bytes:?}");
    }
}

/// A header that promises more than the file has takes no memory.
#[test]
fn headers_that_promise_too_much() {
    for (shape, end) in
        [("[4611686018427387904]", "18446744073709551615"), ("[1099511627776]", "4398046511104"), ("[1, 2]", "4")]
    {
        let header = format!(r#"{{"l.qweight":{{"dtype":"I32","shape":{shape},"data_offsets":[0,{end}]}}}}"#);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 8]);
        let refused = Checkpoint::from_bytes(vec![bytes], &config());
        assert!(matches!(refused, Err(Error::Safetensors { .. })), "{shape}");
    }
}

/// Tensors of no bytes may have any other size.
#[test]
fn absurd_shapes_of_empty_tensors() {
    let huge = usize::MAX / 64;
    for [rows, columns] in [[0, huge], [huge, 0], [0, usize::MAX], [usize::MAX, 0], [0, 0], [0, 8], [8, 0]] {
        for part in ["qweight", "qzeros", "scales"] {
            let mut tensors = gptq_tensors("l", &layer(), StoredZeros::Plain);
            let tensor = tensors.iter_mut().find(|tensor| tensor.0.ends_with(part)).unwrap();
            (tensor.2, tensor.3) = (vec![rows, columns], Vec::new());
            let refused = read(&tensors);
            assert!(matches!(refused, Err(Error::Layer { .. })), "{part} {rows} {columns}: {refused:?}");
        }
    }
    let empty = Table::new(0, usize::MAX, Vec::new()).unwrap();
    assert_eq!(gptq::stored_zeros_of_symmetric(&empty, Bits::Four), None);
    for (method, part) in [("gemm", "qweight"), ("gemv", "qweight"), ("gemv_fast", "qweight")] {
        for shape in [vec![0, huge], vec![huge, 0], vec![4, 0]] {
            let dtype = if method == "gemv_fast" { Dtype::I16 } else { Dtype::I32 };
            let none = |part: &str, dtype| Stored(format!("l.{part}"), dtype, shape.clone(), Vec::new());
            let tensors = [
                none(part, dtype),
                none("qzeros", Dtype::I32),
                none("scales", Dtype::F16),
                none("scaled_zeros", Dtype::F16),
            ];
            let config = json!({"quant_method": "awq", "bits": 4, "group_size": 32, "version": method});
            let checkpoint = Checkpoint::from_bytes(vec![file(&tensors)], &config).unwrap();
            let refused = checkpoint.layer("l");
            assert!(matches!(refused, Err(Error::Layer { .. })), "{method} {shape:?}: {refused:?}");
        }
    }
}

#[test]
fn shapes_of_compressed_tensors() {
    let weights = json!({"num_bits": 4, "strategy": "group", "group_size": 32});
    let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}}});
    for shape in [[i64::MAX, i64::MAX], [-1, 32], [0, 0], [1 << 23, 1 << 23], [2, 64], [1, 33]] {
        let tensors = [
            Stored("l.weight_packed".into(), Dtype::I32, vec![1, 4], vec![0; 16]),
            Stored("l.weight_scale".into(), Dtype::BF16, vec![1, 1], vec![0, 0x3f]),
            Stored("l.weight_shape".into(), Dtype::I64, vec![2], shape.iter().flat_map(|x| x.to_le_bytes()).collect()),
        ];
        let checkpoint = Checkpoint::from_bytes(vec![file(&tensors)], &config).unwrap();
        let refused = checkpoint.layer("l");
        assert!(matches!(refused, Err(Error::Layer { .. })), "{shape:?}: {refused:?}");
    }
}

#[test]
fn tensors_that_contradict_each_other() {
    let sound = || gptq_tensors("l", &layer(), StoredZeros::Plain);
    assert!(read(&sound()).is_ok());
    type Change = fn(&mut Vec<Stored>);
    let changes: [(&str, Change); 10] = [
        ("no qzeros", |tensors| drop(tensors.remove(1))),
        ("no g_idx", |tensors| drop(tensors.remove(3))),
        ("qzeros with the axes exchanged", |tensors| tensors[1].2.reverse()),
        ("scales of one axis", |tensors| tensors[2].2 = vec![64]),
        ("scales as words", |tensors| (tensors[2].1, tensors[2].2) = (Dtype::I32, vec![2, 16])),
        ("a scale of NaN", |tensors| tensors[2].3[..2].copy_from_slice(&half::f16::NAN.to_le_bytes())),
        ("an infinite scale", |tensors| tensors[2].3[2..4].copy_from_slice(&half::f16::INFINITY.to_le_bytes())),
        ("a group that is not there", |tensors| tensors[3].3[..4].copy_from_slice(&2i32.to_le_bytes())),
        ("a negative group", |tensors| tensors[3].3[..4].copy_from_slice(&(-1i32).to_le_bytes())),
        ("a short g_idx", |tensors| {
            tensors[3].2 = vec![63];
            tensors[3].3.truncate(4 * 63);
        }),
    ];
    for (what, change) in changes {
        let mut tensors = sound();
        change(&mut tensors);
        let refused = read(&tensors);
        assert!(matches!(refused, Err(Error::Layer { .. } | Error::Tensor { .. })), "{what}: {refused:?}");
    }
    // Bits and groups that are not those of the tensors.
    for (key, value) in
        [("bits", 2), ("bits", 8), ("bits", 3), ("group_size", 16), ("group_size", 64), ("group_size", -1)]
    {
        let mut config = config();
        config[key] = value.into();
        let checkpoint = Checkpoint::from_bytes(vec![file(&sound())], &config).unwrap();
        let refused = checkpoint.layer("l");
        assert!(matches!(refused, Err(Error::Layer { .. })), "{key} {value}: {refused:?}");
    }
    let checkpoint = Checkpoint::from_bytes(vec![file(&sound())], &config()).unwrap();
    assert!(matches!(checkpoint.layer("other"), Err(Error::Tensor { .. })));
    assert!(matches!(checkpoint.dense("l.qweight"), Err(Error::Tensor { .. })));
}

#[test]
fn what_formats_cannot_store() {
    let four = layer();
    let odd = random_layer(Bits::Four, LinearShape::new(12, 40).unwrap(), GroupSize::Row, false, 2);
    let three = random_layer(Bits::Three, LinearShape::new(32, 40).unwrap(), GroupSize::Row, false, 3);
    let group = GroupSize::Inputs(32);
    for (format, group, linear) in [
        (WrittenFormat::AwqGemm, group, &four),
        (WrittenFormat::AwqGemm, GroupSize::Row, &odd),
        (WrittenFormat::AwqGemm, GroupSize::Row, &three),
        (WrittenFormat::GptqV2, GroupSize::Row, &odd),
        (WrittenFormat::GptqV2, GroupSize::Row, &three),
        (WrittenFormat::GptqV2, GroupSize::Inputs(16), &four),
    ] {
        let refused = NewCheckpoint::new(format, group).add_layer("l", linear);
        assert!(matches!(refused, Err(Error::Format { .. })), "{format:?}: {refused:?}");
    }
    let mut new = NewCheckpoint::new(WrittenFormat::GptqV2, group);
    new.add_layer("a", &four).unwrap();
    let eight = random_layer(Bits::Eight, LinearShape::new(32, 64).unwrap(), group, false, 4);
    assert!(matches!(new.add_layer("b", &eight), Err(Error::Format { .. })));
    for scale in [1e-9, 1e6] {
        let scales = vec![scale; four.scales().len()];
        let linear = QuantizedLinear::new(four.codes().clone(), four.groups().clone(), scales, four.zeros().to_vec());
        let refused = new.add_layer("c", &linear.unwrap());
        assert!(matches!(refused, Err(Error::Value { .. })), "{scale}: {refused:?}");
    }
    assert!(matches!(new.add_dense("d", &[3], &[1.0]), Err(Error::Elements { .. })));
    let empty = NewCheckpoint::new(WrittenFormat::GptqV2, group);
    assert!(matches!(empty.write(std::path::Path::new("."), &Value::Null), Err(Error::Config { .. })));
}

#[test]
fn groups_of_another_layer() {
    let linear = layer();
    for inputs in [32, 96] {
        let groups = Groups::in_order(LinearShape::new(32, inputs).unwrap(), GroupSize::Inputs(inputs / 2));
        let (scales, zeros) = (linear.scales().to_vec(), linear.zeros().to_vec());
        let refused = QuantizedLinear::new(linear.codes().clone(), groups, scales, zeros);
        assert!(matches!(refused, Err(Error::Elements { needed: 64, .. })), "{inputs}: {refused:?}");
    }
}

#[test]
fn activations_that_are_no_rows() {
    assert!(matches!(layer().linear(&[0.0f32; 65]), Err(Error::Elements { .. })));
    assert!(layer().linear::<f64>(&[]).unwrap().is_empty());
}
