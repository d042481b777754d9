//! Kernel `hadamard` against its CPU reference, bit for bit.

use kvpack::AttentionShape;
use kvpack::Error;
use kvpack::backend::Device;
use kvpack::cpu;
use kvpack::format::{Direction, HEAD_DIMS, Rotation};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::wgpu::{HadamardPlan, Kernels, Tensor, Wgpu};
use pollster::block_on;

use super::expected::{Rows, values};
use crate::gpu_device::shared;

fn run(backend: &Wgpu, plan: &HadamardPlan, input: &Tensor) -> Vec<f32> {
    let kernels = Kernels::new(backend.device(), Default::default());
    let output = Tensor::zeroed(backend.device(), plan.elements(), ElementType::F32).unwrap();
    let launches = plan.bind(&kernels, input, &output).unwrap();
    let mut encoder = backend.device().create_command_encoder(&Default::default());
    launches.encode(&mut encoder.begin_compute_pass(&Default::default()));
    backend.queue().submit([encoder.finish()]);
    block_on(backend.download(&output)).unwrap()
}

/// Every head dimension and order, both ways, with and without signs, rows of every type wherever they lie.
#[test]
fn rows_are_rotated_bit_for_bit() {
    let backend = shared();
    for (i, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        let shape = AttentionShape::new(3, 3, head_dim).unwrap();
        let tokens = 37;
        let layout = match i % 2 {
            0 => RowLayout::token_major(tokens, &shape),
            _ => RowLayout::head_major(tokens, &shape),
        };
        let mut elements = values(layout.elements_needed(&shape), i as u32 + 1);
        // What counts as 0, what just does not, and what is large.
        (elements[1], elements[2], elements[4]) = (1e-38, 9e-16, 6e4);
        let mut order = 2;
        while order <= Rotation::largest_order(head_dim) {
            for (turn, rotation) in
                [Rotation::hadamard(order), Rotation::randomized(order, 0xdead_beef), Rotation::dealt(order, 7)]
                    .into_iter()
                    .enumerate()
            {
                let direction = if (turn + order) % 3 == 0 { Direction::Inverse } else { Direction::Forward };
                let element_type = ElementType::ALL[(turn + i) % 3];
                let rows = Rows::new(&backend, layout, elements.clone(), element_type);
                let plan = HadamardPlan::new(&shape, layout, rotation, direction).unwrap();
                let mut expected: Vec<f32> = (0..tokens * 3)
                    .flat_map(|row| rows.elements[layout.row(row / 3, row % 3)..][..head_dim].to_vec())
                    .collect();
                cpu::hadamard(&mut expected, head_dim, rotation, direction).unwrap();
                let got = run(&backend, &plan, &rows.tensor);
                let at = got.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(at.map(|i| (i, got[i], expected[i])), None, "{rotation} {direction:?} of {head_dim}");
            }
            order *= 2;
        }
    }
}

#[test]
fn rotations_that_do_not_fit_are_refused() {
    let shape = AttentionShape::new(1, 1, 96).unwrap();
    let rows = RowLayout::token_major(2, &shape);
    let plan = |rows, order| HadamardPlan::new(&shape, rows, Rotation::hadamard(order), Direction::Forward);
    assert!(matches!(plan(rows, 64), Err(Error::Format { .. })));
    assert!(matches!(plan(RowLayout::token_major(0, &shape), 32), Err(Error::NoTokens { .. })));
    let backend = shared();
    let kernels = Kernels::new(backend.device(), Default::default());
    let tensor = |elements, element_type| Tensor::zeroed(backend.device(), elements, element_type).unwrap();
    let (full, short) = (tensor(192, ElementType::F32), tensor(96, ElementType::F32));
    let bind = |input: &Tensor, output: &Tensor| plan(rows, 32).unwrap().bind(&kernels, input, output).err();
    assert!(matches!(bind(&short, &full), Some(Error::Elements { .. })));
    assert!(matches!(bind(&full, &short), Some(Error::Elements { .. })));
    assert!(matches!(bind(&full, &tensor(192, ElementType::F16)), Some(Error::Buffer { .. })));
}
