//! A check of either library: of caches (`kvpack`), or of layers (`kvpack-weights`).

use std::str::FromStr;

use kvpack::{AttentionShape, Backend, conformance as caches};
use kvpack_report::recipes;
use kvpack_weights::conformance as layers;

/// A backend, as each of the two libraries takes it.
pub struct Backends<'a, B, L> {
    pub caches: &'a B,
    pub layers: L,
}

/// One check.
#[derive(Clone)]
pub enum Check {
    Cache(caches::Check),
    Layer(layers::Check),
}

/// The kinds of both libraries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Cache(caches::Kind),
    Layer(layers::Kind),
}

/// What a check found.
pub struct Found {
    /// The kernel, where there are several for the same call.
    pub kernel: Option<String>,
    pub accuracy: Option<Accuracy>,
    /// Why it did not pass; empty if it passed.
    pub reason: String,
}

/// Normalised mean square errors.
#[derive(Clone, Copy)]
pub struct Accuracy {
    pub nmse: f64,
    /// Of the worst head, where there are heads.
    pub worst_head: Option<f64>,
    /// Relative to what the weights of attention add to a plain average.
    pub informative: Option<f64>,
    /// The largest `nmse` that passes.
    pub limit: f64,
}

/// All checks: those of caches, then those of layers.
pub fn all() -> Vec<Check> {
    let caches = caches::checks().into_iter().map(Check::Cache);
    caches.chain(layers::checks().into_iter().map(Check::Layer)).collect()
}

impl Kind {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        caches::Kind::ALL.into_iter().map(Self::Cache).chain(layers::Kind::ALL.into_iter().map(Self::Layer))
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Cache(kind) => kind.name(),
            Self::Layer(kind) => kind.name(),
        }
    }

    /// What is checked, in a sentence.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Cache(kind) => kind.description(),
            Self::Layer(kind) => kind.description(),
        }
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::all().find(|kind| kind.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::all().map(Self::name).collect();
            format!("there is no kind '{text}'; the kinds are {}", names.join(", "))
        })
    }
}

impl Check {
    pub fn name(&self) -> &str {
        match self {
            Self::Cache(check) => check.name(),
            Self::Layer(check) => check.name(),
        }
    }

    pub const fn kind(&self) -> Kind {
        match self {
            Self::Cache(check) => Kind::Cache(check.kind()),
            Self::Layer(check) => Kind::Layer(check.kind()),
        }
    }

    pub const fn is_quick(&self) -> bool {
        match self {
            Self::Cache(check) => check.is_quick(),
            Self::Layer(check) => check.is_quick(),
        }
    }

    /// What it is about: the recipes whose formats it stores, as a user can paste them, then the formats or sizes.
    pub fn subject(&self) -> String {
        let check = match self {
            Self::Cache(check) => check,
            Self::Layer(check) => return check.subject(),
        };
        let subject = check.subject();
        let Ok(shape) = AttentionShape::new(32, 8, 128) else { return subject };
        let mut named: Vec<String> = Vec::new();
        for recipe in check.stored_formats().iter().filter_map(|format| recipes::of_format(format, &shape)) {
            if recipe != subject && !named.contains(&recipe) {
                named.push(recipe);
            }
        }
        if named.is_empty() { subject } else { format!("{}: {subject}", named.join(" + ")) }
    }

    /// The formats that it stores; none where it stores nothing packed.
    pub fn stored_formats(&self) -> Vec<String> {
        match self {
            Self::Cache(check) => check.stored_formats().iter().map(ToString::to_string).collect(),
            Self::Layer(_) => Vec::new(),
        }
    }

    /// Runs it.
    ///
    /// # Errors
    /// Errors of the backend.
    pub async fn run<B, L>(&self, on: &Backends<'_, B, L>) -> kvpack::Result<Found>
    where
        B: Backend,
        L: layers::Backend,
    {
        match self {
            Self::Cache(check) => Ok(check.run(on.caches).await?.into()),
            Self::Layer(check) => Ok(check.run(&on.layers).await?.into()),
        }
    }
}

impl From<caches::Report> for Found {
    fn from(report: caches::Report) -> Self {
        let accuracy = report.accuracy.map(|caches::Accuracy { error, limits }| Accuracy {
            nmse: error.nmse,
            worst_head: Some(error.worst_head),
            informative: error.informative,
            limit: limits.nmse,
        });
        Self { kernel: None, accuracy, reason: report.reason() }
    }
}

impl From<layers::Report> for Found {
    fn from(report: layers::Report) -> Self {
        let accuracy = report.accuracy.map(|layers::Accuracy { nmse, limit }| Accuracy {
            nmse,
            worst_head: None,
            informative: None,
            limit,
        });
        Self { kernel: report.path.map(|path| path.to_string()), accuracy, reason: report.reason() }
    }
}
