//! What is planted where.

use std::{collections::HashSet, mem};

use quote::{ToTokens, quote};
use syn::{
    Arm, Attribute, BinOp, Block, Expr, ExprBinary, ExprMatch, ExprStruct, ExprUnary, ImplItemFn, ItemConst, ItemFn,
    ItemImpl, ItemMod, ItemStatic, Member, Pat, Signature, Stmt, TraitItemFn, Type, UnOp, parse_quote,
    punctuated::Pair,
    spanned::Spanned,
    visit_mut::{self, VisitMut},
};

use crate::values::{further_values, item_of, plain_values, values_of};

/// The number of the first mistake that the first runs had not: results of those stay what they are.
const FIRST_FURTHER: u32 = 5000;

/// Walks over files and plants.
pub struct Planter {
    next: u32,
    next_further: u32,
    /// Whether all mistakes are further ones, as those in constant functions are.
    only_further: bool,
    /// Whether mistakes are counted and not planted.
    only_counted: bool,
    without: HashSet<u32>,
    constant: HashSet<String>,
    file: String,
    of: String,
    function: String,
}

impl Planter {
    /// `without`: the numbers of mistakes that are counted and not planted. `constant`: the functions that are called
    /// while compiling, as `Type::function` or `function`; in other constant functions mistakes are planted, and they
    /// are constant no longer.
    pub fn new(without: HashSet<u32>, constant: HashSet<String>) -> Self {
        let (next, next_further) = (0, FIRST_FURTHER);
        let (file, of, function) = Default::default();
        let (only_further, only_counted) = Default::default();
        Self { next, next_further, only_further, only_counted, without, constant, file, of, function }
    }

    /// All that follows is of this file.
    pub fn begin_file(&mut self, file: &str) {
        self.file = file.into();
        self.function.clear();
    }

    /// The switch of a new mistake; `None` where it is not to be planted.
    fn switch(&mut self, line: usize, what: &str) -> Option<Expr> {
        if self.only_further {
            return self.further_switch(line, what);
        }
        self.next += 1;
        self.numbered_switch(self.next - 1, line, what)
    }

    /// The same, for a mistake that the first runs had not.
    fn further_switch(&mut self, line: usize, what: &str) -> Option<Expr> {
        self.next_further += 1;
        self.numbered_switch(self.next_further - 1, line, what)
    }

    fn numbered_switch(&self, number: u32, line: usize, what: &str) -> Option<Expr> {
        if self.only_counted || self.without.contains(&number) {
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
        let compares =
            matches!(op, BinOp::Eq(_) | BinOp::Ne(_) | BinOp::Lt(_) | BinOp::Gt(_) | BinOp::Le(_) | BinOp::Ge(_));
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

    /// A field that is the one of the structure that the others are taken from.
    fn fields(&mut self, built: &ExprStruct) -> Option<Expr> {
        built.rest.as_ref()?;
        let mut chosen = built.to_token_stream();
        for (index, field) in built.fields.iter().enumerate() {
            let Member::Named(name) = &field.member else { continue };
            let what = format!("the field {name} is left out");
            let Some(switch) = self.further_switch(field.span().start().line, &what) else { continue };
            let mut without = built.clone();
            let others = built.fields.iter().enumerate().filter(|(i, _)| *i != index);
            without.fields = others.map(|(_, field)| Pair::Punctuated(field.clone(), Default::default())).collect();
            chosen = quote!(if #switch { #without } else { #chosen });
        }
        Some(parse_quote!(({ #chosen })))
    }

    /// Values that a function returns at once.
    fn body(&mut self, signature: &Signature, block: &mut Block, plain: bool) {
        let line = signature.ident.span().start().line;
        let mut returns = Vec::new();
        for value in if plain { plain_values(&signature.output) } else { Vec::new() } {
            let what = format!("returns {} at once", value.to_token_stream());
            if let Some(switch) = self.switch(line, &what) {
                returns.push(quote!(if #switch { return #value; }));
            }
        }
        for value in further_values(&signature.output) {
            let what = format!("returns {} at once", value.to_token_stream());
            if let Some(switch) = self.further_switch(line, &what) {
                returns.push(quote!(if #switch { return #value; }));
            }
        }
        if !returns.is_empty() && !block.stmts.is_empty() {
            let stmts = &block.stmts;
            *block = parse_quote!({ #(#returns)* #(#stmts)* });
        }
        self.iterator(signature, block, line);
    }

    /// An iterator that ends at once, or has one value. All ways out of a function have one type, so what is returned
    /// at the end is cut short.
    fn iterator(&mut self, signature: &Signature, block: &mut Block, line: usize) {
        let Some(item) = item_of(&signature.output) else { return };
        let Some(Stmt::Expr(found, None)) = block.stmts.last_mut() else { return };
        if let Some(switch) = self.further_switch(line, "returns an empty iterator") {
            *found = parse_quote!((#found).take(if #switch { 0 } else { usize::MAX }));
        }
        for value in values_of(item) {
            let what = format!("returns an iterator of {}", value.to_token_stream());
            if let Some(switch) = self.further_switch(line, &what) {
                *found =
                    parse_quote!((#found).take(if #switch { 0 } else { usize::MAX }).chain(#switch.then(|| #value)));
            }
        }
    }

    /// Plants in a function, whose values of the first runs are planted where `plain` says so.
    fn function(&mut self, attributes: &[Attribute], signature: &mut Signature, block: &mut Block, plain: bool) {
        if is_test(attributes) {
            return;
        }
        let outer = mem::replace(&mut self.function, signature.ident.to_string());
        let around = (self.only_further, self.only_counted);
        if signature.constness.is_some() {
            let name =
                if self.of.is_empty() { self.function.clone() } else { format!("{}::{}", self.of, self.function) };
            self.only_further = true;
            self.only_counted |= self.constant.contains(&name);
            if !self.only_counted {
                signature.constness = None;
            }
        }
        visit_mut::visit_block_mut(self, block);
        self.body(signature, block, plain);
        (self.only_further, self.only_counted) = around;
        self.function = outer;
    }
}

impl VisitMut for Planter {
    fn visit_item_fn_mut(&mut self, item: &mut ItemFn) {
        let of = mem::take(&mut self.of);
        self.function(&item.attrs, &mut item.sig, &mut item.block, true);
        self.of = of;
    }

    fn visit_impl_item_fn_mut(&mut self, item: &mut ImplItemFn) {
        self.function(&item.attrs, &mut item.sig, &mut item.block, true);
    }

    // The first runs returned nothing from a trait's own functions.
    fn visit_trait_item_fn_mut(&mut self, item: &mut TraitItemFn) {
        if let Some(block) = &mut item.default {
            self.function(&item.attrs, &mut item.sig, block, false);
        }
    }

    fn visit_item_impl_mut(&mut self, item: &mut ItemImpl) {
        let name = match &*item.self_ty {
            Type::Path(of) => of.path.segments.last().map(|last| last.ident.to_string()),
            _ => None,
        };
        let of = mem::replace(&mut self.of, name.unwrap_or_default());
        visit_mut::visit_item_impl_mut(self, item);
        self.of = of;
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
            Expr::Struct(built) => self.fields(built),
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
