//! Memory that steps of decoding use again. What is allocated in a capture becomes nodes of its graph, and only behind
//! another kernel can one begin early.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Tensor};

/// Tensors of one width that take turns. The stream is read longest: seven others of its width follow before the next
/// sum, where queries, keys and values are as wide.
const TURNS: usize = 12;

/// The most rows of a tensor that is used again.
const MOST_ROWS: usize = 128;

/// Tensors for kernels to write.
#[derive(Clone, Default)]
pub struct Scratch(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    use_again: bool,
    rings: HashMap<(usize, usize, DType), Ring>,
}

#[derive(Default)]
struct Ring {
    tensors: Vec<Tensor>,
    next: usize,
}

/// While it lives, tensors are used again.
pub struct Step<'a>(&'a Scratch);

impl Scratch {
    /// Begins to run the layers of a step. Nothing of them may be kept.
    pub fn step(&self) -> Step<'_> {
        let mut state = self.state();
        state.use_again = true;
        state.rings.values_mut().for_each(|ring| ring.next = 0);
        Step(self)
    }

    /// A tensor `[rows, width]` that holds anything.
    pub fn tensor(&self, (rows, width): (usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
        // SAFETY: callers write every element.
        let empty = |rows| unsafe { Tensor::empty((rows, width), dtype, device) };
        let mut state = self.state();
        if !state.use_again || rows > MOST_ROWS {
            return empty(rows);
        }
        let room = rows.next_power_of_two();
        let ring = state.rings.entry((room, width, dtype)).or_default();
        let at = ring.next;
        if at == ring.tensors.len() {
            ring.tensors.push(empty(room)?);
        }
        ring.next = (at + 1) % TURNS;
        ring.tensors[at].narrow(0, 0, rows)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.0.state().use_again = false;
    }
}
