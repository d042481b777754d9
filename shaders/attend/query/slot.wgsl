// Slot `query`: how the query heads of a workgroup get into workgroup memory: read as `prepare_query` left them, or
// prepared by every workgroup for itself. Integers for scores/dot.wgsl, f32 for scores/fma.wgsl and scores/groups.wgsl.
//
// Every choice has
//   fn load_query(item: WorkItem, y: u32, invocation: u32)
//     fills `query`, called by all invocations; a barrier follows
