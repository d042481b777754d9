//! Unrolls loops of shaders, and evaluates the constants that this needs.

use std::collections::BTreeMap;

/// The values of all lines `const NAME: u32 = expression;`, wherever the constants stand that an expression names.
pub(super) fn evaluate_constants(text: &str) -> BTreeMap<String, u32> {
    let declared = text.lines().filter_map(|line| line.strip_prefix("const ")?.split_once(": u32 = "));
    let mut waiting: Vec<(&str, &str)> =
        declared.map(|(name, rest)| (name, rest.split(';').next().unwrap_or(""))).collect();
    let mut constants = BTreeMap::new();
    loop {
        let before = waiting.len();
        waiting.retain(|&(name, expression)| match Expression::new(expression, &constants).value() {
            Some(value) => {
                constants.insert(name.to_owned(), value);
                false
            }
            None => true,
        });
        if waiting.len() == before {
            return constants;
        }
    }
}

/// Unrolls the loops under `// unroll`, innermost last.
pub(super) fn unroll(
    lines: &[&str],
    constants: &BTreeMap<String, u32>,
    out: &mut String,
) -> std::result::Result<(), String> {
    let mut at = 0;
    while at < lines.len() {
        if lines[at].trim() != "// unroll" {
            out.push_str(lines[at]);
            out.push('\n');
            at += 1;
            continue;
        }
        let header = lines.get(at + 1).ok_or("'// unroll' at the end")?;
        let (variable, bound) = loop_header(header).ok_or_else(|| format!("cannot unroll '{}'", header.trim()))?;
        let times = Expression::new(bound, constants).value().ok_or_else(|| format!("bound '{bound}' is unknown"))?;
        let indent = header.len() - header.trim_start().len();
        let closing = lines[at + 2..]
            .iter()
            .position(|line| line.trim() == "}" && line.len() - line.trim_start().len() == indent)
            .ok_or_else(|| format!("no closing brace for '{}'", header.trim()))?;
        let body = &lines[at + 2..at + 2 + closing];
        for value in 0..times {
            out.push_str(&format!("{}{{ const {variable} = {value}u;\n", " ".repeat(indent)));
            let mut inner = constants.clone();
            inner.insert(variable.to_owned(), value);
            unroll(body, &inner, out)?;
            out.push_str(&format!("{}}}\n", " ".repeat(indent)));
        }
        at += closing + 3;
    }
    Ok(())
}

/// `for (var i = 0u; i < BOUND; i++) {` as `(i, BOUND)`.
fn loop_header(line: &str) -> Option<(&str, &str)> {
    let (variable, rest) = line.trim().strip_prefix("for (var ")?.split_once(" = 0u; ")?;
    let bound = rest.strip_prefix(variable)?.strip_prefix(" < ")?.strip_suffix("++) {")?;
    Some((variable, bound.strip_suffix(variable)?.trim_end().strip_suffix(';')?))
}

/// A tiny evaluator for constant expressions: names, literals, `+ - * / %` and parentheses.
struct Expression<'a> {
    rest: &'a str,
    constants: &'a BTreeMap<String, u32>,
}

impl<'a> Expression<'a> {
    fn new(text: &'a str, constants: &'a BTreeMap<String, u32>) -> Self {
        Self { rest: text.trim(), constants }
    }

    fn value(mut self) -> Option<u32> {
        let value = self.sum()?;
        self.rest.trim().is_empty().then_some(value)
    }

    fn sum(&mut self) -> Option<u32> {
        let mut value = self.product()?;
        loop {
            value = match self.operator(&['+', '-']) {
                Some('+') => value.checked_add(self.product()?)?,
                Some(_) => value.checked_sub(self.product()?)?,
                None => return Some(value),
            };
        }
    }

    fn product(&mut self) -> Option<u32> {
        let mut value = self.atom()?;
        loop {
            value = match self.operator(&['*', '/', '%']) {
                Some('*') => value.checked_mul(self.atom()?)?,
                Some('/') => value.checked_div(self.atom()?)?,
                Some(_) => value.checked_rem(self.atom()?)?,
                None => return Some(value),
            };
        }
    }

    fn atom(&mut self) -> Option<u32> {
        self.rest = self.rest.trim_start();
        if let Some(inner) = self.rest.strip_prefix('(') {
            self.rest = inner;
            let value = self.sum()?;
            self.rest = self.rest.trim_start().strip_prefix(')')?;
            return Some(value);
        }
        let end = self.rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word.strip_suffix('u').unwrap_or(word).parse() {
            Ok(number) => Some(number),
            Err(_) => self.constants.get(word).copied(),
        }
    }

    fn operator(&mut self, allowed: &[char]) -> Option<char> {
        let trimmed = self.rest.trim_start();
        let operator = trimmed.chars().next().filter(|c| allowed.contains(c))?;
        self.rest = &trimmed[1..];
        Some(operator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        let constants = BTreeMap::from([("A".to_owned(), 6), ("B_2".to_owned(), 4)]);
        let value = |text| Expression::new(text, &constants).value();
        assert_eq!(value("A * B_2 / 3u + 1u"), Some(9));
        assert_eq!(value("2u * (A - B_2)"), Some(4));
        assert_eq!(value("A -"), None);
        assert_eq!(value("C"), None);
    }

    #[test]
    fn constants_may_name_later_ones() {
        let constants = evaluate_constants(
            "const A: u32 = B + 1u;\nconst B: u32 = 2u * C;\nconst C: u32 = 3u;\nconst D: u32 = E;\n",
        );
        let expected = [("A", 7), ("B", 6), ("C", 3)].map(|(name, value)| (name.to_owned(), value));
        assert_eq!(constants, BTreeMap::from(expected));
    }

    #[test]
    fn loops_are_written_out() {
        let text = "const N: u32 = 2u;\n// unroll\nfor (var i = 0u; i < N; i++) {\n    // unroll\n    for (var j = 0u; j < i; j++) {\n        x(i, j);\n    }\n}\nend";
        let lines: Vec<&str> = text.lines().collect();
        let mut out = String::new();
        unroll(&lines, &evaluate_constants(text), &mut out).unwrap();
        assert_eq!(
            out,
            "const N: u32 = 2u;\n{ const i = 0u;\n}\n{ const i = 1u;\n    { const j = 0u;\n        x(i, j);\n    }\n}\nend\n"
        );
    }
}
