// Slot `run_outputs`: the states of the rows of `attend_run`, from the sums in registers.
//
// Every choice has
//   fn write_states(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, item: WorkItem, y: u32, team: u32, lane: u32)
//     of the subgroup's rows, whose sums of weights are in `factors`; by all subgroups
