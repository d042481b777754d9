//! Golden vectors: what others packed and quantised, see `tests/golden/README.md`.

use std::collections::BTreeMap;
use std::path::Path;

use half::f16;
use kvpack_weights::format::awq_gemm::AwqTensors;
use kvpack_weights::format::compressed_tensors::CompressedTensors;
use kvpack_weights::format::gptq::{AllOnes, GptqLayout, GptqTensors, StoredZeros};
use kvpack_weights::format::{Table, awq_gemm, awq_gemv, compressed_tensors, gptq};
use kvpack_weights::quantize::{
    AwqOptions, Clip, ColumnOrder, GptqOptions, Grid, Hessian, Matrix, OutOfRange, ScaleType, Symmetry, awq,
    gptq as quantize_gptq,
};
use kvpack_weights::{Bits, GroupSize, QuantizedLinear};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// One case.
struct Golden {
    name: String,
    params: Value,
    compare: Value,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
}

impl Golden {
    fn count(&self, name: &str) -> u64 {
        self.params[name].as_u64().unwrap()
    }

    fn bits(&self) -> Bits {
        Bits::new(self.count("bits")).unwrap()
    }

    fn group(&self, name: &str) -> GroupSize {
        GroupSize::new(self.params[name].as_i64().unwrap()).unwrap()
    }

    fn flag(&self, name: &str) -> bool {
        self.params[name].as_bool().unwrap()
    }

    fn values(&self, name: &str) -> &[f64] {
        &self.tensors[name].1
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.values(name).iter().map(|&x| x as f32).collect()
    }

    fn integers(&self, name: &str) -> Vec<i32> {
        self.values(name).iter().map(|&x| x as i32).collect()
    }

    fn axes(&self, name: &str) -> [usize; 2] {
        self.tensors[name].0.as_slice().try_into().unwrap()
    }

    fn words(&self, name: &str) -> Table<u32> {
        let [rows, columns] = self.axes(name);
        Table::new(rows, columns, self.integers(name).iter().map(|&word| word as u32).collect()).unwrap()
    }

    fn table(&self, name: &str) -> Table<f32> {
        let [rows, columns] = self.axes(name);
        Table::new(rows, columns, self.floats(name)).unwrap()
    }

    /// Compares an output as the file asks.
    fn check(&self, output: &str, got: impl IntoIterator<Item = f64>) {
        let mode = &self.compare[output];
        let (rtol, atol) = match mode["mode"].as_str().unwrap() {
            "exact" => (0.0, 0.0),
            "close" => (mode["rtol"].as_f64().unwrap(), mode["atol"].as_f64().unwrap()),
            other => panic!("{other}"),
        };
        let (got, want): (Vec<f64>, _) = (got.into_iter().collect(), self.values(&format!("out.{output}")));
        assert_eq!(got.len(), want.len(), "{}: {output}", self.name);
        for (at, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((got - want).abs() <= atol + rtol * want.abs(), "{}: {output} {at}: {got}, not {want}", self.name);
        }
    }

    fn check_unpacked(&self, linear: &QuantizedLinear) {
        self.check("codes", linear.codes().unpack().into_iter().map(f64::from));
        self.check("weights", linear.dequantize::<f32>().into_iter().map(f64::from));
    }
}

/// The cases of an op.
fn cases(op: &str, count: usize) -> Vec<Golden> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let name = |path: &Path| path.file_stem().unwrap().to_string_lossy().into_owned();
    paths.retain(|path| name(path).starts_with(&format!("{op}.")));
    assert_eq!(paths.len(), count, "{op}");
    paths.iter().map(|path| golden(name(path), &std::fs::read(path).unwrap())).collect()
}

fn golden(name: String, bytes: &[u8]) -> Golden {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    let file = SafeTensors::deserialize(bytes).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let bytes = view.data();
        let values = match view.dtype() {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x).into()).collect(),
            Dtype::F16 => bytes.as_chunks().0.iter().map(|&x| f16::from_le_bytes(x).to_f64()).collect(),
            Dtype::I32 => bytes.as_chunks().0.iter().map(|&x| i32::from_le_bytes(x).into()).collect(),
            Dtype::U8 => bytes.iter().map(|&x| x.into()).collect(),
            other => panic!("{other:?}"),
        };
        (name, (view.shape().to_vec(), values))
    });
    let json = |key: &str| serde_json::from_str(&metadata[key]).unwrap();
    Golden { name, params: json("params"), compare: json("compare"), tensors: tensors.collect() }
}

fn gptq_layer(case: &Golden) -> (QuantizedLinear, GptqTensors) {
    let zeros = match case.params["checkpoint_format"].as_str().unwrap() {
        "gptq" => StoredZeros::MinusOne,
        "gptq_v2" => StoredZeros::Plain,
        other => panic!("{other}"),
    };
    let layout = GptqLayout { bits: case.bits(), group: case.group("group_size"), zeros, all_ones: AllOnes::Refused };
    let tensors = GptqTensors {
        qweight: case.words("in.qweight"),
        qzeros: case.words("in.qzeros"),
        scales: case.table("in.scales"),
        g_idx: Some(case.integers("in.g_idx")),
    };
    let linear = gptq::unpack(&tensors, &layout).unwrap();
    // What was read is written as it was.
    assert_eq!(gptq::pack(&linear, zeros).unwrap(), tensors, "{}", case.name);
    (linear, tensors)
}

#[test]
fn gptq_unpack() {
    for case in cases("gptq.unpack", 7) {
        let (linear, tensors) = gptq_layer(&case);
        case.check_unpacked(&linear);
        assert_eq!(linear.groups().index().is_some(), case.flag("desc_act"), "{}", case.name);
        if case.flag("sym") {
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
        case.check_unpacked(&linear);
    }
}

#[test]
fn compressed_tensors_unpack() {
    for case in cases("compressed_tensors.unpack", 2) {
        let symmetric = case.flag("symmetric");
        let shape = case.integers("in.weight_shape");
        let tensors = CompressedTensors {
            weight_packed: case.words("in.weight_packed"),
            weight_scale: case.table("in.weight_scale"),
            weight_zero_point: (!symmetric).then(|| case.words("in.weight_zero_point")),
            weight_shape: [shape[0].into(), shape[1].into()],
            weight_g_idx: None,
        };
        case.check_unpacked(&compressed_tensors::unpack(&tensors, case.bits(), case.group("group_size")).unwrap());
    }
}

#[test]
fn gptq_quantize() {
    for case in cases("gptq.quantize", 4) {
        let ([outputs, inputs], [tokens, _]) = (case.axes("in.w"), case.axes("in.x"));
        let (weights, activations) = (case.floats("in.w"), case.floats("in.x"));
        let symmetry = if case.flag("sym") { Symmetry::Symmetric } else { Symmetry::Asymmetric };
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
