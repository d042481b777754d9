//! What lies on a device, and caches that a device still works on.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError, TryLockError};

use crate::host::Host;

/// What lies on a backend's device. The thread that drops it keeps its current device.
pub struct OnDevice<B: Host, T>(ManuallyDrop<T>, PhantomData<fn(B)>);

impl<B: Host, T> OnDevice<B, T> {
    pub const fn new(of: T) -> Self {
        Self(ManuallyDrop::new(of), PhantomData)
    }
}

impl<B: Host, T> Deref for OnDevice<B, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<B: Host, T> DerefMut for OnDevice<B, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<B: Host, T> Drop for OnDevice<B, T> {
    fn drop(&mut self) {
        let _device = B::thread_device();
        // SAFETY: nothing uses the value after this.
        unsafe { ManuallyDrop::drop(&mut self.0) }
    }
}

/// Memory that waits for the end of a capture: what is freed on a stream that a graph captures is part of the graph.
pub trait Parked: Send {
    /// Whether it may be dropped now.
    fn may_go(&mut self) -> bool;
}

static PARKED: Mutex<Vec<Box<dyn Parked>>> = Mutex::new(Vec::new());

/// Keeps it until `free_parked` may drop it. It stays forever if the process was forked while another thread was here.
pub fn park(left: Box<dyn Parked>) {
    match PARKED.try_lock() {
        Ok(mut parked) => parked.push(left),
        Err(TryLockError::Poisoned(parked)) => parked.into_inner().push(left),
        Err(TryLockError::WouldBlock) if crate::forked::is_forked() => std::mem::forget(left),
        Err(TryLockError::WouldBlock) => PARKED.lock().unwrap_or_else(PoisonError::into_inner).push(left),
    }
}

/// Drops what was parked and may go now. Another thread may be at it: it is not waited for.
pub fn free_parked() {
    if let Ok(mut parked) = PARKED.try_lock() {
        parked.retain_mut(|left| !left.may_go());
    }
}
