//! Compiled kernels of one device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use cudarc::nvrtc::Ptx;

use super::driver::{DeviceFacts, driver_error};
use super::program::{KernelCache, Program};
use crate::Result;

/// The kernels of a device. NVRTC compiles them on first use, or they are read from a [`KernelCache`].
#[derive(Debug)]
pub struct Kernels {
    context: Arc<CudaContext>,
    facts: DeviceFacts,
    cache: KernelCache,
    modules: Mutex<HashMap<Program, Arc<CudaModule>>>,
}

impl Kernels {
    /// An empty set of kernels.
    ///
    /// # Errors
    /// [`Error::Adapter`](crate::Error::Adapter) when the device is older than compute capability 8.0, or the driver
    /// than CUDA 11.8.
    pub fn new(context: Arc<CudaContext>, cache: KernelCache) -> Result<Self> {
        let facts = DeviceFacts::of(&context)?;
        Ok(Self { context, facts, cache, modules: Mutex::default() })
    }

    /// The facts about their device.
    pub const fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// The function `name` of a program. Threads that need different programs compile them in parallel.
    pub fn function(&self, program: &Program, name: &str) -> Result<CudaFunction> {
        let modules = || self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let known = modules().get(program).cloned();
        let module = match known {
            Some(module) => module,
            None => {
                let module = self.module(program)?;
                modules().insert(program.clone(), module.clone());
                module
            }
        };
        module.load_function(name).map_err(|error| driver_error("a kernel", 0, error))
    }

    fn module(&self, program: &Program) -> Result<Arc<CudaModule>> {
        let architecture = program.architecture(&self.facts);
        // A file that is not whole never reaches the driver. One that the driver refuses was made for another driver.
        // In both cases the program is compiled and written again.
        if let Some(kept) = self.cache.read(program, &architecture)
            && let Ok(module) = self.context.load_module(Ptx::from_binary(kept))
        {
            return Ok(module);
        }
        let binary = program.compile(&architecture)?;
        self.cache.write(program, &architecture, &binary);
        let bytes = binary.len() as u64;
        self.context.load_module(Ptx::from_binary(binary)).map_err(|error| driver_error("kernels", bytes, error))
    }
}
