// Slot `run_arrivals`: when keys and values are asked for, and when what has arrived goes to workgroup memory.
//
// Products of a step read its keys and the values of the step before; weights are made between two barriers. So
// values can be stored there alone, and keys too, unless there is room for those of two steps. Storing waits for
// what was asked for.
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
