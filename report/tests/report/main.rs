//! The documents and pages of reports.

mod documents;
mod faster_than_f16;
mod links;
mod page;
mod prose;
