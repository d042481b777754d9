// Slot `numbering`: which number an invocation has within its workgroup, so that those that exchange values by shuffles
// can share a subgroup.
//
// Every choice has
//   struct Numbering
//     the builtins that the entry point takes
//   fn number(numbering: Numbering) -> u32
//     each of 0 .. INVOCATIONS once
