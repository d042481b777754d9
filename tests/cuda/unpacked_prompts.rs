//! Prompts of policies and mixtures in parts, on CUDA.

use kvpack::Result;
use kvpack::backend::{Device, TensorRows};
use kvpack::cache::{ModelCache, PartQueries, Recipe};
use kvpack::cuda::{Cuda, KernelCache, LayerTensors, ModelStep, Tensor};
use kvpack::plan::{ElementType, RowLayout};
use pollster::block_on;

use any_backend::unpacked_prompts::{
    Calls, Engine, LAYERS, ROWS, Then, Work, check_mixture, check_policy, of_queries, pairs, shape,
};

/// An engine with tensors of its own, which launches all on its stream.
struct Launches {
    backend: Cuda,
    steps: ModelStep,
    tensors: Vec<LayerTensors>,
    lse: Option<Tensor>,
}

impl Launches {
    fn new(backend: &Cuda, recipe: &Recipe) -> Self {
        let zeroed = |heads: usize| Tensor::zeroed(backend.stream(), ROWS * heads * 64, ElementType::F32).unwrap();
        let of_layer = |_| LayerTensors { keys: zeroed(2), values: zeroed(2), queries: zeroed(4), output: zeroed(4) };
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(of_layer).collect();
        let steps = ModelStep::new(backend, RowLayout::token_major(ROWS, &shape()), tensors.clone()).unwrap();
        // Steps over centred keys write none.
        let lse = (!recipe.is_centred())
            .then(|| Tensor::zeroed(backend.stream(), ROWS * shape().query_heads(), ElementType::F32).unwrap());
        let steps = match &lse {
            Some(lse) => steps.with_log_sum_exps(vec![lse.clone(); LAYERS]).unwrap(),
            None => steps,
        };
        Self { backend: backend.clone(), steps, tensors, lse }
    }
}

impl Engine<Cuda> for Launches {
    fn run(&mut self, cache: &mut ModelCache<Cuda>, mut work: Work<'_, Cuda>) -> Result<Vec<Vec<f32>>> {
        let Self { backend, steps, tensors, lse } = self;
        let open = cache.open_steps()?;
        let step = steps.write(&open)?;
        for (layer, (of, inputs)) in tensors.iter().zip(work.inputs).enumerate() {
            for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(inputs) {
                tensor.write(backend.stream(), rows.as_slice().into())?;
            }
            step.launch(layer)?;
            if let Some(prompt) = work.prompt.as_deref_mut() {
                let queries = TensorRows { tensor: &of.queries, layout: of_queries(work.rows) };
                prompt.observe(cache, layer, PartQueries { queries, log_sum_exps: lse.as_ref() })?;
            }
        }
        drop(open);
        cache.commit()?;
        match (work.then, work.prompt) {
            (Then::Compress, Some(prompt)) => cache.compress_parts(prompt)?,
            (Then::Pack(spans), _) => cache.pack_parts(0, spans)?,
            _ => {}
        }
        self.tensors.iter().map(|of| block_on(self.backend.download(&of.output))).collect()
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn policies_keep_of_parts_what_they_keep_of_the_whole() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    for (name, policy, recipe) in pairs(false) {
        check_policy(&backend, &mut Launches::new(&backend, &recipe), (name, &policy, &recipe), 1e-4);
        check_policy(&backend, &mut Calls { knows: !recipe.is_centred() }, (name, &policy, &recipe), 1e-4);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn mixtures_pack_parts_as_the_whole() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    for recipe in ["cocktail", "mix=f16:0.2,calibquant:4:0.3,saw-int4"] {
        check_mixture(&backend, &mut Launches::new(&backend, &Recipe::f16()), recipe, 1e-4);
    }
}
