//! Decoders of real shape with random weights.

use burn::tensor::Device;
use kvpack_serving::decoder::Tensors;
use kvpack_serving::study::Shape;
use kvpack_serving::tiny;

use crate::Result;
use crate::decoder::Decoder;

/// A decoder of a shape on a device, in f32.
pub fn decoder(shape: Shape, device: &Device) -> Result<Decoder> {
    Decoder::load(device, shape.config()?, &mut RandomWeights::new())
}

/// Tensors with the same random numbers again and again: billions of new ones would take minutes.
struct RandomWeights {
    numbers: Vec<f32>,
}

impl RandomWeights {
    fn new() -> Self {
        const NUMBERS: usize = (1 << 20) + 7; // rows of matrices begin at different ones
        Self { numbers: tiny::random(&mut 3, NUMBERS, 0.04) }
    }
}

impl Tensors for RandomWeights {
    fn has(&self, name: &str) -> bool {
        name == "output.weight"
    }

    fn tensor(&mut self, _: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, String> {
        let elements = shape.iter().product();
        match shape {
            [_] => Ok(vec![1.0; elements]), // norms
            _ => Ok(self.numbers.iter().copied().cycle().take(elements).collect()),
        }
    }
}
