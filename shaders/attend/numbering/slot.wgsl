// Slot `numbering`: the number of an invocation within its workgroup, chosen so that invocations that exchange values
// by shuffles can share a subgroup.
//
// Every choice has
//   struct Numbering
//     the builtins that the entry point takes
//   fn number(numbering: Numbering) -> u32
//     each of 0 .. INVOCATIONS once
