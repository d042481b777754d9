//! burn's own attention over a cache of its tensors: what kvpack is compared with.

use burn::tensor::activation::softmax;
use burn::tensor::{Device, Distribution, Tensor};
use kvpack_serving::decoder::Config;
use kvpack_serving::study::StepTime;

use super::steps::{FIRST, Times};
use crate::Result;
use crate::host::Host;

/// Times steps with this attention, over random contexts.
pub fn decode(device: &Device, host: &Host, (batch, tokens): (usize, usize), steps: usize) -> Result<StepTime> {
    let mut own = OwnAttention::new(device, host.config(), batch, (tokens, FIRST + steps));
    let mut times = Times::new(batch);
    for _ in 0..FIRST + steps {
        times.begin();
        let positions = vec![own.length(); batch];
        let stream = host.decoder().forward(times.tokens(), &positions, &mut |layer, rows| own.attend(layer, rows))?;
        own.step();
        times.submitted();
        times.end(host.decoder().largest(stream)?);
    }
    times.median()
}

/// Keys and values of sequences that are equally long, in tensors with room for more.
pub struct OwnAttention {
    /// `[sequences, kv_heads, room, head_dim]` of every layer; none while a layer is worked on.
    layers: Vec<Option<[Tensor<4>; 2]>>,
    length: usize,
}

impl OwnAttention {
    /// Random contexts of `length` tokens, with room for more.
    pub fn new(device: &Device, config: &Config, sequences: usize, (length, more): (usize, usize)) -> Self {
        let shape = [sequences, config.attention.kv_heads(), length + more, config.attention.head_dim()];
        let random = || Tensor::random(shape, Distribution::Normal(0.0, 1.0), device);
        Self { layers: (0..config.layers).map(|_| Some([random(), random()])).collect(), length }
    }

    /// The position of the next token.
    pub const fn length(&self) -> usize {
        self.length
    }

    /// Counts a token that all layers have.
    pub const fn step(&mut self) {
        self.length += 1;
    }

    /// Attends with a row of every sequence, `[sequences, heads · head_dim]`.
    pub fn attend(&mut self, layer: usize, [queries, keys, values]: [&Tensor<2>; 3]) -> Result<Tensor<2>> {
        let kept = self.layers.get_mut(layer).and_then(Option::take).ok_or("there is no such layer")?;
        let [sequences, kv_heads, _, head_dim] = kept[0].dims();
        let width = queries.dims()[1];
        let at = self.length;
        // A tensor that nothing else holds is written in place.
        let append = |kept: Tensor<4>, given: &Tensor<2>| {
            let row = given.clone().reshape([sequences, kv_heads, 1, head_dim]);
            kept.slice_assign([0..sequences, 0..kv_heads, at..at + 1, 0..head_dim], row)
        };
        let [kept_keys, kept_values] = kept;
        let (kept_keys, kept_values) = (append(kept_keys, keys), append(kept_values, values));
        let seen = |kept: &Tensor<4>| kept.clone().narrow(2, 0, at + 1);
        let queries = queries.clone().reshape([sequences, kv_heads, width / kv_heads / head_dim, head_dim]);
        let scores = queries.matmul(seen(&kept_keys).swap_dims(2, 3)) / (head_dim as f64).sqrt();
        let output = softmax(scores, 3).matmul(seen(&kept_values)).reshape([sequences, width]);
        self.layers[layer] = Some([kept_keys, kept_values]);
        Ok(output)
    }
}
