//! A check: a layer, and the kind of its kernels.

use std::fmt;

use super::layer::LayerCase;
use super::report::Report;
use super::run;
use crate::backend::Backend;

/// The kinds of checks, and with them the families of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Products of activations with a layer.
    Linear,
    /// The weights of a layer in f16.
    Dequantize,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 2] = [Self::Linear, Self::Dequantize];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Dequantize => "dequantize",
        }
    }

    /// What is checked, in a sentence for people.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Linear => "products of activations with packed weights against f64 over the stored codes",
            Self::Dequantize => "weights in f16 against codes, scales and zeros, exactly",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One thing that a backend must do right, as plain data.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    name: String,
    kind: Kind,
    case: LayerCase,
}

impl Check {
    /// A check of this kind.
    pub fn new(kind: Kind, case: LayerCase) -> Self {
        let name = format!("{kind}-{}", case.name(rows(kind, &case)));
        Self { name, kind, case }
    }

    /// Its name, unique among [`checks`](super::checks()): lower case letters, digits and dashes.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its kind.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Its layer and activations.
    pub const fn case(&self) -> &LayerCase {
        &self.case
    }

    /// Whether it belongs to the set that covers every kernel once in the least time.
    pub const fn is_quick(&self) -> bool {
        self.case.quick
    }

    /// Its sizes, for people.
    pub fn subject(&self) -> String {
        self.case.subject(rows(self.kind, &self.case))
    }

    /// Runs it.
    ///
    /// # Errors
    /// Errors of the device. Wrong results, and calls that the backend refuses, are not an error: they give a
    /// [`Report`] that did not pass.
    pub async fn run<B: Backend>(&self, backend: &B) -> kvpack_device::Result<Report> {
        match self.kind {
            Kind::Linear => run::product(backend, &self.case).await,
            Kind::Dequantize => run::dequantize(backend, &self.case).await,
        }
    }
}

fn rows(kind: Kind, case: &LayerCase) -> Option<usize> {
    (kind == Kind::Linear).then_some(case.rows)
}

impl<B: Backend> kvpack_device::Check<B> for Check {
    type Report = Report;

    fn name(&self) -> &str {
        self.name()
    }

    fn kind(&self) -> &'static str {
        self.kind().name()
    }

    fn is_quick(&self) -> bool {
        self.is_quick()
    }

    fn subject(&self) -> String {
        self.subject()
    }

    async fn run(&self, backend: &B) -> kvpack_device::Result<Report> {
        self.run(backend).await
    }

    fn failure(report: &Report) -> Option<String> {
        (!report.passed()).then(|| report.reason())
    }
}
