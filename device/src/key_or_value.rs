//! The two tensors of a cache.

use std::fmt;

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyOrValue {
    /// The keys, packed along channels.
    Key,
    /// The values, packed along tokens.
    Value,
}

impl fmt::Display for KeyOrValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "the key tensor",
            Self::Value => "the value tensor",
        })
    }
}
