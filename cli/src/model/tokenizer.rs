//! The tokenizer of a GGUF file: byte-level BPE, or pieces with scores as SentencePiece makes them.

use anyhow::{Result, anyhow};
use candle_core::quantized::gguf_file::Value;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::{self, NormalizerWrapper, Prepend};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, DecoderWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, decoders};

use super::ModelError;
use super::config::{Metadata, array, number, string};

/// Words, numbers of up to `digits` digits, punctuation and white space (the pattern of Llama 3 and Qwen 2).
fn word_pattern(digits: usize) -> String {
    format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,{digits}}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
}

/// GGUF's mark of a control token.
const CONTROL: i64 = 3;

/// GGUF's mark of a token that text is cut at before pieces are merged.
const WHOLE: i64 = 4;

/// What stands for a space in pieces.
const SPACE: &str = "▁";

/// Text to tokens and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocabulary: usize,
    begin: Option<u32>,
    end: Option<u32>,
}

impl Tokenizer {
    /// Reads the tokenizer of a file's metadata.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] for one that is not implemented.
    pub fn read(metadata: &Metadata) -> Result<Self, ModelError> {
        let wrong = |reason: String| ModelError::Tokenizer { reason };
        let tokens = strings(metadata, "tokenizer.ggml.tokens")?;
        let (kind, byte_level) = (string(metadata, "tokenizer.ggml.model")?, "gpt2");
        let mut inner = match kind {
            "llama" => of_scored_pieces(metadata, &tokens)?,
            kind if kind == byte_level => of_bytes(metadata, &tokens)?,
            other => {
                let known = "byte-level BPE ('gpt2') and pieces with scores ('llama') are implemented";
                return Err(wrong(format!("its kind is '{other}'; {known}")));
            }
        };
        let types = array(metadata, "tokenizer.ggml.token_type").unwrap_or_default();
        let of_kind = |wanted: i64| {
            let is_kind = move |kind: &Value| kind.to_i32().is_ok_and(|kind| i64::from(kind) == wanted);
            tokens.iter().zip(types).filter(move |(_, kind)| is_kind(kind)).map(|(token, _)| token.clone())
        };
        let control: Vec<AddedToken> = of_kind(CONTROL).map(|token| AddedToken::from(token, true)).collect();
        inner.add_special_tokens(control).map_err(|e| wrong(e.to_string()))?;
        if kind != byte_level {
            // Runs of spaces are such tokens, and are found once spaces are replaced.
            let whole = of_kind(WHOLE).map(|token| AddedToken::from(token, false).normalized(true));
            inner.add_tokens(whole.collect::<Vec<_>>()).map_err(|e| wrong(e.to_string()))?;
        }
        let token = |key: &str| number(metadata, key).ok().and_then(|token| u32::try_from(token).ok());
        let begins = matches!(metadata.get("tokenizer.ggml.add_bos_token"), Some(Value::Bool(true)));
        let begin = token("tokenizer.ggml.bos_token_id").filter(|_| begins);
        Ok(Self { inner, vocabulary: tokens.len(), begin, end: token("tokenizer.ggml.eos_token_id") })
    }

    /// One that knows this many tokens and no text.
    pub fn without_text(vocabulary: usize) -> Self {
        Self { inner: tokenizers::Tokenizer::new(BPE::default()), vocabulary, begin: None, end: None }
    }

    /// Number of tokens.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The token that ends an answer.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The tokens of a whole text, which some models have begin with a token of its own.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.begin.into_iter().chain(self.encode(text)?).collect())
    }

    /// The tokens of a part of a text. Names of control tokens in it become control tokens.
    ///
    /// # Errors
    /// When the text cannot be tokenized.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode(text, false).map_err(|error| anyhow!("cannot tokenize the text: {error}"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens.
    ///
    /// # Errors
    /// When a token does not exist.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, true).map_err(|error| anyhow!("cannot decode tokens: {error}"))
    }

    /// A question in the form that instructed models are trained on (ChatML), if the model knows it.
    ///
    /// # Errors
    /// When the model has no such control tokens.
    pub fn chat(&self, question: &str) -> Result<String> {
        let known = |token| self.inner.token_to_id(token).is_some();
        if !known("<|im_start|>") || !known("<|im_end|>") {
            return Err(anyhow!(
                "the model does not know ChatML; leave --chat out and write its own form into the prompt"
            ));
        }
        Ok(format!("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"))
    }
}

/// Bytes whose pairs are merged in the order of the file.
fn of_bytes(metadata: &Metadata, tokens: &[String]) -> Result<tokenizers::Tokenizer, ModelError> {
    let wrong = |reason: String| ModelError::Tokenizer { reason };
    let merges = strings(metadata, "tokenizer.ggml.merges")?;
    let pair = |merge: &String| {
        let (left, right) = merge.split_once(' ')?;
        Some((left.to_owned(), right.to_owned()))
    };
    let merges =
        merges.iter().map(pair).collect::<Option<Vec<_>>>().ok_or_else(|| wrong("a merge is no pair".into()))?;
    let model =
        BPE::builder().vocab_and_merges(vocabulary(tokens), merges).build().map_err(|e| wrong(e.to_string()))?;
    let mut inner = tokenizers::Tokenizer::new(model);
    let name = string(metadata, "tokenizer.ggml.pre").unwrap_or("gpt-2");
    inner.with_pre_tokenizer(Some(pre_tokenizer(name)?));
    inner.with_decoder(Some(ByteLevel::default()));
    Ok(inner)
}

/// Characters whose neighbours are merged where the piece that they form has the highest score; characters that are no
/// piece are pieces of bytes.
fn of_scored_pieces(metadata: &Metadata, tokens: &[String]) -> Result<tokenizers::Tokenizer, ModelError> {
    let wrong = |reason: String| ModelError::Tokenizer { reason };
    let scores = array(metadata, "tokenizer.ggml.scores")?.iter().map(Value::to_f32);
    let scores = scores.collect::<Result<Vec<_>, _>>().map_err(|e| wrong(e.to_string()))?;
    if scores.len() != tokens.len() {
        return Err(wrong(format!("{} scores of {} pieces", scores.len(), tokens.len())));
    }
    let known = vocabulary(tokens);
    // The pairs that form a piece, the best piece first; of one piece the pair whose parts come first in the file.
    let mut pairs = Vec::new();
    for (piece, &score) in tokens.iter().zip(&scores) {
        for (cut, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(cut);
            if let (Some(&a), Some(&b)) = (known.get(left), known.get(right)) {
                pairs.push((score, a, b));
            }
        }
    }
    pairs.sort_by(|(x, a, b), (y, c, d)| y.total_cmp(x).then((a, b).cmp(&(c, d))));
    let text = |token: u32| tokens[token as usize].clone();
    let merges = pairs.into_iter().map(|(_, a, b)| (text(a), text(b))).collect();
    let model = BPE::builder().vocab_and_merges(known, merges).byte_fallback(true).fuse_unk(true);
    let unknown = number(metadata, "tokenizer.ggml.unknown_token_id").ok().and_then(|at| tokens.get(at));
    let model = unknown.into_iter().fold(model, |model, unknown| model.unk_token(unknown.clone()));
    let mut inner = tokenizers::Tokenizer::new(model.build().map_err(|e| wrong(e.to_string()))?);
    let replace = |pattern: &str, content: &str| Replace::new(pattern, content).map_err(|e| wrong(e.to_string()));
    let prefix = matches!(metadata.get("tokenizer.ggml.add_space_prefix"), None | Some(Value::Bool(true)));
    let spaces = NormalizerWrapper::from(replace(" ", SPACE)?);
    let normalizer = match prefix {
        true => normalizers::Sequence::new(vec![Prepend::new(SPACE.into()).into(), spaces]).into(),
        false => spaces,
    };
    inner.with_normalizer(Some(normalizer)).map_err(|e| wrong(e.to_string()))?;
    let decoders: Vec<DecoderWrapper> =
        vec![replace(SPACE, " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
    inner.with_decoder(Some(decoders::sequence::Sequence::new(decoders)));
    Ok(inner)
}

fn vocabulary(tokens: &[String]) -> Vocab {
    tokens.iter().cloned().zip(0u32..).collect()
}

/// How text is cut before the byte pairs are merged.
fn pre_tokenizer(name: &str) -> Result<PreTokenizerWrapper, ModelError> {
    let bytes = |use_regex| PreTokenizerWrapper::from(ByteLevel::new(false, true, use_regex));
    let words = |digits| {
        let pattern = SplitPattern::Regex(word_pattern(digits));
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
            .map_err(|error| ModelError::Tokenizer { reason: error.to_string() })?;
        Ok(Sequence::new(vec![split.into(), bytes(false)]).into())
    };
    match name {
        "gpt-2" => Ok(bytes(true)),
        "smollm" => Ok(Sequence::new(vec![Digits::new(true).into(), bytes(true)]).into()),
        "llama-bpe" => words(3),
        "qwen2" => words(1),
        other => Err(ModelError::Tokenizer {
            reason: format!("its pre-tokenizer is '{other}'; gpt-2, smollm, llama-bpe and qwen2 are implemented"),
        }),
    }
}

fn strings(metadata: &Metadata, key: &str) -> Result<Vec<String>, ModelError> {
    let values = array(metadata, key)?.iter().map(|value| value.to_string().cloned());
    values
        .collect::<Result<_, _>>()
        .map_err(|reason| ModelError::Metadata { key: key.into(), reason: reason.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces with scores, of which the best pair of neighbours is merged first; bytes for what is no piece.
    fn scored(prefix: bool) -> Tokenizer {
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
        ];
        let of = |value: &dyn Fn(&(&str, f32, i32)) -> Value| Value::Array(pieces.iter().map(value).collect());
        let metadata = [
            ("tokenizer.ggml.model", Value::String("llama".into())),
            ("tokenizer.ggml.tokens", of(&|piece| Value::String(piece.0.into()))),
            ("tokenizer.ggml.scores", of(&|piece| Value::F32(piece.1))),
            ("tokenizer.ggml.token_type", of(&|piece| Value::I32(piece.2))),
            ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
            ("tokenizer.ggml.bos_token_id", Value::U32(1)),
            ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
            ("tokenizer.ggml.add_space_prefix", Value::Bool(prefix)),
        ];
        Tokenizer::read(&metadata.map(|(key, value)| (key.to_owned(), value)).into()).unwrap()
    }

    #[test]
    fn the_best_pieces_are_merged_first() {
        let tokenizer = scored(false);
        // "bc" is better than "ab".
        assert_eq!(tokenizer.encode("abc").unwrap(), [3, 7]);
        assert_eq!(tokenizer.encode("ab ab").unwrap(), [6, 8, 4]);
        assert_eq!(tokenizer.encode("a   b").unwrap(), [3, 9, 4], "runs of spaces are found first");
        assert_eq!(tokenizer.encode("é").unwrap(), [10, 11], "bytes");
        assert_eq!(tokenizer.encode_text("a").unwrap(), [1, 3]);
        for text in ["abc", "ab ab", "a   b", "é a"] {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
        }
        assert_eq!(scored(true).encode("abc").unwrap(), [8, 7], "a space before the text");
    }
}
