//! A check: a case of one kind, and its runner.

use std::fmt;
use std::str::FromStr;

use super::attend::{self, AttendCase};
use super::merge::{self, MergeCase};
use super::pack::{self, PackCase};
use super::report::Report;
use super::select::{self, ChunksCase, EvictionCase, StatisticsCase, TokenScoresCase, TopKCase};
use crate::format::SegmentFormat;
use crate::{Backend, Result};

/// One thing that a backend must do right, as plain data.
///
/// ```
/// use kvpack::conformance::{self, Kind};
/// use kvpack::cpu::Cpu;
/// let packing = conformance::checks().into_iter().find(|check| check.kind() == Kind::Packing && check.is_quick()).unwrap();
/// let report = pollster::block_on(packing.run(&Cpu::default()))?;
/// assert!(report.passed(), "{}", report.reason());
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Check {
    /// Stored data equal those of the CPU reference, and attention over them equals f64 attention over them: decode
    /// steps and query runs.
    Attention(AttendCase),
    /// Attention states have the log-sum-exp of f64, and merge to the states of all tokens.
    States(AttendCase),
    /// Attention states of several parts merge as the CPU reference merges them.
    Merge(MergeCase),
    /// Every kernel that writes pages stores the same data as the CPU reference, and writes nothing else.
    Packing(PackCase),
    /// Maxima and log-sum-exps of rows, column sums, counts.
    Statistics(StatisticsCase),
    /// Scores of tokens, computed from their column sums.
    TokenScores(TokenScoresCase),
    /// The best scores.
    TopK(TopKCase),
    /// Kept tokens gathered, evicted ones merged into them.
    Eviction(EvictionCase),
    /// Chunks compared with a query, and reordered.
    Chunks(ChunksCase),
}

/// The kinds of checks, and with them the families of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// [`Check::Attention`].
    Attention,
    /// [`Check::States`].
    States,
    /// [`Check::Merge`].
    Merge,
    /// [`Check::Packing`].
    Packing,
    /// [`Check::Statistics`].
    Statistics,
    /// [`Check::TokenScores`].
    TokenScores,
    /// [`Check::TopK`].
    TopK,
    /// [`Check::Eviction`].
    Eviction,
    /// [`Check::Chunks`].
    Chunks,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 9] = [
        Self::Attention,
        Self::States,
        Self::Merge,
        Self::Packing,
        Self::Statistics,
        Self::TokenScores,
        Self::TopK,
        Self::Eviction,
        Self::Chunks,
    ];

    /// The name that [`Kind::from_str`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::States => "states",
            Self::Merge => "merge",
            Self::Packing => "packing",
            Self::Statistics => "statistics",
            Self::TokenScores => "token-scores",
            Self::TopK => "top-k",
            Self::Eviction => "eviction",
            Self::Chunks => "chunks",
        }
    }

    /// What is checked, in a sentence for people.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Attention => {
                "attention over stored data against f64, stored data against the CPU reference bit for bit"
            }
            Self::States => "attention states and their merge against f64",
            Self::Merge => "states of several parts, merged, against the CPU reference within rounding",
            Self::Packing => "runs, gathers, appended tokens, copies and windows against the CPU reference bit for bit",
            Self::Statistics => "row maxima, log-sum-exps, column sums and counts against the CPU reference",
            Self::TokenScores => "scores made of column sums against the CPU reference within rounding",
            Self::TopK => "the best scores against the CPU reference, index for index",
            Self::Eviction => "gathered tokens against the CPU reference bit for bit, merged ones within rounding",
            Self::Chunks => "similarities of chunks against the CPU reference, reordered rows bit for bit",
        }
    }

    /// Whether a GPU backend has different kernels on different capability paths. The kernels of the other kinds are
    /// the same on all paths.
    pub const fn depends_on_path(self) -> bool {
        matches!(self, Self::Attention | Self::States)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let kinds = Self::ALL.map(Self::name);
            format!("there is no kind '{text}'; the kinds are {}", kinds.join(", "))
        })
    }
}

impl Check {
    /// Its name, unique among [`checks`](super::checks()): lower case letters, digits and dashes.
    pub fn name(&self) -> &str {
        match self {
            Self::Attention(case) | Self::States(case) => &case.name,
            Self::Merge(case) => &case.name,
            Self::Packing(case) => &case.name,
            Self::Statistics(case) => &case.name,
            Self::TokenScores(case) => &case.name,
            Self::TopK(case) => &case.name,
            Self::Eviction(case) => &case.name,
            Self::Chunks(case) => &case.name,
        }
    }

    /// Its kind.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Attention(_) => Kind::Attention,
            Self::States(_) => Kind::States,
            Self::Merge(_) => Kind::Merge,
            Self::Packing(_) => Kind::Packing,
            Self::Statistics(_) => Kind::Statistics,
            Self::TokenScores(_) => Kind::TokenScores,
            Self::TopK(_) => Kind::TopK,
            Self::Eviction(_) => Kind::Eviction,
            Self::Chunks(_) => Kind::Chunks,
        }
    }

    /// Whether the check belongs to the set that covers every kernel once in the least time, which tests run on
    /// software drivers.
    pub const fn is_quick(&self) -> bool {
        match self {
            Self::Attention(case) | Self::States(case) => case.quick,
            Self::Merge(case) => case.quick,
            Self::Packing(case) => case.quick,
            Self::Statistics(case) => case.quick,
            Self::TokenScores(case) => case.quick,
            Self::TopK(case) => case.quick,
            Self::Eviction(case) => case.quick,
            Self::Chunks(case) => case.quick,
        }
    }

    /// Its subject, for people: the formats of its stores, or its sizes.
    pub fn subject(&self) -> String {
        match self {
            Self::Attention(case) | Self::States(case) => case.formats(),
            Self::Merge(case) => format!("{} parts of {} rows", case.parts, case.rows),
            Self::Packing(case) => case.format.to_string(),
            Self::Statistics(case) => format!("{} rows × {} keys", case.positions.len(), case.tokens),
            Self::TokenScores(case) => format!("{} tokens", case.tokens),
            Self::TopK(case) => format!("{} of {}", case.k, case.n),
            Self::Eviction(case) => format!("{} of {} tokens", case.kept, case.tokens),
            Self::Chunks(case) => format!("{} chunks of width {}", case.embeddings, case.width),
        }
    }

    /// The formats of its stores; empty if nothing is packed.
    pub fn stored_formats(&self) -> Vec<SegmentFormat> {
        match self {
            Self::Attention(case) | Self::States(case) => case.segments.iter().map(|segment| segment.format).collect(),
            Self::Packing(case) => vec![case.format],
            Self::Merge(_)
            | Self::Statistics(_)
            | Self::TokenScores(_)
            | Self::TopK(_)
            | Self::Eviction(_)
            | Self::Chunks(_) => Vec::new(),
        }
    }

    /// Runs it.
    ///
    /// # Errors
    /// Errors of the backend. Wrong results are not an error: they give a [`Report`] that did not pass.
    pub async fn run<B: Backend>(&self, backend: &B) -> Result<Report> {
        match self {
            Self::Attention(case) => attend::run(backend, case).await,
            Self::States(case) => attend::run_states(backend, case).await,
            Self::Merge(case) => merge::run(backend, case).await,
            Self::Packing(case) => pack::run(backend, case).await,
            Self::Statistics(case) => select::run_statistics(backend, case).await,
            Self::TokenScores(case) => select::run_token_scores(backend, case).await,
            Self::TopK(case) => select::run_top_k(backend, case).await,
            Self::Eviction(case) => select::run_eviction(backend, case).await,
            Self::Chunks(case) => select::run_chunks(backend, case).await,
        }
    }
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

    async fn run(&self, backend: &B) -> Result<Report> {
        self.run(backend).await
    }

    fn failure(report: &Report) -> Option<String> {
        (!report.passed()).then(|| report.reason())
    }
}
