//! What reading a recipe's text yields.

/// What text says, or why it cannot be read.
pub(super) type Parsed<T> = Result<T, String>;
