//! A tiny model with random weights, written as a GGUF file, and the tests of this room that run on it.

use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use kvpack::cache::{ChunkStores, ModelRecipe, StoreId};
use kvpack::cpu::{Cpu, nmse};
use kvpack::plan::TokenRange;
use kvpack::policy::Spans;

use super::{Attention, DensePrompt, ExactAttention, Model, ModelError, PackedAttention, Tokenizer};

const WIDTH: usize = 128;
const INNER: usize = 160;
const HEADS: usize = 2;
const LAYERS: usize = 2;
const CONTEXT: usize = 400;

/// A file that is gone when the test is.
pub struct Gguf(PathBuf);

/// A model of the tests of other rooms.
pub fn model(name: &str) -> (Gguf, Model) {
    let file = write(name, "llama", |_| {});
    let model = Model::load(&file.0).unwrap();
    (file, model)
}

/// One whose key projection has a bias of 300 in two channels that hardly turn with the position, in every layer.
pub fn model_with_key_bias(name: &str) -> (Gguf, Model) {
    let mut bias = vec![0.0; WIDTH / HEADS];
    (bias[31], bias[63]) = (300.0, -300.0);
    let file = write_biased(name, "qwen2", |_| {}, Some(bias));
    let model = Model::load(&file.0).unwrap();
    (file, model)
}

impl Gguf {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Gguf {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Random numbers of a fixed sequence, about -scale … scale.
fn random(seed: &mut u64, shape: &[usize], scale: f32) -> Tensor {
    let mut next = || {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    };
    let elements: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(elements, shape, &Device::Cpu).unwrap()
}

/// The tokens of single bytes.
fn alphabet() -> Vec<Value> {
    let mut alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    alphabet.into_iter().map(|c| Value::String(c.into())).collect()
}

/// A tokenizer of bytes that knows ChatML, with metadata in addition to or in place of its own.
pub fn bytes(more: &[(&str, Value)]) -> Result<Tokenizer, ModelError> {
    let mut tokens = alphabet();
    let (whole, control) = (["th", "the"], ["<bos>", "<tool_call>", "<|im_start|>", "<|im_end|>"]);
    tokens.extend(whole.into_iter().chain(control).map(|token| Value::String(token.into())));
    let types = (0..tokens.len()).map(|at| {
        Value::I32(if at == 259 {
            4
        } else if at >= 258 {
            3
        } else {
            1
        })
    });
    let own = [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.token_type", Value::Array(types.collect())),
        ("tokenizer.ggml.tokens", Value::Array(tokens)),
        ("tokenizer.ggml.merges", Value::Array(vec![Value::String("t h".into())])),
        ("tokenizer.ggml.bos_token_id", Value::U32(258)),
    ];
    Tokenizer::read(&own.iter().chain(more).map(|(key, value)| (key.to_string(), value.clone())).collect())
}

/// A tokenizer of pieces with scores, of which the best pair of neighbours is merged first, and bytes for what is no
/// piece; with metadata in addition to or in place of its own.
pub fn scored(more: &[(&str, Value)]) -> Result<Tokenizer, ModelError> {
    let pieces = [
        ("<unk>", 0.0, 2),
        ("<bos>", 0.0, 3),
        ("▁", -20.0, 1),
        ("a", -21.0, 1),
        ("b", -22.0, 1),
        ("c", -23.0, 1),
        ("ab", -3.0, 1),
        ("bc", -2.0, 1),
        ("▁a", -1.0, 1),
        ("▁▁▁", 0.0, 4),
        ("<0xC3>", 0.0, 6),
        ("<0xA9>", 0.0, 6),
        ("<t>", 0.0, 4),
    ];
    let of = |value: &dyn Fn(&(&str, f32, i32)) -> Value| Value::Array(pieces.iter().map(value).collect());
    let own = [
        ("tokenizer.ggml.model", Value::String("llama".into())),
        ("tokenizer.ggml.tokens", of(&|piece| Value::String(piece.0.into()))),
        ("tokenizer.ggml.scores", of(&|piece| Value::F32(piece.1))),
        ("tokenizer.ggml.token_type", of(&|piece| Value::I32(piece.2))),
    ];
    Tokenizer::read(&own.iter().chain(more).map(|(key, value)| (key.to_string(), value.clone())).collect())
}

/// Writes a model; `change` may alter its metadata.
fn write(name: &str, architecture: &str, change: impl FnOnce(&mut Vec<(String, Value)>)) -> Gguf {
    write_biased(name, architecture, change, None)
}

/// The same with this bias of keys in place of a random one, where the architecture has one.
fn write_biased(
    name: &str,
    architecture: &str,
    change: impl FnOnce(&mut Vec<(String, Value)>),
    key_bias: Option<Vec<f32>>,
) -> Gguf {
    let path = std::env::temp_dir().join(format!("kvpack-{}-{name}.gguf", std::process::id()));
    let mut tokens = alphabet();
    tokens.push(Value::String("th".into()));
    tokens.push(Value::String("<|end|>".into()));
    let types = (0..tokens.len()).map(|i| Value::I32(if i + 1 == tokens.len() { 3 } else { 1 })).collect();
    let vocabulary = tokens.len();
    let number = |value: usize| Value::U32(value as u32);
    let mut metadata: Vec<(String, Value)> = vec![
        ("general.architecture".into(), Value::String(architecture.into())),
        (format!("{architecture}.block_count"), number(LAYERS)),
        (format!("{architecture}.context_length"), number(CONTEXT)),
        (format!("{architecture}.embedding_length"), number(WIDTH)),
        (format!("{architecture}.feed_forward_length"), number(INNER)),
        (format!("{architecture}.attention.head_count"), number(HEADS)),
        (format!("{architecture}.attention.head_count_kv"), number(1)),
        (format!("{architecture}.attention.layer_norm_rms_epsilon"), Value::F32(1e-5)),
        ("tokenizer.ggml.model".into(), Value::String("gpt2".into())),
        ("tokenizer.ggml.pre".into(), Value::String("smollm".into())),
        ("tokenizer.ggml.merges".into(), Value::Array(vec![Value::String("t h".into())])),
        ("tokenizer.ggml.token_type".into(), Value::Array(types)),
        ("tokenizer.ggml.eos_token_id".into(), number(vocabulary - 1)),
        ("tokenizer.ggml.tokens".into(), Value::Array(tokens)),
    ];
    change(&mut metadata);

    let mut seed = 7;
    let mut tensors: Vec<(String, Tensor)> = vec![
        ("token_embd.weight".into(), random(&mut seed, &[vocabulary, WIDTH], 1.0)),
        ("output_norm.weight".into(), Tensor::ones(WIDTH, candle_core::DType::F32, &Device::Cpu).unwrap()),
    ];
    for layer in 0..LAYERS {
        let mut push = |part: &str, shape: &[usize], scale| {
            tensors.push((format!("blk.{layer}.{part}"), random(&mut seed, shape, scale)));
        };
        push("attn_norm.weight", &[WIDTH], 1.0);
        push("ffn_norm.weight", &[WIDTH], 1.0);
        for (part, outputs, inputs) in [
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH / HEADS, WIDTH),
            ("attn_v", WIDTH / HEADS, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", INNER, WIDTH),
            ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ] {
            push(&format!("{part}.weight"), &[outputs, inputs], 0.3);
            if architecture == "qwen2" && ["attn_q", "attn_k", "attn_v"].contains(&part) {
                push(&format!("{part}.bias"), &[outputs], 0.5);
            }
        }
        if architecture == "gemma3" {
            let of_heads = ["attn_q_norm.weight", "attn_k_norm.weight"].map(|part| (part, WIDTH / HEADS));
            let of_stream = ["post_attention_norm.weight", "post_ffw_norm.weight"].map(|part| (part, WIDTH));
            of_heads.into_iter().chain(of_stream).for_each(|(part, channels)| push(part, &[channels], 1.0));
        }
    }
    if let Some(bias) = key_bias {
        let bias = Tensor::new(bias, &Device::Cpu).unwrap();
        let of_keys = tensors.iter_mut().filter(|(name, _)| name.ends_with("attn_k.bias"));
        of_keys.for_each(|(_, tensor)| *tensor = bias.clone());
    }
    let quantized: Vec<(String, QTensor)> =
        tensors.into_iter().map(|(name, tensor)| (name, QTensor::quantize(&tensor, GgmlDType::F32).unwrap())).collect();
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let quantized: Vec<(&str, &QTensor)> = quantized.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &metadata, &quantized).unwrap();
    Gguf(path)
}

fn load(path: &Path) -> ModelError {
    match Model::load(path) {
        Ok(_) => panic!("{} should not load", path.display()),
        // Contexts are looked through.
        Err(error) => error.downcast().unwrap(),
    }
}

pub fn logits(model: &Model, attention: &mut dyn Attention, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let (mut position, mut logits) = (0, Vec::new());
    for &chunk in chunks {
        let stream = model.forward(&tokens[position..position + chunk], position, attention).unwrap();
        logits.extend(model.logits(&stream).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap());
        position += chunk;
    }
    logits
}

pub fn tokens(model: &Model, count: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * i + 3 * i) % model.tokenizer.vocabulary()) as u32).collect()
}

fn as_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// The f16 cache gives the logits of full-precision attention, however the text is cut, in every architecture.
#[test]
fn the_f16_cache_is_exact() {
    for architecture in ["llama", "qwen2", "gemma3"] {
        let window = |metadata: &mut Vec<(String, Value)>| {
            if architecture == "gemma3" {
                metadata.push(("gemma3.attention.sliding_window".into(), Value::U32(40)));
            }
        };
        let file = write(&format!("exact-{architecture}"), architecture, window);
        let model = Model::load(&file.0).unwrap();
        let tokens = tokens(&model, 300);
        let exact = |chunks: &[usize]| {
            let mut attention = ExactAttention::new(&model.config);
            logits(&model, &mut attention, &tokens, chunks)
        };
        let expected = exact(&[300]);
        assert!(nmse(&exact(&[128, 128, 43, 1]), &as_f64(&expected)) < 1e-9);
        let mut cut = vec![128, 128, 30];
        cut.extend([1; 14]);
        let recipe = "f16".parse().unwrap();
        let mut packed = PackedAttention::new(&Cpu::new(), &model.config, &recipe).unwrap();
        let error = nmse(&logits(&model, &mut packed, &tokens, &cut), &as_f64(&expected));
        assert!(error > 0.0 && error <= 1e-6, "{architecture}: NMSE {error}");
        // Pages behind the window are given back.
        let held = if architecture == "gemma3" { 172 } else { 300 };
        assert_eq!(packed.memory().map(|memory| memory.f16().tokens).collect::<Vec<_>>(), [held; LAYERS]);
    }
}

/// A packed cache is used, and its error falls with the width.
#[test]
fn narrower_codes_lose_more() {
    let file = write("narrow", "llama", |_| {});
    let model = Model::load(&file.0).unwrap();
    let tokens = tokens(&model, 390);
    let run = |recipe: &str| {
        let recipe = recipe.parse().unwrap();
        let mut packed = PackedAttention::new(&Cpu::new(), &model.config, &recipe).unwrap();
        let logits = logits(&model, &mut packed, &tokens, &[128, 128, 128, 6]);
        (
            logits,
            packed
                .memory()
                .map(|memory| memory.packed().iter().map(|store| store.tokens).sum::<usize>())
                .collect::<Vec<_>>(),
        )
    };
    let (expected, packed_tokens) = run("f16");
    assert_eq!(packed_tokens, [0, 0]);
    let mut errors = Vec::new();
    for recipe in ["calibquant:8", "calibquant:4", "calibquant:2", "calibquant:2+layers=1:f16"] {
        let (logits, packed_tokens) = run(recipe);
        // Of 390 tokens, two tiles have 128 newer ones.
        assert_eq!(packed_tokens, [256, if recipe.contains("layers=1") { 0 } else { 256 }], "{recipe}");
        errors.push(nmse(&logits, &as_f64(&expected)));
    }
    assert!(errors[0] < errors[1] && errors[1] < errors[2] && errors[3] < errors[2], "{errors:?}");
}

/// What is kept of a prompt answers like the prompt where all is kept, and loses the more the less is kept.
#[test]
fn a_compressed_prompt_is_read_on() {
    let file = write("compressed", "llama", |_| {});
    let model = Model::load(&file.0).unwrap();
    let tokens = tokens(&model, 320);
    let (prompt, rest) = tokens.split_at(310);
    let mut dense = DensePrompt::new(&model.config);
    let (first, second) = prompt.split_at(200);
    dense.read(&model, first).unwrap();
    let own = dense.clone().read(&model, second).unwrap();
    assert_eq!(dense.tokens(), 200);
    dense.read(&model, second).unwrap();
    let after = |attention: &mut dyn Attention| {
        let stream = model.forward(rest, prompt.len(), attention).unwrap();
        model.logits(&stream).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let mut exact = ExactAttention::new(&model.config);
    let stream = model.forward(prompt, 0, &mut exact).unwrap();
    let last = |stream: &Tensor| model.logits(stream).unwrap().get(stream.dim(0).unwrap() - 1).unwrap();
    let [own, expected] = [&own, &stream].map(|stream| last(stream).to_vec1::<f32>().unwrap());
    assert!(nmse(&own, &as_f64(&expected)) < 1e-9);
    let expected = after(&mut exact);
    let error = |recipe: &str| {
        let recipe: ModelRecipe = recipe.parse().unwrap();
        let spans = Spans::new(prompt.len(), &[TokenRange::new(10, 290).unwrap()]).unwrap();
        let mut packed = PackedAttention::new(&Cpu::new(), &model.config, &recipe).unwrap();
        let observed = packed.observe(&dense, recipe.policy().unwrap().clone(), spans).unwrap();
        let selection = packed.compress(&observed).unwrap();
        let held: usize = packed.memory().flat_map(|memory| memory.stores().to_vec()).map(|store| store.tokens).sum();
        assert_eq!(held, selection.layers().iter().map(|layer| layer.count()).sum::<usize>());
        nmse(&after(&mut packed), &as_f64(&expected))
    };
    assert!(error("h2o:1") < 1e-6 && error("vlcache:1/int8") < 1e-3);
    assert!(error("random:0.1") > error("random:0.5") && error("random:0.5") > 1e-6);
    assert!(error("lookm:0.3/saw-int4").is_finite());

    // All of it packed, and its first 300 tokens in chunks.
    let stored = |recipe: &str, store: &dyn Fn(&mut PackedAttention<Cpu>)| {
        let mut packed = PackedAttention::new(&Cpu::new(), &model.config, &recipe.parse().unwrap()).unwrap();
        store(&mut packed);
        nmse(&after(&mut packed), &as_f64(&expected))
    };
    let chunks = |store| {
        let stores = vec![StoreId(store); 9];
        ChunkStores::new(TokenRange::new(0, 300).unwrap(), 32, stores).unwrap()
    };
    let in_chunks = |store| stored("cocktail", &|packed| packed.store_chunks(&dense, &chunks(store)).unwrap());
    assert!(stored("int8", &|packed| packed.store(&dense).unwrap()) < 1e-3);
    assert!(in_chunks(0) < 1e-6 && in_chunks(0) < in_chunks(1) && in_chunks(1) < in_chunks(2));
}

#[test]
fn text_survives_the_tokenizer() {
    let file = write("tokenizer", "llama", |_| {});
    let tokenizer = Model::load(&file.0).unwrap().tokenizer;
    let text = "the naïve 12 — ☕ thin";
    let tokens = tokenizer.encode(text).unwrap();
    assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
    assert_eq!(tokens[0] as usize, tokenizer.vocabulary() - 2, "'t' and 'h' merge");
    assert_eq!(tokenizer.encode("a<|end|>").unwrap()[1], tokenizer.end().unwrap());
    assert!(tokenizer.chat().is_err());
}

#[test]
fn bad_files_are_refused() {
    assert!(matches!(load(Path::new("/no/such/model.gguf")), ModelError::Unreadable { .. }));
    let text = Gguf(std::env::temp_dir().join(format!("kvpack-{}-text.gguf", std::process::id())));
    std::fs::write(&text.0, "no model at all").unwrap();
    assert!(matches!(load(&text.0), ModelError::NotGguf { .. }));

    let whole = write("truncated", "llama", |_| {});
    let bytes = std::fs::read(&whole.0).unwrap();
    std::fs::write(&whole.0, &bytes[..bytes.len() - 1000]).unwrap();
    let error = load(&whole.0);
    assert!(matches!(error, ModelError::Truncated { given, .. } if given == bytes.len() as u64 - 1000), "{error}");
    // Cut inside its header, it cannot even be parsed.
    std::fs::write(&whole.0, &bytes[..500]).unwrap();
    assert!(matches!(load(&whole.0), ModelError::NotGguf { .. }));

    let other = write("architecture", "mamba", |_| {});
    assert!(matches!(load(&other.0), ModelError::Architecture { given } if given == "mamba"));
    let set = |name: &'static str, key: &'static str, value: Value| {
        write(name, "llama", move |metadata| {
            metadata.retain(|(named, _)| named != key);
            metadata.push((key.into(), value));
        })
    };
    let scaled = set("scaled", "llama.rope.scaling.type", Value::String("yarn".into()));
    assert!(matches!(load(&scaled.0), ModelError::Variant { .. }));
    // Linear scaling where no type is given; a factor of 0 or 1 is none.
    let rope = |entries: &[(&str, Value)]| {
        let file = write("rope", "llama", |metadata| {
            metadata.extend(entries.iter().map(|(name, value)| (format!("llama.rope.{name}"), value.clone())));
        });
        Model::load(&file.0).err().map(|error| error.downcast::<ModelError>().unwrap())
    };
    let kind = |name: &str| ("scaling.type", Value::String(name.into()));
    let (factor, older) = ("scaling.factor", "scale_linear");
    for entries in [
        vec![(factor, Value::F32(8.0))],
        vec![(older, Value::F32(4.0))],
        vec![kind("linear"), (factor, Value::F32(2.0))],
        vec![kind("yarn"), (factor, Value::F32(1.0))],
    ] {
        assert!(matches!(rope(&entries), Some(ModelError::Variant { .. })), "{entries:?}");
    }
    for entries in [
        vec![(factor, Value::F32(1.0))],
        vec![(older, Value::F32(0.0))],
        vec![kind("linear")],
        vec![kind("none"), (factor, Value::F32(8.0))],
    ] {
        assert!(rope(&entries).is_none(), "{entries:?}");
    }
    assert!(matches!(rope(&[("scaling.type", Value::U32(1))]), Some(ModelError::Metadata { .. })));
    let heads = set("heads", "llama.attention.key_length", Value::U32(48));
    assert!(matches!(load(&heads.0), ModelError::Variant { what } if what.contains("48")));
    let tokenizer = set("kind", "tokenizer.ggml.model", Value::String("bert".into()));
    assert!(matches!(load(&tokenizer.0), ModelError::Tokenizer { .. }));
    let layers = set("layers", "llama.block_count", Value::U32(3));
    assert!(matches!(load(&layers.0), ModelError::Tensor { name, .. } if name == "blk.2.attn_norm.weight"));
    let width = set("width", "llama.feed_forward_length", Value::U32(161));
    assert!(matches!(load(&width.0), ModelError::Tensor { name, .. } if name == "blk.0.ffn_gate.weight"));
    let none = set("none", "llama.block_count", Value::U32(0));
    assert!(matches!(load(&none.0), ModelError::Metadata { key, .. } if key == "llama.block_count"));
    // A context of any length costs nothing.
    let endless = set("endless", "llama.context_length", Value::U32(u32::MAX));
    assert!(Model::load(&endless.0).is_ok());
    let context = set("context", "llama.context_length", Value::String("long".into()));
    assert!(matches!(load(&context.0), ModelError::Metadata { key, .. } if key == "llama.context_length"));
}

#[test]
fn requests_beyond_the_model_are_refused() {
    let file = write("requests", "llama", |_| {});
    let model = Model::load(&file.0).unwrap();
    let mut attention = ExactAttention::new(&model.config);
    let tokens = tokens(&model, CONTEXT + 1);
    let error = model.forward(&tokens, 0, &mut attention).err().unwrap().downcast::<ModelError>().unwrap();
    assert!(matches!(error, ModelError::Context { given: 401, context: CONTEXT }));
    let recipe = "kivi:2+layers=2:f16".parse().unwrap();
    let error = PackedAttention::new(&Cpu::new(), &model.config, &recipe).err().unwrap();
    assert!(matches!(error.downcast::<ModelError>().unwrap(), ModelError::Layer { layer: 2, layers: 2, .. }));
}
