//! Documents cut from a text, and questions about them whose answers are known.

use anyhow::{Result, bail};

use crate::model::Model;

/// Tokens of a passage that the question names, and of the rest of it, which is the answer.
const CUE: usize = 16;
const QUOTED: usize = 24;

/// A document and its questions.
pub struct Document {
    /// Its tokens, among them the pass key.
    pub tokens: Vec<u32>,
    /// How does this passage go on?
    pub quote: Question,
    /// What is the pass key?
    pub passkey: Question,
}

/// A question after a document.
pub struct Question {
    pub tokens: Vec<u32>,
    /// At least two.
    pub answer: Vec<u32>,
    /// Its name among embeddings in a file.
    pub name: &'static str,
    /// Its words, for what ranks chunks.
    pub words: String,
}

/// Cuts `count` documents of `length` tokens from a text, in order.
///
/// The depth of the pass key grows from document to document, and that of the passage goes through all depths
/// in another order.
pub fn cut(model: &Model, text: &[u32], count: usize, length: usize) -> Result<Vec<Document>> {
    // Every document has tokens of its own, so that a larger count only ever asks for memory.
    if count > text.len() {
        bail!("--documents {count}: the text has {} tokens, and each document needs some", text.len());
    }
    let encode = |text: &str| model.tokenizer.encode(text);
    // Models that know texts with a first token of its own attend to it.
    let begin = model.tokenizer.encode_text("")?;
    let mut documents = Vec::with_capacity(count);
    for index in 0..count {
        let key = (58_213 + index * 32_452_843) % 90_000 + 10_000;
        let needle = encode(&format!("\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n"))?;
        let hay = length.saturating_sub(needle.len() + begin.len());
        let stride = text.len() / count;
        if hay < 4 * (CUE + QUOTED) || hay > stride {
            bail!(
                "--documents {count} of {length} tokens each: documents have at least {} tokens, and the text has {}",
                4 * (CUE + QUOTED) + needle.len() + begin.len(),
                text.len()
            );
        }
        let part = &text[index * stride..][..hay];
        let depth = |place: usize| hay * (2 * place + 1) / (2 * count);
        let hidden = depth(index);
        let passage = passage(depth((3 * index + 1) % count), hidden, hay);
        let (cue, answer) = part[passage..][..CUE + QUOTED].split_at(CUE);
        let ask = encode("\n\nOnce more, word for word, as it is written above: ")?;
        let question = encode("\n\nWhat is the pass key? The pass key is ")?;
        documents.push(Document {
            tokens: [&begin, &part[..hidden], &needle, &part[hidden..]].concat(),
            quote: Question {
                name: "quote",
                tokens: [ask.as_slice(), cue].concat(),
                answer: answer.to_vec(),
                words: model.tokenizer.decode(cue)?,
            },
            passkey: Question {
                name: "passkey",
                tokens: question,
                answer: encode(&key.to_string())?,
                words: "What is the pass key?".into(),
            },
        });
    }
    Ok(documents)
}

/// Where the passage begins that is to be quoted: at `depth`, but wholly before or after what is hidden,
/// and in the text.
fn passage(depth: usize, hidden: usize, hay: usize) -> usize {
    let passage = CUE + QUOTED;
    let start = depth.min(hay - passage);
    match start < hidden && start + passage > hidden {
        true if hidden >= passage => hidden - passage,
        true => hidden,
        false => start,
    }
}

#[cfg(test)]
mod tests {
    use super::{CUE, QUOTED, passage};

    #[test]
    fn passages_are_whole() {
        let length = CUE + QUOTED;
        for hay in [4 * length, 600] {
            for (depth, hidden) in (0..hay).step_by(7).flat_map(|depth| (0..hay).step_by(11).map(move |h| (depth, h))) {
                let start = passage(depth, hidden, hay);
                assert!(
                    start + length <= hay && (start >= hidden || start + length <= hidden),
                    "{depth} {hidden} {hay}"
                );
            }
        }
    }
}
