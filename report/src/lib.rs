//! What kvpack measures, as JSON, and what is made of it: a page of HTML, tables for documents.
//!
//! JSON that `kvpack check`, `kvpack eval` (without `--precision`) and `kvpack bench` write with `--json` or `--report`
//! names its kind in the field `kind`, and can be read again as [`Measured`].

mod bench;
mod conformance;
pub mod documents;
mod eval;
pub mod family;
mod measured;
mod model;
mod not_a_number;
pub mod page;
mod peers;
mod ranks;
pub mod recipes;
mod run;
mod suite;
pub mod tables;

pub use bench::{
    BenchReport, BenchRow, Figures, MOST_PERCENT_OF_READ, Median, RowOutcome, ShapeReport, Spread, StepTimes, parts_of,
    recipe_of,
};
pub use conformance::{CheckOutcome, CheckRow, ConformanceReport};
pub use documents::{AnswerRow, ByModality, DocumentsReport, DocumentsRow};
pub use eval::{CalibratedRow, EvalReport, FormatRow, LayerReport, SummaryRow, summarize};
pub use measured::{Measured, ReadError, read};
pub use model::{ModelReport, PasskeyRow, RecipeRow};
pub use peers::{PeerRow, PeersReport};
pub use ranks::{ExchangeRow, RanksFound, RanksReport, RanksRow};
pub use run::{Run, utc};
pub use suite::{Skipped, SuiteReport, SuiteTable};
