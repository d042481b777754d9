//! The reader of quantised checkpoints.
//!
//! The bytes are the length of a configuration (4 bytes, little-endian), the configuration as JSON, and one safetensors
//! file.

use half::f16;
use kvpack_weights::Checkpoint;
use kvpack_weights::checkpoint::Scheme;
use kvpack_weights::format::gptq::{AllOnes, StoredZeros};
use kvpack_weights::format::{awq_gemm, gptq};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

/// Weights up to which a layer is computed with.
const MOST_WEIGHTS: usize = 1 << 20;

/// Reads every layer of a checkpoint; true if one can be read.
///
/// # Panics
/// When what was read cannot be written again, or does not come back.
pub fn read(bytes: &[u8]) -> bool {
    let Some((length, rest)) = bytes.split_first_chunk() else { return false };
    let Some((configuration, file)) = rest.split_at_checked(u32::from_le_bytes(*length) as usize) else { return false };
    let Ok(configuration) = serde_json::from_slice::<Value>(configuration) else { return false };
    let Ok(checkpoint) = Checkpoint::from_bytes(vec![file.to_vec()], &configuration) else { return false };
    let checkpoint = checkpoint.with_all_ones(AllOnes::Carries);
    let mut taken = false;
    for name in checkpoint.layer_names() {
        let Ok(linear) = checkpoint.layer(name) else { continue };
        taken = true;
        if linear.shape().weights() > MOST_WEIGHTS {
            continue;
        }
        let x = vec![1.0f32; linear.shape().inputs()];
        let y = linear.linear(&x).expect("a row of activations");
        assert_eq!(y.len(), linear.shape().outputs());
        let order = linear.order_by_group();
        assert!(
            linear.permuted(&order).is_ok_and(|sorted| sorted.groups().index().is_none() || has_odd_groups(&linear))
        );
        match checkpoint.scheme() {
            // Zeros of 2^b come from version 1 alone, and version 2 cannot say them.
            &Scheme::Gptq { bits, group, .. } => {
                if let Ok(tensors) = gptq::pack(&linear, StoredZeros::Plain) {
                    let layout =
                        gptq::GptqLayout { bits, group, zeros: StoredZeros::Plain, all_ones: AllOnes::Refused };
                    assert_eq!(gptq::unpack(&tensors, &layout).expect("what was written"), linear);
                }
            }
            &Scheme::Awq { group, .. } => {
                if let Ok(tensors) = awq_gemm::pack(&linear) {
                    assert_eq!(awq_gemm::unpack(&tensors, group).expect("what was written"), linear);
                }
            }
            Scheme::CompressedTensors { .. } => (),
        }
    }
    taken
}

/// True unless each group has as many inputs as it would have in order.
fn has_odd_groups(linear: &kvpack_weights::QuantizedLinear) -> bool {
    let groups = linear.groups();
    let mut counts = vec![0usize; groups.count()];
    (0..linear.shape().inputs()).for_each(|input| counts[groups.of(input)] += 1);
    let (last, whole) = counts.split_last().expect("a group");
    whole.iter().any(|&count| count != groups.size()) || *last > groups.size()
}

/// The seeds of the corpus: a small sound checkpoint of each format.
///
/// # Panics
/// Never, unless safetensors cannot write.
pub fn sound() -> Vec<(&'static str, Vec<u8>)> {
    let gptq = |bits: u32| json!({"bits": bits, "group_size": 32, "desc_act": true, "sym": false, "checkpoint_format": "gptq_v2"});
    let awq = |version: &str| json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": version});
    let compressed = json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "symmetric": false, "strategy": "group", "group_size": 32}}}});
    let index = ("l.g_idx", Dtype::I32, vec![64]);
    let words = |name, shape: [usize; 2]| (name, Dtype::I32, shape.to_vec());
    let halves = |name, shape: [usize; 2]| (name, Dtype::F16, shape.to_vec());
    let of_gptq = |bits: usize| {
        vec![
            words("l.qweight", [2 * bits, 32]),
            words("l.qzeros", [2, bits]),
            halves("l.scales", [2, 32]),
            index.clone(),
        ]
    };
    let seeds = [
        ("gptq-4", gptq(4), of_gptq(4)),
        ("gptq-3", gptq(3), of_gptq(3)),
        (
            "awq-gemm",
            awq("gemm"),
            vec![words("l.qweight", [64, 2]), words("l.qzeros", [1, 2]), halves("l.scales", [1, 16])],
        ),
        (
            "awq-gemv",
            awq("gemv"),
            vec![words("l.qweight", [4, 8]), words("l.qzeros", [4, 2]), halves("l.scales", [4, 16])],
        ),
        (
            "awq-gemv-fast",
            awq("gemv_fast"),
            vec![
                ("l.qweight", Dtype::I16, vec![1, 64]),
                halves("l.scales", [16, 4]),
                halves("l.scaled_zeros", [16, 4]),
            ],
        ),
        (
            "compressed-tensors",
            compressed,
            vec![
                words("l.weight_packed", [8, 8]),
                halves("l.weight_scale", [8, 2]),
                words("l.weight_zero_point", [1, 2]),
                ("l.weight_shape", Dtype::I64, vec![2]),
            ],
        ),
    ];
    seeds.into_iter().map(|(name, configuration, tensors)| (name, seed(&configuration, &tensors))).collect()
}

/// A configuration and a file whose codes are random.
fn seed(configuration: &Value, tensors: &[(&str, Dtype, Vec<usize>)]) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(1);
    let content = tensors.iter().map(|(name, dtype, shape)| {
        let elements = shape.iter().product::<usize>();
        match (*name, dtype) {
            ("l.g_idx", _) => (0..elements).flat_map(|at| (at as i32 % 2).to_le_bytes()).collect(),
            ("l.weight_shape", _) => [8i64, 64].iter().flat_map(|size| size.to_le_bytes()).collect(),
            // Minus a zero of 3 times the scale.
            ("l.scaled_zeros", _) => (0..elements).flat_map(|_| f16::from_f32(-1.5).to_le_bytes()).collect(),
            (_, Dtype::F16) => (0..elements).flat_map(|_| f16::from_f32(0.5).to_le_bytes()).collect(),
            (_, Dtype::I16) => (0..elements).flat_map(|_| random.u16(..).to_le_bytes()).collect(),
            _ => (0..elements).flat_map(|_| random.u32(..).to_le_bytes()).collect::<Vec<u8>>(),
        }
    });
    let content: Vec<Vec<u8>> = content.collect();
    let views = tensors.iter().zip(&content).map(|((name, dtype, shape), bytes)| {
        (*name, TensorView::new(*dtype, shape.clone(), bytes).expect("bytes of this shape"))
    });
    let file = safetensors::serialize(views, None).expect("a file");
    let configuration = configuration.to_string();
    [&(configuration.len() as u32).to_le_bytes()[..], configuration.as_bytes(), &file].concat()
}
