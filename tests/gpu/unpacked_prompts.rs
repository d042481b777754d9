//! Prompts of policies and mixtures in parts, encoded into the passes of an engine: what is measured, chosen and packed
//! goes into the same passes, and the library neither submits nor waits.

use kvpack::backend::{Device, TensorRows};
use kvpack::cache::{ModelCache, PartQueries, Recipe, TokenRun};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::policy::Policy;
use kvpack::wgpu::{LayerTensors, ModelStep, Tensor, Wgpu};
use kvpack::{Error, Result, SegmentFormat};
use pollster::block_on;

use crate::gpu_device;
use crate::round_trips::newest_submission;
use any_backend::unpacked_prompts::{
    Calls, Engine, LAYERS, PARTS, ROWS, TOKENS, Then, Work, check_mixture, check_policy, of_queries, pairs, prompt,
    shape,
};

/// An engine with tensors of its own, which encodes all into one pass for every step.
struct Passes {
    backend: Wgpu,
    steps: ModelStep,
    tensors: Vec<LayerTensors>,
    lse: Option<Tensor>,
    /// Submissions of the library.
    submissions: u64,
}

impl Passes {
    fn new(backend: &Wgpu, recipe: &Recipe) -> Self {
        let zeroed = |_| LayerTensors::zeroed(backend.device(), &shape(), ROWS, ElementType::F32).unwrap();
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(zeroed).collect();
        let steps = ModelStep::new(backend, RowLayout::token_major(ROWS, &shape()), tensors.clone()).unwrap();
        // Steps over centred keys write none.
        let lse = (!recipe.is_centred())
            .then(|| Tensor::zeroed(backend.device(), ROWS * shape().query_heads(), ElementType::F32).unwrap());
        let steps = match &lse {
            Some(lse) => steps.with_log_sum_exps(vec![lse.clone(); LAYERS]).unwrap(),
            None => steps,
        };
        Self { backend: backend.clone(), steps, tensors, lse, submissions: 0 }
    }
}

impl Engine<Wgpu> for Passes {
    fn run(&mut self, cache: &mut ModelCache<Wgpu>, mut work: Work<'_, Wgpu>) -> Result<Vec<Vec<f32>>> {
        let Self { backend, steps, tensors, lse, submissions } = self;
        let before = newest_submission(backend);
        let open = cache.open_steps()?;
        let step = steps.write(&open)?;
        let device = backend.device();
        let mut commands = Vec::new();
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for (layer, (of, inputs)) in tensors.iter().zip(work.inputs).enumerate() {
            for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(inputs) {
                backend.queue().write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
            }
            step.encode_store(layer, &mut pass)?;
            step.encode_attend(layer, &mut pass)?;
            if let Some(prompt) = work.prompt.as_deref_mut() {
                let queries = TensorRows { tensor: &of.queries, layout: of_queries(work.rows) };
                let queries = PartQueries { queries, log_sum_exps: lse.as_ref() };
                backend.record(|| prompt.observe(cache, layer, queries))?.encode(&mut pass);
            }
        }
        drop(open);
        cache.commit()?;
        let packing = match (work.then, work.prompt) {
            (Then::Compress, Some(prompt)) => Some(backend.record(|| cache.compress_parts(prompt))?),
            (Then::Pack(spans), _) => Some(backend.record(|| cache.pack_parts(0, spans))?),
            _ => None,
        };
        let packs = packing.is_some();
        if packs {
            let refused = cache.begin_swap_out(0).map(drop);
            assert!(matches!(refused, Err(Error::NotSubmitted { .. })), "recorded: {refused:?}");
        }
        packing.into_iter().for_each(|packing| packing.encode(&mut pass));
        drop(pass);
        commands.push(encoder.finish());
        // Until then calls that submit are refused.
        if packs {
            let refused = cache.begin_swap_out(0).map(drop);
            assert!(matches!(refused, Err(Error::NotSubmitted { .. })), "{refused:?}");
        }
        *submissions += newest_submission(backend) - before - 1;
        backend.queue().submit(commands);
        self.tensors.iter().map(|of| block_on(self.backend.download(&of.output))).collect()
    }
}

#[test]
fn policies_keep_of_parts_what_they_keep_of_the_whole() {
    let backend = gpu_device::fresh(); // where nobody else submits
    for (name, policy, recipe) in pairs(false) {
        let mut engine = Passes::new(&backend, &recipe);
        check_policy(&backend, &mut engine, (name, &policy, &recipe), 1e-4);
        assert_eq!(engine.submissions, 0, "{name}");
    }
}

/// The same by calls that submit for themselves, with log-sum-exps and without.
#[test]
fn calls_keep_the_same() {
    let backend = gpu_device::shared();
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    for knows in [true, false] {
        let policy = Policy::h2o(0.2).unwrap();
        check_policy(&backend, &mut Calls { knows }, ("h2o", &policy, &recipe), 1e-4);
    }
}

#[test]
fn mixtures_pack_parts_as_the_whole() {
    let backend = gpu_device::fresh(); // where nobody else submits
    for recipe in ["cocktail", "mix=f16:0.2,calibquant:4:0.3,saw-int4"] {
        let mut engine = Passes::new(&backend, &Recipe::f16());
        check_mixture(&backend, &mut engine, recipe, 1e-4);
        assert_eq!(engine.submissions, 0, "{recipe}");
    }
}

/// Budgets by sparsity cost one submission, whatever the number of layers, and nothing waits once the counts are there.
#[test]
fn counts_arrive_in_one_submission() {
    let backend = gpu_device::fresh();
    let (prompt, recipe) = (prompt(), Recipe::pack_all(SegmentFormat::saw_int4()));
    let mut cache = prompt.cache(&backend, &recipe);
    let policy = Policy::vlcache(0.2).unwrap();
    let mut observed = block_on(cache.observe_parts(0, policy, prompt.spans())).unwrap();
    let mut engine = Passes::new(&backend, &recipe);
    let mut start = 0;
    for tokens in PARTS {
        let runs = [TokenRun::unpacked(0, tokens)];
        block_on(cache.reserve_for_append(&runs)).unwrap();
        cache.begin_append(&runs).unwrap();
        let of = |rows: &[f32], heads: usize| rows[start * heads * 64..(start + tokens) * heads * 64].to_vec();
        let inputs: Vec<[Vec<f32>; 3]> = (0..LAYERS)
            .map(|at| [of(&prompt.keys[at], 2), of(&prompt.values[at], 2), of(&prompt.queries[at], 4)])
            .collect();
        let work = Work { rows: tokens, inputs: &inputs, prompt: Some(&mut observed), then: Then::Nothing };
        engine.run(&mut cache, work).unwrap();
        start += tokens;
    }
    assert_eq!((start, engine.submissions), (TOKENS, 0));
    // wgpu counts the map of a download as well.
    let word = block_on(backend.upload((&[0.0f32][..]).into())).unwrap();
    let before = newest_submission(&backend);
    block_on(backend.download(&word)).unwrap();
    let of_download = newest_submission(&backend) - before - 1;
    let before = newest_submission(&backend);
    observed.begin_counts(&cache).unwrap();
    while !observed.counts_have_arrived().unwrap() {}
    block_on(observed.finish_counts()).unwrap();
    assert_eq!(newest_submission(&backend) - before - 1, of_download);
    block_on(cache.reserve_for_parts(&observed)).unwrap();
    let before = newest_submission(&backend);
    let packing = backend.record(|| cache.compress_parts(&mut observed)).unwrap();
    assert!(!packing.is_empty());
    assert_eq!(newest_submission(&backend) - before - 1, 0);
    // What was chosen is known once it is submitted, and no step goes before it.
    let (chosen, held) = (block_on(observed.selection(&cache)), block_on(cache.positions(0, 0)));
    assert!(matches!(chosen, Err(Error::NotSubmitted { .. })), "{chosen:?}");
    assert!(matches!(held, Err(Error::NotSubmitted { .. })), "{held:?}");
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    let early = engine.steps.write(&cache.open_steps().unwrap()).map(drop);
    assert!(matches!(early, Err(Error::NotSubmitted { steps: 1, .. })), "{early:?}");
    cache.abandon();
    let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    packing.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    backend.queue().submit([encoder.finish()]);
    let selection = block_on(observed.selection(&cache)).unwrap();
    for layer in 0..LAYERS {
        assert_eq!(cache.tokens(layer, 0), Ok(selection.layers()[layer].count()));
    }
}

/// A recording refuses what waits or uploads, ends with an error or a panic, and does not nest.
#[test]
fn recordings_refuse_what_waits() {
    let backend = gpu_device::shared();
    let word = block_on(backend.upload((&[0.0f32][..]).into())).unwrap();
    let refused = backend.record(|| block_on(backend.download(&word)).map(drop));
    assert!(matches!(refused, Err(Error::Plan { .. })), "{refused:?}");
    let nested = backend.record(|| backend.record(|| Ok(())).map(drop));
    assert!(matches!(nested, Err(Error::Plan { .. })), "{nested:?}");
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| backend.record(|| panic!("on purpose"))));
    assert!(panics.is_err());
    assert_eq!(block_on(backend.download(&word)).unwrap(), [0.0]);
    // Another thread submits as before.
    let recorded = backend.record(|| {
        let other = backend.clone();
        let word = word.clone();
        std::thread::spawn(move || block_on(other.download(&word)).unwrap()).join().map(drop).unwrap();
        Ok(())
    });
    assert!(recorded.unwrap().is_empty());
}
