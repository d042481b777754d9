//! [`ModelCache`]: the keys and values of all layers.
