//! Text and images of a prompt.

use crate::counts::{TokenCount, filled};
use crate::plan::TokenRange;
use crate::{Error, Result};

/// The images of a prompt. Everything else is text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spans {
    tokens: TokenCount,
    images: Vec<TokenRange>,
}

impl Spans {
    /// A prompt of `tokens` tokens with `images`, in order. There may be none.
    ///
    /// # Errors
    /// [`Error::NoTokens`] for an empty prompt; [`Error::ImageSpans`] when images overlap, are out of order or reach
    /// beyond the prompt; [`Error::Limit`] when the prompt is longer than [`MOST_TOKENS`](crate::plan::MOST_TOKENS).
    pub fn new(tokens: usize, images: &[TokenRange]) -> Result<Self> {
        if tokens == 0 {
            return Err(Error::NoTokens { what: "spans of a prompt", hint: "a prompt has at least one token" });
        }
        let count = TokenCount::new(tokens)?;
        let reject = |reason: String| Err(Error::ImageSpans { tokens, reason });
        for pair in images.windows(2) {
            if pair[1].start() < pair[0].end() {
                let [(a, b), (c, d)] = [(pair[0].start(), pair[0].end()), (pair[1].start(), pair[1].end())];
                return reject(format!("{c}..{d} begins before {a}..{b} ends"));
            }
        }
        match images.last() {
            Some(last) if last.end() > tokens => {
                reject(format!("{}..{} reaches beyond the prompt", last.start(), last.end()))
            }
            _ => Ok(Self { tokens: count, images: images.to_vec() }),
        }
    }

    /// Tokens of the prompt.
    pub const fn tokens(&self) -> usize {
        self.tokens.get()
    }

    /// The images, in order.
    pub fn images(&self) -> &[TokenRange] {
        &self.images
    }

    /// A mask that is true for every text token.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the host has no memory for the mask.
    pub fn text_mask(&self) -> Result<Vec<bool>> {
        let mut mask = filled("text mask", self.tokens(), true)?;
        self.images.iter().for_each(|image| mask[image.start()..image.end()].fill(false));
        Ok(mask)
    }

    /// The text after the last image. The attention of these rows shows which tokens matter (VL-Cache). For a prompt
    /// without images this is the whole prompt.
    ///
    /// # Errors
    /// [`Error::NoTextAfterImage`] when the prompt ends with an image.
    pub fn post_vision(&self) -> Result<TokenRange> {
        let start = self.images.last().map_or(0, TokenRange::end);
        TokenRange::new(start, self.tokens())
            .map_err(|_| Error::NoTextAfterImage { image_end: start, tokens: self.tokens() })
    }
}
