//! Steps that an engine encodes one after the other into one submission, with inputs and outputs of their own, and
//! attention in f64 over all that they appended.

use kvpack::cache::TokenRun;
use kvpack::plan::ElementType;
use kvpack::wgpu::LayerTensors;

use any_backend::exact::dot;
use any_backend::model_steps::{self, Inputs};
use any_backend::random_rows::Random;

/// Inputs that f16 holds exactly.
pub fn exact_inputs(random: &mut Random) -> Inputs {
    let exact = |rows: Vec<f32>| rows.into_iter().map(|element| (element * 16.0).round() / 16.0).collect();
    model_steps::inputs(random).into_iter().map(|of| of.map(exact)).collect()
}

/// Tensors of a step that lie elsewhere than those that are bound, filled with the inputs of a layer.
pub fn staged(device: &wgpu::Device, queue: &wgpu::Queue, inputs: &[Vec<f32>; 3]) -> LayerTensors {
    let of = LayerTensors::zeroed(device, &model_steps::shape(), model_steps::ROWS, ElementType::F32).unwrap();
    for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(inputs) {
        queue.write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
    }
    of
}

/// Copies what a layer's step reads to the tensors that are bound, in the order of the commands.
pub fn encode_inputs(staged: &LayerTensors, bound: &LayerTensors, encoder: &mut wgpu::CommandEncoder) {
    for (from, to) in [(&staged.keys, &bound.keys), (&staged.values, &bound.values), (&staged.queries, &bound.queries)]
    {
        from.encode_copy(to, encoder).unwrap();
    }
}

/// All keys and values that were appended, by layer and sequence, `[tokens, kv_heads, head_dim]`.
pub struct Appended(Vec<Vec<[Vec<f32>; 2]>>);

impl Appended {
    pub fn new() -> Self {
        Self(vec![vec![[Vec::new(), Vec::new()]; model_steps::SEQUENCES]; model_steps::LAYERS])
    }

    /// Appends the tokens of a step to a layer, and attends with its queries in f64.
    pub fn attend(&mut self, layer: usize, runs: &[TokenRun], inputs: &[Vec<f32>; 3]) -> Vec<f64> {
        let (kv_row, query_row) = (2 * 64, 4 * 64);
        let (mut row, mut outputs) = (0, Vec::new());
        for run in runs {
            let held = &mut self.0[layer][run.sequence()];
            for _ in 0..run.tokens() {
                for (held, new) in held.iter_mut().zip(inputs) {
                    held.extend_from_slice(&new[row * kv_row..][..kv_row]);
                }
                let query = &inputs[2][row * query_row..][..query_row];
                (0..4).for_each(|head| outputs.extend(attend_head(held, head / 2, &query[head * 64..][..64])));
                row += 1;
            }
        }
        outputs
    }
}

/// Attention of one query of 64 channels to all tokens of a KV head of two.
fn attend_head([keys, values]: &[Vec<f32>; 2], kv_head: usize, query: &[f32]) -> Vec<f64> {
    let rows = |of: &[f32]| of.chunks(64).skip(kv_head).step_by(2).map(<[f32]>::to_vec).collect::<Vec<_>>();
    let score = |key: &[f32]| dot(key, query) / 8.0;
    let scores: Vec<f64> = rows(keys).iter().map(|key| score(key)).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut output = vec![0.0; 64];
    for (weight, value) in weights.iter().zip(rows(values)) {
        output.iter_mut().zip(value).for_each(|(out, value)| *out += weight / sum * f64::from(value));
    }
    output
}
