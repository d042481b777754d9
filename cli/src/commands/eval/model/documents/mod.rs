//! What eviction, merging and mixtures do to answers about documents: a long document, a question after it, and the
//! answer read over what a cache keeps of both.

mod answer;
mod attended;
mod questions;
mod table;

use std::rc::Rc;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use kvpack::Backend;
use kvpack::cache::{ChunkStores, EVICTIONS, ModelRecipe, ObservedPrompt, StoreId};
use kvpack::plan::TokenRange;
use kvpack::policy::{ChunkSearch, Selection, Spans};
use kvpack_report::page::of_documents;
use kvpack_report::{AnswerRow, DocumentsReport, DocumentsRow, Run};

use super::super::page;
use super::{Destination, ModelArgs};
use crate::backend::{BackendArgs, Chosen};
use crate::chunk_ranking::{Query, RankBy, RankedChunks, Ranking};
use crate::commands::{CHUNK_TOKENS, no_chunks, text};
use crate::model::{DensePrompt, Model, PackedAttention};
use crate::outcome::Outcome;
use crate::print::{self, note};
use crate::provenance;
use answer::Asked;
use questions::{Document, Question};

/// Shares of the prompt at which 'all' evaluates every policy.
const SHARES: [f64; 5] = [0.5, 0.2, 0.1, 0.05, 0.01];
/// First tokens of 'all' streaming recipes.
const SINK: usize = 4;

/// Evaluates a model.
pub fn run(
    file: &std::path::Path,
    args: &ModelArgs,
    count: usize,
    backend: &BackendArgs,
    to: Destination<'_>,
) -> Result<Outcome> {
    let recipes = parse(&args.recipes, args.document_tokens)?;
    if count == 0 {
        bail!("--documents 0: at least one is needed");
    }
    let given = [
        ("--rank-by", !args.rank_by.is_empty()),
        ("--chunk-tokens", !args.chunk_tokens.is_empty()),
        ("--draws", args.draws.is_some()),
    ];
    if let Some((option, _)) = given.iter().find(|(_, given)| *given)
        && recipes.iter().all(|recipe| recipe.mixture().is_none())
    {
        let names: Vec<String> = recipes.iter().map(ToString::to_string).collect();
        bail!("{}", no_chunks(option, &names.join(" ")));
    }
    let model = Model::load(file)?;
    let text = text(args.text.as_deref())?;
    let tokens = model.tokenizer.encode(&text.content)?;
    let documents = questions::cut(&model, &tokens, count, args.document_tokens)?;
    let longest = documents.iter().flat_map(|document| [&document.quote, &document.passkey]);
    let longest = longest.map(|question| question.tokens.len() + question.answer.len()).max();
    let asked = longest.unwrap_or(0);
    model.check_context(args.document_tokens + asked)?;
    if let Some((layer, left)) = model.config.first_local(0..model.config.layers, args.document_tokens + asked) {
        bail!(
            "--document-tokens {}: layer {layer} sees {left} positions before a query's own, and answers are compared \
             with attention to all of a document; with {asked} tokens of a question and its answer, take at most {}",
            args.document_tokens,
            (left + 1).saturating_sub(asked)
        );
    }
    let cuts = match recipes.iter().any(|recipe| recipe.mixture().is_some()) {
        true => Cut::open(
            if args.rank_by.is_empty() { &[RankBy::Bm25] } else { &args.rank_by },
            if args.chunk_tokens.is_empty() { &[CHUNK_TOKENS] } else { &args.chunk_tokens },
        )?,
        false => Vec::new(),
    };
    let backend = backend.open()?;
    let run = provenance::run(backend.driver(), None);
    let (document_tokens, draws) = (args.document_tokens, args.draws.unwrap_or(1));
    let task = Task { model: &model, documents, document_tokens, recipes, cuts, draws, text: text.name };
    let report = match &backend {
        Chosen::Cpu(backend) => task.evaluate(backend, run),
        Chosen::Wgpu(backend) => task.evaluate(backend, run),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => task.evaluate(backend, run),
    }?;
    to.files.map_or(Ok(()), |path| page::write(path, &report, &of_documents(&report)))?;
    to.print(&report, table::print)?;
    Ok(Outcome::Passed)
}

/// The requested recipes. 'all' is every policy at several shares, Cocktail, and recipes of one format.
fn parse(given: &[String], document_tokens: usize) -> Result<Vec<ModelRecipe>> {
    let mut recipes: Vec<ModelRecipe> = Vec::new();
    for text in given.iter().flat_map(|text| text.split_whitespace()) {
        if text != "all" {
            recipes.push(text.parse()?);
            continue;
        }
        for eviction in EVICTIONS {
            for share in SHARES {
                let last = ((document_tokens as f64 * share) as usize).saturating_sub(SINK);
                let recipe = match eviction.arguments {
                    "FIRST,LAST" => format!("{}:{SINK},{last}", eviction.name),
                    _ => format!("{}:{share}", eviction.name),
                };
                recipes.push(recipe.parse()?);
            }
        }
        for recipe in ["cocktail", "kivi:4", "kivi:2"] {
            recipes.push(recipe.parse()?);
        }
    }
    if let Some(recipe) = recipes.iter().find(|recipe| recipe.every().is_some()) {
        bail!(
            "recipe {recipe}: answers are read over what is kept of their prompt; leave out every=, which generate takes"
        );
    }
    if recipes.is_empty() {
        bail!("--recipes names no recipe; 'all' stands for every policy at several shares, and Cocktail");
    }
    Ok(recipes)
}

/// What every recipe has to do.
struct Task<'a> {
    model: &'a Model,
    documents: Vec<Document>,
    document_tokens: usize,
    recipes: Vec<ModelRecipe>,
    /// How mixtures cut documents.
    cuts: Vec<Cut>,
    /// How often the stores of every cut are shuffled.
    draws: u32,
    text: String,
}

/// Chunks of a size, and what ranks them.
struct Cut {
    tokens: usize,
    by: RankBy,
    ranking: Rc<Ranking>,
}

impl Cut {
    /// Every size with every ranking.
    fn open(by: &[RankBy], sizes: &[usize]) -> Result<Vec<Self>> {
        let mut cuts = Vec::new();
        for by in by {
            let ranking = Rc::new(Ranking::open(by)?);
            for &tokens in sizes {
                ChunkSearch::chunks(0, tokens)?; // before anything is computed
                cuts.push(Self { tokens, by: by.clone(), ranking: ranking.clone() });
            }
        }
        Ok(cuts)
    }

    /// The document's chunks; the remainder is none.
    fn chunks(&self, model: &Model, document: &Document, index: usize) -> Result<RankedChunks<'_>> {
        let text = |chunk: &[u32]| model.tokenizer.decode(chunk);
        let texts: Result<_> = document.tokens.chunks_exact(self.tokens).map(text).collect();
        self.ranking.chunks(&format!("document{index}."), texts?)
    }
}

/// How the prompt is stored that an answer is read over.
enum Stored<'a, B: Backend> {
    /// What a policy keeps of it.
    Compressed(&'a ObservedPrompt<B>),
    /// Its document in chunks.
    Chunks(ChunkStores),
    /// All of it.
    Whole,
}

/// A row that grows with the documents.
struct Growing {
    row: DocumentsRow,
    bytes: u64,
    /// Elements of the whole prompts.
    elements: u64,
    kept: Vec<f64>,
    /// Sums by layer.
    kept_by_layer: Vec<f64>,
}

impl Task<'_> {
    fn evaluate<B: Backend + Clone>(&self, backend: &B, run: Run) -> Result<DocumentsReport> {
        let f16: ModelRecipe = "f16".parse()?;
        let observer = PackedAttention::new(backend, &self.model.config, &f16)?;
        // Before anything is computed.
        for recipe in &self.recipes {
            PackedAttention::new(backend, &self.model.config, recipe).with_context(|| format!("recipe {recipe}"))?;
        }
        let mut rows = vec![Growing::new("full precision".into())];
        for recipe in &self.recipes {
            if recipe.mixture().is_none() {
                rows.push(Growing::new(recipe.to_string()));
                continue;
            }
            for cut in &self.cuts {
                let name = format!("{recipe}, chunks of {} by {}", cut.tokens, cut.by);
                rows.push(Growing::new(name.clone()));
                rows.push(Growing::new(format!("{name}, shuffled")));
                rows.extend((2..=self.draws).map(|draw| Growing::new(format!("{name}, shuffled, draw {draw}"))));
            }
        }
        let progress = ProgressBar::new((2 * self.documents.len() * rows.len()) as u64).with_style(print::bar());
        for (index, document) in self.documents.iter().enumerate() {
            progress.set_message(format!("document {index}"));
            let mut dense = DensePrompt::new(&self.model.config);
            dense.read(self.model, &document.tokens)?;
            let chunks: Result<Vec<_>> = self.cuts.iter().map(|cut| cut.chunks(self.model, document, index)).collect();
            let chunks = chunks?;
            for is_quote in [true, false] {
                let question = if is_quote { &document.quote } else { &document.passkey };
                let asked = Asked::new(self.model, &dense, question, &observer)?;
                let answers =
                    Answers { task: self, document, chunks: &chunks, question, asked: &asked, progress: &progress };
                answers.read(backend, &observer, index, |at, answer| rows[at].add(answer, is_quote))?;
            }
            note!("read document {} of {}", index + 1, self.documents.len());
        }
        progress.finish_and_clear();
        Ok(DocumentsReport {
            run: Some(run),
            model: self.model.config.name.clone(),
            text: self.text.clone(),
            backend: backend.name(),
            documents: self.documents.len(),
            document_tokens: self.document_tokens,
            rows: rows.into_iter().map(Growing::finish).collect(),
        })
    }
}

/// An answer, and what the cache held of its prompt.
struct Answered {
    answer: AnswerRow,
    kept: f64,
    /// By layer; empty where all tokens stay.
    kept_by_layer: Vec<f64>,
    bytes: u64,
    elements: u64,
}

/// The answers to one question by all recipes.
struct Answers<'a> {
    task: &'a Task<'a>,
    document: &'a Document,
    /// Those of every cut.
    chunks: &'a [RankedChunks<'a>],
    question: &'a Question,
    asked: &'a Asked,
    progress: &'a ProgressBar,
}

impl Answers<'_> {
    /// Reads the answer by every recipe, and hands each on with the number of its row.
    fn read<B: Backend + Clone>(
        &self,
        backend: &B,
        observer: &PackedAttention<B>,
        seed: usize,
        mut each: impl FnMut(usize, Answered),
    ) -> Result<()> {
        let elements = self.elements();
        let reference = self.asked.reference()?;
        let (kept, kept_by_layer, bytes) = (1.0, Vec::new(), 4 * elements);
        each(0, Answered { answer: reference, kept, kept_by_layer, bytes, elements });
        let mut at = 1;
        let mut observed: Vec<ObservedPrompt<B>> = Vec::new();
        for recipe in &self.task.recipes {
            let mut score = |stored: Stored<'_, B>| {
                let answered = self.score(backend, recipe, stored)?;
                each(at, answered);
                at += 1;
                self.progress.inc(1);
                Ok::<_, anyhow::Error>(())
            };
            if let Some(mixture) = recipe.mixture() {
                let context = TokenRange::new(0, self.document.tokens.len())?;
                let query = Query { name: self.question.name, text: &self.question.words };
                for (cut, chunks) in self.task.cuts.iter().zip(self.chunks) {
                    let mut stores = mixture.stores_of(&chunks.similarities(query)?)?;
                    let stored = |stores: &Vec<StoreId>| -> Result<Stored<'_, B>> {
                        let chunks = ChunkStores::new(context, cut.tokens, stores.clone())?;
                        Ok(Stored::Chunks(chunks.with_order(mixture.order())))
                    };
                    score(stored(&stores)?)?;
                    // As many chunks in each format, others.
                    let mut random = fastrand::Rng::with_seed(seed as u64);
                    for _ in 0..self.task.draws {
                        random.shuffle(&mut stores);
                        score(stored(&stores)?)?;
                    }
                }
            } else if let Some(policy) = recipe.policy() {
                // What was measured for another policy may do.
                let found = observed.iter_mut().position(|observed| observed.decide_by(policy.clone()).is_ok());
                let found = match found {
                    Some(found) => found,
                    None => {
                        let document = TokenRange::new(0, self.document.tokens.len())?;
                        let spans = Spans::new(self.asked.prompt.tokens(), &[document])?;
                        observed.push(observer.observe(&self.asked.prompt, policy.clone(), spans)?);
                        observed.len() - 1
                    }
                };
                score(Stored::Compressed(&observed[found]))?;
            } else {
                score(Stored::Whole)?;
            }
        }
        Ok(())
    }

    fn score<B: Backend + Clone>(&self, backend: &B, recipe: &ModelRecipe, stored: Stored<'_, B>) -> Result<Answered> {
        let prompt = &self.asked.prompt;
        let mut attention = PackedAttention::new(backend, &self.task.model.config, recipe)?;
        let mut selection: Option<Selection> = None;
        match stored {
            Stored::Compressed(observed) => selection = Some(attention.compress(observed)?),
            Stored::Chunks(chunks) => attention.store_chunks(prompt, &chunks)?,
            Stored::Whole => attention.store(prompt)?,
        }
        let bytes = attention.memory().map(|memory| memory.in_use_bytes()).sum();
        Ok(Answered {
            answer: self.asked.score(self.task.model, &mut attention, selection.as_ref())?,
            kept: selection.as_ref().map_or(1.0, Selection::ratio),
            kept_by_layer: selection.as_ref().map_or(Vec::new(), |selection| {
                selection.layers().iter().map(|layer| layer.count() as f64 / layer.tokens() as f64).collect()
            }),
            bytes,
            elements: self.elements(),
        })
    }

    /// Elements of keys and values of the whole prompt in all layers.
    fn elements(&self) -> u64 {
        let config = &self.task.model.config;
        let of_token = 2 * config.layers * config.attention.kv_heads() * config.attention.head_dim();
        (self.asked.prompt.tokens() * of_token) as u64
    }
}

impl Growing {
    fn new(recipe: String) -> Self {
        let row = DocumentsRow {
            recipe,
            kept: 0.0,
            kept_by_layer: Vec::new(),
            bits_per_element: 0.0,
            quotes: Vec::new(),
            passkeys: Vec::new(),
        };
        Self { row, bytes: 0, elements: 0, kept: Vec::new(), kept_by_layer: Vec::new() }
    }

    fn add(&mut self, answered: Answered, is_quote: bool) {
        let answers = if is_quote { &mut self.row.quotes } else { &mut self.row.passkeys };
        answers.push(answered.answer);
        self.bytes += answered.bytes;
        self.elements += answered.elements;
        self.kept.push(answered.kept);
        self.kept_by_layer.resize(answered.kept_by_layer.len(), 0.0);
        for (sum, kept) in self.kept_by_layer.iter_mut().zip(answered.kept_by_layer) {
            *sum += kept;
        }
    }

    fn finish(mut self) -> DocumentsRow {
        self.row.kept = super::score::mean(&self.kept);
        self.row.kept_by_layer = self.kept_by_layer.iter().map(|sum| sum / self.kept.len() as f64).collect();
        self.row.bits_per_element = self.bytes as f64 * 8.0 / self.elements as f64;
        self.row
    }
}

#[cfg(test)]
mod tests {
    use kvpack::cpu::Cpu;

    use super::*;
    use crate::model::tiny;

    #[test]
    fn recipes_answer_by_what_they_keep() {
        let (_file, model) = tiny::model("documents");
        let text = "The Rabbit took a watch out of its pocket, looked at it, and hurried on. ".repeat(12);
        let tokens = model.tokenizer.encode(&text).unwrap();
        let documents = questions::cut(&model, &tokens, 2, 270).unwrap();
        assert!(documents.iter().all(|document| document.tokens.len() == 270));
        assert!(Cut::open(&[RankBy::Bm25], &[32, 8]).is_err());
        assert!(questions::cut(&model, &tokens, 5, 270).is_err() && questions::cut(&model, &tokens, 2, 100).is_err());
        let recipes = ["f16 h2o:1 h2o:0.2 random:0.2 cocktail mix=f16:0.5,kivi:2 int8".to_owned()];
        let recipes = parse(&recipes, 270).unwrap();
        let refused = parse(&["h2o:0.2+every=512".to_owned()], 270).unwrap_err().to_string();
        assert!(refused.contains("leave out every="), "{refused}");
        let cuts = Cut::open(&[RankBy::Bm25], &[32]).unwrap();
        let task =
            Task { model: &model, documents, document_tokens: 270, recipes, cuts, draws: 2, text: "a test".into() };
        let report = task.evaluate(&Cpu::new(), provenance::run("none".into(), None)).unwrap();
        let names: Vec<&str> = report.rows.iter().map(|row| row.recipe.as_str()).collect();
        assert_eq!(names[..5], ["full precision", "f16", "h2o:1", "h2o:0.2", "random:0.2"]);
        let by = "chunks of 32 by bm25";
        let mixed =
            |recipe: &str| ["", ", shuffled", ", shuffled, draw 2"].map(|order| format!("{recipe}, {by}{order}"));
        assert_eq!(names[5..11], [mixed("cocktail"), mixed("mix=f16:0.5,kivi:2")].concat());
        assert_eq!(names[11..], ["int8"]);
        let divergence = |at: usize| DocumentsRow::spread(&report.rows[at].quotes, |answer| answer.divergence).0;
        assert!(report.rows.iter().all(|row| (row.quotes.len(), row.passkeys.len()) == (2, 2)));
        assert_eq!(divergence(0), 0.0);
        assert!(divergence(1).abs() < 1e-5 && divergence(2).abs() < 1e-5, "{} {}", divergence(1), divergence(2));
        assert!(divergence(4) > 10.0 * divergence(11), "{} {}", divergence(4), divergence(11));
        let hits = |at: usize| report.rows[at].quotes.iter().map(|answer| answer.hit_rate).collect::<Vec<_>>();
        assert_eq!((hits(1), hits(2)), (vec![None; 2], vec![Some(1.0); 2]));
        assert!(hits(3)[0] > hits(4)[0], "{:?} {:?}", hits(3), hits(4));
        let answers = |at: usize| report.rows[at].quotes.iter();
        let contribution = answers(0).next().and_then(|answer| answer.contribution).unwrap();
        assert!(contribution.document > 0.5 && contribution.document < 1.0, "{contribution:?}");
        assert!(answers(1).all(|answer| answer.contribution.is_none() && answer.coverage.is_none()));
        let covered = |at: usize| answers(at).map(|answer| answer.coverage.unwrap()).collect::<Vec<_>>();
        assert!(covered(2).iter().all(|of| (of.document - 1.0).abs() < 1e-9 && (of.text - 1.0).abs() < 1e-9));
        // Half of what H2O keeps is recent: the question.
        assert!(covered(3)[0].text > covered(4)[0].text, "{:?} {:?}", covered(3), covered(4));
        assert!((report.rows[3].kept - 0.2).abs() < 0.01 && report.rows[2].kept == 1.0);
        let budgets = &report.rows[3].kept_by_layer;
        assert_eq!(budgets.len(), model.config.layers);
        assert!((super::super::score::mean(budgets) - report.rows[3].kept).abs() < 1e-9, "{budgets:?}");
        assert!(report.rows[1].kept_by_layer.is_empty(), "f16 keeps all");
        // As many chunks in each format, shuffled or not, and others in every draw.
        assert!(report.rows[9..11].iter().all(|row| row.bits_per_element == report.rows[8].bits_per_element));
        assert_ne!(divergence(9), divergence(10));
    }
}
