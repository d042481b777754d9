//! Queries and output in one buffer, as engines have them that allocate from large pages.

use kvpack::backend::{AttendOptions, Device};
use kvpack::cache::PromptSpan;
use kvpack::plan::{ElementType, Elements, RowLayout, TokenRange};
use kvpack::wgpu::{Scratch, StepPlan, StepTensors, Tensor};
use kvpack::{AttentionShape, Bits, Error, KvCache, Recipe, SegmentFormat};
use pollster::block_on;

use crate::expected::values;
use crate::gpu_device::shared;

/// Steps that merge by themselves (few states), that merge by a launch of their own (many), and whose queries are prepared
/// by one write the same bits as with buffers apart, and wgpu has nothing to say.
#[test]
fn queries_and_output_may_lie_in_one_buffer() {
    let backend = shared();
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let row = 4 * 64;
    for format in [SegmentFormat::F16, SegmentFormat::per_channel(Bits::Four), SegmentFormat::saw_int4()] {
        for tokens in [200, 3000] {
            let mut cache = KvCache::new(backend.clone(), shape, 1, Recipe::pack_all(format)).unwrap();
            let upload = |elements: &[f32]| block_on(backend.upload(Elements::F32(elements))).unwrap();
            let (keys, stored) = (upload(&values(tokens * 128, 1)), upload(&values(tokens * 128, 2)));
            let prompt = [PromptSpan::packed(TokenRange::new(0, tokens).unwrap())];
            block_on(cache.prefill(0, RowLayout::token_major(tokens, &shape), &keys, &stored, &prompt)).unwrap();
            // 64 words between them, since offsets are aligned to at most 256 bytes.
            let page = upload(&[values(row, 3), vec![7.0; 64 + row]].concat());
            let (queries, output) = (page.slice(0, row).unwrap(), page.slice(row + 64, row).unwrap());

            let plan = cache.plan(&[0]).unwrap();
            let step =
                StepPlan::new(backend.capabilities(), &plan, ElementType::F32, AttendOptions::default()).unwrap();
            let capabilities = backend.capabilities();
            if tokens == 200 && capabilities.coherent && capabilities.limits.storage_buffers >= 10 {
                let merges = step.launch_labels().iter().all(|label| !label.contains("merge_states"));
                assert!(merges, "few states are merged by attend: {:?}", step.launch_labels());
            }
            let run = |output: &Tensor| {
                let scratch = block_on(Scratch::new(backend.device(), step.scratch())).unwrap();
                let tensors = StepTensors { queries: &queries, output, lse: None };
                let launches = step.bind(backend.kernels(), &cache.stores(), &scratch, tensors).unwrap();
                backend.queue().write_buffer(&scratch.tables, 0, step.tables());
                let mut encoder = backend.device().create_command_encoder(&Default::default());
                launches.encode(&mut encoder.begin_compute_pass(&Default::default()));
                // Uncaptured errors panic.
                backend.queue().submit([encoder.finish()]);
                block_on(backend.download(output)).unwrap()
            };
            let apart = Tensor::zeroed(backend.device(), row, ElementType::F32).unwrap();
            assert_eq!(run(&output), run(&apart), "{format}, {tokens} tokens: {:?}", step.launch_labels());
            let around = block_on(backend.download(&page.slice(row, 64).unwrap())).unwrap();
            assert!(around.iter().all(|&x| x == 7.0));

            let scratch = block_on(Scratch::new(backend.device(), step.scratch())).unwrap();
            let tensors = StepTensors { queries: &queries, output: &queries, lse: None };
            let bound = step.bind(backend.kernels(), &cache.stores(), &scratch, tensors);
            assert!(matches!(bound, Err(Error::Buffer { what: "output", .. })));
        }
    }
}
