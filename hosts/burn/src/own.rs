//! burn's own attention over a cache of its tensors: what kvpack is compared with.

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Distribution, Tensor};

use crate::Result;
use crate::decoder::Decoder;

/// Keys and values of sequences that are equally long, in tensors with room for more.
pub struct OwnAttention<'a> {
    decoder: &'a Decoder,
    /// `[sequences, kv_heads, room, head_dim]` of every layer, in f16.
    layers: Vec<[Tensor<4>; 2]>,
    length: usize,
}

impl<'a> OwnAttention<'a> {
    /// Random contexts of `length` tokens, with room for more.
    pub fn new(device: &Device, decoder: &'a Decoder, sequences: usize, (length, more): (usize, usize)) -> Self {
        let shape = &decoder.config.attention;
        let of_layer = [sequences, shape.kv_heads(), length + more, shape.head_dim()];
        let random = || Tensor::random(of_layer, Distribution::Normal(0.0, 1.0), (device, DType::F16));
        let layers = (0..decoder.config.layers).map(|_| [random(), random()]).collect();
        Self { decoder, layers, length }
    }

    /// The next tokens of all sequences.
    pub fn step(&mut self, tokens: &[u32]) -> Result<Vec<u32>> {
        let Self { decoder, layers, length } = self;
        let positions = vec![*length; tokens.len()];
        let stream = decoder.forward(tokens, &positions, &mut |layer, rows| {
            Ok(attend(&decoder.config.attention, &mut layers[layer], *length, rows))
        })?;
        *length += 1;
        decoder.largest(stream, &(0..tokens.len()).collect::<Vec<_>>())
    }
}

fn attend(
    shape: &kvpack::AttentionShape,
    [keys, values]: &mut [Tensor<4>; 2],
    length: usize,
    [q, k, v]: [&Tensor<2>; 3],
) -> Tensor<2> {
    let (sequences, kv_heads, head_dim) = (q.dims()[0], shape.kv_heads(), shape.head_dim());
    let at = [0..sequences, 0..kv_heads, length..length + 1, 0..head_dim];
    for (kept, new) in [(&mut *keys, k), (&mut *values, v)] {
        let new = new.clone().cast(DType::F16).reshape([sequences, kv_heads, 1, head_dim]);
        // burn writes in place what nothing else holds.
        let empty = Tensor::empty([0, 0, 0, 0], (&new.device(), DType::F16));
        *kept = std::mem::replace(kept, empty).slice_assign(at.clone(), new);
    }
    let held = |of: &Tensor<4>| of.clone().narrow(2, 0, length + 1);
    let queries = q.clone().cast(DType::F16).reshape([sequences, kv_heads, shape.query_heads() / kv_heads, head_dim]);
    let scores = queries.matmul(held(keys).transpose()) / (head_dim as f64).sqrt();
    let attended = softmax(scores, 3).matmul(held(values));
    attended.cast(DType::F32).reshape([sequences, shape.query_heads() * head_dim])
}
