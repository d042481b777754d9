//! Kernels that count out-of-bounds indices, so that tests can show that there are none.
//!
//! Drivers hide an out-of-bounds index: they skip the access, or clamp the index. This module therefore rewrites the
//! text of a kernel. Every index into a storage buffer or into workgroup memory is compared with the length of its
//! array, regardless of the plan, and counted if it is not below. Arrays private to an invocation are left alone: their
//! indices are constants, which naga checks.

use super::shader::{Binding, Source};

/// The buffer that holds the count.
pub(super) const OUT_OF_BOUNDS: &str = "out_of_bounds";

/// Greater than the bindings of all kernels.
const BINDING: u32 = 15;

/// An array of a kernel: the text that begins an access to it (`name[`), and its length.
struct Array {
    name: String,
    length: String,
}

impl Source {
    /// The same kernel with one more buffer, `out_of_bounds`, in which it counts indices out of bounds. An access with
    /// such an index takes the first element instead.
    pub fn counted(&self) -> Self {
        let arrays = arrays(&self.wgsl);
        let text = compared(&self.wgsl, &arrays);
        let counter = format!(
            "\n@group(0) @binding({BINDING}) var<storage, read_write> {OUT_OF_BOUNDS}: atomic<u32>;\n\n\
             fn counted_index(index: u32, length: u32) -> u32 {{\n    if (index >= length) {{\n        \
             atomicAdd(&{OUT_OF_BOUNDS}, 1u);\n        return 0u;\n    }}\n    return index;\n}}\n"
        );
        let mut bindings = self.bindings.clone();
        bindings.push(Binding { index: BINDING, name: OUT_OF_BOUNDS.into(), writable: true, least_bytes: 4 });
        Self { wgsl: text + &counter, bindings }
    }
}

/// The arrays in buffers and in workgroup memory.
fn arrays(text: &str) -> Vec<Array> {
    let mut found = Vec::new();
    for line in text.lines() {
        let (line, member) = (line.trim_end_matches([',', ';']), line.starts_with("    ") && line.ends_with(','));
        let Some((before, ty)) = line.split_once(": array<") else { continue };
        let Some(ty) = ty.strip_suffix('>') else { continue };
        let name = before.rsplit([' ', '>']).next().unwrap_or_default();
        let of = |length| Array { name: name.to_owned(), length };
        if member {
            // Arguments lie in a variable of their own, which ends in a runtime-sized array.
            found.push(Array { name: format!("call.{name}"), length: format!("arrayLength(&call.{name})") });
        } else if before.contains("var<storage") {
            found.push(of(format!("arrayLength(&{name})")));
        } else if before.contains("var<workgroup>") {
            found.extend(ty.rsplit_once(", ").map(|(_, length)| of(length.to_owned())));
        }
    }
    found
}

/// The text with a comparison at every index into one of the arrays.
fn compared(text: &str, arrays: &[Array]) -> String {
    let mut out = String::with_capacity(text.len() * 2);
    let mut rest = text;
    while let Some((at, array)) = next_access(rest, arrays) {
        let start = at + array.name.len() + 1;
        let Some(length) = matching_bracket(&rest[start..]) else { break };
        out.push_str(&rest[..start]);
        let index = compared(&rest[start..start + length], arrays);
        out.push_str(&format!("counted_index({index}, {})", array.length));
        rest = &rest[start + length..];
    }
    out + rest
}

/// The first access to an element of one of the arrays.
fn next_access<'a>(text: &str, arrays: &'a [Array]) -> Option<(usize, &'a Array)> {
    let of_array = |array: &'a Array| {
        let access = format!("{}[", array.name);
        let is_whole = |at: usize| {
            let before = text[..at].chars().next_back();
            !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '.')
        };
        text.match_indices(&access).map(|(at, _)| at).find(|&at| is_whole(at)).map(|at| (at, array))
    };
    arrays.iter().filter_map(of_array).min_by_key(|(at, _)| *at)
}

/// Bytes up to the bracket that closes one opened just before `text`.
fn matching_bracket(text: &str) -> Option<usize> {
    let mut depth = 1;
    for (at, c) in text.char_indices() {
        depth += i32::from(c == '[') - i32::from(c == ']');
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(wgsl: &str) -> String {
        Source { wgsl: wgsl.into(), bindings: Vec::new() }.counted().wgsl
    }

    #[test]
    fn indices_into_buffers_and_workgroup_memory_are_compared() {
        let text = "@group(0) @binding(0) var<storage, read> a: array<vec4<u32>>;\n\
                    var<workgroup> b: array<f32, 2u * N>;\nvar<private> c: array<u32, 4>;\n\
                    x = a[b[i] + c[0]].x + other.a[1] + ba[2];\n";
        let line = counted(text).lines().nth(3).unwrap().to_owned();
        let inner = "counted_index(i, 2u * N)";
        assert_eq!(line, format!("x = a[counted_index(b[{inner}] + c[0], arrayLength(&a))].x + other.a[1] + ba[2];"));
    }

    #[test]
    fn arrays_behind_arguments_are_compared() {
        let text = "struct Call {\n    tokens: u32,\n    places: array<Place>,\n}\nx = call.places[i];\n";
        assert!(counted(text).contains("call.places[counted_index(i, arrayLength(&call.places))]"));
    }
}
