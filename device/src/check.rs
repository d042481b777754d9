//! What a device must do right, by name.

use crate::Result;

/// One thing that a backend must do right, as plain data, and how it is found out.
///
/// A program can list the checks of several libraries, choose among them by name or kind, run them and print what they
/// found, without knowing what they compute.
pub trait Check<B> {
    /// What a run finds.
    type Report;

    /// Its name, unique among the checks of its library: lower case letters, digits and dashes.
    fn name(&self) -> &str;

    /// The name of its kind, which is the family of kernels that it checks.
    fn kind(&self) -> &'static str;

    /// Whether it belongs to the set that covers every kernel once in the least time, which tests run on software
    /// drivers.
    fn is_quick(&self) -> bool;

    /// Its subject, for people: formats, or sizes.
    fn subject(&self) -> String;

    /// Runs it.
    ///
    /// # Errors
    /// Errors of the backend. Wrong results are not an error: they give a report that did not pass.
    fn run(&self, backend: &B) -> impl Future<Output = Result<Self::Report>>;

    /// Why a run did not pass, in a line; `None` if it passed.
    fn failure(report: &Self::Report) -> Option<String>;
}
