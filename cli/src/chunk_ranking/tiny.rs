//! A tiny encoder with random weights, written as a folder, and the tests of this room that run on it.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use kvpack::cpu::nmse;

use super::encoder::Encoder;
use super::{Query, RankBy, Ranking, RankingError};

const PIECES: [&str; 11] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "rabbit", "##s", "ran", "queen", "tea", "."];
const WIDTH: usize = 8;
const INNER: usize = 12;
const LAYERS: usize = 2;
const POSITIONS: usize = 10;

/// A folder that is gone when the test is.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvpack-{}-ranking-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// One that holds an encoder.
    fn encoder(name: &str) -> Self {
        let folder = Self::new(name);
        folder.write("config.json", config().to_string().as_bytes());
        folder.write("vocab.txt", PIECES.join("\n").as_bytes());
        folder.write_tensors("model.safetensors", &weights());
        folder
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.join(file)
    }

    fn write(&self, file: &str, bytes: &[u8]) {
        std::fs::write(self.path(file), bytes).unwrap();
    }

    fn write_tensors(&self, file: &str, tensors: &[(String, Tensor)]) {
        let tensors = tensors.iter().cloned().collect();
        candle_core::safetensors::save(&tensors, self.path(file)).unwrap();
    }
}

fn config() -> serde_json::Value {
    serde_json::json!({
        "model_type": "bert", "hidden_act": "gelu", "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2, "vocab_size": PIECES.len(), "layer_norm_eps": 1e-12,
    })
}

/// Random numbers of a fixed sequence, -1 … 1, in the order of the tensors.
fn weights() -> Vec<(String, Tensor)> {
    let mut seed = 7u64;
    let mut tensors = Vec::new();
    let mut push = |name: String, shape: &[usize]| {
        let mut next = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let elements: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
        tensors.push((name, Tensor::from_vec(elements, shape, &Device::Cpu).unwrap()));
    };
    for (name, rows) in [("word", PIECES.len()), ("position", POSITIONS), ("token_type", 2)] {
        push(format!("embeddings.{name}_embeddings.weight"), &[rows, WIDTH]);
    }
    push("embeddings.LayerNorm.weight".into(), &[WIDTH]);
    push("embeddings.LayerNorm.bias".into(), &[WIDTH]);
    for layer in 0..LAYERS {
        for (part, outputs, inputs) in [
            ("attention.self.query", WIDTH, Some(WIDTH)),
            ("attention.self.key", WIDTH, Some(WIDTH)),
            ("attention.self.value", WIDTH, Some(WIDTH)),
            ("attention.output.dense", WIDTH, Some(WIDTH)),
            ("attention.output.LayerNorm", WIDTH, None),
            ("intermediate.dense", INNER, Some(WIDTH)),
            ("output.dense", WIDTH, Some(INNER)),
            ("output.LayerNorm", WIDTH, None),
        ] {
            let name = format!("encoder.layer.{layer}.{part}");
            push(format!("{name}.weight"), &[&[outputs], inputs.as_slice()].concat());
            push(format!("{name}.bias"), &[outputs]);
        }
    }
    tensors
}

fn load(folder: &Path) -> RankingError {
    match Encoder::load(folder) {
        Ok(_) => panic!("{} should not load", folder.display()),
        Err(error) => error,
    }
}

/// A forward pass written apart from this one, in f64, got these embeddings.
#[test]
fn embeddings_are_those_of_another_implementation() {
    let folder = Folder::encoder("exact");
    let encoder = Encoder::load(&folder.0).unwrap();
    for (text, expected) in EXPECTED {
        let error = nmse(&encoder.embed(text).unwrap(), &expected);
        assert!(error < 1e-10, "{text}: NMSE {error}");
    }
}

/// A text and its embedding.
const EXPECTED: [(&str, [f64; WIDTH]); 3] = [
    (
        "The rabbits ran.",
        [0.041200570, -2.763873088, -0.103775325, -0.188753183, -1.136915887, 0.329272057, -0.948351051, -0.433750183],
    ),
    (
        "",
        [0.023706613, -2.637148533, -0.237935669, -0.415446809, -1.420248356, 0.255099505, -0.908005746, -0.385248255],
    ),
    (
        "Thé HATTER, tea tea tea tea tea tea tea",
        [0.030549212, -2.709826083, -0.191823900, -0.338901986, -1.313462598, 0.320160819, -0.924874664, -0.409436970],
    ),
];

/// What the same implementation got of MiniLM itself: its first channels.
#[test]
#[ignore = "needs the encoder that scripts/fetch-encoder.sh fetches"]
fn minilm_embeds_as_elsewhere() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(super::MINILM);
    let encoder = Encoder::load(&folder).unwrap();
    for (text, expected) in [
        ("This is an example sentence", [0.34934534, 0.32786012, 0.25152937, 0.40949003]),
        ("Où est la Reine? It's 12:30 — naïve!", [-0.0375415, 0.23186802, 0.01928528, -0.20919877]),
        (&"word ".repeat(400), [-0.01893578, -0.22280524, -0.09014481, 0.11575912]),
    ] {
        let embedding = encoder.embed(text).unwrap();
        assert_eq!(embedding.len(), 384);
        assert!(nmse(&embedding[..4], &expected) < 1e-9, "{text}: {:?}", &embedding[..4]);
    }
}

#[test]
fn chunks_are_ranked() {
    let folder = Folder::encoder("ranked");
    let by = |text: &str| Ranking::open(&text.parse::<RankBy>().unwrap());
    let texts = ["The rabbits ran.", "the queen", "tea tea tea"].map(String::from).to_vec();
    let query = Query { name: "query", text: "the Queen" };
    let minilm = by(&format!("minilm:{}", folder.0.display())).unwrap();
    let similarities = minilm.chunks("", texts.clone()).unwrap().similarities(query).unwrap();
    assert!((similarities[1] - 1.0).abs() < 1e-6 && similarities[0] < 0.99999 && similarities[2] < 0.99999);
    let bm25 = by("bm25").unwrap();
    let similarities = bm25.chunks("", texts.clone()).unwrap().similarities(query).unwrap();
    assert!(similarities[1] > similarities[0] && similarities[2] == 0.0, "{similarities:?}");

    let tensor = |shape: &[usize], data: Vec<f32>| Tensor::from_vec(data, shape, &Device::Cpu).unwrap();
    let file = folder.path("given.safetensors");
    folder.write_tensors(
        "given.safetensors",
        &[
            ("document3.chunks".into(), tensor(&[3, 2], vec![1.0, 0.0, 0.0, 2.0, 1.0, 1.0])),
            ("document3.query".into(), tensor(&[2], vec![0.0, 3.0])),
            ("document3.wide".into(), tensor(&[4], vec![1.0; 4])),
            ("document3.none".into(), tensor(&[2], vec![f32::NAN, 1.0])),
        ],
    );
    let given = by(&file.display().to_string()).unwrap();
    let chunks = given.chunks("document3.", texts).unwrap();
    let similarities = chunks.similarities(query).unwrap();
    assert_eq!(similarities, [0.0, 1.0, 0.5f32.sqrt()]);
    let refused = |name| chunks.similarities(Query { name, text: "" }).unwrap_err();
    assert!(
        matches!(refused("chunks").downcast().unwrap(), RankingError::Tensor { reason, .. } if reason.contains("[3, 2]"))
    );
    assert!(
        matches!(refused("other").downcast().unwrap(), RankingError::Tensor { name, .. } if name == "document3.other")
    );
    assert!(matches!(refused("wide").downcast().unwrap(), kvpack::Error::Chunks { .. }));
    assert!(matches!(refused("none").downcast().unwrap(), kvpack::Error::NotANumber { .. }));
    assert!(matches!("words".parse::<RankBy>(), Err(RankingError::Unknown { given }) if given == "words"));
}

#[test]
fn bad_encoders_are_refused() {
    let folder = Folder::encoder("refused");
    let unreadable = |error| matches!(error, RankingError::Unreadable { file, .. } if file == "config.json");
    assert!(unreadable(load(Path::new("/no/such/encoder"))));
    let with = |key: &str, value: serde_json::Value| {
        let mut config = config();
        config[key] = value;
        folder.write("config.json", config.to_string().as_bytes());
        load(&folder.0)
    };
    for (key, value) in [
        ("model_type", "roberta".into()),
        ("hidden_act", "relu".into()),
        ("hidden_size", (-8).into()),
        ("hidden_size", 0.into()),
        ("num_attention_heads", 0.into()),
        ("num_attention_heads", 3.into()),
        ("num_hidden_layers", 0.into()),
        ("max_position_embeddings", 2.into()),
        ("type_vocab_size", 0.into()),
        ("layer_norm_eps", 0.into()),
        ("layer_norm_eps", "small".into()),
    ] {
        let error = with(key, value);
        assert!(matches!(error, RankingError::Config { .. }), "{key}: {error}");
    }
    let vocabulary = with("vocab_size", 10.into());
    assert!(matches!(&vocabulary, RankingError::Vocabulary { reason } if reason.contains("11 pieces")), "{vocabulary}");
    for (key, value) in [("hidden_size", 16u64), ("intermediate_size", 1 << 62), ("num_hidden_layers", u64::MAX)] {
        let error = with(key, value.into());
        assert!(matches!(error, RankingError::Tensor { .. }), "{key}: {error}");
    }
    folder.write("config.json", b"{");
    assert!(matches!(load(&folder.0), RankingError::Config { .. }));

    folder.write("config.json", config().to_string().as_bytes());
    for bad in ["[CLS]\n[UNK]\nthe", "[CLS]\n[SEP]\nthe", ""] {
        folder.write("vocab.txt", bad.as_bytes());
        assert!(matches!(load(&folder.0), RankingError::Vocabulary { .. }), "{bad}");
    }
    folder.write("vocab.txt", b"\xff\xfe");
    assert!(matches!(load(&folder.0), RankingError::Vocabulary { .. }));

    folder.write("vocab.txt", PIECES.join("\n").as_bytes());
    let whole = std::fs::read(folder.path("model.safetensors")).unwrap();
    for bytes in [&whole[..whole.len() - 4], &whole[..100], b""] {
        folder.write("model.safetensors", bytes);
        assert!(matches!(load(&folder.0), RankingError::NotSafetensors { .. }), "{} bytes", bytes.len());
    }
    let mut tensors = weights();
    tensors[0].1 = tensors[0].1.to_dtype(candle_core::DType::F16).unwrap();
    folder.write_tensors("model.safetensors", &tensors);
    let halves = load(&folder.0);
    assert!(matches!(&halves, RankingError::Tensor { reason, .. } if reason.contains("F16")), "{halves}");
    tensors.remove(0);
    folder.write_tensors("model.safetensors", &tensors);
    assert!(matches!(load(&folder.0), RankingError::Tensor { .. }));
    assert!(Ranking::open(&RankBy::File(folder.path("vocab.txt"))).is_err());
}
