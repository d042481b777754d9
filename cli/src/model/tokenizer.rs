//! The tokenizer of a GGUF file.

use anyhow::{Result, anyhow};
use candle_core::quantized::gguf_file::Value;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior};

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

/// Text to tokens and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocabulary: usize,
    end: Option<u32>,
}

impl Tokenizer {
    /// Reads the tokenizer of a file's metadata.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] for one that is not implemented.
    pub fn read(metadata: &Metadata) -> Result<Self, ModelError> {
        let wrong = |reason: String| ModelError::Tokenizer { reason };
        let kind = string(metadata, "tokenizer.ggml.model")?;
        if kind != "gpt2" {
            return Err(wrong(format!("its kind is '{kind}'; byte-level BPE ('gpt2') is implemented")));
        }
        let tokens = strings(metadata, "tokenizer.ggml.tokens")?;
        let merges = strings(metadata, "tokenizer.ggml.merges")?;
        let pair = |merge: &String| {
            let (left, right) = merge.split_once(' ')?;
            Some((left.to_owned(), right.to_owned()))
        };
        let merges =
            merges.iter().map(pair).collect::<Option<Vec<_>>>().ok_or_else(|| wrong("a merge is no pair".into()))?;
        let vocabulary = tokens.iter().cloned().zip(0u32..);
        let model = BPE::builder()
            .vocab_and_merges(vocabulary.collect::<Vocab>(), merges)
            .build()
            .map_err(|e| wrong(e.to_string()))?;

        let mut inner = tokenizers::Tokenizer::new(model);
        let name = string(metadata, "tokenizer.ggml.pre").unwrap_or("gpt-2");
        inner.with_pre_tokenizer(Some(pre_tokenizer(name)?));
        inner.with_decoder(Some(ByteLevel::default()));
        let types = array(metadata, "tokenizer.ggml.token_type").unwrap_or_default();
        let is_control = |kind: &Value| kind.to_i32().is_ok_and(|kind| i64::from(kind) == CONTROL);
        let control = tokens.iter().zip(types).filter(|(_, kind)| is_control(kind));
        let control: Vec<AddedToken> = control.map(|(token, _)| AddedToken::from(token.clone(), true)).collect();
        inner.add_special_tokens(control).map_err(|e| wrong(e.to_string()))?;
        let end = number(metadata, "tokenizer.ggml.eos_token_id").ok().and_then(|end| u32::try_from(end).ok());
        Ok(Self { inner, vocabulary: tokens.len(), end })
    }

    /// Number of tokens.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The token that ends an answer.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The tokens of a text. Names of control tokens in it become control tokens.
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
