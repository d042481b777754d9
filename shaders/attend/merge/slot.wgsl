// Slot `merge`: chooses what merges the states of a sequence: `merge_states`, or the workgroup that writes the last of
// them.
//
// Every choice has
//   var states
//     attention states, as in attend/states.wgsl
//
// needs: WorkItem
// gives: merge_item

// Called once the states of an item are written.
fn merge_item(item: WorkItem, y: u32, invocation: u32) {}
