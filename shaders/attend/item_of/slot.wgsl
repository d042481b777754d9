// Slot `item_of`: the item of a workgroup. By default workgroup (y, x) has item x, with all its queries.
//
// needs: WorkItem, read_item
// gives: has_item, item_of

// False for a workgroup without queries, which then does nothing.
fn has_item(group: vec3<u32>) -> bool {
    return true;
}

fn item_of(group: vec3<u32>) -> WorkItem {
    return read_item(group.y);
}
