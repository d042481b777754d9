//! The readers of files as functions of bytes, which fuzz targets hand anything to: they may refuse it, but not panic,
//! not run for long, and not take more memory than the bytes account for.

use std::io::Cursor;

use anyhow::{Result, ensure};

use crate::golden::{self, GoldenFile};
use crate::model::{ExactAttention, Model};

/// Reads a dump of keys, values and queries.
///
/// # Errors
/// What is wrong with it.
pub fn dump(bytes: &[u8]) -> Result<()> {
    for layer in crate::dump::parse(bytes)?.layers {
        let elements = layer.shape.kv_heads() * layer.tokens * layer.shape.head_dim();
        ensure!(layer.keys.len() == elements && layer.values.len() == elements, "keys or values of another shape");
        let row = layer.shape.query_heads() * layer.shape.head_dim();
        ensure!(layer.prompt_queries.iter().chain(&layer.decode_queries).all(|query| query.len() == row));
        ensure!((0..layer.prompt_queries.len()).all(|query| (1..=layer.tokens).contains(&layer.visible_to(query))));
    }
    Ok(())
}

/// Reads a golden file and runs its op on the CPU.
///
/// # Errors
/// What is wrong with it.
pub fn golden(bytes: &[u8]) -> Result<()> {
    golden::run_op(&GoldenFile::parse(bytes)?, None).map(drop)
}

/// Reads a GGUF model and lets it read a few tokens.
///
/// # Errors
/// What is wrong with it.
pub fn model(bytes: &[u8]) -> Result<()> {
    let model = Model::read(Cursor::new(bytes))?;
    let tokens = model.tokenizer.encode_text("the pass key")?;
    ensure!(!tokens.is_empty(), "no tokens");
    let mut attention = ExactAttention::new(&model.config);
    let stream = model.forward(&tokens, 0, &mut attention)?;
    model.logits(&stream)?;
    model.tokenizer.decode(&tokens).map(drop)
}
