//! Documents, documentation and help texts are plain English in the words of the glossary: none of the habits below,
//! and no name that the glossary has retired.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::documents::{documents, root};

/// A turn of phrase that needs a second reading.
struct Habit {
    name: &'static str,
    /// What to write in its place.
    instead: &'static str,
    /// Whether the habit begins with the first of these words.
    begins: fn(&[Word]) -> bool,
}

const HABITS: [Habit; 13] = [
    Habit { name: "so many", instead: "a number, or 'this many'", begins: |words| says(words, "so many") },
    Habit { name: "anew", instead: "again; rebuilt, rewritten, remeasured", begins: |words| says(words, "anew") },
    Habit { name: "beside", instead: "next to, with, in addition to", begins: |words| says(words, "beside") },
    Habit { name: "yields", instead: "returns, gives", begins: |words| says(words, "yields") || says(words, "yield") },
    Habit { name: "twin", instead: "CPU reference", begins: |words| says(words, "twin") || says(words, "twins") },
    Habit { name: "books", instead: "page tables", begins: |words| says(words, "books") },
    Habit { name: "what is held", instead: "the tokens, the stored data", begins: |words| says(words, "what is held") },
    Habit { name: "held against", instead: "compared with", begins: |words| says(words, "held against") },
    Habit { name: "at most at the end", instead: "at most N, up to N", begins: at_most_at_the_end },
    Habit { name: "less for minus", instead: "minus; centred", begins: less_for_minus },
    Habit { name: "one thing more", instead: "one more, one extra thing", begins: one_thing_more },
    Habit { name: "of somebody's", instead: "candle tensors, a layer of Mesa", begins: of_somebodys },
    Habit { name: "what X says", instead: "X lists what", begins: what_something_says },
];

/// Where a habit is right, and why.
struct Exception {
    document: &'static str,
    habit: &'static str,
    reason: &'static str,
}

const EXCEPTIONS: [Exception; 3] = [
    Exception { document: "docs/glossary.md", habit: "books", reason: "it lists the retired words" },
    Exception { document: "docs/glossary.md", habit: "twin", reason: "it lists the retired words" },
    Exception { document: "docs/glossary.md", habit: "less for minus", reason: "it lists the retired words" },
];

/// A word of a text in lower case, without marks around it.
struct Word {
    text: String,
    /// The number of its line, from 1.
    line: usize,
    /// Whether a mark, a cell or a paragraph ends behind it.
    ends_clause: bool,
}

fn says(words: &[Word], phrase: &str) -> bool {
    let phrase: Vec<&str> = phrase.split(' ').collect();
    let Some(found) = words.get(..phrase.len()) else { return false };
    let inner = &found[..phrase.len() - 1];
    found.iter().zip(&phrase).all(|(word, wanted)| word.text == *wanted) && inner.iter().all(|word| !word.ends_clause)
}

/// "adds 5 % at most."
fn at_most_at_the_end(words: &[Word]) -> bool {
    says(words, "at most") && words[1].ends_clause
}

/// "keys less a centre"
fn less_for_minus(words: &[Word]) -> bool {
    ["less a", "less an", "less the", "less its", "less their"].iter().any(|phrase| says(words, phrase))
}

/// "a dispatch more"; not "a quarter more", which compares.
fn one_thing_more(words: &[Word]) -> bool {
    const COMPARE: [&str; 14] = [
        "few", "little", "bit", "lot", "half", "third", "quarter", "fifth", "sixth", "eighth", "tenth", "once", "is",
        "code",
    ];
    let [article, thing, more, rest @ ..] = words else { return false };
    let one = ["a", "an", "one"].contains(&article.text.as_str()) && !article.ends_clause && !thing.ends_clause;
    let compares = COMPARE.contains(&thing.text.as_str()) || rest.first().is_some_and(|word| word.text == "than");
    one && more.text == "more" && !compares
}

/// "tensors of candle's"; not "the output of candle's attention".
fn of_somebodys(words: &[Word]) -> bool {
    const NO_NOUNS: [&str; 17] = [
        "and", "are", "as", "at", "by", "for", "from", "in", "is", "on", "or", "that", "to", "which", "whose", "with",
        "would",
    ];
    let [of, owner, rest @ ..] = words else { return false };
    let owns = of.text == "of" && !of.ends_clause && owner.text.ends_with("'s");
    let stands_alone = owner.ends_clause || rest.first().is_none_or(|word| NO_NOUNS.contains(&word.text.as_str()));
    owns && stands_alone
}

/// "what was checked on which build says docs/lab/cuda.md"
fn what_something_says(words: &[Word]) -> bool {
    const FURTHEST: usize = 10;
    if words[0].text != "what" {
        return false;
    }
    let clause = words.iter().take(FURTHEST).take_while(|word| !word.ends_clause).count();
    words[..words.len().min(clause + 1)].iter().any(|word| word.text == "says" || word.text == "tells")
}

/// The words of a document, without its code and the targets of its links.
fn words(text: &str) -> Vec<Word> {
    let mut found: Vec<Word> = Vec::new();
    let (mut in_block, mut in_code, mut in_target) = (false, false, false);
    for (index, line) in text.lines().enumerate() {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        if is_fence || in_block || line.starts_with("    ") || line.starts_with("<!--") {
            continue;
        }
        let mut word = String::new();
        if line.trim().is_empty() || line.trim_start().starts_with(['#', '-', '|']) {
            end_clause(&mut found);
            in_code = false;
        }
        for (mark, next) in line.chars().zip(line.chars().skip(1).chain([' '])) {
            if in_target {
                in_target = mark != ')';
                continue;
            }
            match mark {
                // Code stands for a word.
                '`' => {
                    in_code = !in_code;
                    if in_code {
                        word.push_str("code");
                    }
                }
                _ if in_code => {}
                ']' if next == '(' => in_target = true,
                _ if mark.is_alphanumeric() || mark == '\'' || (mark == '.' && next.is_alphanumeric()) => {
                    word.extend(mark.to_lowercase());
                }
                _ => {
                    finish_word(&mut word, index + 1, &mut found);
                    if ['.', ',', ';', ':', '?', '!', '|', '–', '('].contains(&mark) {
                        end_clause(&mut found);
                    }
                }
            }
        }
        finish_word(&mut word, index + 1, &mut found);
    }
    end_clause(&mut found);
    found
}

fn finish_word(word: &mut String, line: usize, found: &mut Vec<Word>) {
    let text = word.trim_matches('\'').to_owned();
    word.clear();
    if !text.is_empty() {
        found.push(Word { text, line, ends_clause: false });
    }
}

fn end_clause(found: &mut [Word]) {
    if let Some(last) = found.last_mut() {
        last.ends_clause = true;
    }
}

/// Every place of a text where a habit begins, with its line.
fn habits(text: &str) -> Vec<(&'static Habit, usize)> {
    let words = words(text);
    let places = words.iter().enumerate();
    let found = places.flat_map(|(index, word)| {
        let rest = &words[index..];
        HABITS.iter().filter(|habit| (habit.begins)(rest)).map(|habit| (habit, word.line))
    });
    found.collect()
}

fn name(path: &Path) -> String {
    path.strip_prefix(root()).expect("a path in the repository").to_string_lossy().replace('\\', "/")
}

/// Every file below a folder that ends in `.rs`.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("a folder of the repository").path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The documentation in a Rust file, each line in its place: the command's help is made of it.
fn documentation(code: &str) -> String {
    let comment = |line: &str| -> Option<String> {
        let line = line.trim_start();
        let text = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
        Some(text.strip_prefix(' ').unwrap_or(text).to_owned())
    };
    code.lines().map(|line| comment(line).unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Folders whose documentation is read as the documents are: the library's, the crates' and the command's, of which help
/// texts are made.
const DOCUMENTED: [&str; 14] = [
    "src",
    "device/src",
    "weights/src",
    "report/src",
    "cli/src",
    "examples",
    "hosts/serving/src",
    "hosts/burn/src",
    "hosts/candle/src",
    "hosts/candle/cuda/src",
    "python/src",
    "web/src",
    "web/build/src",
    "fuzz/functions/src",
];

/// What is not held to plain English: the diaries of the lab, which are records of their time.
const NOT_HELD: [&str; 1] = ["lab/"];

fn is_held(document: &Path) -> bool {
    !NOT_HELD.iter().any(|folder| name(document).starts_with(folder))
}

#[test]
fn documents_and_help_are_plain_english() {
    let code = DOCUMENTED.iter().flat_map(|folder| rust_files(&root().join(folder)));
    let texts = documents().into_iter().chain(code).filter(|path| is_held(path)).map(|path| {
        let text = fs::read_to_string(&path).expect("a readable text");
        let is_code = path.extension().is_some_and(|extension| extension == "rs");
        (name(&path), if is_code { documentation(&text) } else { text })
    });
    let (mut faults, mut used) = (Vec::new(), BTreeSet::new());
    for (document, text) in texts {
        for (habit, line) in habits(&text) {
            let is_excepted = |exception: &Exception| exception.document == document && exception.habit == habit.name;
            match EXCEPTIONS.iter().position(is_excepted) {
                Some(exception) => _ = used.insert(exception),
                None => faults.push(format!("{document}:{line}: '{}'; write: {}", habit.name, habit.instead)),
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
    let unused = EXCEPTIONS.iter().enumerate().filter(|(index, _)| !used.contains(index));
    let unused: Vec<_> = unused.map(|(_, exception)| (exception.document, exception.habit, exception.reason)).collect();
    assert!(unused.is_empty(), "exceptions that nothing needs: {unused:?}");
}

#[test]
fn each_habit_is_found_and_good_english_is_not() {
    let found = |text: &str| habits(text).iter().map(|(habit, _)| habit.name).collect::<Vec<_>>();
    for (text, habit) in [
        ("holds so many heads", "so many"),
        ("tables are made\nanew", "anew"),
        ("tokens beside each other", "beside"),
        ("a call yields a state", "yields"),
        ("with a twin on the CPU", "twin"),
        ("a cache and its books", "books"),
        ("what is held is decoded", "what is held"),
        ("outputs are held against f64", "held against"),
        ("it adds 5 % at most.", "at most at the end"),
        ("4 at most (see below)", "at most at the end"),
        ("stores keys less a centre", "less for minus"),
        ("which takes a dispatch more for a store", "one thing more"),
        ("a program of burn's, in a workspace", "of somebody's"),
        ("a tensor of candle's that is read", "of somebody's"),
        ("what was checked on which build says `docs/lab`", "what X says"),
    ] {
        assert_eq!(found(text), [habit], "{text}");
    }
    for text in [
        "It takes at most 5 % of the time.",
        "2 bits lose less than the others.",
        "A page is the output of candle's attention.",
        "What is stored? The page says that.",
        "It takes a quarter more time than a row that reads 3 % low.",
        "A row with a guard more than 3 % low.",
        "`so many` is code, and\n\n```text\nbeside\n```\n\n    anew\n\nis too.",
        "[a link](beside.md)",
    ] {
        assert_eq!(found(text), Vec::<&str>::new(), "{text}");
    }
}

/// The identifiers in the left column of the glossary's table of retired words.
fn retired() -> Vec<String> {
    let glossary = fs::read_to_string(root().join("docs/glossary.md")).expect("docs/glossary.md");
    let (_, table) = glossary.split_once("| retired | now |").expect("a table of retired words");
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// The identifiers and paths of a Rust file: `StepPlan`, `plan::Segment`.
fn paths(code: &str) -> impl Iterator<Item = &str> {
    let words = code.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
    words.map(|word| word.trim_matches(':')).filter(|word| !word.is_empty())
}

/// Whether a file uses a retired name: a bare one anywhere, `module::Name` by its path or by a definition in the module, and
/// `Enum::Variant` by its path or, where the enum is defined, as a variant.
fn uses(file: &str, code: &str, retired: &str) -> bool {
    let Some((owner, name)) = retired.split_once("::") else {
        return paths(code).any(|path| path.split("::").any(|part| part == retired));
    };
    let by_path = || paths(code).any(|path| path == retired || path.ends_with(&format!("::{retired}")));
    let defines = |kind: &str, name: &str| {
        code.split(&format!("{kind} {name}")).skip(1).any(|rest| !rest.starts_with(|c: char| c.is_alphanumeric()))
    };
    let is_module = owner.starts_with(char::is_lowercase);
    let in_module = || file.starts_with(&format!("src/{owner}/")) || file == format!("src/{owner}.rs");
    let defined = || match is_module {
        true => in_module() && ["struct", "enum", "trait", "type"].iter().any(|kind| defines(kind, name)),
        false => defines("enum", owner) && code.lines().any(|line| line.trim().trim_end_matches(',') == name),
    };
    by_path() || defined()
}

#[test]
fn retired_names_are_gone() {
    let retired = retired();
    assert!(retired.len() > 10, "{retired:?}");
    let mut faults = Vec::new();
    for path in ["src", "device/src"].into_iter().flat_map(|folder| rust_files(&root().join(folder))) {
        let code = fs::read_to_string(&path).expect("a readable file");
        let file = name(&path);
        faults.extend(retired.iter().filter(|name| uses(&file, &code, name)).map(|name| format!("{file}: {name}")));
    }
    assert!(faults.is_empty(), "docs/glossary.md has retired: {faults:#?}");
}

#[test]
fn retired_names_are_found() {
    for (file, code, retired) in [
        ("src/cache/step.rs", "use crate::wgpu::StepPlan;", "StepPlan"),
        ("src/plan/mod.rs", "pub struct Segment {", "plan::Segment"),
        ("src/cpu/attend.rs", "let part: &crate::plan::Segment = part;", "plan::Segment"),
        ("src/format/rotation.rs", "enum Direction {\n    Forth,\n}", "Direction::Forth"),
        ("src/cpu/hadamard.rs", "turn(Direction::Back)", "Direction::Back"),
    ] {
        assert!(uses(file, code, retired), "{file}: {code}");
    }
    for (file, code, retired) in [
        ("src/plan/mod.rs", "pub struct SegmentFormat; struct AttendStep; use wgpu::StepPlans;", "plan::Segment"),
        ("src/plan/mod.rs", "use wgpu::StepPlans;", "StepPlan"),
        ("src/plan/mod.rs", "pub struct StorePart {", "wgpu::StorePart"),
        ("src/wgpu/mod.rs", "use crate::plan::StorePart;", "wgpu::StorePart"),
    ] {
        assert!(!uses(file, code, retired), "{file}: {code}");
    }
}
