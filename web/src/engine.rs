//! The interface for engines in JavaScript: a cache on a `GPUDevice`, with tensors that are `GPUBuffer`s.
//!
//! The device is kvpack's, and the engine makes its own pipelines on it. The other way round is not possible: wgpu 30
//! hands its `GPUDevice` and `GPUBuffer`s out, and takes neither in. So a tensor is made here, and the engine's kernels
//! write it through its `buffer`, without a copy.

use js_sys::{Float32Array, Uint16Array};
use kvpack::backend::Device;
use kvpack::cache::{ModelRecipe, PromptSpan};
use kvpack::plan::{ElementType, Elements, RowLayout, TokenRange};
use kvpack::wgpu::{Requirements, Tensor, Wgpu, choose_adapter, open_device};
use kvpack::{AttentionShape, Error, KvCache};
use wasm_bindgen::JsCast;
use wasm_bindgen::prelude::*;
use wgpu::ExperimentalFeatures;

use crate::javascript::{JsResult, thrown, whole};

/// A WebGPU device with kvpack's kernels.
#[wasm_bindgen]
pub struct Gpu(Wgpu);

#[wasm_bindgen]
impl Gpu {
    /// Opens the device of the browser's high-performance adapter with everything that kvpack's kernels can use.
    pub async fn open() -> JsResult<Gpu> {
        let adapter = choose_adapter(None).await.map_err(thrown)?;
        let requirements = Requirements::of(&adapter, ExperimentalFeatures::disabled());
        let (device, queue) = open_device(&adapter, requirements).await.map_err(thrown)?;
        Wgpu::new(device, queue).map(Self).map_err(thrown)
    }

    /// The `GPUDevice`, to make pipelines, bind groups and submissions of one's own with. Its `lost` promise tells
    /// when it is gone.
    #[wasm_bindgen(getter, unchecked_return_type = "GPUDevice")]
    pub fn device(&self) -> JsValue {
        self.0.device().as_webgpu().map_or(JsValue::UNDEFINED, |device| device.clone().into())
    }

    /// A tensor of `elements` zeros of type "f32" or "f16".
    pub fn tensor(&self, elements: f64, r#type: &str) -> JsResult<GpuTensor> {
        let elements = whole("elements", elements)?;
        Tensor::zeroed(self.0.device(), elements, element_type(r#type)?).map(GpuTensor::new(&self.0)).map_err(thrown)
    }

    /// A tensor of the elements of a `Float32Array`.
    #[wasm_bindgen(js_name = uploadF32)]
    pub async fn upload_f32(&self, elements: Float32Array) -> JsResult<GpuTensor> {
        let elements = checked(elements, "a Float32Array")?.to_vec();
        self.0.upload(Elements::F32(&elements)).await.map(GpuTensor::new(&self.0)).map_err(thrown)
    }

    /// A tensor of halves: the words of a `Uint16Array`, which may lie in the buffer of a `Float16Array`.
    #[wasm_bindgen(js_name = uploadF16)]
    pub async fn upload_f16(&self, words: Uint16Array) -> JsResult<GpuTensor> {
        let words = checked(words, "a Uint16Array of the bits of halves")?.to_vec();
        let elements: Vec<half::f16> = words.into_iter().map(half::f16::from_bits).collect();
        self.0.upload(Elements::F16(&elements)).await.map(GpuTensor::new(&self.0)).map_err(thrown)
    }
}

/// Dense elements in a `GPUBuffer` with the usages `STORAGE | COPY_SRC | COPY_DST`.
#[wasm_bindgen]
pub struct GpuTensor {
    gpu: Wgpu,
    tensor: Tensor,
}

impl GpuTensor {
    fn new(gpu: &Wgpu) -> impl Fn(Tensor) -> Self {
        move |tensor| Self { gpu: gpu.clone(), tensor }
    }
}

#[wasm_bindgen]
impl GpuTensor {
    /// The buffer, which the engine's kernels may read and write.
    #[wasm_bindgen(getter, unchecked_return_type = "GPUBuffer")]
    pub fn buffer(&self) -> JsValue {
        self.tensor.buffer().as_webgpu().map_or(JsValue::UNDEFINED, |buffer| buffer.clone().into())
    }

    /// Elements.
    #[wasm_bindgen(getter)]
    pub fn length(&self) -> usize {
        self.tensor.elements()
    }

    /// The elements on the host, once all submitted work is done.
    pub async fn read(&self) -> JsResult<Float32Array> {
        let elements = self.gpu.download(&self.tensor).await.map_err(thrown)?;
        Ok(Float32Array::from(elements.as_slice()))
    }
}

/// The keys and values of one layer.
#[wasm_bindgen]
pub struct Cache(KvCache<Wgpu>);

#[wasm_bindgen]
impl Cache {
    /// An empty cache. `recipe` is a name as `kvpack generate --recipe` takes it: "f16", "calibquant:2",
    /// "kivi:4+window=64".
    #[wasm_bindgen(constructor)]
    pub fn new(
        gpu: &Gpu,
        query_heads: f64,
        kv_heads: f64,
        head_dim: f64,
        sequences: f64,
        recipe: &str,
    ) -> JsResult<Cache> {
        let (query_heads, kv_heads) = (whole("query heads", query_heads)?, whole("KV heads", kv_heads)?);
        let (head_dim, sequences) = (whole("head_dim", head_dim)?, whole("sequences", sequences)?);
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim).map_err(thrown)?;
        let recipe: ModelRecipe = recipe.parse().map_err(thrown)?;
        let recipe = recipe.plain().map_err(thrown)?.layer(0, &shape);
        KvCache::new(gpu.0.clone(), shape, sequences, recipe).map(Self).map_err(thrown)
    }

    /// Stores a prompt, keys and values `[tokens, kv_heads, head_dim]`, in a sequence that is empty. Tokens
    /// `packed_from .. packed_to` are packed, as an image's; the others stay in f16, or go where the recipe packs text.
    pub async fn prefill(
        &mut self,
        sequence: f64,
        keys: &GpuTensor,
        values: &GpuTensor,
        packed_from: f64,
        packed_to: f64,
    ) -> JsResult<()> {
        let sequence = whole("sequence", sequence)?;
        let (packed_from, packed_to) = (whole("packed_from", packed_from)?, whole("packed_to", packed_to)?);
        let (shape, held) = (*self.0.shape(), self.0.tokens(sequence).map_err(thrown)?);
        let (of_keys, of_values) = (keys.tensor.elements(), values.tensor.elements());
        let of_token = shape.kv_heads() * shape.head_dim();
        let tokens = of_keys / of_token;
        let refuse = |reason: String| Err(thrown(Error::Plan { what: "prompt", reason }));
        if held > 0 {
            return refuse(format!("sequence {sequence} holds {held} tokens; store a prompt in an empty one"));
        }
        if of_keys % of_token != 0 || of_values != of_keys {
            return refuse(format!(
                "keys have {of_keys} elements and values {of_values}; both need {of_token} a token"
            ));
        }
        if packed_to > tokens || packed_from > packed_to {
            return refuse(format!(
                "tokens {packed_from} .. {packed_to} of {tokens} cannot be packed; name a part of them"
            ));
        }
        let range = |from: usize, to: usize| TokenRange::new(from, to).map_err(thrown);
        let mut prompt = Vec::new();
        if packed_from > 0 {
            prompt.push(PromptSpan::f16(range(0, packed_from)?));
        }
        if packed_to > packed_from {
            prompt.push(PromptSpan::packed(range(packed_from, packed_to)?));
        }
        if tokens > packed_to {
            prompt.push(PromptSpan::f16(range(packed_to, tokens)?));
        }
        let rows = RowLayout::token_major(tokens, &shape);
        self.0.prefill(sequence, rows, &keys.tensor, &values.tensor, &prompt).await.map_err(thrown)
    }

    /// Appends one token to every sequence: keys and values `[sequences, kv_heads, head_dim]`.
    pub async fn append(&mut self, keys: &GpuTensor, values: &GpuTensor) -> JsResult<()> {
        let rows = RowLayout::token_major(self.0.sequences(), self.0.shape());
        self.0.append(rows, &keys.tensor, &values.tensor).await.map_err(thrown)
    }

    /// Attends every sequence's query, `[sequences, query_heads, head_dim]`, to all it stores; the output has the same
    /// layout, in f32.
    pub async fn attend(&self, queries: &GpuTensor) -> JsResult<GpuTensor> {
        let output = self.0.attend(&queries.tensor, ElementType::F32).await.map_err(thrown)?;
        Ok(GpuTensor { gpu: queries.gpu.clone(), tensor: output })
    }

    /// Tokens of a sequence.
    pub fn tokens(&self, sequence: f64) -> JsResult<usize> {
        self.0.tokens(whole("sequence", sequence)?).map_err(thrown)
    }

    /// Bytes of the pages and ranges in use.
    #[wasm_bindgen(getter)]
    pub fn bytes(&self) -> f64 {
        self.0.memory().in_use_bytes() as f64
    }
}

/// An array of its declared type. JavaScript passes any value, and another array would be converted number by number.
fn checked<A: JsCast + AsRef<JsValue>>(array: A, wanted: &str) -> JsResult<A> {
    if array.is_instance_of::<A>() {
        return Ok(array);
    }
    let given: &JsValue = array.as_ref();
    let reason = format!("{given:?} was given; pass {wanted}");
    Err(thrown(Error::Buffer { what: "a tensor", reason }))
}

fn element_type(name: &str) -> JsResult<ElementType> {
    match name {
        "f32" => Ok(ElementType::F32),
        "f16" => Ok(ElementType::F16),
        _ => Err(thrown(Error::Buffer {
            what: "a tensor",
            reason: format!("there is no type '{name}'; use f32 or f16"),
        })),
    }
}
