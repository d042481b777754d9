//! What is planted where.

use std::{collections::HashSet, mem};

use quote::{ToTokens, quote};
use syn::{
    Arm, Attribute, BinOp, Block, Expr, ExprBinary, ExprMatch, ExprUnary, ImplItemFn, ItemConst, ItemFn, ItemMod, ItemStatic,
    Pat, ReturnType, Signature, Type, TypePath, UnOp, parse_quote,
    spanned::Spanned,
    visit_mut::{self, VisitMut},
};

/// Walks over files and plants.
pub struct Planter {
    next: u32,
    without: HashSet<u32>,
    file: String,
    function: String,
}

impl Planter {
    /// `without`: the numbers of mistakes that are counted and not planted.
    pub fn new(without: HashSet<u32>) -> Self {
        Self { next: 0, without, file: String::new(), function: String::new() }
    }

    /// All that follows is of this file.
    pub fn begin_file(&mut self, file: &str) {
        self.file = file.into();
        self.function.clear();
    }

    /// The switch of a new mistake; `None` where it is not to be planted.
    fn switch(&mut self, line: usize, what: &str) -> Option<Expr> {
        let number = self.next;
        self.next += 1;
        if self.without.contains(&number) {
            return None;
        }
        println!("{number}\t{}\t{line}\t{}\t{what}", self.file, self.function);
        Some(parse_quote!(crate::planted::on(#number)))
    }

    /// A binary operation, its operands evaluated once.
    fn binary(&mut self, binary: &ExprBinary) -> Option<Expr> {
        let line = binary.op.span().start().line;
        let others = other_operators(&binary.op);
        let (left, right, op) = (&binary.left, &binary.right, &binary.op);
        let mut switches = Vec::new();
        for other in &others {
            let what = format!("{} becomes {}", op.to_token_stream(), other.to_token_stream());
            if let Some(switch) = self.switch(line, &what) {
                switches.push((switch, other));
            }
        }
        if switches.is_empty() {
            return None;
        }
        let lazy = matches!(op, BinOp::And(_) | BinOp::Or(_));
        let compares = matches!(op, BinOp::Eq(_) | BinOp::Ne(_) | BinOp::Lt(_) | BinOp::Gt(_) | BinOp::Le(_) | BinOp::Ge(_));
        let assigns = binary.op.to_token_stream().to_string().ends_with('=') && !compares;
        let chosen = |l: &dyn ToTokens, r: &dyn ToTokens| {
            let (l, r) = (l.to_token_stream(), r.to_token_stream());
            let mut chosen = quote!({ #l #op #r });
            for (switch, other) in switches.iter().rev() {
                chosen = quote!({ if #switch { #l #other #r } else #chosen });
            }
            chosen
        };
        let l = quote!(__l);
        let r = quote!(__r);
        Some(if lazy {
            let chosen = chosen(&l, right);
            parse_quote!({ let __l: bool = #left; #chosen })
        } else if assigns {
            let chosen = chosen(left, &r);
            parse_quote!({ let __r = #right; #chosen })
        } else if compares {
            let chosen = chosen(&l, &r);
            parse_quote!((match (&(#left), &(#right)) { (__l, __r) => #chosen }))
        } else {
            let chosen = chosen(&l, &r);
            parse_quote!((match (#left, #right) { (__l, __r) => #chosen }))
        })
    }

    /// An operation that is left out.
    fn unary(&mut self, unary: &ExprUnary) -> Option<Expr> {
        if matches!(unary.op, UnOp::Deref(_)) || matches!(*unary.expr, Expr::Lit(_)) {
            return None;
        }
        let what = format!("{} is left out", unary.op.to_token_stream());
        let switch = self.switch(unary.span().start().line, &what)?;
        let (op, expr) = (&unary.op, &unary.expr);
        Some(parse_quote!((match #expr { __e => if #switch { __e } else { #op __e } })))
    }

    /// Guards that are always or never so, and arms that are never taken where another takes all.
    fn arms(&mut self, found: &mut ExprMatch) {
        let takes_all = found.arms.iter().any(|arm| matches!(arm.pat, Pat::Wild(_)) && arm.guard.is_none());
        for arm in &mut found.arms {
            let line = arm.pat.span().start().line;
            if let Some((_, guard)) = &mut arm.guard {
                if has_let(guard) {
                    continue;
                }
                if let Some(switch) = self.switch(line, "a guard is always so") {
                    **guard = parse_quote!(#switch || (#guard));
                }
                if let Some(switch) = self.switch(line, "a guard is never so") {
                    **guard = parse_quote!(!#switch && (#guard));
                }
            } else if takes_all && !matches!(arm.pat, Pat::Wild(_)) {
                self.never(arm, line);
            }
        }
    }

    fn never(&mut self, arm: &mut Arm, line: usize) {
        if let Some(switch) = self.switch(line, "an arm is never taken") {
            arm.guard = Some((Default::default(), Box::new(parse_quote!(!#switch))));
        }
    }

    /// Values that a function returns at once.
    fn body(&mut self, signature: &Signature, block: &mut Block) {
        let line = signature.ident.span().start().line;
        let mut returns = Vec::new();
        for value in values(&signature.output) {
            let what = format!("returns {} at once", value.to_token_stream());
            if let Some(switch) = self.switch(line, &what) {
                returns.push(quote!(if #switch { return #value; }));
            }
        }
        if !returns.is_empty() && !block.stmts.is_empty() {
            let stmts = &block.stmts;
            *block = parse_quote!({ #(#returns)* #(#stmts)* });
        }
    }

    fn function(&mut self, attributes: &[Attribute], signature: &Signature, block: &mut Block) {
        if signature.constness.is_some() || is_test(attributes) {
            return;
        }
        let outer = mem::replace(&mut self.function, signature.ident.to_string());
        visit_mut::visit_block_mut(self, block);
        self.body(signature, block);
        self.function = outer;
    }
}

impl VisitMut for Planter {
    fn visit_item_fn_mut(&mut self, item: &mut ItemFn) {
        self.function(&item.attrs, &item.sig, &mut item.block);
    }

    fn visit_impl_item_fn_mut(&mut self, item: &mut ImplItemFn) {
        self.function(&item.attrs, &item.sig, &mut item.block);
    }

    fn visit_item_mod_mut(&mut self, item: &mut ItemMod) {
        if !is_test(&item.attrs) {
            visit_mut::visit_item_mod_mut(self, item);
        }
    }

    // Nothing is asked while compiling.
    fn visit_item_const_mut(&mut self, _: &mut ItemConst) {}
    fn visit_impl_item_const_mut(&mut self, _: &mut syn::ImplItemConst) {}
    fn visit_item_static_mut(&mut self, _: &mut ItemStatic) {}
    fn visit_type_mut(&mut self, _: &mut Type) {}
    fn visit_expr_const_mut(&mut self, _: &mut syn::ExprConst) {}
    fn visit_expr_repeat_mut(&mut self, repeat: &mut syn::ExprRepeat) {
        self.visit_expr_mut(&mut repeat.expr);
    }

    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        visit_mut::visit_expr_mut(self, expr);
        let planted = match expr {
            Expr::Binary(binary) if !has_let(&binary.left) && !has_let(&binary.right) => self.binary(binary),
            Expr::Unary(unary) => self.unary(unary),
            Expr::Match(found) => {
                self.arms(found);
                None
            }
            _ => None,
        };
        if let Some(planted) = planted {
            *expr = planted;
        }
    }
}

/// Whether an operand binds by `let`, in a chain.
fn has_let(expr: &Expr) -> bool {
    match expr {
        Expr::Let(_) => true,
        Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        _ => false,
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || (attribute.path().is_ident("cfg") && attribute.to_token_stream().to_string().contains("test"))
    })
}

fn other_operators(op: &BinOp) -> Vec<BinOp> {
    match op {
        BinOp::Eq(_) => vec![parse_quote!(!=)],
        BinOp::Ne(_) => vec![parse_quote!(==)],
        BinOp::And(_) => vec![parse_quote!(||)],
        BinOp::Or(_) => vec![parse_quote!(&&)],
        BinOp::Lt(_) => vec![parse_quote!(==), parse_quote!(>), parse_quote!(<=)],
        BinOp::Gt(_) => vec![parse_quote!(==), parse_quote!(<), parse_quote!(>=)],
        BinOp::Le(_) => vec![parse_quote!(>)],
        BinOp::Ge(_) => vec![parse_quote!(<)],
        BinOp::Add(_) => vec![parse_quote!(-), parse_quote!(*)],
        BinOp::Sub(_) => vec![parse_quote!(+), parse_quote!(/)],
        BinOp::Mul(_) => vec![parse_quote!(+), parse_quote!(/)],
        BinOp::Div(_) => vec![parse_quote!(%), parse_quote!(*)],
        BinOp::Rem(_) => vec![parse_quote!(/), parse_quote!(+)],
        BinOp::Shl(_) => vec![parse_quote!(>>)],
        BinOp::Shr(_) => vec![parse_quote!(<<)],
        BinOp::BitAnd(_) => vec![parse_quote!(|), parse_quote!(^)],
        BinOp::BitOr(_) => vec![parse_quote!(&), parse_quote!(^)],
        BinOp::BitXor(_) => vec![parse_quote!(|), parse_quote!(&)],
        BinOp::AddAssign(_) => vec![parse_quote!(-=), parse_quote!(*=)],
        BinOp::SubAssign(_) => vec![parse_quote!(+=), parse_quote!(/=)],
        BinOp::MulAssign(_) => vec![parse_quote!(+=), parse_quote!(/=)],
        BinOp::DivAssign(_) => vec![parse_quote!(%=), parse_quote!(*=)],
        BinOp::RemAssign(_) => vec![parse_quote!(/=), parse_quote!(+=)],
        BinOp::BitAndAssign(_) => vec![parse_quote!(|=), parse_quote!(^=)],
        BinOp::BitOrAssign(_) => vec![parse_quote!(&=), parse_quote!(^=)],
        _ => Vec::new(),
    }
}

/// The values that a function may return without looking.
fn values(output: &ReturnType) -> Vec<Expr> {
    match output {
        ReturnType::Default => vec![parse_quote!(())],
        ReturnType::Type(_, output) => values_of(output),
    }
}

fn values_of(output: &Type) -> Vec<Expr> {
    let Type::Path(TypePath { path, .. }) = output else {
        return match output {
            Type::Tuple(tuple) if tuple.elems.is_empty() => vec![parse_quote!(())],
            _ => Vec::new(),
        };
    };
    let Some(last) = path.segments.last() else { return Vec::new() };
    let inner = match &last.arguments {
        syn::PathArguments::AngleBracketed(arguments) => arguments.args.first().and_then(|argument| match argument {
            syn::GenericArgument::Type(inner) => Some(inner),
            _ => None,
        }),
        _ => None,
    };
    match last.ident.to_string().as_str() {
        "bool" => vec![parse_quote!(true), parse_quote!(false)],
        "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" | "isize" => vec![parse_quote!(0), parse_quote!(1)],
        "f32" | "f64" => vec![parse_quote!(0.0), parse_quote!(1.0)],
        "String" => vec![parse_quote!(String::new())],
        "Vec" => with_each(parse_quote!(Vec::new()), inner, |value| parse_quote!(vec![#value])),
        "Option" => with_each(parse_quote!(None), inner, |value| parse_quote!(Some(#value))),
        "Result" => inner.map(values_of).unwrap_or_default().iter().map(|value| parse_quote!(Ok(#value))).collect(),
        _ => Vec::new(),
    }
}

/// A value that holds nothing, and those that hold one value of a type each.
fn with_each(nothing: Expr, inner: Option<&Type>, with: impl Fn(&Expr) -> Expr) -> Vec<Expr> {
    std::iter::once(nothing).chain(inner.map(values_of).unwrap_or_default().iter().map(with)).collect()
}
