//! Requests, and the JSON lines that they are read from.

use std::time::Duration;

use serde::Deserialize;

use crate::Error;

/// A request: a prompt, and how many tokens to generate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it arrives, counted from the start of the server.
    pub arrival: Duration,
    /// Its tokens, at least one.
    pub prompt: Vec<u32>,
    /// Tokens to generate, at least one. A model's end token ends the text earlier.
    pub output: usize,
}

/// The prompt of a line, which a host turns into tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// A number of tokens without a meaning, for measurements.
    Length {
        /// Tokens.
        tokens: usize,
        /// The first tokens, which are the same in all requests.
        shared: usize,
        /// The line, from which the other tokens are drawn.
        seed: usize,
    },
}

impl Prompt {
    /// The tokens of a prompt without a meaning, below `vocabulary`; none for a text.
    pub fn drawn(&self, vocabulary: u32) -> Option<Vec<u32>> {
        let Self::Length { tokens, shared, seed } = *self else { return None };
        let draw = |at: usize| {
            let seed = if at < shared { 0 } else { seed };
            let mixed = (at as u64 + 1)
                .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .wrapping_add(seed as u64)
                .wrapping_mul(0xD134_2543_DE82_EF95);
            ((mixed >> 33) % u64::from(vocabulary.max(1))) as u32
        };
        Some((0..tokens).map(draw).collect())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(default)]
    arrival_s: f64,
    prompt: Option<String>,
    prompt_tokens: Option<usize>,
    #[serde(default)]
    shared_tokens: usize,
    output_tokens: usize,
}

/// Reads requests, one JSON object a line; empty lines are skipped. `encode` turns prompts into tokens. The requests are
/// sorted by arrival.
///
/// # Errors
/// [`Error::Line`].
pub fn read_requests(
    lines: &str,
    mut encode: impl FnMut(&Prompt) -> Result<Vec<u32>, String>,
) -> Result<Vec<Request>, Error> {
    let mut requests = Vec::new();
    for (at, text) in lines.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let request = request(text, at + 1, &mut encode);
        requests.push(request.map_err(|reason| Error::Line { line: at + 1, reason })?);
    }
    requests.sort_by_key(|request| request.arrival);
    Ok(requests)
}

fn request(
    text: &str,
    number: usize,
    encode: &mut impl FnMut(&Prompt) -> Result<Vec<u32>, String>,
) -> Result<Request, String> {
    let line: Line = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let prompt = match (line.prompt, line.prompt_tokens) {
        (Some(text), None) => Prompt::Text(text),
        (None, Some(tokens)) => Prompt::Length { tokens, shared: line.shared_tokens, seed: number },
        _ => return Err("it needs either \"prompt\" or \"prompt_tokens\"".into()),
    };
    let arrival = Duration::try_from_secs_f64(line.arrival_s)
        .map_err(|_| format!("\"arrival_s\" is {}, it must be a time from 0 on", line.arrival_s))?;
    let prompt = encode(&prompt)?;
    if prompt.is_empty() || line.output_tokens == 0 {
        return Err("a prompt and an output have at least one token".into());
    }
    Ok(Request { arrival, prompt, output: line.output_tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &str) -> Result<Vec<Request>, Error> {
        read_requests(lines, |prompt| match prompt {
            Prompt::Text(text) => Ok(text.bytes().map(u32::from).collect()),
            length => length.drawn(50).ok_or_else(|| "no length".into()),
        })
    }

    #[test]
    fn lines_are_read_in_the_order_of_arrival() {
        let lines = "{\"arrival_s\": 2, \"prompt\": \"ab\", \"output_tokens\": 3}\n\n\
                     {\"prompt_tokens\": 40, \"shared_tokens\": 30, \"output_tokens\": 1}\n\
                     {\"prompt_tokens\": 40, \"shared_tokens\": 30, \"output_tokens\": 1, \"arrival_s\": 0.5}";
        let requests = read(lines).unwrap();
        let arrivals: Vec<u128> = requests.iter().map(|request| request.arrival.as_millis()).collect();
        assert_eq!(arrivals, [0, 500, 2000]);
        assert_eq!(requests[2].prompt, [97, 98]);
        assert_eq!(requests[0].prompt[..30], requests[1].prompt[..30]);
        assert_ne!(requests[0].prompt[30..], requests[1].prompt[30..]);
        assert!(requests[0].prompt.iter().all(|&token| token < 50));
    }

    #[test]
    fn bad_lines_are_named() {
        for (line, said) in [
            ("{}", "output_tokens"),
            ("{\"output_tokens\": 1}", "either"),
            ("{\"prompt\": \"a\", \"prompt_tokens\": 1, \"output_tokens\": 1}", "either"),
            ("{\"prompt\": \"\", \"output_tokens\": 1}", "at least one token"),
            ("{\"prompt\": \"a\", \"output_tokens\": 1, \"arrival_s\": -1}", "from 0 on"),
            ("{\"prompt\": \"a\", \"outputs\": 1}", "outputs"),
        ] {
            let error = read(&format!("\n{line}")).unwrap_err().to_string();
            assert!(error.starts_with("line 2") && error.contains(said), "{error}");
        }
    }
}
