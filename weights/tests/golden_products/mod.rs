//! The published products, on any backend.

use kvpack_device::ElementType;
use kvpack_weights::conformance::{Backend, HostTensor};

use crate::golden_files;

/// Multiplies with the activations of the files in f32, and in f16 where it holds them.
pub fn pass(backend: &impl Backend) {
    for case in golden_files::cases("w4a16.matmul", 3) {
        let (layer, _) = golden_files::gptq_layer(&case);
        let given = case.floats("in.x");
        let rows = given.len() / layer.shape().inputs();
        let y = HostTensor::new(ElementType::F32, &vec![0.0; rows * layer.shape().outputs()]);
        for of in [ElementType::F32, ElementType::F16] {
            let x = HostTensor::new(of, &given);
            if x.numbers() != given {
                continue;
            }
            let [got, _] = pollster::block_on(backend.product(&layer, &x, rows, &y)).unwrap().runs;
            case.check("y", got.into_iter().map(f64::from));
        }
    }
}
