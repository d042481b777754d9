//! Storage formats of other projects, for caches that come from them or go to them.
//!
//! No kernel and no store of kvpack uses these orders. They are part of the library, and not of the golden tests,
//! because users who move to kvpack have such caches. Each module packs and unpacks the bytes of one project, and
//! computes its codes as the published code does where that differs from kvpack's own rounding.
//!
//! | module | of | order |
//! | --- | --- | --- |
//! | [`kivi`] | KIVI | `i32` words, the first code in the lowest bits |
//! | [`msb_bytes`] | CalibQuant | words of 8, 16 or 32 bits, the first code in the highest bits |
//! | [`saw_int4`] | SAW-INT4 | bytes of two halves of a row |

pub mod kivi;
pub mod msb_bytes;
pub mod saw_int4;
