//! What a function may return without looking.

use quote::{ToTokens, quote};
use syn::{Expr, GenericArgument, Path, PathArguments, ReturnType, Type, TypeParamBound, TypePath, parse_quote};

/// The values of the first runs: plain ones, and lists and options of them.
pub fn plain_values(output: &ReturnType) -> Vec<Expr> {
    match output {
        ReturnType::Default => vec![parse_quote!(())],
        ReturnType::Type(_, output) => plain_values_of(output),
    }
}

fn plain_values_of(output: &Type) -> Vec<Expr> {
    let Type::Path(TypePath { path, .. }) = output else {
        return match output {
            Type::Tuple(tuple) if tuple.elems.is_empty() => vec![parse_quote!(())],
            _ => Vec::new(),
        };
    };
    let Some(last) = path.segments.last() else { return Vec::new() };
    let inner = types_in(path).first().copied();
    match last.ident.to_string().as_str() {
        "bool" => vec![parse_quote!(true), parse_quote!(false)],
        "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" | "isize" => vec![parse_quote!(0), parse_quote!(1)],
        "f32" | "f64" => vec![parse_quote!(0.0), parse_quote!(1.0)],
        "String" => vec![parse_quote!(String::new())],
        "Vec" => with_each(parse_quote!(Vec::new()), inner, |value| parse_quote!(vec![#value])),
        "Option" => with_each(parse_quote!(None), inner, |value| parse_quote!(Some(#value))),
        "Result" => {
            inner.map(plain_values_of).unwrap_or_default().iter().map(|value| parse_quote!(Ok(#value))).collect()
        }
        _ => Vec::new(),
    }
}

/// A value that holds nothing, and those that hold one value of a type each.
fn with_each(nothing: Expr, inner: Option<&Type>, with: impl Fn(&Expr) -> Expr) -> Vec<Expr> {
    std::iter::once(nothing).chain(inner.map(plain_values_of).unwrap_or_default().iter().map(with)).collect()
}

/// The values that are not plain. Some do not compile: nothing here knows which types have a default.
pub fn further_values(output: &ReturnType) -> Vec<Expr> {
    let plain: Vec<_> = plain_values(output).iter().map(|value| value.to_token_stream().to_string()).collect();
    let mut values = match output {
        ReturnType::Default => Vec::new(),
        ReturnType::Type(_, output) => values_of(output),
    };
    values.retain(|value| !plain.contains(&value.to_token_stream().to_string()));
    values
}

/// What `impl Iterator` iterates over.
pub fn item_of(output: &ReturnType) -> Option<&Type> {
    let ReturnType::Type(_, output) = output else { return None };
    let Type::ImplTrait(output) = &**output else { return None };
    output.bounds.iter().find_map(|bound| {
        let TypeParamBound::Trait(bound) = bound else { return None };
        let last = bound.path.segments.last().filter(|last| last.ident == "Iterator")?;
        let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
        arguments.args.iter().find_map(|argument| match argument {
            GenericArgument::AssocType(item) if item.ident == "Item" => Some(&item.ty),
            _ => None,
        })
    })
}

/// All values of a type.
pub fn values_of(output: &Type) -> Vec<Expr> {
    match output {
        Type::Path(TypePath { path, .. }) => values_of_path(path),
        Type::Array(array) => {
            let length = &array.len;
            values_of(&array.elem).iter().map(|value| parse_quote!([#value; #length])).collect()
        }
        Type::Slice(slice) => slices(&slice.elem),
        Type::Reference(reference) => match &*reference.elem {
            Type::Slice(slice) => slices(&slice.elem),
            Type::Path(TypePath { path, .. }) if path.is_ident("str") => vec![parse_quote!(""), parse_quote!("xyzzy")],
            referred => values_of(referred).iter().map(|value| parse_quote!(Box::leak(Box::new(#value)))).collect(),
        },
        Type::Tuple(tuple) => {
            let mut tuples = vec![Vec::new()];
            for element in &tuple.elems {
                let values = values_of(element);
                tuples = tuples
                    .iter()
                    .flat_map(|begun| {
                        values.iter().map(move |value| [&begun[..], std::slice::from_ref(value)].concat())
                    })
                    .collect();
            }
            tuples.iter().map(|values| parse_quote!((#(#values),*))).collect()
        }
        _ => Vec::new(),
    }
}

/// Slices that are never freed: an empty one, and those of one value.
fn slices(element: &Type) -> Vec<Expr> {
    let one = values_of(element).into_iter().map(|value| parse_quote!(Vec::leak(vec![#value])));
    std::iter::once(parse_quote!(Vec::leak(Vec::new()))).chain(one).collect()
}

fn values_of_path(path: &Path) -> Vec<Expr> {
    let Some(last) = path.segments.last() else { return Vec::new() };
    let inner: Vec<Vec<Expr>> = types_in(path).into_iter().map(values_of).collect();
    let first = inner.first().cloned().unwrap_or_default();
    let name = &last.ident;
    match name.to_string().as_str() {
        "bool" => vec![parse_quote!(true), parse_quote!(false)],
        "u8" | "u16" | "u32" | "u64" | "u128" | "usize" => vec![parse_quote!(0), parse_quote!(1)],
        "i8" | "i16" | "i32" | "i64" | "i128" | "isize" => vec![parse_quote!(0), parse_quote!(1), parse_quote!(-1)],
        "f32" | "f64" => vec![parse_quote!(0.0), parse_quote!(1.0), parse_quote!(-1.0)],
        "NonZeroU32" | "NonZeroU64" | "NonZeroUsize" => vec![parse_quote!(1.try_into().unwrap())],
        "String" => vec![parse_quote!(String::new()), parse_quote!("xyzzy".into())],
        "Result" if inner.is_empty() => vec![parse_quote!(Ok(Default::default()))],
        "Result" => first.iter().map(|value| parse_quote!(Ok(#value))).collect(),
        "Option" => {
            let one = first.iter().map(|value| parse_quote!(Some(#value)));
            std::iter::once(parse_quote!(None)).chain(one).collect()
        }
        "Vec" => {
            let one = first.iter().map(|value| parse_quote!(vec![#value]));
            std::iter::once(parse_quote!(Vec::new())).chain(one).collect()
        }
        "Cow" => first
            .iter()
            .flat_map(|v| [quote!(Cow::Borrowed(#v)), quote!(Cow::Owned(#v.to_owned()))])
            .map(parsed)
            .collect(),
        "Box" | "Cell" | "RefCell" | "Arc" | "Rc" | "Mutex" => {
            first.iter().map(|value| parse_quote!(#name::new(#value))).collect()
        }
        "BinaryHeap" | "BTreeSet" | "HashSet" | "LinkedList" | "VecDeque" => {
            let one = first.iter().map(|value| parse_quote!(#name::from_iter([#value])));
            std::iter::once(parse_quote!(#name::new())).chain(one).collect()
        }
        "BTreeMap" | "HashMap" => {
            let values = inner.get(1).cloned().unwrap_or_default();
            let pairs =
                first.iter().flat_map(|key| values.iter().map(move |value| quote!(#name::from_iter([(#key, #value)]))));
            std::iter::once(quote!(#name::new())).chain(pairs).map(parsed).collect()
        }
        // Something made of one other type, which may be a list or a box of it.
        _ if inner.len() == 1 => {
            let one = first
                .iter()
                .flat_map(|v| [quote!(#name::from_iter([#v])), quote!(#name::new(#v)), quote!(#name::from(#v))]);
            std::iter::once(quote!(#name::new())).chain(one).map(parsed).collect()
        }
        _ => vec![parse_quote!(Default::default())],
    }
}

fn parsed(tokens: proc_macro2::TokenStream) -> Expr {
    parse_quote!(#tokens)
}

/// The types between a path's last angle brackets.
fn types_in(path: &Path) -> Vec<&Type> {
    let Some(PathArguments::AngleBracketed(arguments)) = path.segments.last().map(|last| &last.arguments) else {
        return Vec::new();
    };
    arguments
        .args
        .iter()
        .filter_map(|argument| match argument {
            GenericArgument::Type(inner) => Some(inner),
            _ => None,
        })
        .collect()
}
