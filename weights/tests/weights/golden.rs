//! Golden vectors: what others packed and quantised, see `tests/golden/README.md`.

use kvpack_weights::QuantizedLinear;
use kvpack_weights::format::awq_gemm::AwqTensors;
use kvpack_weights::format::compressed_tensors::CompressedTensors;
use kvpack_weights::format::gptq::StoredZeros;
use kvpack_weights::format::{awq_gemm, awq_gemv, compressed_tensors, gptq};
use kvpack_weights::quantize::{
    AwqOptions, Clip, ColumnOrder, GptqOptions, Grid, Hessian, Matrix, OutOfRange, ScaleType, Symmetry, awq,
    gptq as quantize_gptq,
};

use crate::golden_files::{Golden, cases, gptq_layer};

fn flag(case: &Golden, name: &str) -> bool {
    case.params[name].as_bool().unwrap()
}

fn check_unpacked(case: &Golden, linear: &QuantizedLinear) {
    case.check("codes", linear.codes().unpack().into_iter().map(f64::from));
    case.check("weights", linear.dequantize::<f32>().into_iter().map(f64::from));
}

#[test]
fn gptq_unpack() {
    for case in cases("gptq.unpack", 7) {
        let (linear, tensors) = gptq_layer(&case);
        check_unpacked(&case, &linear);
        assert_eq!(linear.groups().index().is_some(), flag(&case, "desc_act"), "{}", case.name);
        if flag(&case, "sym") {
            let shown = gptq::stored_zeros_of_symmetric(&tensors.qzeros, case.bits()).unwrap();
            assert_eq!(shown == StoredZeros::Plain, case.params["checkpoint_format"] == "gptq_v2", "{}", case.name);
            assert!(linear.is_symmetric(), "{}", case.name);
        }
    }
}

#[test]
fn awq_unpack() {
    for case in cases("awq.unpack", 3) {
        let tensors = AwqTensors {
            qweight: case.words("in.qweight"),
            qzeros: case.words("in.qzeros"),
            scales: case.table("in.scales"),
        };
        let linear = match case.params["version"].as_str().unwrap() {
            "gemm" => {
                let linear = awq_gemm::unpack(&tensors, case.group("group_size")).unwrap();
                assert_eq!(awq_gemm::pack(&linear).unwrap(), tensors, "{}", case.name);
                linear
            }
            "gemv" => awq_gemv::unpack(&tensors, case.group("group_size")).unwrap(),
            other => panic!("{other}"),
        };
        check_unpacked(&case, &linear);
    }
}

#[test]
fn compressed_tensors_unpack() {
    for case in cases("compressed_tensors.unpack", 2) {
        let symmetric = flag(&case, "symmetric");
        let shape = case.integers("in.weight_shape");
        let tensors = CompressedTensors {
            weight_packed: case.words("in.weight_packed"),
            weight_scale: case.table("in.weight_scale"),
            weight_zero_point: (!symmetric).then(|| case.words("in.weight_zero_point")),
            weight_shape: [shape[0].into(), shape[1].into()],
            weight_g_idx: None,
        };
        check_unpacked(&case, &compressed_tensors::unpack(&tensors, case.bits(), case.group("group_size")).unwrap());
    }
}

#[test]
fn gptq_quantize() {
    for case in cases("gptq.quantize", 4) {
        let ([outputs, inputs], [tokens, _]) = (case.axes("in.w"), case.axes("in.x"));
        let (weights, activations) = (case.floats("in.w"), case.floats("in.x"));
        let symmetry = if flag(&case, "sym") { Symmetry::Symmetric } else { Symmetry::Asymmetric };
        let grid = Grid { bits: case.bits(), group: case.group("groupsize"), symmetry, scales: ScaleType::F32 };
        let options = GptqOptions {
            damping: case.params["percdamp"].as_f64().unwrap(),
            order: ColumnOrder::Natural,
            out_of_range: OutOfRange::Clamped,
            ..GptqOptions::new(grid)
        };
        let mut hessian = Hessian::new(inputs).unwrap();
        hessian.add(Matrix::new(tokens, inputs, &activations).unwrap()).unwrap();
        let quantized = quantize_gptq(Matrix::new(outputs, inputs, &weights).unwrap(), &hessian, &options).unwrap();
        let linear = &quantized.linear;
        case.check("codes", linear.codes().unpack().into_iter().map(f64::from));
        case.check("scale", linear.scales().iter().map(|&x| x.into()));
        case.check("zero", linear.zeros().iter().map(|&x| x.into()));
        case.check("w_q", linear.dequantize::<f64>());
        assert_eq!(quantized.report.dead_inputs, if case.name.contains("dead2") { 2 } else { 0 });
    }
}

#[test]
fn awq_scale() {
    for case in cases("awq.scale", 3) {
        let ([outputs, inputs], [tokens, _]) = (case.axes("in.w"), case.axes("in.x"));
        let (weights, activations) = (case.floats("in.w"), case.floats("in.x"));
        let grid = Grid {
            bits: case.bits(),
            group: case.group("group"),
            symmetry: Symmetry::Asymmetric,
            scales: ScaleType::F32,
        };
        let (w, x) =
            (Matrix::new(outputs, inputs, &weights).unwrap(), Matrix::new(tokens, inputs, &activations).unwrap());
        let quantized = awq(w, x, &AwqOptions { grid, clip: Clip::Never }).unwrap();
        let linear = &quantized.linear;
        case.check("best_index", [quantized.search.best as f64]);
        case.check("scales", quantized.search.scales.iter().map(|&x| x.into()));
        case.check("loss", quantized.search.losses.iter().copied());
        case.check("codes", linear.codes().unpack().into_iter().map(f64::from));
        case.check("q_scale", linear.scales().iter().map(|&x| x.into()));
        case.check("q_zero", linear.zeros().iter().map(|&x| x.into()));
        let weights = linear.dequantize::<f64>();
        let unscaled = weights.iter().enumerate().map(|(at, w)| w / f64::from(quantized.search.scales[at % inputs]));
        case.check("w_q", unscaled);
    }
}

#[test]
fn w4a16_matmul() {
    for case in cases("w4a16.matmul", 3) {
        let (linear, _) = gptq_layer(&case);
        case.check("y", linear.linear(case.values("in.x")).unwrap());
        case.check("y", linear.linear(&case.floats("in.x")).unwrap().into_iter().map(f64::from));
        // Act-order is a permutation of the inputs.
        let order = linear.order_by_group();
        let sorted = linear.permuted(&order).unwrap();
        assert!(sorted.groups().index().is_none());
        let rows = case.values("in.x").chunks(order.len());
        let permuted: Vec<f64> = rows.flat_map(|row| order.iter().map(|&input| row[input as usize])).collect();
        case.check("y", sorted.linear(&permuted).unwrap());
    }
}
