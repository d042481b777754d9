//! Options of every study.

use std::path::PathBuf;

use super::Shape;

/// How long a study times, and where it writes what it found.
#[derive(Clone, Debug, clap::Args)]
pub struct StudyOptions {
    /// Steps that are timed.
    #[arg(long, default_value_t = 12)]
    pub steps: usize,
    /// Writes the rows as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Writes a plot as SVG.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// A model with random weights.
#[derive(Clone, Debug, clap::Args)]
pub struct RandomModel {
    /// The shape of the model, whose weights are random.
    #[arg(long, value_enum, default_value = "8b")]
    shape: Shape,
    /// The shape `small` and the smallest sizes, on any machine.
    #[arg(long)]
    pub quick: bool,
}

impl RandomModel {
    /// The shape, in its small form where asked for.
    pub const fn shape(&self) -> Shape {
        if self.quick { Shape::Small } else { self.shape }
    }
}
