//! Texts in HTML.

/// A text with the characters that HTML gives a meaning replaced.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
