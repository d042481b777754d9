//! Prompts that are measured, evicted, merged and packed through wgpu, against the CPU. `gpu_device` says on which adapter.
#![cfg(feature = "wgpu")]

mod compressed;
mod gpu_device;
mod random_rows;

use compressed::{Prompt, policies, state};
use kvpack::cache::{Recipe, SpanPositions};
use kvpack::cpu::Cpu;
use kvpack::{AttentionShape, Bits, SegmentFormat};
use pollster::block_on;

/// The device keeps the tokens that the CPU keeps and packs what the CPU packs; merged rows are sums in f32, which may round
/// otherwise. Two runs give the same bits.
#[test]
fn the_device_keeps_what_the_cpu_keeps() {
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let prompt = Prompt::new(shape, 3, 300, 11);
    let recipes = [Recipe::f16(), Recipe::pack_all(SegmentFormat::saw_int4()), Recipe::calibquant(Bits::Four)];
    for (name, policy) in policies(0.2) {
        for recipe in &recipes {
            let mut on_cpu = prompt.cache(&Cpu::new(), recipe);
            let observed = prompt.observe(&on_cpu, policy.clone());
            let expected = block_on(on_cpu.compress(0, &observed)).unwrap();
            let run = || {
                let mut cache = prompt.cache(&gpu_device::shared(), recipe);
                let observed = prompt.observe(&cache, policy.clone());
                let selection = block_on(cache.compress(0, &observed)).unwrap();
                (selection, state(&cache))
            };
            let (selection, device) = run();
            assert_eq!(selection, expected, "{name}");
            assert!(run() == (selection, device.clone()), "{name}: two runs differ");
            let cpu = state(&on_cpu);
            assert_eq!(device.1, cpu.1);
            for (layer, (device, cpu)) in device.0.iter().zip(&cpu.0).enumerate() {
                assert_eq!(device.len(), cpu.len());
                for (device, cpu) in device.iter().zip(cpu) {
                    assert_eq!((device.0, &device.1), (cpu.0, &cpu.1), "{name}, layer {layer}");
                    assert!(matches!(device.1, SpanPositions::PerHead(_)));
                    match policy.merging {
                        None => assert!(device.2 == cpu.2 && device.3 == cpu.3, "{name}, layer {layer}"),
                        Some(_) => {
                            let packs = recipe.packs();
                            compare_merged(&device.2, &cpu.2, packs);
                            compare_merged(&device.3, &cpu.3, packs);
                        }
                    }
                }
            }
        }
    }
}

/// A code may fall to the other side where sums round otherwise: few do, and by one step.
fn compare_merged(device: &[f32], cpu: &[f32], packed: bool) {
    let differ = |limit: f32| device.iter().zip(cpu).filter(|(x, y)| (*x - *y).abs() > limit).count();
    assert_eq!(device.len(), cpu.len());
    assert_eq!(differ(if packed { 0.5 } else { 2e-3 }), 0);
    assert!(differ(2e-3) <= device.len() / 100, "{} of {} elements differ", differ(2e-3), device.len());
}
