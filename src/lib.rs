//! kvpack packs the key-value cache of a transformer and computes attention on the packed form.
