//! What every shader file needs of others and gives to them stands in its header, and is what its text says.
//!
//! `KVPACK_UPDATE=1 cargo test --test shaders` writes the headers anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::{all_variants, updates};

/// What starts the statements of a header.
const STATEMENTS: [&str; 4] = ["needs", "gives", "binds", "set by plans"];

/// Longest line of a header.
const WIDTH: usize = 120;

/// A shader file, or one of the sections of a file.
struct File {
    /// Below `shaders/`: `{file}` or `{file}#{section}`.
    path: String,
    /// Whether the choices of a slot follow it in the file.
    is_slot: bool,
    text: String,
    declared: Vec<Declaration>,
    /// Names of other files' declarations, or of its own.
    used: BTreeSet<String>,
    imports: Vec<Import>,
}

#[derive(Clone)]
struct Declaration {
    name: String,
    /// The line up to the body or value.
    signature: String,
    /// Number in group 0, of a buffer.
    binding: Option<u32>,
}

/// A line `// import file` or `// import slot = file`.
struct Import {
    is_slot: bool,
    file: String,
}

fn shaders() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../shaders")
}

fn files() -> BTreeMap<String, File> {
    fn below(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => below(&path, found),
                false => found.push(path),
            }
        }
    }
    let mut paths = Vec::new();
    below(&shaders(), &mut paths);
    let read = |path: PathBuf| {
        let name = path.strip_prefix(shaders()).unwrap().to_str().unwrap().replace('\\', "/");
        let text = fs::read_to_string(&path).unwrap();
        let sections = sections(&text);
        let (is_slot, has_sections) = (text.starts_with("// Slot `"), sections.len() > 1);
        let of = |(section, text): (Option<&str>, &str)| {
            let path = section.map_or(name.clone(), |section| format!("{name}#{section}"));
            (path.clone(), File::new(path, is_slot && section.is_none(), text.trim_start_matches('\n').to_owned()))
        };
        // What precedes the parts of a file that is no slot says what they have in common.
        let wanted = sections.into_iter().filter(|(section, _)| is_slot || !has_sections || section.is_some());
        wanted.map(of).collect::<Vec<_>>()
    };
    paths.into_iter().flat_map(read).collect()
}

/// The line above a section of a file.
fn heading(section: &str) -> String {
    format!("// -------- {section} --------\n")
}

/// What precedes the sections of a file, then each section with its text.
fn sections(text: &str) -> Vec<(Option<&str>, &str)> {
    let mut found = Vec::new();
    let (mut section, mut start, mut at) = (None, 0, 0);
    for line in text.split_inclusive('\n') {
        if let Some(next) = line.strip_prefix("// -------- ").and_then(|rest| rest.strip_suffix(" --------\n")) {
            found.push((section, &text[start..at]));
            (section, start) = (Some(next), at + line.len());
        }
        at += line.len();
    }
    found.push((section, &text[start..]));
    found
}

/// Writes a file's text, or that of one section among the others of its file.
fn write(path: &str, text: &str) {
    let (file, wanted) = path.split_once('#').map_or((path, None), |(file, section)| (file, Some(section)));
    let kept = fs::read_to_string(shaders().join(file)).unwrap();
    let parts = sections(&kept).into_iter().map(|(section, before)| {
        let text = if section == wanted { text } else { before };
        section.map_or(String::new(), |section| heading(section) + "\n") + text.trim_matches('\n') + "\n"
    });
    fs::write(shaders().join(file), parts.collect::<Vec<_>>().join("\n")).unwrap();
}

impl File {
    fn new(path: String, is_slot: bool, text: String) -> Self {
        let code: String = text.lines().map(|line| line.split("//").next().unwrap_or("").to_owned() + "\n").collect();
        let mut used = BTreeSet::new();
        let mut declared = Vec::new();
        for item in items(&code) {
            declared.extend(Declaration::new(&item));
            let locals = locals(&item);
            used.extend(names(&item).filter(|name| !locals.contains(name)).map(str::to_owned));
        }
        let imports = text.lines().filter_map(|line| line.strip_prefix("// import ")).map(|import| {
            let (is_slot, file) = match import.split_once(" = ") {
                Some((_, default)) => (true, default),
                None => (false, import),
            };
            Import { is_slot, file: file.into() }
        });
        Self { imports: imports.collect(), path, is_slot, declared, used, text }
    }

    fn is_kernel(&self) -> bool {
        self.text.contains("\n@compute ")
    }

    fn slot_file(&self) -> Option<String> {
        slot_file(&self.path)
    }

    fn declares(&self, name: &str) -> bool {
        self.declared.iter().any(|declaration| declaration.name == name)
    }

    /// The lines of a slot's header that say what its choices have: all of them, or some.
    fn interface(&self, heading: &str) -> Vec<&str> {
        let lines =
            self.text.lines().skip_while(|line| *line != heading).skip(1).take_while(|line| line.starts_with("//  "));
        lines.filter(|line| !line.starts_with("//    ")).map(|line| line.trim_start_matches('/').trim()).collect()
    }

    /// Names that a kernel which opens the slot may count on.
    fn offered(&self) -> BTreeSet<String> {
        let all = [self.interface(EVERY), self.interface(SOME)].concat();
        let named = all.iter().filter_map(|line| Declaration::new(line)).map(|declaration| declaration.name);
        named.chain(self.declared.iter().map(|declaration| declaration.name.clone())).collect()
    }

    /// The statements that the header should have.
    fn statements(&self, files: &BTreeMap<String, Self>, together: &Together, set: &BTreeSet<String>) -> String {
        let needs = self.needs(files);
        let declared = || self.declared.iter();
        let used_elsewhere = |name: &str| {
            let mut others = files.values().filter(|other| together.contains(&self.path, &other.path));
            others.any(|other| other.used.contains(name) && !other.declares(name))
        };
        let gives = declared().filter(|own| used_elsewhere(&own.name)).map(|own| own.name.clone());
        let mut bound: Vec<(u32, &str)> =
            declared().filter_map(|own| Some((own.binding?, own.name.as_str()))).collect();
        bound.sort_unstable();
        let binds = bound.into_iter().map(|(binding, name)| format!("{binding} {name}"));
        let set = declared().filter(|own| set.contains(&own.name)).map(|own| own.name.clone());
        let lists: [Vec<String>; 4] = [needs.into_iter().collect(), gives.collect(), binds.collect(), set.collect()];
        STATEMENTS
            .iter()
            .zip(lists)
            .filter(|(_, list)| !list.is_empty())
            .map(|(what, list)| statement(what, &list))
            .collect()
    }

    /// Names that neither the file nor what it imports declares.
    fn needs(&self, files: &BTreeMap<String, Self>) -> BTreeSet<String> {
        let everywhere: BTreeSet<&str> =
            files.values().flat_map(|file| &file.declared).map(|declaration| declaration.name.as_str()).collect();
        let mut given = BTreeSet::new();
        self.collect_given(files, &mut BTreeSet::new(), &mut given);
        self.used.iter().filter(|name| everywhere.contains(name.as_str()) && !given.contains(*name)).cloned().collect()
    }

    /// What the file and its imports declare, and what every choice of the slots that they open does.
    fn collect_given(&self, files: &BTreeMap<String, Self>, seen: &mut BTreeSet<String>, given: &mut BTreeSet<String>) {
        if !seen.insert(self.path.clone()) {
            return;
        }
        given.extend(self.declared.iter().map(|declaration| declaration.name.clone()));
        for import in &self.imports {
            let slot = slot_file(&import.file).filter(|slot| is_slot(files, slot));
            given.extend(slot.iter().flat_map(|slot| files[slot].offered()));
            if !import.is_slot {
                files[&import.file].collect_given(files, seen, given);
            }
        }
    }

    /// First and last line of the statements: at the end of the comment that the file starts with.
    fn statement_lines(&self) -> (usize, usize) {
        let end = self.text.lines().position(|line| !line.starts_with("//")).unwrap_or(self.text.lines().count());
        let is_statement = |line: &str| {
            STATEMENTS
                .iter()
                .any(|what| line.strip_prefix("// ").is_some_and(|rest| rest.starts_with(&format!("{what}: "))))
        };
        let start = self.text.lines().take(end).position(is_statement).unwrap_or(end);
        (start, end)
    }

    fn stated(&self) -> String {
        let (start, end) = self.statement_lines();
        self.text.lines().take(end).skip(start).map(|line| format!("{line}\n")).collect()
    }

    /// The text with other statements.
    fn with_statements(&self, statements: &str) -> String {
        let (start, end) = self.statement_lines();
        let lines: Vec<&str> = self.text.lines().collect();
        let mut head = lines[..start].to_vec();
        while head.last() == Some(&"//") {
            head.pop();
        }
        let blank = if statements.is_empty() { "" } else { "//\n" };
        let line = |line: &&str| format!("{line}\n");
        head.iter().map(line).collect::<String>()
            + blank
            + statements
            + &lines[end..].iter().map(line).collect::<String>()
    }
}

/// Which files can be parts of one kernel: all that it reaches by imports and slots, but for two choices of one slot.
struct Together {
    of_kernels: Vec<BTreeSet<String>>,
    slots: BTreeSet<String>,
}

impl Together {
    fn new(files: &BTreeMap<String, File>) -> Self {
        fn reach(file: &File, files: &BTreeMap<String, File>, found: &mut BTreeSet<String>) {
            if !found.insert(file.path.clone()) {
                return;
            }
            for import in &file.imports {
                let folder = slot_file(&import.file).filter(|slot| import.is_slot && is_slot(files, slot));
                let is_choice = |other: &File| folder.is_some() && slot_file(&other.path) == folder;
                files
                    .values()
                    .filter(|other| other.path == import.file || is_choice(other))
                    .for_each(|other| reach(other, files, found));
                // Defaults of its slot come with a file.
                slot_file(&import.file)
                    .filter(|slot| is_slot(files, slot))
                    .and_then(|slot| files.get(&slot))
                    .into_iter()
                    .for_each(|slot| reach(slot, files, found));
            }
        }
        let kernels = files.values().filter(|file| file.is_kernel());
        let reached = |kernel| {
            let mut found = BTreeSet::new();
            reach(kernel, files, &mut found);
            found
        };
        let slots = files.values().filter(|file| file.is_slot).map(|slot| slot.path.clone()).collect();
        Self { of_kernels: kernels.map(reached).collect(), slots }
    }

    fn contains(&self, one: &str, other: &str) -> bool {
        let choices = |path: &str| slot_file(path).filter(|slot| slot != path && self.slots.contains(slot));
        let of_one_slot = choices(one).is_some() && choices(one) == choices(other);
        one != other
            && !of_one_slot
            && self.of_kernels.iter().any(|reached| reached.contains(one) && reached.contains(other))
    }
}

const EVERY: &str = "// Every choice has";
const SOME: &str = "// A choice may have";

fn slot_file(path: &str) -> Option<String> {
    path.split('#').next().map(str::to_owned)
}

fn is_slot(files: &BTreeMap<String, File>, path: &str) -> bool {
    files.get(path).is_some_and(|file| file.is_slot)
}

fn statement(what: &str, list: &[String]) -> String {
    let mut text = format!("// {what}:");
    let mut width = text.len();
    for (i, name) in list.iter().enumerate() {
        let comma = if i + 1 < list.len() { "," } else { "" };
        if width + name.len() + 1 + comma.len() > WIDTH {
            text += "\n//  ";
            width = 4;
        }
        text += &format!(" {name}{comma}");
        width += name.len() + 1 + comma.len();
    }
    text + "\n"
}

impl Declaration {
    fn new(item: &str) -> Option<Self> {
        let mut rest = item.trim();
        let mut binding = None;
        while let Some(attribute) = rest.strip_prefix('@') {
            let name_end = attribute.find(|c: char| !c.is_alphanumeric() && c != '_')?;
            let after = &attribute[name_end..];
            let (argument, after) =
                after.strip_prefix('(').and_then(|inner| inner.split_once(')')).unwrap_or(("", after));
            if &attribute[..name_end] == "binding" {
                binding = argument.parse().ok();
            }
            rest = after.trim_start();
        }
        let (kind, after) = rest.split_once([' ', '<'])?;
        if !["fn", "const", "alias", "struct", "var"].contains(&kind) {
            return None;
        }
        let after = if kind == "var" { after.split_once("> ").map_or(after, |(_, after)| after) } else { after };
        let name: String = after.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let signature = rest.split(" {").next()?.split(" = ").next()?.split(';').next()?;
        Some(Self { name, signature: signature.split_whitespace().collect::<Vec<_>>().join(" "), binding })
    }
}

/// The declarations of a file without comments.
fn items(code: &str) -> Vec<String> {
    let (mut found, mut item, mut depth) = (Vec::new(), String::new(), 0);
    for c in code.chars() {
        item.push(c);
        match c {
            '{' | '(' => depth += 1,
            '}' | ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 && (c == ';' || c == '}') {
            found.push(std::mem::take(&mut item));
        }
    }
    found
}

/// Identifiers that are no members of something.
fn names(code: &str) -> impl Iterator<Item = &str> {
    let boundary = |c: char| !c.is_alphanumeric() && c != '_';
    code.split(boundary).filter(|name| name.starts_with(|c: char| c.is_alphabetic() || c == '_')).filter(move |name| {
        let at = name.as_ptr() as usize - code.as_ptr() as usize;
        !code[..at].ends_with('.')
    })
}

/// Parameters and local declarations of a function, members of a structure.
fn locals(item: &str) -> BTreeSet<&str> {
    let words: Vec<&str> = names(item).collect();
    let declared = words.windows(2).filter(|pair| ["let", "var", "const"].contains(&pair[0])).map(|pair| pair[1]);
    let is_global = !item.trim_start().starts_with("fn ") && !item.contains("\nfn ") && !item.contains("struct ");
    if is_global {
        return BTreeSet::new();
    }
    let typed = words.iter().copied().filter(|name| {
        let after = name.as_ptr() as usize - item.as_ptr() as usize + name.len();
        item[after..].starts_with(": ")
    });
    declared.chain(typed).collect()
}

/// The files or sections below a heading: `{file}`, or `{file}#{section}` and further sections, ` #{section}`.
fn sections_of(heading: &str) -> Vec<String> {
    let mut words = heading.split(' ');
    let first = words.next().unwrap_or_default();
    let file = first.split('#').next().unwrap_or_default();
    std::iter::once(first.to_owned()).chain(words.map(|section| format!("{file}{section}"))).collect()
}

/// Constants and aliases that plans set, by the file that declares them.
fn set_by_plans(files: &BTreeMap<String, File>) -> BTreeMap<String, BTreeSet<String>> {
    let mut set: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for variant in all_variants() {
        let listing = variant.listing().unwrap();
        let headings = listing.lines().filter_map(|line| line.strip_prefix("// shaders/"));
        let parts: BTreeSet<String> = headings.flat_map(sections_of).collect();
        for name in variant.settings() {
            let declaring = parts.iter().find(|part| files[*part].declares(name));
            let file = declaring.unwrap_or_else(|| panic!("no part of {} declares {name}", variant.label()));
            set.entry(file.clone()).or_default().insert(name.to_owned());
        }
    }
    set
}

#[test]
fn headers_say_what_files_need_and_give() {
    let files = files();
    let (set, together) = (set_by_plans(&files), Together::new(&files));
    let nothing = BTreeSet::new();
    let mut wrong = Vec::new();
    for file in files.values() {
        let statements = file.statements(&files, &together, set.get(&file.path).unwrap_or(&nothing));
        if file.stated() == statements {
            continue;
        }
        if updates() {
            write(&file.path, &file.with_statements(&statements));
            continue;
        }
        wrong.push(format!("shaders/{} says\n{}\nand should say\n{statements}", file.path, file.stated()));
    }
    assert!(wrong.is_empty(), "{}\nKVPACK_UPDATE=1 writes them", wrong.join("\n"));
}

/// What a file is made of stands between its header and its code.
#[test]
fn imports_are_at_the_top() {
    for file in files().values() {
        let after_code = file.text.lines().skip_while(|line| line.is_empty() || line.starts_with("//"));
        let late: Vec<&str> = after_code.filter(|line| line.starts_with("// import ")).collect();
        assert!(late.is_empty(), "shaders/{} imports after its code begins: {late:?}", file.path);
    }
}

/// What a slot's header says every choice has is there, with the same parameters, and defaults are replaced by
/// functions with the same parameters.
#[test]
fn choices_have_what_their_slot_says() {
    let files = files();
    let together = Together::new(&files);
    for import in files.values().flat_map(|file| &file.imports).filter(|import| import.is_slot) {
        let slot = slot_file(&import.file).filter(|slot| is_slot(&files, slot));
        assert!(slot.is_some(), "shaders/{} is no choice of a slot", import.file);
    }
    let mut slots = 0;
    for slot in files.values().filter(|file| file.is_slot) {
        slots += 1;
        let interface = slot.interface(EVERY);
        let required = || interface.iter().filter_map(|line| Declaration::new(line));
        let choices = files.values().filter(|file| !file.is_slot && file.slot_file().as_ref() == Some(&slot.path));
        for choice in choices {
            let mut given = BTreeSet::new();
            choice.collect_given(&files, &mut BTreeSet::new(), &mut given);
            let missing: Vec<String> = required().map(|own| own.name).filter(|name| !given.contains(name)).collect();
            assert!(missing.is_empty(), "shaders/{} lacks {missing:?}, which every choice has", choice.path);
        }
        for agreed in required().chain(slot.declared.iter().cloned()) {
            let others = files.values().filter(|file| {
                file.slot_file().as_ref() == Some(&slot.path) || together.contains(&slot.path, &file.path)
            });
            for (file, other) in others.flat_map(|file| file.declared.iter().map(move |other| (file, other))) {
                if other.name == agreed.name && agreed.signature.starts_with("fn ") {
                    assert_eq!(other.signature, agreed.signature, "shaders/{} and shaders/{}", file.path, slot.path);
                }
            }
        }
    }
    assert!(slots > 30, "{slots}");
}

/// Kernels need nothing that they do not import.
#[test]
fn kernels_are_whole() {
    let files = files();
    let kernels: Vec<&File> = files.values().filter(|file| file.is_kernel()).collect();
    let lacking =
        kernels.iter().map(|kernel| (&kernel.path, kernel.needs(&files))).filter(|(_, needs)| !needs.is_empty());
    assert_eq!(lacking.collect::<Vec<_>>(), []);
    assert!(kernels.len() > 15, "{}", kernels.len());
}
