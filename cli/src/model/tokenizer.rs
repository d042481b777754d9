//! The tokenizer of a GGUF file: byte-level BPE, or pieces with scores as SentencePiece makes them.

use anyhow::{Result, anyhow};
use candle_core::quantized::gguf_file::Value;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::replace::Replace;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, DecoderWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, decoders};

use super::ModelError;
use super::config::{Metadata, array, flag, number, string};

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
    turn_end: Option<u32>,
    /// Whether whole texts get a space before them.
    spaced: bool,
    assumption: Option<&'static str>,
}

/// What surrounds a question to an instructed model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatForm {
    /// Before the question.
    pub before: &'static str,
    /// After it, up to where the answer begins.
    pub after: &'static str,
    /// The token that ends the answer.
    pub end: u32,
}

/// What llama.cpp assumes of a kind of tokenizer where the file is silent.
#[derive(Default)]
struct Defaults {
    begins: bool,
    begin: Option<u32>,
    end: Option<u32>,
    spaced: bool,
}

impl Tokenizer {
    /// Reads the tokenizer of a file's metadata. What the metadata do not say is as llama.cpp assumes it.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] for one that is not implemented or inconsistent, [`ModelError::Metadata`] for an entry
    /// of the wrong type.
    pub fn read(metadata: &Metadata) -> Result<Self, ModelError> {
        let tokens = strings(metadata, "tokenizer.ggml.tokens")?;
        let mut assumption = None;
        let (mut inner, defaults) = match string(metadata, "tokenizer.ggml.model")? {
            "llama" => {
                let defaults = Defaults { begins: true, begin: Some(1), end: Some(2), spaced: true };
                (of_scored_pieces(metadata, &tokens)?, defaults)
            }
            "gpt2" => {
                let words = Words::read(metadata)?;
                assumption = words.assumption;
                let defaults = Defaults { begins: words.name == LLAMA_BPE, ..Defaults::default() };
                (of_bytes(metadata, &tokens, &words)?, defaults)
            }
            other => {
                let known = "byte-level BPE ('gpt2') and pieces with scores ('llama') are implemented";
                return Err(ModelError::Tokenizer { reason: format!("its kind is '{other}'; {known}") });
            }
        };
        add_tokens(&mut inner, &tokens, array(metadata, "tokenizer.ggml.token_type").unwrap_or_default())?;
        let token = |name: &str, default: Option<u32>| {
            let given = number(metadata, &format!("tokenizer.ggml.{name}_token_id")).ok();
            given
                .and_then(|token| u32::try_from(token).ok())
                .or(default)
                .filter(|&token| (token as usize) < tokens.len())
        };
        let is_set = |name: &str, default| Ok(flag(metadata, &format!("tokenizer.ggml.{name}"))?.unwrap_or(default));
        let begins = is_set("add_bos_token", defaults.begins)?;
        Ok(Self {
            begin: token("bos", defaults.begin).filter(|_| begins),
            end: token("eos", defaults.end),
            turn_end: token("eot", None),
            spaced: is_set("add_space_prefix", defaults.spaced)? && defaults.spaced,
            inner,
            vocabulary: tokens.len(),
            assumption,
        })
    }

    /// One that knows this many tokens and no text.
    pub fn without_text(vocabulary: usize) -> Self {
        Self {
            inner: tokenizers::Tokenizer::new(BPE::default()),
            vocabulary,
            begin: None,
            end: None,
            turn_end: None,
            spaced: false,
            assumption: None,
        }
    }

    /// Number of tokens.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The token that ends a text.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// All tokens after which a model has nothing more to say: that of [`Tokenizer::end`], and the end of a turn.
    pub fn ends(&self) -> impl Iterator<Item = u32> {
        self.end.into_iter().chain(self.turn_end)
    }

    /// What had to be assumed because the file does not say it, in a sentence for the user.
    pub fn assumption(&self) -> Option<&'static str> {
        self.assumption
    }

    /// The tokens of a whole text. Some models have it begin with a token of its own, and some with a space.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        let tokens = match self.spaced && !text.is_empty() && !self.begins_with_token(text) {
            true => self.encode(&format!(" {text}"))?,
            false => self.encode(text)?,
        };
        Ok(self.begin.into_iter().chain(tokens).collect())
    }

    /// The tokens of a part of a text. Names of control tokens in it become control tokens.
    ///
    /// # Errors
    /// When the text cannot be tokenized.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode(text, false).map_err(|error| anyhow!("cannot tokenize the text: {error}"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether the text begins with the name of a control token or of another that is never cut.
    fn begins_with_token(&self, text: &str) -> bool {
        self.inner.get_added_vocabulary().get_vocab().keys().any(|token| text.starts_with(token.as_str()))
    }

    /// The text of tokens.
    ///
    /// # Errors
    /// When a token does not exist.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, true).map_err(|error| anyhow!("cannot decode tokens: {error}"))
    }

    /// The form in which instructed models get a question (ChatML without a system turn), if the model knows it.
    ///
    /// # Errors
    /// When the model has no such control tokens.
    pub fn chat(&self) -> Result<ChatForm> {
        let [start, end] = ["<|im_start|>", "<|im_end|>"].map(|token| self.inner.token_to_id(token));
        let (Some(_), Some(end)) = (start, end) else {
            return Err(anyhow!(
                "the model does not know ChatML; leave --chat out and write its own form into the prompt"
            ));
        };
        Ok(ChatForm { before: "<|im_start|>user\n", after: "<|im_end|>\n<|im_start|>assistant\n", end })
    }
}

/// Adds the tokens that text is cut at: control tokens, and those that the file defines as whole.
fn add_tokens(inner: &mut tokenizers::Tokenizer, tokens: &[String], types: &[Value]) -> Result<(), ModelError> {
    let of_kind = |wanted: i64| {
        let is_kind = move |kind: &Value| kind.to_i32().is_ok_and(|kind| i64::from(kind) == wanted);
        tokens.iter().zip(types).filter(move |(_, kind)| is_kind(kind)).map(|(token, _)| token.clone())
    };
    // Runs of spaces are such tokens. Where pieces have another sign for spaces, they are found once it is set.
    let is_normalized = inner.get_normalizer().is_some();
    let control: Vec<AddedToken> = of_kind(CONTROL).map(|token| AddedToken::from(token, true)).collect();
    let whole = of_kind(WHOLE).map(|token| AddedToken::from(token, false).normalized(is_normalized));
    let added = inner.add_special_tokens(control).and_then(|_| inner.add_tokens(whole.collect::<Vec<_>>()));
    added.map(drop).map_err(|error| ModelError::Tokenizer { reason: error.to_string() })
}

/// Bytes whose pairs are merged in the order of the file.
fn of_bytes(metadata: &Metadata, tokens: &[String], words: &Words<'_>) -> Result<tokenizers::Tokenizer, ModelError> {
    let wrong = |reason: String| ModelError::Tokenizer { reason };
    let known = vocabulary(tokens);
    let mut merges = Vec::new();
    for merge in strings(metadata, "tokenizer.ggml.merges")? {
        let (left, right) =
            merge.split_once(' ').ok_or_else(|| wrong(format!("the merge '{merge}' is no pair of pieces")))?;
        // The crate panics where a merge is longer than every token.
        if let Some(piece) =
            [left, right, &[left, right].concat()].into_iter().find(|piece| !known.contains_key(*piece))
        {
            return Err(wrong(format!("its merge '{merge}' needs the piece '{piece}', which is none of its tokens")));
        }
        merges.push((left.to_owned(), right.to_owned()));
    }
    let model = BPE::builder().vocab_and_merges(known, merges).ignore_merges(words.name == LLAMA_BPE);
    let mut inner = tokenizers::Tokenizer::new(model.build().map_err(|e| wrong(e.to_string()))?);
    inner.with_pre_tokenizer(Some(words.pre_tokenizer()?));
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
    let unknown = tokens.get(number(metadata, "tokenizer.ggml.unknown_token_id").unwrap_or(0));
    let model = unknown.into_iter().fold(model, |model, unknown| model.unk_token(unknown.clone()));
    let mut inner = tokenizers::Tokenizer::new(model.build().map_err(|e| wrong(e.to_string()))?);
    let replace = |pattern: &str, content: &str| Replace::new(pattern, content).map_err(|e| wrong(e.to_string()));
    inner.with_normalizer(Some(replace(" ", SPACE)?)).map_err(|e| wrong(e.to_string()))?;
    let decoders: Vec<DecoderWrapper> =
        vec![replace(SPACE, " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
    inner.with_decoder(Some(decoders::sequence::Sequence::new(decoders)));
    Ok(inner)
}

fn vocabulary(tokens: &[String]) -> Vocab {
    tokens.iter().cloned().zip(0u32..).collect()
}

/// The rule of Llama 3. Words that are tokens are not merged from pieces.
const LLAMA_BPE: &str = "llama-bpe";

/// How text is cut before the byte pairs are merged.
struct Words<'a> {
    name: &'a str,
    /// A sentence for the user, where the file does not name the rule.
    assumption: Option<&'static str>,
}

impl<'a> Words<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self, ModelError> {
        const KEY: &str = "tokenizer.ggml.pre";
        if metadata.contains_key(KEY) {
            return Ok(Self { name: string(metadata, KEY)?, assumption: None });
        }
        match string(metadata, "general.architecture") {
            Ok("qwen2") => Ok(Self { name: "qwen2", assumption: None }),
            _ => Ok(Self {
                name: "gpt-2",
                assumption: Some(
                    "The model's file does not name its pre-tokenizer (tokenizer.ggml.pre). Text is cut as GPT-2 cuts \
                     it; a model that was trained on other tokens writes worse. Files of current converters name it.",
                ),
            }),
        }
    }

    fn pre_tokenizer(&self) -> Result<PreTokenizerWrapper, ModelError> {
        let bytes = |use_regex| PreTokenizerWrapper::from(ByteLevel::new(false, true, use_regex));
        let words = |digits| {
            let pattern = SplitPattern::Regex(word_pattern(digits));
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map_err(|error| ModelError::Tokenizer { reason: error.to_string() })?;
            Ok(Sequence::new(vec![split.into(), bytes(false)]).into())
        };
        match self.name {
            "gpt-2" => Ok(bytes(true)),
            "smollm" => Ok(Sequence::new(vec![Digits::new(true).into(), bytes(true)]).into()),
            LLAMA_BPE => words(3),
            "qwen2" => words(1),
            other => Err(ModelError::Tokenizer {
                reason: format!("its pre-tokenizer is '{other}'; gpt-2, smollm, llama-bpe and qwen2 are implemented"),
            }),
        }
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
    use crate::model::tiny::{bytes, scored};

    const NO_PREFIX: (&str, Value) = ("tokenizer.ggml.add_space_prefix", Value::Bool(false));

    #[test]
    fn the_best_pieces_are_merged_first() {
        let tokenizer = scored(&[NO_PREFIX]).unwrap();
        // "bc" is better than "ab".
        assert_eq!(tokenizer.encode("abc").unwrap(), [3, 7]);
        assert_eq!(tokenizer.encode("ab ab").unwrap(), [6, 8, 4]);
        assert_eq!(tokenizer.encode("a   b").unwrap(), [3, 9, 4], "runs of spaces are found first");
        assert_eq!(tokenizer.encode("é").unwrap(), [10, 11], "bytes");
        assert_eq!(tokenizer.encode_text("a").unwrap(), [1, 3]);
        for text in ["abc", "ab ab", "a   b", "é a"] {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
        }
    }

    /// The space that SentencePiece puts before a text belongs to no part of it, and to no token that is never cut.
    #[test]
    fn only_whole_texts_get_a_space() {
        let tokenizer = scored(&[]).unwrap();
        assert_eq!(tokenizer.encode("abc").unwrap(), [3, 7]);
        assert_eq!(tokenizer.encode_text("abc").unwrap(), [1, 8, 7]);
        assert_eq!(tokenizer.encode_text("").unwrap(), [1]);
        for (text, tokens) in [("a<t>b", [3, 12, 4]), ("a   b", [3, 9, 4])] {
            assert_eq!(tokenizer.encode(text).unwrap(), tokens, "{text}");
        }
        assert_eq!(tokenizer.encode_text("<t>ab").unwrap(), [1, 12, 6]);
        assert_eq!(scored(&[NO_PREFIX]).unwrap().encode_text("abc").unwrap(), [1, 3, 7]);
    }

    /// What a file does not say is as llama.cpp assumes it.
    #[test]
    fn texts_begin_and_end_as_files_say() {
        let of = |value| ("tokenizer.ggml.add_bos_token", Value::Bool(value));
        let pre = |name: &str| ("tokenizer.ggml.pre", Value::String(name.into()));
        let first = |tokenizer: Tokenizer| tokenizer.encode_text("a").unwrap().len() - 1;
        assert_eq!(first(scored(&[]).unwrap()), 1);
        assert_eq!(first(scored(&[of(false)]).unwrap()), 0);
        for (name, begins) in [("llama-bpe", 1), ("smollm", 0), ("qwen2", 0)] {
            assert_eq!(first(bytes(&[pre(name)]).unwrap()), begins, "{name}");
            assert_eq!(first(bytes(&[pre(name), of(true)]).unwrap()), 1, "{name}");
            assert_eq!(first(bytes(&[pre(name), of(false)]).unwrap()), 0, "{name}");
        }
        let wrong = scored(&[("tokenizer.ggml.add_bos_token", Value::U32(1))]).err().unwrap();
        assert!(matches!(&wrong, ModelError::Metadata { key, .. } if key.ends_with("add_bos_token")), "{wrong}");
        let turn = scored(&[("tokenizer.ggml.eot_token_id", Value::U32(5))]).unwrap();
        assert_eq!((turn.end(), turn.ends().collect()), (Some(2), vec![2, 5]));
        // An id beyond the vocabulary is none.
        let none = scored(&[("tokenizer.ggml.eos_token_id", Value::U32(u32::MAX))]).unwrap();
        assert_eq!(none.ends().count(), 0);
    }

    #[test]
    fn bytes_are_merged_as_the_pre_tokenizer_wants() {
        let pre = |name: &str| bytes(&[("tokenizer.ggml.pre", Value::String(name.into()))]).unwrap();
        // "the" is a token that no merge makes.
        assert_eq!(pre("llama-bpe").encode("the").unwrap(), [257]);
        assert_eq!(pre("smollm").encode("the").unwrap()[0], 256);
        let called = pre("qwen2").encode("a<tool_call>").unwrap();
        assert_eq!(called[1..], [259], "tokens that are never cut");
        assert_eq!(pre("qwen2").decode(&called).unwrap(), "a<tool_call>");
        let architecture = |name: &str| bytes(&[("general.architecture", Value::String(name.into()))]).unwrap();
        assert!(pre("gpt-2").assumption().is_none() && architecture("qwen2").assumption().is_none());
        assert!(architecture("llama").assumption().is_some_and(|said| said.contains("tokenizer.ggml.pre")));
        assert_eq!(architecture("qwen2").encode("12").unwrap(), pre("qwen2").encode("12").unwrap());
        assert!(matches!(bytes(&[("tokenizer.ggml.pre", Value::U32(1))]), Err(ModelError::Metadata { .. })));
    }

    #[test]
    fn merges_of_what_is_no_piece_are_refused() {
        let long = "x".repeat(40);
        for merge in ["th e", &format!("{long} {long}"), &format!("t {long}"), "t o", "the"] {
            let merges = Value::Array(vec![Value::String("t h".into()), Value::String(merge.into())]);
            let error = bytes(&[("tokenizer.ggml.merges", merges)]).err();
            match merge {
                "th e" => assert!(error.is_none()),
                _ => assert!(
                    matches!(error, Some(ModelError::Tokenizer { reason }) if reason.contains(merge)),
                    "{merge}"
                ),
            }
        }
    }
}
