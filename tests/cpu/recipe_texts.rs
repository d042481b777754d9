//! Recipes in words: whatever is read can be used. A model of three layers takes a prompt by it, decodes, attends, and
//! compresses where the recipe says so.

use kvpack::backend::TensorRows;
use kvpack::cache::{ChunkStores, DenseLayer, MeasuredQueries, ModelCache, ModelRecipe, PromptSpan, StoreId, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::policy::{KeepRule, Merging, Spans, TextRule};
use kvpack::{AttentionShape, Error, Result};
use pollster::block_on;

use any_backend::random_rows::Random;

const LAYERS: usize = 3;
/// Tokens of the prompt, the last 20 of which are text.
const PROMPT: usize = 200;
/// Tokens that are appended, so that a window falls behind.
const APPENDED: usize = 150;
/// Texts that are tried.
const TEXTS: usize = 40;
/// Of them, those that must be recipes for the test to have shown something.
const LEAST_RECIPES: usize = 12;

/// A text that may be a recipe.
fn text(random: &mut Random) -> String {
    fn one<'a>(random: &mut Random, of: &[&'a str]) -> &'a str {
        of[random.below(of.len())]
    }
    let methods: Vec<String> = ModelRecipe::all().iter().map(ToString::to_string).collect();
    let method = |random: &mut Random| methods[random.below(methods.len())].clone();
    let policies = [
        "vlcache:0.4",
        "lookm:0.3",
        "h2o:0.5",
        "snapkv:0.3",
        "pyramidkv:0.4",
        "streaming:4,60",
        "random:0.2,9",
        "uniform:1",
    ];
    let base = match random.below(4) {
        0 => method(random),
        1 => format!("{}/{}", one(random, &policies), method(random)),
        2 => "cocktail".into(),
        _ => {
            let tiers = random.below(3);
            let shares: String =
                (0..=tiers).map(|_| format!("{}:{},", method(random), one(random, &["0", "0.2", "0.3"]))).collect();
            format!("mix={shares}{}", method(random))
        }
    };
    let options = (0..random.below(4)).map(|_| match random.below(10) {
        0 => format!("window={}", one(random, &["0", "1", "128", "18446744073709551615"])),
        1 => format!("sink={}", one(random, &["0", "3", "128", "18446744073709551615"])),
        2 => "tau=0,3".into(),
        3 => format!("query={}", one(random, &["int8", "int16"])),
        4 => "centre".into(),
        5 => format!("store={}", method(random)),
        6 | 7 => format!("layers={}:{}", one(random, &["0", "1", "0,2", "0,1,2"]), method(random)),
        8 => format!("merge={}", one(random, &["none", "averaged", "pivotal", "weighted"])),
        _ => format!("{}={}", "every", one(random, &["1", "100"])),
    });
    options.fold(base, |text, option| format!("{text}+{option}"))
}

#[test]
fn every_recipe_that_is_read_can_be_used() {
    let mut random = Random::new(7);
    let mut recipes = 0;
    for _ in 0..TEXTS {
        let text = text(&mut random);
        let Ok(recipe) = text.parse::<ModelRecipe>() else { continue };
        recipes += 1;
        if let Err(error) = serve(&recipe) {
            panic!("{text}: {error}");
        }
    }
    assert!(recipes >= LEAST_RECIPES, "{recipes} of {TEXTS} texts were recipes");
}

/// Layers by another method lack stores that chunks of a mixture go to: it is said when the text is read.
#[test]
fn mixtures_whose_layers_lack_stores_are_refused() {
    for text in [
        "mix=f16:0.2,int4:0.3,calibquant:2+layers=0:int8",
        "cocktail+layers=2:kivi:4",
        "cocktail+store=int4+layers=1:f16",
    ] {
        assert!(matches!(text.parse::<ModelRecipe>(), Err(Error::Recipe { .. })), "{text}");
    }
    for text in ["mix=f16:0.2,int4:0.3,calibquant:2+layers=0:f16", "mix=f16:0.5,int4+layers=0:int8"] {
        serve(&text.parse().unwrap()).unwrap_or_else(|error| panic!("{text}: {error}"));
    }
}

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

fn tensor(tokens: usize, heads: usize, seed: u64) -> CpuTensor {
    let mut random = Random::new(seed);
    CpuTensor::F32((0..tokens * heads * 64).map(|_| random.normal()).collect())
}

/// Does everything with a recipe that it says.
fn serve(recipe: &ModelRecipe) -> Result<()> {
    let layers: Vec<_> = (0..LAYERS).map(|layer| (shape(), recipe.layer(layer, &shape()))).collect();
    let mut cache = ModelCache::new(&Cpu::new(), &layers, 1)?;
    match (recipe.policy(), recipe.mixture()) {
        (Some(policy), _) => {
            let image = TokenRange::new(10, PROMPT - 20)?;
            let mut prompt = cache.observe(policy.clone(), Spans::new(PROMPT, &[image])?)?;
            let queries = tensor(PROMPT, 4, 1);
            for layer in 0..LAYERS {
                let dense = DenseLayer {
                    rows: RowLayout::token_major(PROMPT, &shape()),
                    keys: tensor(PROMPT, 2, 2),
                    values: tensor(PROMPT, 2, 3),
                };
                let rows = prompt.query_rows().map(|rows| rows.len());
                prompt.observe(layer, dense, rows.map(|rows| measured(&queries, rows)))?;
            }
            block_on(cache.compress(0, &prompt))?;
        }
        (None, Some(mixture)) => {
            let stores = mixture.stores_of(&[0.1, 0.9, 0.5, 0.3, 0.7, 0.2])?;
            let chunks = ChunkStores::new(TokenRange::new(3, PROMPT)?, 32, stores)?;
            let spans = block_on(chunks.upload(&Cpu::new(), 2, PROMPT))?;
            prefill(&mut cache, &spans.prompt())?;
        }
        (None, None) => {
            // A part of the prompt for every store that all layers have.
            let stores = layers.iter().map(|(_, recipe)| recipe.stores().len()).min().unwrap_or(1).min(3);
            let part = |store: usize| TokenRange::new(PROMPT * store / stores, PROMPT * (store + 1) / stores);
            let span = |store: usize| Ok(PromptSpan::run(part(store)?, StoreId(store as u8)));
            prefill(&mut cache, &(0..stores).map(span).collect::<Result<Vec<_>>>()?)?;
        }
    }
    append(&mut cache, TokenRun::chunk(0, APPENDED - 4))?;
    append(&mut cache, TokenRun::chunk(0, 3))?;
    append(&mut cache, TokenRun::decode(0))?;
    block_on(cache.pack_windows(0))?;
    if let (Some(policy), Some(every)) = (recipe.policy(), recipe.every())
        && cache.compression_due(0, every)?
    {
        let rows = policy.rows_again(cache.appended(0)?);
        let queries = tensor(PROMPT + APPENDED, 4, 4);
        let of_layers = vec![measured(&queries, rows); if rows > 0 { LAYERS } else { 0 }];
        let spans = Spans::new(cache.length(0)?, &[])?;
        block_on(cache.compress_again(0, policy, &spans, &of_layers))?;
    }
    append(&mut cache, TokenRun::decode(0))?;
    assert_eq!(cache.length(0), Ok(PROMPT + APPENDED + 1), "{recipe}");
    Ok(())
}

fn measured(tensor: &CpuTensor, rows: usize) -> MeasuredQueries<'_, CpuTensor> {
    let layout = RowLayout { tokens: rows, token_stride: 4 * 64, head_stride: 64 };
    MeasuredQueries { queries: TensorRows { tensor, layout }, known_lse: None }
}

fn prefill(cache: &mut ModelCache<Cpu>, spans: &[PromptSpan<'_, kvpack::cpu::CpuIndices>]) -> Result<()> {
    let (keys, values) = (tensor(PROMPT, 2, 2), tensor(PROMPT, 2, 3));
    block_on(cache.reserve_for_prefill(spans))?;
    cache.begin_prefill(0, PROMPT, spans)?;
    for layer in 0..LAYERS {
        block_on(cache.store_prompt(layer, RowLayout::token_major(PROMPT, &shape()), &keys, &values, spans))?;
    }
    cache.commit()
}

/// Appends a run of tokens, and attends to what is stored then, if it is short.
fn append(cache: &mut ModelCache<Cpu>, run: TokenRun) -> Result<()> {
    let (keys, values, queries) = (tensor(run.tokens(), 2, 5), tensor(run.tokens(), 2, 6), tensor(run.tokens(), 4, 7));
    block_on(cache.reserve_for_append(&[run]))?;
    cache.begin_append(&[run])?;
    for layer in 0..LAYERS {
        block_on(cache.store(layer, RowLayout::token_major(run.tokens(), &shape()), &keys, &values))?;
        if run.tokens() < 4 {
            let output = block_on(cache.attend(layer, &queries, ElementType::F32))?;
            assert!(output.to_f32().iter().all(|x| x.is_finite()));
        }
    }
    cache.commit()
}

/// Every word of a policy's options means something else, and what is missing is told.
#[test]
fn options_of_policies_are_what_they_say() {
    let policy = |text: &str| text.parse::<ModelRecipe>().unwrap().policy().cloned().unwrap();
    for (word, merging) in [
        ("none", None),
        ("averaged", Some(Merging::Averaged)),
        ("pivotal", Some(Merging::Pivotal)),
        ("weighted", Some(Merging::Weighted)),
    ] {
        for text in ["lookm:0.2", "h2o:0.2"] {
            assert_eq!(policy(&format!("{text}+merge={word}")).merging, merging, "{word}");
        }
    }
    for (word, rule) in [("equal", TextRule::Equal), ("raised", TextRule::Raised), ("stays", TextRule::Stays)] {
        for text in ["lookm:0.2", "h2o:0.2"] {
            let KeepRule::Best { text, .. } = policy(&format!("{text}+text={word}")).keep else { panic!("{text}") };
            assert_eq!(text, rule);
        }
    }
    for text in ["h2o:0.2+merge=mean", "h2o:0.2+text=last", "h2o:0.2+every=0"] {
        assert!(text.parse::<ModelRecipe>().is_err(), "{text}");
    }
    let refused = "kivi".parse::<ModelRecipe>().unwrap_err().to_string();
    assert!(refused.contains("needs a width: kivi:4, kivi:2"), "{refused}");
    let refused = "saw-int4:4".parse::<ModelRecipe>().unwrap_err().to_string();
    assert!(refused.contains("takes no width"), "{refused}");
}

/// A mixture packs nothing that is appended, so it has no window.
#[test]
fn mixtures_have_no_windows() {
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let layer = |text: &str| text.parse::<ModelRecipe>().unwrap().layer(0, &shape);
    assert_eq!(layer("cocktail+window=5"), layer("cocktail"));
}
