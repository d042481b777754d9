//! Runs two kernels in one dispatch, so that neither waits for the other. wgpu puts a barrier between two dispatches
//! when the second writes what the first wrote, and a launch that waits costs microseconds.
//!
//! The text of the second kernel follows the text of the first. Every name that it declares gets the prefix `other_`,
//! and eight is added to its bindings. Workgroups at z = 0 do the work of the first kernel; those at z = 1 do the work
//! of the second.

use std::collections::BTreeSet;

/// The combined entry point.
pub(super) const ENTRY: &str = "side_by_side";

/// Prefix of the names of the second kernel.
const OTHER: &str = "other_";

/// Greater than every binding of the first kernel.
const FIRST_BINDING: u32 = 8;

/// The name of a buffer of the second kernel. The `shared` buffer keeps its name, because both kernels bind it once.
pub(super) fn other_name(name: &str, shared: &str) -> String {
    if name == shared { name.to_owned() } else { format!("{OTHER}{name}") }
}

/// Combines two kernels, each given as its text and its entry point. Both read the buffer `shared`, and neither writes
/// it.
///
/// # Errors
/// The reason why they cannot be combined: different arguments, a directive that the first lacks, or a binding in use.
pub(super) fn beside(first: [&str; 2], second: [&str; 2], shared: &str) -> Result<String, String> {
    let [first, second] = [Called::new(first)?, Called::new(second)?];
    if (&first.attribute, &first.arguments) != (&second.attribute, &second.arguments) {
        return Err("the two kernels take different arguments".into());
    }
    let other = below(&second.text, &first.text, shared)?;
    let entry = first.entry_of_both(&format!("{OTHER}{}", second.entry))?;
    Ok(format!("{}\n{other}\n{entry}", first.text))
}

/// The text of the second kernel, without the declarations that the first already has.
fn below(text: &str, first: &str, shared: &str) -> Result<String, String> {
    let names: BTreeSet<&str> = text.lines().filter_map(declared_name).collect();
    let mut other = String::new();
    for line in text.lines() {
        let is_shared = line.starts_with("@group(0)") && declared_name(line) == Some(shared);
        if line.starts_with("enable ") || is_shared {
            if !first.lines().any(|of_first| of_first == line) {
                return Err(format!("the first kernel has no '{line}'"));
            }
            continue;
        }
        other += &renamed(&rebound(line)?, &names, shared);
        other.push('\n');
    }
    Ok(other)
}

/// A kernel whose entry point was turned into a function.
struct Called<'a> {
    text: String,
    entry: &'a str,
    /// `@compute @workgroup_size(64)`.
    attribute: &'a str,
    arguments: Vec<Argument<'a>>,
}

/// An argument of an entry point.
#[derive(PartialEq)]
struct Argument<'a> {
    /// `@builtin(workgroup_id)`.
    builtin: &'a str,
    name: &'a str,
    ty: &'a str,
}

impl<'a> Called<'a> {
    fn new([text, entry]: [&'a str; 2]) -> Result<Self, String> {
        let parts = || {
            let (before, rest) = text.split_once(&format!("\nfn {entry}(\n"))?;
            let (before, attribute) = before.rsplit_once('\n')?;
            let (arguments, body) = rest.split_once("\n) {\n")?;
            let arguments = arguments.lines().map(Argument::new).collect::<Option<Vec<_>>>()?;
            attribute.starts_with("@compute ").then_some((before, attribute, arguments, body))
        };
        let missing = || format!("no entry point {entry} with a line for each argument");
        let (before, attribute, arguments, body) = parts().ok_or_else(missing)?;
        let plain: Vec<String> = arguments.iter().map(|Argument { name, ty, .. }| format!("{name}: {ty}")).collect();
        let text = format!("{before}\nfn {entry}({}) {{\n{body}", plain.join(", "));
        Ok(Self { text, entry, attribute, arguments })
    }

    /// The entry point that calls this kernel or the other one, which takes the same arguments.
    fn entry_of_both(&self, other: &str) -> Result<String, String> {
        let Self { entry, attribute, arguments, .. } = self;
        let workgroup = arguments.iter().find(|argument| argument.builtin == "@builtin(workgroup_id)");
        let workgroup = workgroup.ok_or_else(|| format!("{entry} does not take its workgroup"))?.name;
        let line = |Argument { builtin, name, ty }: &Argument<'_>| format!("    {builtin} {name}: {ty},\n");
        let lines: String = arguments.iter().map(line).collect();
        let values: Vec<&str> = arguments.iter().map(|argument| argument.name).collect();
        let values = values.join(", ");
        Ok(format!(
            "{attribute}\nfn {ENTRY}(\n{lines}) {{\n    if ({workgroup}.z == 0u) {{\n        {entry}({values});\n    \
             }} else {{\n        {other}({values});\n    }}\n}}\n"
        ))
    }
}

impl<'a> Argument<'a> {
    /// Parses a line such as `    @builtin(workgroup_id) group: vec3<u32>,`.
    fn new(line: &'a str) -> Option<Self> {
        let (builtin, rest) = line.trim().trim_end_matches(',').split_once(' ')?;
        let (name, ty) = rest.split_once(": ")?;
        Some(Self { builtin, name, ty })
    }
}

/// The name that a line outside functions declares.
fn declared_name(line: &str) -> Option<&str> {
    let rest = match line.starts_with("@group(0)") || line.starts_with("var<") {
        true => line.split_once('>')?.1.trim_start(),
        false => ["fn ", "const ", "alias ", "struct "].iter().find_map(|word| line.strip_prefix(word))?,
    };
    rest.split(|c| !is_of_name(c)).next()
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// A line of the second kernel with its binding moved above those of the first.
fn rebound(line: &str) -> Result<String, String> {
    let Some(rest) = line.strip_prefix("@group(0) @binding(") else { return Ok(line.to_owned()) };
    let binding = rest.split_once(')').and_then(|(index, rest)| Some((index.parse::<u32>().ok()?, rest)));
    match binding {
        Some((index, rest)) if index < FIRST_BINDING => {
            Ok(format!("@group(0) @binding({}){rest}", index + FIRST_BINDING))
        }
        _ => Err(format!("a binding that is not below {FIRST_BINDING}: {line}")),
    }
}

/// A line with the prefix on every declared name, except the shared one and names in comments. Names are changed
/// wherever they stand, including members and arguments of the same name, so that all uses still agree.
fn renamed(line: &str, names: &BTreeSet<&str>, shared: &str) -> String {
    let (code, comment) = line.split_at(line.find("//").unwrap_or(line.len()));
    let mut out = String::with_capacity(line.len() * 2);
    let mut rest = code;
    while !rest.is_empty() {
        let length = rest.find(|c| !is_of_name(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(length);
        if names.contains(word) && word != shared {
            out.push_str(OTHER);
        }
        out.push_str(word);
        let between = after.find(is_of_name).unwrap_or(after.len());
        out.push_str(&after[..between]);
        rest = &after[between..];
    }
    out + comment
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = "@group(0) @binding(0) var<storage, read> table: array<u32>;\n\
        @group(0) @binding(2) var<storage, read_write> tiles: array<u32>;\n\n\
        const SIZE: u32 = 4u;\n\n\
        fn size(tiles_of: u32) -> u32 {\n    return tiles_of * SIZE;\n}\n\n\
        @compute @workgroup_size(64)\nfn store(\n    @builtin(workgroup_id) group: vec3<u32>,\n    \
        @builtin(local_invocation_index) invocation: u32,\n) {\n    tiles[invocation] = size(table[group.x]);\n}\n";

    #[test]
    fn two_kernels_keep_their_names_apart() {
        let both = beside([KERNEL, "store"], [KERNEL, "store"], "table").unwrap();
        let count = |part: &str| both.matches(part).count();
        assert_eq!(count("@binding(0) var<storage, read> table"), 1);
        assert_eq!(count("@binding(10) var<storage, read_write> other_tiles: array<u32>;"), 1);
        assert_eq!(count("const other_SIZE: u32 = 4u;"), 1);
        assert_eq!(count("other_tiles[invocation] = other_size(table[group.x]);"), 1);
        assert_eq!(count("fn other_size(tiles_of: u32)"), 1);
        assert_eq!(count("@compute @workgroup_size(64)\nfn side_by_side("), 1);
        assert_eq!(count("fn store(group: vec3<u32>, invocation: u32) {"), 1);
        assert_eq!(count("if (group.z == 0u) {\n        store(group, invocation);\n"), 1);
        assert_eq!(count("other_store(group, invocation);\n"), 1);
        assert_eq!(other_name("tiles", "table"), "other_tiles");
        assert_eq!(other_name("table", "table"), "table");
    }

    #[test]
    fn what_cannot_stand_beside_is_told() {
        let with = |from: &str, to: &str| KERNEL.replace(from, to);
        let error = |text: &str| beside([KERNEL, "store"], [text, "store"], "table").unwrap_err();
        assert!(error(&with("size(64)", "size(32)")).contains("different arguments"));
        assert!(error(&format!("enable f16;\n{KERNEL}")).contains("enable f16"));
        assert!(error(&with("@binding(2)", "@binding(9)")).contains("below 8"));
        assert!(error(&with("fn store(", "fn other(")).contains("no entry point store"));
        assert!(error(&with("@binding(0)", "@binding(1)")).contains("table"));
    }
}
