//! How often the device is asked between steps: every submission costs an engine time, and every wait stops it.

use kvpack::backend::Device;
use kvpack::cache::{ModelCache, TokenRun};
use kvpack::wgpu::Wgpu;
use pollster::block_on;

use crate::gpu_device;
use any_backend::model_steps::{self, LAYERS};
use any_backend::random_rows::Random;

/// Number of the newest submission, which is one of nothing.
pub fn newest_submission(backend: &Wgpu) -> u64 {
    let told = format!("{:?}", backend.queue().submit([]));
    told.chars().filter(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

/// A sequence leaves in one submission, whatever the number of its layers, spans and centres, and comes back bit for
/// bit. Windows of which none is due take none at all.
#[test]
fn a_sequence_leaves_in_one_submission() {
    for recipe in ["f16", "saw-int4+window=0+centre", "kivi:2+window=0+sink=128", "calibquant:2+window=1"] {
        let backend = gpu_device::fresh();
        let recipe_of = model_steps::recipe(recipe);
        let mut cache = model_steps::cache(&backend, &recipe_of);
        let mut random = Random::new(3);
        for tokens in [200, 200, 7] {
            let inputs = model_steps::inputs_of(&mut random, tokens);
            model_steps::submit(&mut cache, &[TokenRun::chunk(0, tokens)], &inputs);
            block_on(cache.pack_windows(0)).unwrap();
        }
        let submissions = |before: u64| newest_submission(&backend) - before - 1;
        let before = newest_submission(&backend);
        block_on(cache.pack_windows(0)).unwrap();
        assert_eq!(submissions(before), 0, "{recipe}: no window is due");

        let contents = |cache: &ModelCache<Wgpu>, sequence| {
            let of_layer = |layer| cache.dequantize(layer, sequence).unwrap();
            let rows = |tensor: &_| block_on(backend.download(tensor)).unwrap();
            let spans = (0..LAYERS).flat_map(of_layer);
            spans.map(|span| (span.tokens, rows(&span.keys), rows(&span.values))).collect::<Vec<_>>()
        };
        let held = contents(&cache, 0);
        // wgpu counts the map of a download as well.
        let word = block_on(backend.upload((&[0.0f32][..]).into())).unwrap();
        let before = newest_submission(&backend);
        block_on(backend.download(&word)).unwrap();
        let of_download = submissions(before);
        let before = newest_submission(&backend);
        let swapped = block_on(cache.swap_out(0)).unwrap();
        assert_eq!(submissions(before), of_download, "{recipe}");
        assert_eq!((swapped.length(), cache.length(0)), (407, Ok(0)));
        block_on(cache.swap_in(2, &swapped)).unwrap();
        assert!(contents(&cache, 2) == held, "{recipe}: something else came back");
        block_on(cache.swap_out(2)).unwrap();
        assert_eq!(cache.memory().in_use_bytes(), 0);
    }
}
