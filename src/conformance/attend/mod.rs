//! Checks of attention: of the stored data, of the outputs over them, and of states and their merge.

mod accuracy;
mod build;
mod case;
mod cases;
mod centred;
mod formats;
mod lone_heads;
mod many_heads;
mod query_precision;
mod query_runs;
mod read_path;
mod reference;
mod run;
mod small_values;
mod stored;

pub(super) use accuracy::Expected;
pub use case::{AttendCase, DataKind, Fill, InputLayout, Paging, Queries, RowOrder, SinkPlace, SpanCase, StoreCase};
pub use cases::attend_cases;
pub use query_runs::state_cases;
pub(super) use reference::decode as exact_decode;
pub(super) use run::{run, run_states};
