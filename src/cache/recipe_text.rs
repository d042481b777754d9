//! The text form of recipes: one grammar for command lines, tables and configuration files.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::evictions::{EVICTIONS, Eviction, EvictionOption};
use super::methods::Choice;
use super::mixture::{Mixture, MixtureOption};
use super::parsed::{Parsed, did_you_mean};
use super::recipe_option::{RecipeOption, option_without_value};
use crate::policy::Policy;
use crate::{Error, Result};

/// A recipe for every layer of a model, in its text form.
///
/// ```text
/// recipe  = ([policy "/"] method [":" bits] | mixture) { "+" option }
/// policy  = name ":" arguments             which tokens of a prompt stay; alone, they stay in f16
/// mixture = "cocktail"                     chunks of a context in f16, kivi:4 and kivi:2, by how much they resemble a query
///         | "mix=" { method [":" bits] ":" share "," } method [":" bits]    the best share of the chunks by the first method, …
/// option  = "window=" tokens               newest tokens in f16, at least, and tiles packed when full (128 if not said,
///                                          but for methods that pack tokens as they arrive)
///         | "sink=" tokens                 first tokens in f16; whole tiles of 128 where tiles are packed (0); not of
///                                          what a policy keeps or a mixture stores
///         | "tau=" τ1 "," τ2               calibrated scores of packed spans, CalibQuant's eq. 7 (none)
///         | "query=" ("int8" | "int16")    precision of query and weights in integer dot products (by format)
///         | "centre"                       keys minus the mean of the first 64 of their sequence; not with ranges per channel
///         | "store=" method [":" bits]     one more store, which spans of a prompt may name: the first after the method's own
///         | "layers=" layer { "," layer } ":" method [":" bits]    these layers by another method
///         | "merge=" ("none" | "averaged" | "pivotal" | "weighted")   what becomes of evicted tokens (as the policy has it)
///         | "text=" ("equal" | "raised" | "stays")                    whether text goes before images (as the policy has it)
///         | "every=" tokens                after this many appended tokens the policy chooses again from all that is stored (never)
///         | "reorder=none"                 the chunks of a mixture stay in the order of the context; each run of one store has its own pages
///         | "search=none"                  as many chunks of a mixture get each method, whatever they resemble
/// ```
///
/// The methods are [`METHODS`](super::METHODS), and the policies [`EVICTIONS`](super::EVICTIONS). Options apply to
/// every layer, including layers with another method. The method packs the tokens that a policy keeps:
/// [`ModelCache::observe`](super::ModelCache::observe) takes [`ModelRecipe::policy`], and
/// [`ModelCache::compression_due`](super::ModelCache::compression_due) takes [`ModelRecipe::every`].
///
/// ```
/// use kvpack::cache::{Appended, ModelRecipe, StoreId};
/// let shape = kvpack::AttentionShape::new(32, 8, 128)?;
/// let recipe: ModelRecipe = "kivi:2+window=256+layers=0,1:f16".parse()?;
/// assert_eq!(recipe.layer(5, &shape).appended(), Appended::Tiles { to: StoreId::PACKED, newer: 256 });
/// assert_eq!(recipe.layer(1, &shape).packed().format, kvpack::SegmentFormat::F16);
/// assert_eq!(recipe.to_string(), "kivi:2+window=256+layers=0,1:f16");
///
/// // A fifth of a prompt by LOOK-M, in 4 bits.
/// let recipe: ModelRecipe = "lookm:0.2/saw-int4".parse()?;
/// assert_eq!(recipe.policy(), Some(&kvpack::policy::Policy::lookm(0.2)?));
/// assert_eq!(recipe.layer(0, &shape).packed().format, kvpack::SegmentFormat::saw_int4());
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModelRecipe {
    text: String,
    policy: Option<Policy>,
    every: Option<usize>,
    pub(super) base: Base,
    pub(super) layers: Vec<(usize, Choice)>,
    pub(super) options: Vec<RecipeOption>,
}

/// The method of layers that the text does not name.
#[derive(Clone, Debug)]
pub(super) enum Base {
    Method(Choice),
    Mixture(Mixture),
}

impl ModelRecipe {
    /// Every method at every width, without options.
    pub fn all() -> Vec<Self> {
        let recipe = |choice: Choice| Self::new(choice.to_string(), None, Base::Method(choice));
        Choice::all().map(recipe).collect()
    }

    const fn new(text: String, policy: Option<Policy>, base: Base) -> Self {
        Self { text, policy, every: None, base, layers: Vec::new(), options: Vec::new() }
    }

    /// The policy that evicts tokens of a prompt, if the text names one.
    pub fn policy(&self) -> Option<&Policy> {
        self.policy.as_ref()
    }

    /// The number of appended tokens after which a sequence is compressed again
    /// ([`ModelCache::compress_again`](super::ModelCache::compress_again)), if the text sets it.
    pub const fn every(&self) -> Option<usize> {
        self.every
    }

    /// The stores of a context's chunks, if the text names several formats.
    pub fn mixture(&self) -> Option<&Mixture> {
        match &self.base {
            Base::Method(_) => None,
            Base::Mixture(mixture) => Some(mixture),
        }
    }

    /// The recipe, if it stores tokens as they arrive: for callers that neither evict tokens of a prompt nor compare
    /// its chunks.
    ///
    /// # Errors
    /// [`Error::Recipe`] when it begins with a policy or is a mixture.
    pub fn plain(&self) -> Result<&Self> {
        let reason = match (&self.policy, &self.base) {
            (None, Base::Method(_)) => return Ok(self),
            (Some(_), _) => "it evicts tokens of a prompt, and here all are kept; leave out what is before the '/'",
            (None, Base::Mixture(_)) => "it compares chunks of a prompt, and here tokens are stored as they come",
        };
        Err(Error::Recipe { given: self.text.clone(), reason: reason.into() })
    }
}

impl fmt::Display for ModelRecipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for ModelRecipe {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse(text).map_err(|reason| Error::Recipe { given: text.into(), reason })
    }
}

fn parse(text: &str) -> Parsed<ModelRecipe> {
    // Both spellings are read, and one is kept: a recipe has one text.
    let parts: Vec<&str> = text.split('+').map(|part| if part == "center" { "centre" } else { part }).collect();
    let (policy, base) = policy_and_base(parts[0])?;
    let mut recipe = ModelRecipe::new(parts.join("+"), policy, base);
    for &part in &parts[1..] {
        if part == "centre" {
            recipe.options.push(RecipeOption::Centre);
            continue;
        }
        let (name, value) = part.split_once('=').ok_or_else(|| option_without_value(part))?;
        match (name, EvictionOption::parse(name, value)) {
            ("layers", _) => recipe.layers.extend(layer_choices(value)?),
            (_, None) => match (MixtureOption::parse(name, value), &mut recipe.base) {
                (None, _) => recipe.options.push(RecipeOption::parse(name, value)?),
                (Some(option), Base::Mixture(mixture)) => mixture.apply(option?),
                (Some(_), Base::Method(_)) => {
                    return Err(format!("{part}: nothing is in chunks; cocktail and mix= store a context in chunks"));
                }
            },
            (_, Some(option)) => match &mut recipe.policy {
                Some(policy) => option?.apply(policy, &mut recipe.every)?,
                None => {
                    return Err(format!("{part}: nothing is evicted; the methods that do are {}", Eviction::names()));
                }
            },
        }
    }
    recipe.check_layers()?;
    let mut seen = BTreeSet::new();
    match recipe.layers.iter().find(|(layer, _)| !seen.insert(*layer)) {
        Some((twice, _)) => Err(format!("layer {twice} is named twice")),
        None => Ok(recipe),
    }
}

/// The policy and the method: `lookm:0.2/saw-int4`.
fn policy_and_base(text: &str) -> Parsed<(Option<Policy>, Base)> {
    if let Some(mixture) = Mixture::parse(text) {
        return Ok((None, Base::Mixture(mixture?)));
    }
    let (policy, method) = match text.split_once('/') {
        Some((policy, method)) => (policy, method),
        None if Eviction::parse(text).is_some() => (text, "f16"),
        None => return Ok((None, Base::Method(Choice::parse(text)?))),
    };
    let unknown = || {
        let name = policy.split(':').next().unwrap_or(policy);
        let near = did_you_mean(name, EVICTIONS.iter().map(|eviction| eviction.name));
        format!("there is no policy '{policy}'{near}; the policies are {}", Eviction::names())
    };
    Ok((Some(Eviction::parse(policy).ok_or_else(unknown)??), Base::Method(Choice::parse(method)?)))
}

fn layer_choices(value: &str) -> Parsed<Vec<(usize, Choice)>> {
    let needed = || format!("layers={value}: layers and a method are needed, as in layers=0,1:f16");
    let (layers, text) = value.split_once(':').ok_or_else(needed)?;
    let choice = Choice::parse(text)?;
    layers.split(',').map(|layer| Ok((layer.parse().map_err(|_| needed())?, choice))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{ChunkOrder, METHODS, MOST_STORES, Recipe, StoreId};
    use super::*;
    use crate::cache::Appended;
    use crate::format::{AttentionShape, Bits, SegmentFormat};
    use crate::policy::{BudgetRule, KeepRule, Merging, TextRule};

    fn shape() -> AttentionShape {
        AttentionShape::new(4, 2, 64).unwrap()
    }

    #[test]
    fn every_method_parses_as_it_is_printed() {
        let all = ModelRecipe::all();
        assert!(all.len() > METHODS.len());
        for recipe in all {
            let parsed: ModelRecipe = recipe.to_string().parse().unwrap();
            assert_eq!(parsed.layer(0, &shape()), recipe.layer(0, &shape()), "{recipe}");
            assert_eq!(parsed.to_string(), recipe.to_string());
            recipe.layer(0, &shape()).packed().format.check(&shape()).unwrap();
        }
    }

    #[test]
    fn recipes_of_several_stores_print_as_they_were_written() {
        let text = "saw-int4+store=calibquant:2+tau=0,3+store=kivi:2+sink=64";
        let recipe: ModelRecipe = text.parse().unwrap();
        assert_eq!(recipe.to_string(), text);
        let layer = recipe.layer(0, &shape());
        let formats: Vec<SegmentFormat> = layer.stores().iter().map(|store| store.format).collect();
        let kivi: ModelRecipe = "kivi:2".parse().unwrap();
        let two_bits = kivi.layer(0, &shape()).packed().format;
        let expected = [SegmentFormat::F16, SegmentFormat::saw_int4(), SegmentFormat::calibquant(Bits::Two), two_bits];
        assert_eq!(formats, expected);
        assert!(layer.stores()[1..].iter().all(|store| store.calibration.is_some()));
        assert_eq!(layer.appended(), Appended::AtOnce(StoreId::PACKED));
        // A store for appended tiles alone follows those that prompts name.
        let beside: ModelRecipe = "calibquant:2+store=saw-int4+window=256".parse().unwrap();
        let layer = beside.layer(0, &shape());
        let formats: Vec<SegmentFormat> = layer.stores().iter().map(|store| store.format).collect();
        let two_bits = SegmentFormat::calibquant(Bits::Two);
        assert_eq!(formats, [SegmentFormat::F16, two_bits, SegmentFormat::saw_int4(), two_bits.with_tile_ranges()]);
        assert_eq!(layer.appended(), Appended::Tiles { to: StoreId(3), newer: 256 });
        assert_eq!(layer.with_appended(Appended::Keep).stores().len(), 3);
        // f16 next to packed stores that only prompts use.
        let prompts: ModelRecipe = "f16+store=saw-int4+store=calibquant:2".parse().unwrap();
        let layer = prompts.layer(0, &shape());
        assert_eq!((layer.stores().len(), layer.appended()), (3, Appended::Keep));
        let many = "int8".to_owned() + &"+store=int4".repeat(MOST_STORES - 1);
        assert!(many.parse::<ModelRecipe>().unwrap_err().to_string().contains("at most 16"));
        let many = "cocktail".to_owned() + &"+store=int4".repeat(MOST_STORES - 2);
        assert!(many.parse::<ModelRecipe>().unwrap_err().to_string().contains("at most 16"));
        let most = "cocktail".to_owned() + &"+store=int4".repeat(MOST_STORES - 3);
        assert_eq!(most.parse::<ModelRecipe>().unwrap().layer(0, &shape()).stores().len(), MOST_STORES);
    }

    #[test]
    fn policies_go_with_every_method() {
        let policy = |text: &str| text.parse::<ModelRecipe>().unwrap().policy().cloned();
        assert_eq!(policy("saw-int4"), None);
        let expected = [
            ("vlcache:0.1", Policy::vlcache(0.1)),
            ("lookm:0.2", Policy::lookm(0.2)),
            ("h2o:0.2", Policy::h2o(0.2)),
            ("snapkv:0.2", Policy::snapkv(0.2)),
            ("pyramidkv:0.2", Policy::pyramidkv(0.2)),
            ("streaming:4,1024", Ok(Policy::streaming(4, 1024))),
            ("random:0.2", Policy::random(0.2, 0)),
            ("random:0.2,9", Policy::random(0.2, 9)),
            ("uniform:0.1", Policy::vlcache(0.1).map(|policy| Policy { budget: BudgetRule::Uniform, ..policy })),
        ];
        for (text, expected) in expected {
            assert_eq!(policy(text), Some(expected.unwrap()), "{text}");
            assert_eq!(text.parse::<ModelRecipe>().unwrap().layer(0, &shape()), Recipe::f16());
            for method in ModelRecipe::all() {
                let both = format!("{text}/{method}+sink=64");
                let recipe: ModelRecipe = both.parse().unwrap();
                assert_eq!((recipe.to_string(), recipe.policy().cloned()), (both, policy(text)));
                assert_eq!(recipe.layer(0, &shape()), method.layer(0, &shape()).with_sink(64));
                assert!(recipe.plain().is_err() && method.plain().is_ok());
            }
        }
        let changed = policy("lookm:0.2/saw-int4+merge=none+text=stays").unwrap();
        let KeepRule::Best { text, .. } = changed.keep else { panic!("{changed:?}") };
        assert_eq!((changed.merging, text), (None, TextRule::Stays));
        let text = "h2o:0.2/int4+every=512+window=64";
        let again: ModelRecipe = text.parse().unwrap();
        assert_eq!((again.every(), again.to_string().as_str()), (Some(512), text));
        assert_eq!(
            (again.policy().cloned(), "h2o:0.2".parse::<ModelRecipe>().unwrap().every()),
            (policy("h2o:0.2"), None)
        );
        assert_eq!(policy("h2o:0.2+merge=weighted").unwrap().merging, Some(Merging::Weighted));
    }

    #[test]
    fn mixtures_have_a_store_for_each_method() {
        let mixture = |text: &str| -> ModelRecipe { text.parse().unwrap() };
        let cocktail = mixture("cocktail+sink=64");
        let layer = cocktail.layer(0, &shape());
        let kivi = |bits| mixture(&format!("kivi:{bits}")).layer(0, &shape()).packed().format;
        let formats: Vec<SegmentFormat> = layer.stores().iter().map(|store| store.format).collect();
        assert_eq!(formats, [SegmentFormat::F16, kivi(4), kivi(2)]);
        assert_eq!(
            (layer.appended(), layer.sink(), cocktail.to_string().as_str()),
            (Appended::Keep, 64, "cocktail+sink=64")
        );
        assert!(cocktail.plain().is_err() && cocktail.policy().is_none());
        let stores = cocktail.mixture().unwrap().stores_of(&[0.0, 0.7, 1.0]).unwrap();
        assert_eq!(stores, [StoreId(2), StoreId(1), StoreId(0)]);

        let text = "mix=saw-int4:0.25,f16:0.25,calibquant:2+tau=0,3";
        let mix = mixture(text);
        let formats: Vec<SegmentFormat> = mix.layer(0, &shape()).stores().iter().map(|store| store.format).collect();
        let expected = [SegmentFormat::F16, SegmentFormat::saw_int4(), SegmentFormat::calibquant(Bits::Two)];
        assert_eq!((formats.as_slice(), mix.to_string().as_str()), (expected.as_slice(), text));
        let stores = mix.mixture().unwrap().stores_of(&[0.1, 0.9, 0.5, 0.1]).unwrap();
        assert_eq!(stores, [StoreId(2), StoreId(1), StoreId(0), StoreId(2)]);
        // Two equal methods may have two stores.
        let twice = mixture("mix=calibquant:4:0.5,calibquant:4");
        assert_eq!(twice.mixture().unwrap().stores_of(&[0.1, 0.2]).unwrap(), [StoreId(2), StoreId(1)]);
    }

    #[test]
    fn mixtures_without_search_or_reordering() {
        let stores = |text: &str, similarities: &[f32]| {
            let recipe: ModelRecipe = text.parse().unwrap();
            assert_eq!(recipe.to_string(), text);
            recipe.mixture().unwrap().stores_of(similarities).unwrap()
        };
        let similarities: Vec<f32> = (0..100).map(|chunk| chunk as f32 / 100.0).collect();
        let backwards: Vec<f32> = similarities.iter().rev().copied().collect();
        for text in ["cocktail", "mix=f16:0.1,saw-int4:0.3,calibquant:2"] {
            let scattered = stores(&format!("{text}+search=none"), &similarities);
            assert_eq!(scattered, stores(&format!("{text}+search=none"), &backwards), "{text}");
            let mut searched = stores(text, &similarities);
            assert_ne!(scattered, searched, "{text}");
            // The searched ones are in order, up to a tie; the scattered ones change from chunk to chunk.
            assert!(scattered.chunk_by(PartialEq::eq).count() > 10 * searched.chunk_by(PartialEq::eq).count());
            let mut sorted = scattered;
            sorted.sort_unstable();
            searched.sort_unstable();
            assert_eq!(sorted, searched, "{text}: as many chunks in each store");
        }
        let order = |text: &str| text.parse::<ModelRecipe>().unwrap().mixture().unwrap().order();
        assert_eq!(order("cocktail"), ChunkOrder::ByStore);
        assert_eq!(order("cocktail+reorder=none+search=none+sink=64"), ChunkOrder::OfContext);
    }

    #[test]
    fn both_spellings_of_centre_are_one_recipe() {
        let recipe: ModelRecipe = "int4+center+sink=128".parse().unwrap();
        assert_eq!(recipe.to_string(), "int4+centre+sink=128");
    }

    #[test]
    fn errors_say_what_is_allowed() {
        for (text, part) in [
            ("vlcache", "vlcache:SHARE"),
            ("vlcache:x", "vlcache:SHARE"),
            ("vlcache:1.5", "must be 0 to 1"),
            ("h2o:nan", "must be 0 to 1"),
            ("streaming:4", "streaming:FIRST,LAST"),
            ("random:0.1,-1", "random:SHARE[,SEED]"),
            ("kiwi:0.1/f16", "the policies are vlcache"),
            ("lookm:0.2/", "the methods are f16"),
            ("lookm:0.2/h2o:0.2", "the methods are f16"),
            ("lookm:0.2+merge=sum", "none, averaged, pivotal or weighted"),
            ("lookm:0.2+text=no", "equal, raised or stays"),
            ("streaming:4,9+text=stays", "looks at scores"),
            ("kivi:2+merge=none", "nothing is evicted"),
            ("kivi:2+every=512", "nothing is evicted"),
            ("cocktail+every=512", "nothing is evicted"),
            ("cocktail+reorder=all", "none is needed"),
            ("cocktail+search", "search needs a value, as in search=none"),
            ("kivi:2+search=none", "nothing is in chunks"),
            ("lookm:0.2/f16+reorder=none", "nothing is in chunks"),
            ("h2o:0.2+every=0", "at least 1"),
            ("h2o:0.2+every=x", "at least 1"),
            ("lookm:0.2/cocktail", "the methods are f16"),
            ("cocktail:2", "the methods are f16"),
            ("mix=", "shares and a last one"),
            ("mix=f16:0.1", "shares and a last one"),
            ("mix=f16,int4", "shares and a last one"),
            ("mix=f16:x,int4", "shares and a last one"),
            ("mix=f16:0.5,int4:0.6,int8", "must be 0 to 1"),
            ("mix=f16:0.5,f16:0.1,int8", "f16 may come once"),
            ("mix=f16:0.5,kiwi", "the methods are f16"),
            ("", "the methods are f16"),
            ("kiwi:2", "the methods are f16"),
            ("kivi", "kivi:4, kivi:2"),
            ("kivi:3", "kivi:4, kivi:2"),
            ("f16:2", "takes no width"),
            ("kivi:2+", "the options are window"),
            ("kivi:2+windows=3", "the options are window"),
            ("kivi:2+window=-1", "a number of tokens"),
            ("kivi:2+query=f16", "int8 or int16"),
            ("kivi:2+tau=3", "two numbers"),
            ("kivi:2+tau=nan,1", "NaN"),
            ("kivi:2+store=kiwi", "the methods are f16"),
            ("kivi:2+store=f16", "every recipe has an f16 store"),
            ("kivi:2+centre", "ranges of their own for every channel"),
            ("int4+centre+layers=3:calibquant:2", "ranges of their own for every channel"),
            ("int4+centre=3", "centre takes no value"),
            ("saw-in4", "did you mean saw-int4?"),
            ("kiwi:2", "did you mean kivi?"),
            ("coctail", "did you mean cocktail?"),
            ("lokm:0.2/int4", "did you mean lookm?"),
            ("int4+windw=3", "did you mean window?"),
            ("int4+sinks=3", "did you mean sink?"),
            ("int4+sink", "sink needs a value, as in sink=128"),
            ("int4+tau", "tau needs a value"),
            ("int4+centr", "did you mean centre?"),
            ("kivi:2+layers=0", "layers and a method"),
            ("kivi:2+layers=x:f16", "layers and a method"),
            ("kivi:2+layers=0:f16+layers=0:int8", "named twice"),
            ("mix=f16:0.2,int4:0.3,calibquant:2+layers=0:int8", "stores 1 to 2, and this layer has 1 besides f16"),
            ("cocktail+layers=1:f16+layers=4:saw-int4", "layers=4:saw-int4"),
            // Its third store is that of appended tiles.
            ("cocktail+layers=0:calibquant:4", "stores 1 to 2, and this layer has 1 besides f16"),
        ] {
            let error = text.parse::<ModelRecipe>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{text}'")) && error.contains(part), "{text}: {error}");
        }
    }
}
