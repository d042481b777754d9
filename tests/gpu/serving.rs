//! A server under a budget, at random, whose steps are encoded into one pass.

use kvpack::Result;
use kvpack::backend::Device;
use kvpack::cache::{Growth, ModelCache};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::wgpu::{LayerTensors, ModelStep, Wgpu};
use pollster::block_on;

use crate::gpu_device;
use any_backend::serving::{LAYERS, ROWS, Runner, Server, shape};

/// An engine with tensors of its own.
struct Passes {
    backend: Wgpu,
    steps: ModelStep,
    tensors: Vec<LayerTensors>,
}

impl Passes {
    fn new(backend: &Wgpu) -> Self {
        let zeroed = |_| LayerTensors::zeroed(backend.device(), &shape(), ROWS, ElementType::F32).unwrap();
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(zeroed).collect();
        let steps = ModelStep::new(backend, RowLayout::token_major(ROWS, &shape()), tensors.clone()).unwrap();
        Self { backend: backend.clone(), steps, tensors }
    }
}

impl Runner<Wgpu> for Passes {
    fn run(&mut self, cache: &mut ModelCache<Wgpu>, _: usize, inputs: &[[Vec<f32>; 3]]) -> Result<Vec<Vec<f32>>> {
        let (device, queue) = (self.backend.device(), self.backend.queue());
        for (of, inputs) in self.tensors.iter().zip(inputs) {
            for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(inputs) {
                queue.write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
            }
        }
        let open = cache.open_steps()?;
        let step = self.steps.write(&open)?;
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for layer in 0..LAYERS {
            step.encode_store(layer, &mut pass)?;
            step.encode_attend(layer, &mut pass)?;
        }
        drop(pass);
        queue.submit([encoder.finish()]);
        self.tensors.iter().map(|of| block_on(self.backend.download(&of.output))).collect()
    }
}

/// 10³ operations and more over two growths and three recipes.
#[test]
fn a_server_keeps_its_budget() {
    for (recipe, growth, operations) in
        [("f16", Growth::None, 500), ("int8", Growth::Doubling, 400), ("kivi:4+window=0", Growth::Exact, 300)]
    {
        let backend = gpu_device::shared();
        let mut server = Server::new(&backend, recipe, growth, 5, |_| Passes::new(&backend));
        server.serve(operations);
        println!("{recipe}, {growth:?}: {} steps, {} refused", server.steps, server.refused);
        assert!(server.refused > operations / 200, "{recipe}, {growth:?}: the budget ran out {} times", server.refused);
        assert!(server.steps > operations / 5, "{recipe}, {growth:?}: {} steps", server.steps);
    }
}
