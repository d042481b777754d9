//! What kvpack measures, as JSON, and what is made of it: a page of HTML, tables for documents.
//!
//! What `kvpack check`, `kvpack eval` (without `--precision`) and `kvpack bench` (of steps: shapes, dumps, the suites
//! decode and mixed) write with `--json` or `--report` says in its field `kind` what it is, and can be read again as
//! [`Measured`]. JSON of the other suites and of `--precision` cannot.

mod bench;
mod conformance;
pub mod documents;
mod eval;
pub mod family;
mod measured;
mod model;
pub mod page;
mod peers;
pub mod recipes;
mod run;
pub mod tables;

pub use bench::{BenchReport, BenchRow, Figures, MOST_PERCENT_OF_READ, RowOutcome, ShapeReport, StepTimes, parts_of};
pub use conformance::{CheckOutcome, CheckRow, ConformanceReport};
pub use documents::{AnswerRow, ByModality, DocumentsReport, DocumentsRow};
pub use eval::{CalibratedRow, EvalReport, FormatRow, LayerReport, SummaryRow, summarize};
pub use measured::{Measured, ReadError, read};
pub use model::{ModelReport, PasskeyRow, RecipeRow};
pub use peers::{PeerRow, PeersReport};
pub use run::{Run, utc};
