//! Windows whose rows are rotated before they are packed: they pass through scratch memory, which holds as many as
//! steps have packed at once, and not one for every sequence.

use kvpack::backend::Device;
use kvpack::cache::{ModelCache, Recipe, TokenRun};
use kvpack::cpu::Cpu;
use kvpack::format::{AffineFormat, Grouping, Rotation, TensorFormat};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::wgpu::{LayerTensors, ModelStep};
use kvpack::{AttentionShape, Bits, SegmentFormat};
use pollster::block_on;

use crate::gpu_device;
use any_backend::random_rows::Random;

const SEQUENCES: usize = 20;

fn shape() -> AttentionShape {
    AttentionShape::new(2, 1, 64).unwrap()
}

fn recipe() -> Recipe {
    let rotated = AffineFormat::new(Bits::Four, Grouping::Channel).rotated(Rotation::hadamard(64));
    let both = TensorFormat::Affine(rotated);
    Recipe::pack_all(SegmentFormat { key: both, value: both }).with_window(0)
}

fn run(sequence: usize, tokens: usize) -> TokenRun {
    if tokens == 1 { TokenRun::decode(sequence) } else { TokenRun::chunk(sequence, tokens) }
}

/// The tiles of all sequences become due in one step.
#[test]
fn tiles_of_many_sequences_become_due_at_once() {
    let backend = gpu_device::shared();
    let layers = vec![(shape(), recipe())];
    let (mut cache, mut twin) = (
        ModelCache::new(&backend, &layers, SEQUENCES).unwrap(),
        ModelCache::new(&Cpu::new(), &layers, SEQUENCES).unwrap(),
    );
    let most = SEQUENCES * 127;
    let tensors = vec![LayerTensors::zeroed(backend.device(), &shape(), most, ElementType::F32).unwrap()];
    let mut steps = ModelStep::new(&backend, RowLayout::token_major(most, &shape()), tensors.clone()).unwrap();
    let mut random = Random::new(5);
    let mut windows = Vec::new();
    for tokens in [127, 1] {
        let runs: Vec<TokenRun> = (0..SEQUENCES).map(|sequence| run(sequence, tokens)).collect();
        let rows: Vec<f32> = (0..SEQUENCES * tokens * 64).map(|_| random.unit()).collect();
        let layout = RowLayout::token_major(SEQUENCES * tokens, &shape());
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        for tensor in [&tensors[0].keys, &tensors[0].values] {
            backend.queue().write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(&rows));
        }
        let open = cache.open_steps().unwrap();
        windows.push(open[0].table.layout().windows()[0].windows);
        let step = steps.write(&open).unwrap();
        let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        step.encode_store(0, &mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default())).unwrap();
        backend.queue().submit([encoder.finish()]);
        cache.commit().unwrap();

        block_on(twin.reserve_for_append(&runs)).unwrap();
        twin.begin_append(&runs).unwrap();
        let rows = block_on(Cpu::new().upload(rows.as_slice().into())).unwrap();
        block_on(twin.store(0, layout, &rows, &rows)).unwrap();
        twin.commit().unwrap();
    }
    assert_eq!(windows, [8, 32], "windows of the layouts");
    for sequence in 0..SEQUENCES {
        let (found, expected) = (cache.dequantize(0, sequence).unwrap(), twin.dequantize(0, sequence).unwrap());
        assert_eq!(found.iter().map(|span| span.tokens).collect::<Vec<_>>(), [128]);
        for (found, expected) in found.iter().zip(&expected) {
            let download = |tensor| block_on(backend.download(tensor)).unwrap();
            for (found, expected) in [(&found.keys, &expected.keys), (&found.values, &expected.values)] {
                let expected = block_on(Cpu::new().download(expected)).unwrap();
                let near = |(found, expected): (&f32, &f32)| (found - expected).abs() <= 2e-3;
                assert!(download(found).iter().zip(&expected).all(near), "sequence {sequence}");
            }
        }
    }
}
