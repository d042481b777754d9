//! Folders with checkpoints.

use std::fs;
use std::path::Path;

use kvpack_weights::checkpoint::{AwqVersion, NewCheckpoint, Scheme, WrittenFormat};
use kvpack_weights::format::gptq::{AllOnes, StoredZeros};
use kvpack_weights::format::{Table, gptq};
use kvpack_weights::{Bits, Checkpoint, Error, GroupSize, Groups, LinearShape, PackedCodes, QuantizedLinear};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};

use crate::random_layer;
use crate::round_trips::fast;

/// A tensor as bytes.
pub struct Stored(pub String, pub Dtype, pub Vec<usize>, pub Vec<u8>);

/// A safetensors file.
pub fn file<'a>(tensors: impl IntoIterator<Item = &'a Stored>) -> Vec<u8> {
    let views = tensors.into_iter().map(|Stored(name, dtype, shape, bytes)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// A layer as GPTQ tensors.
pub fn gptq_tensors(name: &str, linear: &QuantizedLinear, zeros: StoredZeros) -> Vec<Stored> {
    let tensors = gptq::pack(linear, zeros).unwrap();
    let words = |part: &str, table: &kvpack_weights::format::Table<u32>| {
        let bytes = table.values().iter().flat_map(|word| word.to_le_bytes()).collect();
        Stored(format!("{name}.{part}"), Dtype::I32, vec![table.rows(), table.columns()], bytes)
    };
    let scales = tensors.scales.values().iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect();
    let index = tensors.g_idx.unwrap();
    vec![
        words("qweight", &tensors.qweight),
        words("qzeros", &tensors.qzeros),
        Stored(format!("{name}.scales"), Dtype::F16, vec![tensors.scales.rows(), tensors.scales.columns()], scales),
        Stored(
            format!("{name}.g_idx"),
            Dtype::I32,
            vec![index.len()],
            index.iter().flat_map(|group| group.to_le_bytes()).collect(),
        ),
    ]
}

/// A layer with all zeros at 2^(b - 1).
fn symmetric(bits: Bits, seed: u64) -> QuantizedLinear {
    let shape = LinearShape::new(32, 64).unwrap();
    let linear = random_layer(bits, shape, GroupSize::Inputs(32), false, seed);
    let zeros = vec![bits.middle() as u16; linear.zeros().len()];
    QuantizedLinear::new(linear.codes().clone(), linear.groups().clone(), linear.scales().to_vec(), zeros).unwrap()
}

#[test]
fn what_is_written_is_read() {
    for (format, bits) in [
        (WrittenFormat::GptqV2, Bits::Three),
        (WrittenFormat::GptqV2, Bits::Eight),
        (WrittenFormat::AwqGemm, Bits::Four),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let group = GroupSize::Inputs(32);
        let shuffled = format == WrittenFormat::GptqV2;
        let layers = [("a.q_proj", 64, 96), ("b.up", 32, 128)].map(|(name, outputs, inputs)| {
            (name, random_layer(bits, LinearShape::new(outputs, inputs).unwrap(), group, shuffled, inputs as u64))
        });
        let mut new = NewCheckpoint::new(format, group);
        for (name, linear) in &layers {
            new.add_layer(name, linear).unwrap();
        }
        assert!(matches!(new.add_layer("b.up", &layers[1].1), Err(Error::Tensor { .. })), "a name twice");
        new.add_dense("norm.weight", &[2], &[0.5, 1.0e-9]).unwrap();
        new.write(folder.path(), &json!({"model_type": "llama"})).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(checkpoint.layer_names().collect::<Vec<_>>(), ["a.q_proj", "b.up"]);
        for (name, linear) in &layers {
            assert_eq!(&checkpoint.layer(name).unwrap(), linear, "{name}");
        }
        assert_eq!(checkpoint.dense("norm.weight").unwrap().values, [0.5, 0.0]);
        let config: Value = serde_json::from_slice(&fs::read(folder.path().join("config.json")).unwrap()).unwrap();
        assert_eq!(config["model_type"], "llama");
        match checkpoint.scheme() {
            Scheme::Gptq { bits: found, zeros, symmetric, act_order, .. } => {
                assert_eq!((*found, *zeros, *symmetric, *act_order), (bits, StoredZeros::Plain, false, true));
            }
            scheme => assert_eq!(*scheme, Scheme::Awq { group, version: AwqVersion::Gemm }),
        }
    }
}

#[test]
fn layers_lie_in_several_files() {
    let folder = tempfile::tempdir().unwrap();
    let layers =
        [1, 2].map(|seed| random_layer(Bits::Four, LinearShape::new(32, 64).unwrap(), GroupSize::Row, false, seed));
    let config = json!({"bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2", "sym": false});
    fs::write(folder.path().join("quantize_config.json"), config.to_string()).unwrap();
    // The tensors of a layer, too, lie in two files.
    let mut parts = [Vec::new(), Vec::new()];
    let mut map = serde_json::Map::new();
    for (name, layer) in ["one", "two"].into_iter().zip(&layers) {
        for (at, tensor) in gptq_tensors(name, layer, StoredZeros::Plain).into_iter().enumerate() {
            map.insert(tensor.0.clone(), format!("part-{}.safetensors", at % 2).into());
            parts[at % 2].push(tensor);
        }
    }
    for (at, tensors) in parts.iter().enumerate() {
        fs::write(folder.path().join(format!("part-{at}.safetensors")), file(tensors)).unwrap();
    }
    let check = |path: &Path| {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(["one", "two"].map(|name| checkpoint.layer(name).unwrap()), layers);
    };
    check(folder.path());
    let index = folder.path().join("model.safetensors.index.json");
    fs::write(&index, json!({"weight_map": map}).to_string()).unwrap();
    check(folder.path());
    // Another file in the folder is none of the checkpoint.
    fs::write(folder.path().join("other.safetensors"), file(&parts[0])).unwrap();
    check(folder.path());
    fs::remove_file(&index).unwrap();
    let twice = Checkpoint::open(folder.path()).err().unwrap();
    assert!(twice.to_string().contains("remove one of the files"), "{twice}");
    for (file, wanted) in
        [("part-0.safetensors", "but it is in"), ("../part-0.safetensors", "names no file"), ("gone", "gone")]
    {
        let mut map = map.clone();
        map.insert("one.qzeros".into(), file.into());
        fs::write(&index, json!({"weight_map": map}).to_string()).unwrap();
        let error = Checkpoint::open(folder.path()).err().unwrap();
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

/// Symmetric layers show the version, whatever the configuration says.
#[test]
fn the_version_of_symmetric_layers_is_seen() {
    for bits in Bits::ALL {
        let linear = symmetric(bits, 3);
        for stored in [StoredZeros::MinusOne, StoredZeros::Plain] {
            for told in ["gptq", "gptq_v2"] {
                let config = json!({"bits": bits.count(), "group_size": 32, "checkpoint_format": told, "sym": true});
                let bytes = file(&gptq_tensors("l", &linear, stored));
                let checkpoint = Checkpoint::from_bytes(vec![bytes], &config).unwrap();
                assert_eq!(checkpoint.gptq_layer("l").unwrap(), (linear.clone(), stored), "{bits} {told}");
            }
        }
    }
    // Zeros of an asymmetric layer may all be one less by chance: the configuration decides.
    let linear = symmetric(Bits::Four, 4);
    let bytes = file(&gptq_tensors("l", &linear, StoredZeros::Plain));
    let config = json!({"bits": 4, "group_size": 32, "checkpoint_format": "gptq", "sym": false});
    let (read, stored) = Checkpoint::from_bytes(vec![bytes], &config).unwrap().gptq_layer("l").unwrap();
    assert_eq!(stored, StoredZeros::MinusOne);
    assert!(read.zeros().iter().all(|&zero| zero == 9));
}

/// A zero of all ones in version 1 is refused until somebody says what it means.
#[test]
fn zeros_of_all_ones_need_a_meaning() {
    let shape = LinearShape::new(8, 32).unwrap();
    let codes = PackedCodes::pack(Bits::Four, shape, &[3; 256]).unwrap();
    let linear =
        QuantizedLinear::new(codes, Groups::in_order(shape, GroupSize::Row), vec![1.0; 8], vec![15; 8]).unwrap();
    let bytes = file(&gptq_tensors("l", &linear, StoredZeros::Plain));
    let config = json!({"bits": 4, "group_size": -1, "sym": false});
    let open = || Checkpoint::from_bytes(vec![bytes.clone()], &config).unwrap();
    let refused = open().layer("l").err().unwrap();
    assert!(refused.to_string().contains("all ones"), "{refused}");
    let zeros = |all_ones| open().with_all_ones(all_ones).layer("l").unwrap().zeros().to_vec();
    assert_eq!(zeros(AllOnes::Carries), [16; 8]);
    assert_eq!(zeros(AllOnes::Wraps), [0; 8]);
    let carried = open().with_all_ones(AllOnes::Carries).layer("l").unwrap();
    assert!(matches!(gptq::pack(&carried, StoredZeros::Plain), Err(Error::Format { .. })));
}

#[test]
fn configurations_are_understood_or_refused() {
    let parsed = |value: Value| Scheme::parse(&value);
    let group = GroupSize::Inputs(128);
    for version in ["GEMM", "gemv", "gemv_fast"] {
        let old = json!({"w_bit": 4, "q_group_size": 128, "zero_point": true, "version": version});
        let new = json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": version});
        assert_eq!(parsed(old).unwrap(), parsed(new).unwrap());
    }
    let round = json!({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
        "group_size": 128,
        "sym": true});
    assert!(matches!(parsed(round).unwrap(), Scheme::Gptq { zeros: StoredZeros::MinusOne, .. }));
    let weights = json!({"num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": 128});
    let compressed = |format: &str, weights: &Value| {
        let groups = json!({"group_0": {"weights": weights}});
        json!({"quant_method": "compressed-tensors", "format": format, "config_groups": groups})
    };
    let ordered = |order: Value| {
        let mut weights = weights.clone();
        weights["actorder"] = order;
        compressed("pack-quantized", &weights)
    };
    let wanted = Scheme::CompressedTensors { bits: Bits::Four, group, symmetric: false, act_order: false };
    for order in [Value::Null, "weight".into(), "static".into(), false.into()] {
        assert_eq!(parsed(ordered(order)).unwrap(), wanted);
    }
    for order in [Value::from("group"), "Dynamic".into(), true.into()] {
        assert!(matches!(parsed(ordered(order)).unwrap(), Scheme::CompressedTensors { act_order: true, .. }));
    }
    let sound = [
        json!({"bits": 4, "group_size": 128}),
        json!({"quant_method": "awq", "bits": 4, "group_size": 128}),
        compressed("pack-quantized", &weights),
    ];
    for of_method in sound {
        for key in ["rotation", "transform_config", "rotation_config", "spinquant_config"] {
            for (value, is_read) in
                [(Value::Null, true), ("".into(), true), (json!({}), true), ("hadamard".into(), false)]
            {
                let mut configuration = of_method.clone();
                configuration[key] = value;
                let scheme = parsed(configuration.clone());
                assert_eq!(scheme.is_ok(), is_read, "{configuration}");
                assert!(is_read || scheme.unwrap_err().to_string().contains(key), "{configuration}");
            }
        }
    }
    let mut other = compressed("pack-quantized", &weights);
    other["config_groups"]["group_1"] = json!({"weights": {"num_bits": 8, "strategy": "channel"}});
    let mut rotated = compressed("pack-quantized", &weights);
    rotated["transform_config"] = json!({"config_groups": {"u": {"type": "hadamard"}}});
    for (refused, why) in [
        (other, "config_groups"),
        (rotated, "transform_config"),
        (ordered("rows".into()), "actorder"),
        (compressed("int-quantized", &weights), "format"),
        (compressed("pack-quantized", &json!({"num_bits": 4, "type": "float", "strategy": "channel"})), "type"),
        (compressed("pack-quantized", &json!({"num_bits": 4, "strategy": "block"})), "strategy"),
        (json!({"quant_method": "bitsandbytes"}), "quant_method"),
        (json!({}), "quant_method"),
        (json!([1]), "quant_method"),
        (json!({"bits": 5, "group_size": 128}), "5 bits"),
        (json!({"bits": -4, "group_size": 128}), "bits"),
        (json!({"bits": 4, "group_size": 0}), "group_size"),
        (json!({"bits": 4, "group_size": "128"}), "group_size"),
        (json!({"bits": 4, "group_size": i64::MAX}), "group_size"),
        (json!({"bits": 4, "group_size": 128, "checkpoint_format": "marlin"}), "checkpoint_format"),
        (json!({"bits": 4, "group_size": 128, "is_marlin_format": true}), "is_marlin_format"),
        (json!({"bits": 4, "group_size": 128, "desc_act": "yes"}), "desc_act"),
        (json!({"quant_method": "awq", "bits": 8, "group_size": 128}), "AWQ"),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "marlin"}), "version"),
    ] {
        let error = parsed(refused.clone()).err().unwrap_or_else(|| panic!("{refused}"));
        assert!(error.to_string().contains(why), "{refused}: {error}");
    }
}

#[test]
fn the_version_may_be_in_the_other_file() {
    let folder = tempfile::tempdir().unwrap();
    let linear = random_layer(Bits::Four, LinearShape::new(32, 64).unwrap(), GroupSize::Row, false, 8);
    fs::write(folder.path().join("model.safetensors"), file(&gptq_tensors("l", &linear, StoredZeros::Plain))).unwrap();
    let config = json!({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": false}});
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let quantize = folder.path().join("quantize_config.json");
    fs::write(&quantize, json!({"bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"}).to_string()).unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().layer("l").unwrap(), linear);
    // So may a rotation.
    let rotated = json!({"bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2", "rotation": "random"});
    fs::write(&quantize, rotated.to_string()).unwrap();
    let refused = Checkpoint::open(folder.path()).err().unwrap();
    assert!(refused.to_string().contains("'rotation'"), "{refused}");
    fs::remove_file(&quantize).unwrap();
    for key in ["rotation_config", "spinquant_config"] {
        let mut config = config.clone();
        config[key] = json!({"hadamard_type": "hadamard"});
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let refused = Checkpoint::open(folder.path()).err().unwrap();
        assert!(refused.to_string().contains(key), "{refused}");
    }
}

/// With an index, or with other tensor files, readers would take other weights than those that were written.
#[test]
fn a_folder_takes_one_checkpoint() {
    let linear = symmetric(Bits::Four, 5);
    let mut new = NewCheckpoint::new(WrittenFormat::GptqV2, GroupSize::Inputs(32));
    new.add_layer("l", &linear).unwrap();
    for other in ["model.safetensors.index.json", "model-00001-of-00002.safetensors"] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(other), "{}").unwrap();
        let refused = new.write(folder.path(), &Value::Null);
        assert!(matches!(&refused, Err(Error::Config { reason, .. }) if reason.contains(other)), "{refused:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{other}");
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.safetensors"), "older").unwrap();
    new.write(folder.path(), &Value::Null).unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().layer("l").unwrap(), linear);
    let mut awq = NewCheckpoint::new(WrittenFormat::AwqGemm, GroupSize::Inputs(32));
    awq.add_layer("l", &linear).unwrap();
    let refused = awq.write(folder.path(), &Value::Null).unwrap_err().to_string();
    assert!(refused.contains("quantize_config.json"), "{refused}");
}

/// A checkpoint that cannot be written leaves an earlier one as it is, and one that is written shows those who have the
/// earlier one open.
#[test]
fn an_earlier_checkpoint_stays_whole() {
    let (old, other) = (symmetric(Bits::Four, 5), symmetric(Bits::Four, 6));
    let new = |linear| {
        let mut new = NewCheckpoint::new(WrittenFormat::GptqV2, GroupSize::Inputs(32));
        new.add_layer("l", linear).unwrap();
        new
    };
    let folder = tempfile::tempdir().unwrap();
    new(&old).write(folder.path(), &Value::Null).unwrap();
    let names = || {
        let mut names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = names();
    // Where the configuration is to be written lies a folder.
    fs::create_dir(folder.path().join(".config.json.partial")).unwrap();
    let refused = new(&other).write(folder.path(), &Value::Null);
    assert!(matches!(refused, Err(Error::Io { .. })), "{refused:?}");
    fs::remove_dir(folder.path().join(".config.json.partial")).unwrap();
    assert_eq!(names(), before);
    let opened = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(opened.layer("l").unwrap(), old);

    new(&other).write(folder.path(), &Value::Null).unwrap();
    assert_eq!(names(), before);
    let replaced = opened.layer("l").map(drop);
    assert!(matches!(&replaced, Err(Error::Io { reason, .. }) if reason.to_string().contains("open that again")));
    assert_eq!(Checkpoint::open(folder.path()).unwrap().layer("l").unwrap(), other);

    let mut none = NewCheckpoint::new(WrittenFormat::GptqV2, GroupSize::Inputs(0));
    let linear = random_layer(Bits::Four, LinearShape::new(32, 64).unwrap(), GroupSize::Inputs(1), false, 6);
    none.add_layer("l", &linear).unwrap();
    let refused = none.write(folder.path(), &Value::Null);
    assert!(matches!(refused, Err(Error::Config { .. })), "no reader takes groups of 0: {refused:?}");
}

/// A `g_idx` of zeros is none without act-order, and a mistake with it.
#[test]
fn an_index_of_zeros_is_none() {
    for (size, act_order, is_read) in [(32, false, true), (32, true, false), (64, true, true)] {
        let group = GroupSize::Inputs(size);
        let linear = random_layer(Bits::Four, LinearShape::new(32, 64).unwrap(), group, false, 6);
        let mut tensors = gptq_tensors("l", &linear, StoredZeros::Plain);
        tensors[3].3.fill(0);
        let config = json!({"bits": 4, "group_size": size, "checkpoint_format": "gptq_v2", "sym": false,
            "desc_act": act_order});
        let read = Checkpoint::from_bytes(vec![file(&tensors)], &config).unwrap().layer("l");
        match is_read {
            true => assert_eq!(read.unwrap(), linear),
            false => assert!(matches!(read, Err(Error::Layer { .. })), "{read:?}"),
        }
    }
    // It is not written either.
    let linear = symmetric(Bits::Four, 7);
    let groups = Groups::indexed(linear.shape(), GroupSize::Inputs(32), vec![0; 64]).unwrap();
    let (scales, zeros) = (linear.scales().to_vec(), linear.zeros().to_vec());
    let odd = QuantizedLinear::new(linear.codes().clone(), groups, scales, zeros).unwrap();
    assert!(matches!(gptq::pack(&odd, StoredZeros::Plain), Err(Error::Format { .. })));
}

/// compressed-tensors: "group" needs an index, and an index with a -1 says that groups are in order.
#[test]
fn compressed_groups_along_activations_need_an_index() {
    let linear = symmetric(Bits::Four, 8);
    let floats = linear.scales().iter().flat_map(|x| x.to_le_bytes()).collect();
    let words = linear.codes().words().iter().flat_map(|word| word.to_le_bytes()).collect();
    let sound = [
        Stored("l.weight_packed".into(), Dtype::I32, vec![32, 8], words),
        Stored("l.weight_scale".into(), Dtype::F32, vec![32, 2], floats),
        Stored(
            "l.weight_shape".into(),
            Dtype::I64,
            vec![2],
            [32i64, 64].iter().flat_map(|x| x.to_le_bytes()).collect(),
        ),
    ];
    let read = |order: &str, index: Option<[i32; 64]>| {
        let index = index.map(|index| index.iter().flat_map(|group| group.to_le_bytes()).collect());
        let index = index.map(|bytes| Stored("l.weight_g_idx".into(), Dtype::I32, vec![64], bytes));
        let tensors: Vec<&Stored> = sound.iter().chain(&index).collect();
        let weights = json!({"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": order});
        let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": weights}}});
        Checkpoint::from_bytes(vec![file(tensors)], &config).unwrap().layer("l")
    };
    let alternating = std::array::from_fn(|input| input as i32 % 2);
    assert!(read("group", Some(alternating)).unwrap().groups().index().is_some());
    assert!(matches!(read("group", None), Err(Error::Tensor { .. })));
    for (order, index) in [("weight", None), ("weight", Some([-1; 64])), ("group", Some([-1; 64]))] {
        assert_eq!(read(order, index).unwrap(), linear, "{order} {index:?}");
    }
    assert!(matches!(read("group", Some([-2; 64])), Err(Error::Layer { .. })));
}

/// The zeros of `gemv_fast` have the name of AutoAWQ, or that of llm-awq.
#[test]
fn scaled_zeros_have_two_names() {
    let linear = random_layer(Bits::Four, LinearShape::new(8, 128).unwrap(), GroupSize::new(64).unwrap(), false, 3);
    let tensors = fast(&linear);
    let halves = |part: &str, table: &Table<f32>| {
        let bytes = table.values().iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect();
        Stored(format!("l.{part}"), Dtype::F16, vec![table.rows(), table.columns()], bytes)
    };
    let config = json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv_fast"});
    for zeros in ["qzeros", "scaled_zeros"] {
        let words = tensors.qweight.values().iter().flat_map(|word| word.to_le_bytes()).collect();
        let stored = [
            Stored("l.qweight".into(), Dtype::I16, vec![tensors.qweight.rows(), tensors.qweight.columns()], words),
            halves("scales", &tensors.scales),
            halves(zeros, &tensors.scaled_zeros),
        ];
        let checkpoint = Checkpoint::from_bytes(vec![file(&stored)], &config).unwrap();
        assert_eq!(checkpoint.layer("l").unwrap(), linear, "{zeros}");
    }
    let without = Checkpoint::from_bytes(
        vec![file(&[Stored("l.qweight".into(), Dtype::I16, vec![2, 128], vec![0; 512])])],
        &config,
    );
    assert!(matches!(without.unwrap().layer("l"), Err(Error::Tensor { .. })));
}
