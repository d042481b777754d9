//! A server under a budget, at random, on the CPU.

use kvpack::Result;
use kvpack::cache::{Growth, ModelCache};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, RowLayout};
use pollster::block_on;

use any_backend::serving::{Runner, Server, shape};

/// The calls of the cache.
struct Calls;

impl Runner<Cpu> for Calls {
    fn run(&mut self, cache: &mut ModelCache<Cpu>, rows: usize, inputs: &[[Vec<f32>; 3]]) -> Result<Vec<Vec<f32>>> {
        let mut outputs = Vec::new();
        for (layer, inputs) in inputs.iter().enumerate() {
            let [keys, values, queries] = inputs.each_ref().map(|rows| CpuTensor::F32(rows.clone()));
            block_on(cache.store(layer, RowLayout::token_major(rows, &shape()), &keys, &values))?;
            outputs.push(block_on(cache.attend(layer, &queries, ElementType::F32))?.to_f32());
        }
        Ok(outputs)
    }
}

/// A third of 10⁴ operations, over all recipes.
fn serve(growth: Growth, seed: u64) {
    for (recipe, operations) in [("f16", 1500), ("int8", 1000), ("saw-int4+centre", 500), ("kivi:4+window=0", 400)] {
        let mut server = Server::new(&Cpu::new(), recipe, growth, seed, |_| Calls);
        server.serve(operations);
        let (steps, refused, found) = (server.steps, server.refused, server.found);
        println!("{recipe}, {growth:?}: {steps} steps, {refused} refused, {found} prefixes found");
        // Sequences of more than a tile are rare under so small a budget.
        assert!(found > 2 || recipe != "f16", "{recipe}, {growth:?}: {found} prefixes found");
        assert!(refused > 1, "{recipe}, {growth:?}: the budget ran out {refused} times");
        assert!(steps > operations / 6, "{recipe}, {growth:?}: {steps} steps");
    }
}

#[test]
fn a_server_without_growth_keeps_its_budget() {
    serve(Growth::None, 1);
}

#[test]
fn a_server_that_grows_exactly_keeps_its_budget() {
    serve(Growth::Exact, 2);
}

#[test]
fn a_server_that_doubles_keeps_its_budget() {
    serve(Growth::Doubling, 3);
}
