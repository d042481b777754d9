//! What stands for a model: projections in burn, with burn's own attention next to kvpack's.

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Distribution, Tensor};
use kvpack::AttentionShape;

use crate::Result;

/// Channels between layers.
pub const HIDDEN: usize = 256;

/// The projections of a layer.
pub struct Layer {
    query: Tensor<2>,
    key: Tensor<2>,
    value: Tensor<2>,
    output: Tensor<2>,
}

/// Rows of normal numbers.
pub fn normal(device: &Device, of: DType, [rows, columns]: [usize; 2], deviation: f64) -> Tensor<2> {
    Tensor::random([rows, columns], Distribution::Normal(0.0, deviation), (device, of))
}

impl Layer {
    pub fn new(device: &Device, of: DType, shape: &AttentionShape) -> Self {
        let width = |heads: usize| heads * shape.head_dim();
        let weights = |from: usize, to: usize| normal(device, of, [from, to], 1.0 / (from as f64).sqrt());
        Self {
            query: weights(HIDDEN, width(shape.query_heads())),
            key: weights(HIDDEN, width(shape.kv_heads())),
            value: weights(HIDDEN, width(shape.kv_heads())),
            output: weights(width(shape.query_heads()), HIDDEN),
        }
    }

    /// Queries, keys and values of rows of hidden channels.
    pub fn project(&self, hidden: &Tensor<2>) -> [Tensor<2>; 3] {
        [&self.query, &self.key, &self.value].map(|weights| hidden.clone().matmul(weights.clone()))
    }

    /// What goes on to the next layer.
    pub fn after(&self, hidden: Tensor<2>, attended: Tensor<2>) -> Tensor<2> {
        (hidden + attended.matmul(self.output.clone())) * std::f64::consts::FRAC_1_SQRT_2
    }
}

/// Keys and values of a sequence, runs of tokens `[tokens, kv_heads · head_dim]`, as burn keeps them.
#[derive(Default)]
pub struct History {
    keys: Vec<Tensor<2>>,
    values: Vec<Tensor<2>>,
}

impl History {
    pub fn append(&mut self, keys: Tensor<2>, values: Tensor<2>) {
        self.keys.push(keys);
        self.values.push(values);
    }

    /// burn's own attention of one row of queries, in f32.
    pub fn attend(&self, shape: &AttentionShape, queries: Tensor<2>) -> Tensor<2> {
        let (heads, kv_heads, head_dim) = (shape.query_heads(), shape.kv_heads(), shape.head_dim());
        let by_head = |runs: &[Tensor<2>]| {
            let rows = Tensor::cat(runs.to_vec(), 0);
            let tokens = rows.dims()[0];
            rows.cast(DType::F32).reshape([tokens, kv_heads, head_dim]).swap_dims(0, 1)
        };
        let queries = queries.cast(DType::F32).reshape([kv_heads, heads / kv_heads, head_dim]);
        let scores = queries.matmul(by_head(&self.keys).swap_dims(1, 2)) / (head_dim as f64).sqrt();
        softmax(scores, 2).matmul(by_head(&self.values)).reshape([1, heads * head_dim])
    }
}

/// The squared error of the elements over the squares of what was expected.
pub fn nmse(given: &Tensor<2>, expected: &Tensor<2>) -> Result<f64> {
    let values = |tensor: &Tensor<2>| {
        let data = tensor.clone().cast(DType::F32).into_data();
        data.try_to_vec::<f32>().map_err(|error| format!("{error:?}"))
    };
    let square = |x: f32| f64::from(x) * f64::from(x);
    let (given, expected) = (values(given)?, values(expected)?);
    let error: f64 = given.iter().zip(&expected).map(|(a, b)| square(a - b)).sum();
    Ok(error / expected.iter().map(|&x| square(x)).sum::<f64>())
}
