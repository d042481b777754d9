//! Steps on the CPU: the calls of the cache, since there is nothing to encode.

use kvpack::Result;
use kvpack::cache::{ModelCache, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::ElementType;

use super::{Measured, ModelEngine, Tensors, TimedModel};

impl TimedModel for Cpu {
    type Engine = Tensors<Self>;

    async fn engine(&self, _: &ModelCache<Self>, tensors: Tensors<Self>) -> Result<Tensors<Self>> {
        Ok(tensors)
    }
}

impl Tensors<Cpu> {
    /// Opens a step and runs all of its layers: the output of the last.
    fn run(&self, cache: &mut ModelCache<Cpu>, runs: &[TokenRun]) -> Result<Vec<f32>> {
        cache.begin_append(runs)?;
        let mut output = Vec::new();
        for layer in 0..cache.layers() {
            pollster::block_on(cache.store(layer, self.rows, &self.keys, &self.values))?;
            output = pollster::block_on(cache.attend(layer, &self.queries, ElementType::F32))?.to_f32();
        }
        Ok(output)
    }
}

impl ModelEngine<Cpu> for Tensors<Cpu> {
    fn step(&mut self, cache: &mut ModelCache<Cpu>, runs: &[TokenRun]) -> Result<bool> {
        self.run(cache, runs)?;
        cache.commit()?;
        Ok(false)
    }

    async fn wait(&self) -> Result<()> {
        Ok(())
    }

    async fn measure(&mut self, cache: &mut ModelCache<Cpu>, runs: &[TokenRun]) -> Result<Measured> {
        Ok(Measured { output: self.run(cache, runs)?, kernels: None })
    }

    fn queries(&self) -> &CpuTensor {
        &self.queries
    }
}
