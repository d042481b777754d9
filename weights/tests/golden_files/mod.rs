//! Golden vectors of weights: what others packed, quantised and multiplied, see `tests/golden/README.md`.

use std::collections::BTreeMap;
use std::path::Path;

use half::f16;
use kvpack_weights::format::gptq::{AllOnes, GptqLayout, GptqTensors, StoredZeros};
use kvpack_weights::format::{Table, gptq};
use kvpack_weights::{Bits, GroupSize, QuantizedLinear};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// One case.
pub struct Golden {
    pub name: String,
    pub params: Value,
    compare: Value,
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
}

impl Golden {
    pub fn count(&self, name: &str) -> u64 {
        self.params[name].as_u64().unwrap()
    }

    pub fn bits(&self) -> Bits {
        Bits::new(self.count("bits")).unwrap()
    }

    pub fn group(&self, name: &str) -> GroupSize {
        GroupSize::new(self.params[name].as_i64().unwrap()).unwrap()
    }

    pub fn values(&self, name: &str) -> &[f64] {
        &self.tensors[name].1
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.values(name).iter().map(|&x| x as f32).collect()
    }

    pub fn integers(&self, name: &str) -> Vec<i32> {
        self.values(name).iter().map(|&x| x as i32).collect()
    }

    pub fn axes(&self, name: &str) -> [usize; 2] {
        self.tensors[name].0.as_slice().try_into().unwrap()
    }

    pub fn words(&self, name: &str) -> Table<u32> {
        let [rows, columns] = self.axes(name);
        Table::new(rows, columns, self.integers(name).iter().map(|&word| word as u32).collect()).unwrap()
    }

    pub fn table(&self, name: &str) -> Table<f32> {
        let [rows, columns] = self.axes(name);
        Table::new(rows, columns, self.floats(name)).unwrap()
    }

    /// Compares an output as the file asks.
    pub fn check(&self, output: &str, got: impl IntoIterator<Item = f64>) {
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
}

/// The cases of an op.
pub fn cases(op: &str, count: usize) -> Vec<Golden> {
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

/// The layer of a case, and its tensors.
pub fn gptq_layer(case: &Golden) -> (QuantizedLinear, GptqTensors) {
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
