// Slot `query`: loads the query heads of a workgroup into workgroup memory. They are read as `prepare_query` wrote
// them, or every workgroup prepares its own. Integers for scores/dot.wgsl, f32 for scores/fma.wgsl and
// scores/groups.wgsl.
//
// Every choice has
//   fn load_query(item: WorkItem, y: u32, invocation: u32)
//     fills `query`, called by all invocations; a barrier follows
