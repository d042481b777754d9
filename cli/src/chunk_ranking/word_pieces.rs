//! The tokenizer of BERT: words cut into pieces of a vocabulary.

use anyhow::{Result, anyhow};
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::bert::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;

use super::RankingError;

/// What stands for a word that no pieces make up.
const UNKNOWN: &str = "[UNK]";

/// Text to word pieces.
pub struct WordPieces {
    inner: tokenizers::Tokenizer,
    /// What a text begins and ends with.
    first: u32,
    last: u32,
}

impl WordPieces {
    /// Reads a vocabulary, a piece to a line, of which an encoder embeds `embedded`.
    ///
    /// # Errors
    /// [`RankingError::Vocabulary`].
    pub fn read(bytes: Vec<u8>, embedded: usize) -> Result<Self, RankingError> {
        let wrong = |reason: String| RankingError::Vocabulary { reason };
        let text = String::from_utf8(bytes).map_err(|error| wrong(error.to_string()))?;
        let vocabulary: Vocab = text.lines().map(str::to_owned).zip(0u32..).collect();
        let lines = text.lines().count();
        if lines > embedded {
            return Err(wrong(format!("it has {lines} pieces, of which the encoder embeds {embedded}")));
        }
        let special = |piece: &str| {
            vocabulary.get(piece).copied().ok_or_else(|| wrong(format!("it has no piece {piece}, which is needed")))
        };
        let (first, last) = (special("[CLS]")?, special("[SEP]")?);
        special(UNKNOWN)?;
        let model = WordPiece::builder().vocab(vocabulary);
        let model = model.unk_token(UNKNOWN.into()).build().map_err(|error| wrong(error.to_string()))?;
        let mut inner = tokenizers::Tokenizer::new(model);
        // Control characters out, Chinese characters apart, accents off, all in lower case.
        inner
            .with_normalizer(Some(BertNormalizer::new(true, true, None, true)))
            .map_err(|error| wrong(error.to_string()))?;
        inner.with_pre_tokenizer(Some(BertPreTokenizer));
        Ok(Self { inner, first, last })
    }

    /// The pieces of a text between the marks of its beginning and end, at most `most` with these.
    ///
    /// # Errors
    /// When the text cannot be tokenized.
    pub fn encode(&self, text: &str, most: usize) -> Result<Vec<u32>> {
        let encoding = self.inner.encode(text, false).map_err(|error| anyhow!("cannot tokenize the text: {error}"))?;
        let pieces = encoding.get_ids().iter().take(most.saturating_sub(2));
        Ok([self.first].iter().chain(pieces).chain(&[self.last]).copied().collect())
    }
}
