//! What kvpack measures, as JSON, and what is made of it: tables for documents.
//!
//! Every file that the command writes with `--json` or `--report` says in its field `kind` what it is, and can be read
//! again as [`Measured`].

mod bench;
mod measured;
mod peers;
mod run;
pub mod tables;

pub use bench::{BenchReport, BenchRow, Figures, MOST_PERCENT_OF_READ, RowOutcome, ShapeReport, StepTimes, parts_of};
pub use measured::{Measured, ReadError, read};
pub use peers::{PeerRow, PeersReport};
pub use run::{Run, utc};
