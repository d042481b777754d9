// Slot `run_arrivals`: when keys and values are loaded, and when loads are stored to workgroup memory.
//
// Products of a step read its keys and the values of the previous step. Weights are computed between two barriers.
// Values can only be stored there, and so can keys, unless there is room for the keys of two steps. Storing waits for
// the loads.
//
// Every choice has
//   const KEY_STEPS: u32
//     steps that keys have room for
//   fn before_steps(tiles: u32, invocation: u32)
//     when the first keys are stored
//   fn before_products(step: u32, tiles: u32, invocation: u32)
//   fn behind_products(step: u32, tiles: u32, invocation: u32)
//   fn before_weights(step: u32, tiles: u32, invocation: u32)
//   fn behind_weights(step: u32, tiles: u32, invocation: u32)
