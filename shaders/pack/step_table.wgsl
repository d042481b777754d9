// A step's table: `plan::WriteTable`. A section holds the number of its entries, then the entries.
//
// needs: call
// gives: entry_count, entry_at, has_entry
// binds: 6 table

@group(0) @binding(6) var<storage, read> table: array<vec4<u32>>;

fn entry_count() -> u32 {
    return table[call.section].x;
}

fn entry_at(index: u32) -> vec4<u32> {
    return table[call.section + 1u + index];
}

// Whether an entry belongs to the shards of the dispatch.
fn has_entry(index: u32) -> bool {
    return entry_at(index).w == call.shards;
}
