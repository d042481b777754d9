//! What a step of decoding takes.

use serde::{Deserialize, Serialize};

/// What a step of decoding takes, the middle of several, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct StepTime {
    /// By the clock of the host, from one token to the next.
    pub step_ms: f64,
    /// Of that, the layers and the logits, by the clock of the device. Hosts that replay graphs know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_ms: Option<f64>,
    /// Of that, until all is submitted. Hosts that submit layer by layer know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub submitted_ms: Option<f64>,
    /// Storing and attending in all layers, timed without the rest of the model.
    pub attention_ms: Option<f64>,
}

impl StepTime {
    /// A step of which nothing else is known.
    pub const fn of_step(step_ms: f64) -> Self {
        Self { step_ms, device_ms: None, submitted_ms: None, attention_ms: None }
    }

    /// The rest of the model.
    fn rest_ms(&self) -> Option<f64> {
        Some(self.device_ms? - self.attention_ms?)
    }

    /// What the device waits for the host.
    fn host_ms(&self) -> Option<f64> {
        Some(self.step_ms - self.device_ms?)
    }
}

/// The columns of tables that say what a step is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepColumns {
    /// Of hosts that know [`StepTime::device_ms`].
    Device,
    /// Of hosts that know [`StepTime::submitted_ms`].
    Submission,
}

impl StepColumns {
    /// Their headings.
    pub const fn names(self) -> &'static [&'static str] {
        match self {
            Self::Device => &["step ms", "attention ms", "rest ms", "host ms"],
            Self::Submission => &["step ms", "attention alone ms", "submitted after ms"],
        }
    }

    /// Their cells.
    pub fn cells(self, time: &StepTime) -> Vec<String> {
        let step = Some(time.step_ms);
        match self {
            Self::Device => [step, time.attention_ms, time.rest_ms(), time.host_ms()].map(ms).to_vec(),
            Self::Submission => [step, time.attention_ms, time.submitted_ms].map(ms).to_vec(),
        }
    }
}

/// A time in a table.
fn ms(time: Option<f64>) -> String {
    number(time, 2)
}

/// A number in a table, where it is known.
pub(super) fn number(x: Option<f64>, digits: usize) -> String {
    x.map_or("–".into(), |x| format!("{x:.digits$}"))
}

/// The tokens with which sequences begin to decode.
pub fn first_tokens(sequences: usize) -> Vec<u32> {
    (0..sequences as u32).map(|sequence| 7 + 13 * sequence % 400).collect()
}

/// The middle of some times, if there are any.
pub fn median(times: &[f64]) -> Option<f64> {
    let mut times = times.to_vec();
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}
