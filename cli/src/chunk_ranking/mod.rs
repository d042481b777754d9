//! How much the chunks of a context resemble a query, for recipes that store chunks by that (Cocktail).
//!
//! | file | holds |
//! | --- | --- |
//! | `bm25` | by the words that they share |
//! | `encoder` | by embeddings of MiniLM: the forward pass of a BERT encoder |
//! | `encoder_files` | what a folder with such an encoder holds |
//! | `word_pieces` | its tokenizer |
//! | `embeddings` | by embeddings that others computed, in a file |
//!
//! The library takes similarities or embeddings; which text they are of is the command's affair.

mod bm25;
mod embeddings;
mod encoder;
mod encoder_files;
mod error;
#[cfg(test)]
mod tiny;
mod word_pieces;

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result};
use kvpack::cpu::chunk_similarity;
use rayon::prelude::*;

pub use error::RankingError;

use embeddings::Embeddings;
use encoder::Encoder;

/// Where scripts/fetch-encoder.sh puts MiniLM.
const MINILM: &str = "models/all-MiniLM-L6-v2";

/// What chunks are ranked by, as it is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankBy {
    /// The words that they share with the query.
    Bm25,
    /// Embeddings by the encoder in a folder.
    Encoder(PathBuf),
    /// Embeddings in a file.
    File(PathBuf),
}

impl FromStr for RankBy {
    type Err = RankingError;

    fn from_str(text: &str) -> Result<Self, RankingError> {
        match text.split_once(':') {
            None if text == "bm25" => Ok(Self::Bm25),
            None if text == "minilm" => Ok(Self::Encoder(MINILM.into())),
            Some(("minilm", folder)) => Ok(Self::Encoder(folder.into())),
            _ if text.ends_with(".safetensors") => Ok(Self::File(text.into())),
            _ => Err(RankingError::Unknown { given: text.into() }),
        }
    }
}

impl Display for RankBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bm25 => "bm25",
            Self::Encoder(_) => "minilm",
            Self::File(_) => "embeddings",
        })
    }
}

/// What chunks are ranked by, loaded.
pub enum Ranking {
    /// The words that they share with the query.
    Bm25,
    /// Embeddings by an encoder.
    Encoder(Box<Encoder>),
    /// Embeddings of a file.
    File(Embeddings),
}

/// The chunks of a context, ready to be compared with queries.
pub enum RankedChunks<'a> {
    /// Their texts.
    Bm25(Vec<String>),
    /// Their embeddings, `[chunks, width]`, and what embeds the query.
    Embedded(&'a Encoder, Vec<f32>),
    /// The file that holds the embeddings, and what the names of its tensors begin with.
    File(&'a Embeddings, String),
}

/// A query.
#[derive(Clone, Copy)]
pub struct Query<'a> {
    /// The tensor of its embedding in a file.
    pub name: &'a str,
    /// Its text.
    pub text: &'a str,
}

impl Ranking {
    /// Loads what is needed.
    ///
    /// # Errors
    /// [`RankingError`] where a file is not as it should be.
    pub fn open(by: &RankBy) -> Result<Self> {
        let of = |path: &Path| path.display().to_string();
        Ok(match by {
            RankBy::Bm25 => Self::Bm25,
            RankBy::Encoder(folder) => {
                Self::Encoder(Box::new(Encoder::load(folder).with_context(|| format!("encoder {}", of(folder)))?))
            }
            RankBy::File(path) => {
                Self::File(Embeddings::read(path).with_context(|| format!("embeddings {}", of(path)))?)
            }
        })
    }

    /// Takes the texts of the chunks of a context; those of a file have their embeddings in the tensor
    /// `{prefix}chunks`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn chunks(&self, prefix: &str, texts: Vec<String>) -> Result<RankedChunks<'_>> {
        Ok(match self {
            Self::Bm25 => RankedChunks::Bm25(texts),
            Self::Encoder(encoder) => {
                let embedded: Result<Vec<_>> = texts.par_iter().map(|text| encoder.embed(text)).collect();
                RankedChunks::Embedded(encoder, embedded?.concat())
            }
            Self::File(embeddings) => RankedChunks::File(embeddings, prefix.into()),
        })
    }
}

impl RankedChunks<'_> {
    /// How much every chunk resembles a query: its BM25 score, or the cosine similarity of the embeddings.
    ///
    /// # Errors
    /// [`RankingError::Tensor`] where a file has no such embeddings; [`kvpack::Error`] where they are of another width
    /// or not numbers.
    pub fn similarities(&self, query: Query<'_>) -> Result<Vec<f32>> {
        Ok(match self {
            Self::Bm25(texts) => bm25::bm25(query.text, texts),
            Self::Embedded(encoder, chunks) => chunk_similarity(&encoder.embed(query.text)?, chunks)?,
            Self::File(embeddings, prefix) => {
                let query = embeddings.rows(&format!("{prefix}{}", query.name), 1)?;
                chunk_similarity(query, embeddings.rows(&format!("{prefix}chunks"), 2)?)?
            }
        })
    }
}
