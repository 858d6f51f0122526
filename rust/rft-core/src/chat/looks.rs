//! What a template looks at in the text of a message, read from its syntax tree.
//!
//! Most templates copy contents into their text and decide by roles. Whatever such a template asks of a content (does it
//! hold `</think>`, is it empty, does it equal "none") is found here, so that two chats of the same roles for which all
//! these questions have the same answers are known to be rendered alike. What is not understood makes it "no": the
//! template is then rendered for every chat.

use std::collections::{BTreeMap, BTreeSet};

use minijinja::machinery::{ast, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;

use ast::{BinOpKind, CallArg, CompareOpKind, Expr, Stmt};

/// The questions that a template asks of contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Looks {
    /// Texts that it searches for.
    pub searched: Vec<String>,
    /// Texts that a whole content is compared with.
    pub compared: Vec<String>,
    /// Texts in which it looks for a whole content.
    pub within: Vec<String>,
    /// Characters that it strips, beside white space.
    pub stripped: String,
    /// Whether it compares messages with one another.
    pub compares_messages: bool,
}

/// What a template looks at; none where that cannot be told.
///
/// The chats in question have messages of a role and a content that holds something (a string, or with `parts` a list of
/// one part), no tools, no documents and no other options: branches that such a chat never takes are left out.
pub fn looks(source: &str, syntax: SyntaxConfig, parts: bool) -> Option<Looks> {
    let tree = parse(source, "chat_template", syntax).ok()?;
    let mut walk = Walk {
        source,
        parts,
        looks: Looks::default(),
        known: true,
        first_pass: true,
        names: BTreeMap::new(),
        assigned: BTreeSet::new(),
        set: BTreeSet::new(),
        macros: BTreeMap::new(),
        called: BTreeSet::new(),
    };
    walk.bind(&tree);
    walk.first_pass = false;
    walk.names.clear();
    walk.set.clear();
    walk.bind(&tree);
    walk.statement(&tree);
    let mut looks = walk.looks;
    for list in [&mut looks.searched, &mut looks.compared, &mut looks.within] {
        list.sort();
        list.dedup();
    }
    let searchable = looks.searched.iter().all(|text| !text.is_empty());
    (walk.known && searchable).then_some(looks)
}

/// What a name stands for, wherever it is set.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bound {
    Message,
    List,
    Other,
}

struct Walk<'a, 'e> {
    source: &'a str,
    parts: bool,
    looks: Looks,
    known: bool,
    /// While names are gathered: which branches are taken is not yet known.
    first_pass: bool,
    names: BTreeMap<&'a str, Bound>,
    /// Every name that the template sets anywhere.
    assigned: BTreeSet<&'a str>,
    /// Tools or documents, where the template sets them to something.
    set: BTreeSet<&'a str>,
    macros: BTreeMap<&'a str, &'e ast::Macro<'a>>,
    called: BTreeSet<&'a str>,
}

const TESTS: [&str; 16] = [
    "defined",
    "undefined",
    "none",
    "string",
    "mapping",
    "iterable",
    "sequence",
    "number",
    "integer",
    "float",
    "boolean",
    "true",
    "false",
    "odd",
    "even",
    "divisibleby",
];

/// Filters that say nothing of a text but what it is, or whose work shows where the text is written.
const FILTERS: [&str; 26] = [
    "string",
    "tojson",
    "default",
    "d",
    "list",
    "first",
    "last",
    "map",
    "selectattr",
    "rejectattr",
    "select",
    "reject",
    "join",
    "items",
    "dictsort",
    "sort",
    "unique",
    "safe",
    "length",
    "count",
    "indent",
    "reverse",
    "batch",
    "max",
    "min",
    "__rft_generation",
];
const CASES: [&str; 6] = ["lower", "upper", "capitalize", "title", "swapcase", "casefold"];
const FUNCTIONS: [&str; 6] = ["raise_exception", "namespace", "range", "dict", "strftime_now", "caller"];
/// What the context holds as none.
const OPTIONS: [&str; 2] = ["tools", "documents"];
const CONTENTS: [&str; 6] = ["content", "text", "value", "reasoning_content", "reasoning", "thinking"];
const LISTS: [&str; 6] = ["messages", "tools", "calls", "history", "documents", "functions"];

/// Whether it is a word of the chat's structure, which may change its case: a content that does is searched for other words
/// than the ones that the template names.
fn is_a_name(expr: &Expr<'_>) -> bool {
    matches!(tail(expr), Some("role" | "name" | "type" | "key"))
}

/// The last name of `a.b['c']`, through slices and filters.
fn tail<'e>(expr: &'e Expr<'_>) -> Option<&'e str> {
    match expr {
        Expr::Var(var) => Some(var.id),
        Expr::GetAttr(attr) => Some(attr.name),
        Expr::GetItem(item) => match &item.subscript_expr {
            Expr::Const(constant) if constant.value.kind() == ValueKind::String => match &item.subscript_expr {
                Expr::Const(constant) => constant.value.as_str(),
                _ => None,
            },
            _ => None,
        },
        Expr::Slice(slice) => tail(&slice.expr),
        Expr::Filter(filter) => tail(filter.expr.as_ref()?),
        _ => None,
    }
}

/// The method that a call calls, and on what.
fn method<'e, 'a>(call: &'e ast::Call<'a>) -> Option<(&'e Expr<'a>, &'a str)> {
    match &call.expr {
        Expr::GetAttr(attr) => Some((&attr.expr, attr.name)),
        _ => None,
    }
}

fn text_of(expr: &Expr<'_>) -> Option<String> {
    match expr {
        Expr::Const(constant) => constant.value.as_str().map(str::to_string),
        _ => None,
    }
}

fn argument<'e, 'a>(args: &'e [CallArg<'a>], index: usize) -> Option<&'e Expr<'a>> {
    match args.get(index)? {
        CallArg::Pos(expr) => Some(expr),
        _ => None,
    }
}

impl<'a, 'e> Walk<'a, 'e> {
    // ---- names

    fn name(&mut self, target: &Expr<'a>, bound: Bound) {
        match target {
            Expr::Var(var) => {
                self.assigned.insert(var.id);
                if OPTIONS.contains(&var.id) {
                    self.set.insert(var.id);
                }
                let seen = self.names.get(var.id).copied();
                self.names.insert(var.id, if seen.is_none_or(|seen| seen == bound) { bound } else { Bound::Other });
            }
            Expr::List(list) => list.items.iter().for_each(|item| self.name(item, Bound::Other)),
            Expr::Tuple(list) => list.items.iter().for_each(|item| self.name(item, Bound::Other)),
            _ => {}
        }
    }

    fn bound(&self, expr: &Expr<'a>) -> Bound {
        match expr {
            Expr::List(_) | Expr::Tuple(_) => Bound::List,
            Expr::Slice(slice) => self.bound(&slice.expr),
            Expr::Call(call) => match method(call) {
                Some((_, "split" | "rsplit" | "partition" | "rpartition" | "splitlines")) => Bound::List,
                _ => Bound::Other,
            },
            Expr::GetItem(item) if tail(expr).is_none() && self.of_messages(&item.expr) => Bound::Message,
            Expr::Filter(filter) if matches!(filter.name, "first" | "last") => match &filter.expr {
                Some(inner) if self.of_messages(inner) => Bound::Message,
                _ => Bound::Other,
            },
            Expr::Filter(filter) if matches!(filter.name, "selectattr" | "rejectattr" | "list" | "reverse") => {
                Bound::List
            }
            Expr::IfExpr(choice) => match (self.bound(&choice.true_expr), choice.false_expr.as_ref()) {
                (bound, Some(other)) if bound == self.bound(other) => bound,
                _ => Bound::Other,
            },
            _ if self.is_list(expr) => Bound::List,
            _ => Bound::Other,
        }
    }

    fn is_list(&self, expr: &Expr<'a>) -> bool {
        match expr {
            Expr::Var(var) if self.names.get(var.id) == Some(&Bound::List) => true,
            Expr::Call(_) | Expr::List(_) | Expr::Tuple(_) => self.bound(expr) == Bound::List,
            _ => tail(expr).is_some_and(|name| LISTS.iter().any(|list| name.ends_with(list))),
        }
    }

    fn of_messages(&self, expr: &Expr<'a>) -> bool {
        tail(expr).is_some_and(|name| name.ends_with("messages"))
    }

    fn bind(&mut self, statement: &'e Stmt<'a>) {
        match statement {
            Stmt::Template(template) => self.bind_all(&template.children),
            Stmt::ForLoop(each) if self.truth(&each.iter) == Some(false) => {
                each.else_body.iter().for_each(|inner| self.bind(inner));
            }
            Stmt::ForLoop(each) => {
                self.bind_all(&each.body);
                self.bind_all(&each.else_body);
                let bound = if self.of_messages(&each.iter) { Bound::Message } else { Bound::Other };
                self.name(&each.target, bound);
            }
            Stmt::IfCond(choice) => {
                let truth = self.truth(&choice.expr);
                if truth != Some(false) {
                    choice.true_body.iter().for_each(|inner| self.bind(inner));
                }
                if truth != Some(true) {
                    choice.false_body.iter().for_each(|inner| self.bind(inner));
                }
            }
            Stmt::WithBlock(with) => {
                self.bind_all(&with.body);
                for (target, expr) in &with.assignments {
                    let bound = self.bound(expr);
                    self.name(target, bound);
                }
            }
            Stmt::Set(set) => {
                let bound = self.bound(&set.expr);
                let nothing = self.truth(&set.expr) == Some(false);
                match &set.target {
                    // Set to nothing, tools stay none.
                    Expr::Var(var) if nothing && OPTIONS.contains(&var.id) => {}
                    target => self.name(target, bound),
                }
            }
            Stmt::SetBlock(set) => {
                self.bind_all(&set.body);
                self.name(&set.target, Bound::Other);
            }
            Stmt::FilterBlock(block) => self.bind_all(&block.body),
            Stmt::AutoEscape(block) => self.bind_all(&block.body),
            Stmt::Macro(block) => {
                self.bind_all(&block.body);
                self.macros.insert(block.name, block);
                self.assigned.insert(block.name);
                block.args.iter().for_each(|arg| self.name(arg, Bound::Other));
            }
            Stmt::CallBlock(block) => self.bind_all(&block.macro_decl.body),
            _ => {}
        }
    }

    fn bind_all(&mut self, list: &'e [Stmt<'a>]) {
        list.iter().for_each(|inner| self.bind(inner));
    }

    // ---- what is known of a plain chat

    /// Whether the value is undefined: an option that nobody gave, or a field that no plain message has.
    fn is_absent(&self, expr: &Expr<'a>) -> bool {
        match expr {
            Expr::Var(var) => {
                let context = ["messages", "add_generation_prompt", "loop", "self", "true", "false", "none"];
                !self.first_pass
                    && !self.assigned.contains(var.id)
                    && !OPTIONS.contains(&var.id)
                    && !context.contains(&var.id)
                    && !FUNCTIONS.contains(&var.id)
                    && !var.id.ends_with("_token")
            }
            Expr::GetAttr(attr) => self.lacks(&attr.expr, attr.name),
            Expr::GetItem(item) => tail(expr).is_some_and(|name| self.lacks(&item.expr, name)),
            _ => false,
        }
    }

    /// Whether a value is a message as the row has it, without this field.
    fn lacks(&self, message: &Expr<'a>, field: &str) -> bool {
        self.is_message(message) && !["role", "content"].contains(&field) && !self.makes(field)
    }

    fn is_message(&self, expr: &Expr<'a>) -> bool {
        match expr {
            Expr::Var(var) => !self.first_pass && self.names.get(var.id) == Some(&Bound::Message),
            Expr::GetItem(item) => !self.first_pass && tail(expr).is_none() && self.of_messages(&item.expr),
            _ => false,
        }
    }

    /// Whether the template may make a map with this key; text that looks alike counts.
    fn makes(&self, key: &str) -> bool {
        let keyed = |quote: char| {
            let quoted = format!("{quote}{key}{quote}");
            self.source
                .match_indices(&quoted)
                .any(|(at, _)| self.source[at + quoted.len()..].trim_start().starts_with(':'))
        };
        self.source.contains("dict(") || keyed('"') || keyed('\'')
    }

    /// Whether an expression is true of every plain chat, or of none.
    fn truth(&self, expr: &Expr<'a>) -> Option<bool> {
        if self.first_pass {
            return None;
        }
        let option =
            |expr: &Expr<'a>| matches!(expr, Expr::Var(var) if OPTIONS.contains(&var.id) && !self.set.contains(var.id));
        match expr {
            Expr::Const(constant) => Some(constant.value.is_true()),
            Expr::List(list) if list.items.is_empty() => Some(false),
            _ if self.is_absent(expr) || option(expr) => Some(false),
            Expr::UnaryOp(op) if matches!(op.op, ast::UnaryOpKind::Not) => self.truth(&op.expr).map(|truth| !truth),
            Expr::BinOp(op) => match (op.op, self.truth(&op.left), self.truth(&op.right)) {
                (BinOpKind::ScAnd, Some(false), _) | (BinOpKind::ScAnd, _, Some(false)) => Some(false),
                (BinOpKind::ScAnd, Some(true), Some(true)) => Some(true),
                (BinOpKind::ScOr, Some(true), _) | (BinOpKind::ScOr, _, Some(true)) => Some(true),
                (BinOpKind::ScOr, Some(false), Some(false)) => Some(false),
                (BinOpKind::In, ..) => self.has_field(&op.left, &op.right),
                _ => None,
            },
            Expr::Compare(compare) if compare.ops.len() == 1 => match compare.ops[0].op {
                CompareOpKind::In => self.has_field(&compare.expr, &compare.ops[0].expr),
                CompareOpKind::NotIn => self.has_field(&compare.expr, &compare.ops[0].expr).map(|has| !has),
                _ => None,
            },
            Expr::Test(test) if test.args.is_empty() => {
                let (absent, none) = (self.is_absent(&test.expr), option(&test.expr));
                match test.name {
                    "defined" if absent || none => Some(!absent),
                    "undefined" if absent || none => Some(absent),
                    "none" if absent || none => Some(none),
                    "string" | "mapping" | "number" | "integer" | "boolean" | "true" if absent || none => Some(false),
                    "string" if tail(&test.expr) == Some("content") && self.of_message(&test.expr) => Some(!self.parts),
                    _ => None,
                }
            }
            Expr::Filter(filter) if matches!(filter.name, "default" | "d") => {
                let inner = filter.expr.as_ref()?;
                if self.is_absent(inner) {
                    argument(&filter.args, 0).map_or(Some(false), |other| self.truth(other))
                } else {
                    None
                }
            }
            Expr::IfExpr(choice) => match self.truth(&choice.test_expr) {
                Some(true) => self.truth(&choice.true_expr),
                Some(false) => choice.false_expr.as_ref().map_or(Some(false), |other| self.truth(other)),
                None => None,
            },
            _ => None,
        }
    }

    fn of_message(&self, expr: &Expr<'a>) -> bool {
        match expr {
            Expr::GetAttr(attr) => self.is_message(&attr.expr),
            Expr::GetItem(item) => self.is_message(&item.expr),
            _ => false,
        }
    }

    fn has_field(&self, part: &Expr<'a>, whole: &Expr<'a>) -> Option<bool> {
        let field = text_of(part)?;
        if !self.is_message(whole) || self.makes(&field) {
            return None;
        }
        Some(["role", "content"].contains(&field.as_str()))
    }

    // ---- what is asked

    /// What is not understood makes the whole unknown.
    fn require(&mut self, understood: bool) {
        self.known &= understood;
    }

    fn statements(&mut self, list: &[Stmt<'a>]) {
        list.iter().for_each(|inner| self.statement(inner));
    }

    fn statement(&mut self, statement: &Stmt<'a>) {
        match statement {
            Stmt::Template(template) => self.statements(&template.children),
            Stmt::EmitExpr(emit) => self.expr(&emit.expr, false),
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
            Stmt::ForLoop(each) if self.truth(&each.iter) == Some(false) => {
                self.expr(&each.iter, false);
                self.statements(&each.else_body);
            }
            Stmt::ForLoop(each) => {
                self.expr(&each.iter, false);
                each.filter_expr.iter().for_each(|expr| self.expr(expr, false));
                self.statements(&each.body);
                self.statements(&each.else_body);
            }
            Stmt::IfCond(choice) => {
                self.expr(&choice.expr, false);
                let truth = self.truth(&choice.expr);
                if truth != Some(false) {
                    self.statements(&choice.true_body);
                }
                if truth != Some(true) {
                    self.statements(&choice.false_body);
                }
            }
            Stmt::WithBlock(with) => {
                with.assignments.iter().for_each(|(_, expr)| self.expr(expr, false));
                self.statements(&with.body);
            }
            Stmt::Set(set) => self.expr(&set.expr, false),
            Stmt::SetBlock(set) => {
                set.filter.iter().for_each(|filter| self.expr(filter, false));
                self.statements(&set.body);
            }
            Stmt::FilterBlock(block) => {
                self.expr(&block.filter, false);
                self.statements(&block.body);
            }
            Stmt::AutoEscape(block) => self.statements(&block.body),
            // Looked at where it is called.
            Stmt::Macro(_) => {}
            Stmt::CallBlock(block) => {
                self.call(&block.call);
                self.statements(&block.macro_decl.body);
            }
            Stmt::Do(run) => self.call(&run.call),
            #[allow(unreachable_patterns)]
            _ => self.require(false),
        }
    }

    /// `under_name`: whether an attribute of the value is taken.
    fn expr(&mut self, expr: &Expr<'a>, under_name: bool) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::GetAttr(attr) => self.expr(&attr.expr, true),
            Expr::GetItem(item) => {
                let named = tail(expr).is_some();
                // An element of a text is a character of it.
                self.require(named || under_name || self.is_list(&item.expr));
                self.expr(&item.expr, named);
                self.expr(&item.subscript_expr, false);
            }
            Expr::Slice(slice) => {
                self.require(self.is_list(&slice.expr));
                self.expr(&slice.expr, false);
                for part in [&slice.start, &slice.stop, &slice.step].into_iter().flatten() {
                    self.expr(part, false);
                }
            }
            Expr::UnaryOp(op) => self.expr(&op.expr, false),
            Expr::BinOp(op) => {
                self.expr(&op.left, false);
                match (op.op, self.truth(&op.left)) {
                    (BinOpKind::ScAnd, Some(false)) | (BinOpKind::ScOr, Some(true)) => return,
                    _ => self.expr(&op.right, false),
                }
                match op.op {
                    BinOpKind::Eq | BinOpKind::Ne => self.equal(&op.left, &op.right),
                    BinOpKind::In => self.contained(&op.left, &op.right),
                    BinOpKind::Lt | BinOpKind::Lte | BinOpKind::Gt | BinOpKind::Gte => {
                        self.ordered(&op.left, &op.right);
                    }
                    _ => {}
                }
            }
            Expr::Compare(compare) => {
                self.expr(&compare.expr, false);
                let mut left = &compare.expr;
                for op in &compare.ops {
                    self.expr(&op.expr, false);
                    match op.op {
                        CompareOpKind::Eq | CompareOpKind::Ne => self.equal(left, &op.expr),
                        CompareOpKind::In | CompareOpKind::NotIn => self.contained(left, &op.expr),
                        _ => self.ordered(left, &op.expr),
                    }
                    left = &op.expr;
                }
            }
            Expr::IfExpr(choice) => {
                self.expr(&choice.test_expr, false);
                let truth = self.truth(&choice.test_expr);
                if truth != Some(false) {
                    self.expr(&choice.true_expr, under_name);
                }
                if truth != Some(true) {
                    choice.false_expr.iter().for_each(|other| self.expr(other, under_name));
                }
            }
            Expr::Filter(filter) => {
                if let Some(inner) = &filter.expr {
                    self.expr(inner, false);
                }
                self.args(&filter.args);
                match filter.name {
                    "trim" => self.strip(&filter.args),
                    "replace" | "split" => self.search(&filter.args),
                    name if CASES.contains(&name) => self.require(filter.expr.as_ref().is_some_and(is_a_name)),
                    name if FILTERS.contains(&name) => {}
                    _ => self.require(false),
                }
            }
            Expr::Test(test) => {
                self.expr(&test.expr, false);
                self.args(&test.args);
                match (test.name, argument(&test.args, 0)) {
                    ("equalto" | "eq" | "==" | "ne" | "!=" | "sameas", Some(other)) => self.equal(&test.expr, other),
                    ("in", Some(other)) => self.contained(&test.expr, other),
                    (name, _) => self.require(TESTS.contains(&name)),
                }
            }
            Expr::Call(call) => self.call(call),
            Expr::List(list) => list.items.iter().for_each(|item| self.expr(item, false)),
            Expr::Tuple(list) => list.items.iter().for_each(|item| self.expr(item, false)),
            Expr::Map(map) => map.keys.iter().chain(&map.values).for_each(|item| self.expr(item, false)),
        }
    }

    fn args(&mut self, args: &[CallArg<'a>]) {
        for arg in args {
            match arg {
                CallArg::Pos(expr) | CallArg::Kwarg(_, expr) | CallArg::PosSplat(expr) | CallArg::KwargSplat(expr) => {
                    self.expr(expr, false);
                }
            }
        }
    }

    fn call(&mut self, call: &ast::Call<'a>) {
        self.args(&call.args);
        let Some((object, name)) = method(call) else {
            // A function of ours, or a macro, whose body is looked at where it stands.
            match &call.expr {
                Expr::Var(var) => {
                    self.require(!minijinja_has(var.id));
                    self.enter(var.id);
                }
                _ => self.require(false),
            }
            return;
        };
        self.expr(object, false);
        match name {
            "strip" | "lstrip" | "rstrip" => self.strip(&call.args),
            "split" | "rsplit" | "partition" | "rpartition" | "startswith" | "endswith" | "replace" | "find"
            | "rfind" | "count" | "index" | "removeprefix" | "removesuffix" => self.search(&call.args),
            "items" | "keys" | "values" | "get" | "append" | "join" | "pop" | "cycle" => {}
            name if CASES.contains(&name) => self.require(is_a_name(object)),
            _ => self.require(false),
        }
    }

    /// The body of a macro, once.
    fn enter(&mut self, name: &'a str) {
        if let Some(block) = self.macros.get(name).copied()
            && self.called.insert(name)
        {
            block.defaults.iter().for_each(|expr| self.expr(expr, false));
            self.statements(&block.body);
        }
    }

    fn search(&mut self, args: &[CallArg<'a>]) {
        match argument(args, 0) {
            Some(Expr::Tuple(list)) => self.search_all(&list.items),
            Some(Expr::List(list)) => self.search_all(&list.items),
            Some(expr) => self.search_all(std::slice::from_ref(expr)),
            None => self.require(false),
        }
    }

    fn search_all(&mut self, texts: &[Expr<'a>]) {
        for expr in texts {
            match text_of(expr) {
                Some(text) => self.looks.searched.push(text),
                None => self.require(false),
            }
        }
    }

    fn strip(&mut self, args: &[CallArg<'a>]) {
        match args.first() {
            None => {}
            Some(CallArg::Pos(expr)) => match text_of(expr) {
                Some(set) => self.looks.stripped.push_str(&set),
                None => self.require(false),
            },
            Some(_) => self.require(false),
        }
    }

    /// Whether the value is made of a text in a way that a comparison of the whole text does not cover.
    fn is_changed(&self, expr: &Expr<'a>) -> bool {
        match expr {
            Expr::Filter(filter) if matches!(filter.name, "trim" | "string" | "default" | "d") => {
                filter.expr.as_ref().is_some_and(|inner| self.is_changed(inner))
            }
            Expr::Filter(filter) => {
                let inner = filter.expr.as_ref().and_then(tail);
                inner != Some("role") && !filter.expr.as_ref().is_some_and(|inner| self.is_list(inner))
            }
            Expr::Call(call) => match method(call) {
                Some((object, "strip" | "lstrip" | "rstrip")) => self.is_changed(object),
                Some((_, "get")) => false,
                Some((object, _)) => tail(object) != Some("role"),
                None => true,
            },
            Expr::BinOp(op) => matches!(op.op, BinOpKind::Add | BinOpKind::Concat | BinOpKind::Mul),
            Expr::GetItem(item) => tail(expr).is_none() && !self.of_messages(&item.expr),
            Expr::Slice(_) => true,
            _ => false,
        }
    }

    fn is_length_of_text(&self, expr: &Expr<'a>) -> bool {
        match expr {
            Expr::Filter(filter) if matches!(filter.name, "length" | "count") => match &filter.expr {
                Some(inner) => !self.is_list(inner) && self.bound(inner) != Bound::List,
                None => false,
            },
            _ => false,
        }
    }

    fn equal(&mut self, left: &Expr<'a>, right: &Expr<'a>) {
        for (one, other) in [(left, right), (right, left)] {
            if let Expr::Const(constant) = one {
                match constant.value.as_str() {
                    Some(text) => {
                        self.require(!self.is_changed(other));
                        self.looks.compared.push(text.to_string());
                    }
                    // Only contents that hold something come this way.
                    None => self.require(!self.is_length_of_text(other) || constant.value.as_i64() == Some(0)),
                }
                return;
            }
        }
        self.require(!self.is_length_of_text(left) && !self.is_length_of_text(right));
        self.require(!self.is_changed(left) && !self.is_changed(right));
        self.looks.compares_messages = true;
    }

    fn contained(&mut self, part: &Expr<'a>, whole: &Expr<'a>) {
        let in_message = matches!(whole, Expr::Var(var) if self.names.get(var.id) == Some(&Bound::Message))
            || matches!(whole, Expr::GetItem(item) if tail(whole).is_none() && self.of_messages(&item.expr));
        match (text_of(part), whole) {
            (Some(_), _) if in_message => {}
            (Some(text), _) => self.looks.searched.push(text),
            (None, Expr::List(list)) => list.items.iter().for_each(|item| self.equal(part, item)),
            (None, Expr::Tuple(list)) => list.items.iter().for_each(|item| self.equal(part, item)),
            (None, Expr::Const(constant)) => match constant.value.as_str() {
                Some(text) => {
                    self.require(!self.is_changed(part));
                    self.looks.within.push(text.to_string());
                }
                None => match constant.value.try_iter() {
                    Ok(items) => {
                        self.require(!self.is_changed(part));
                        let texts = items.filter_map(|item| item.as_str().map(str::to_string));
                        self.looks.compared.extend(texts);
                    }
                    Err(_) => self.require(false),
                },
            },
            // Names and kinds, of tools for the most part, are no contents.
            (None, _) => self
                .require(matches!(tail(part), Some("role" | "name" | "type" | "key")) && !matches!(part, Expr::Var(_))),
        }
    }

    fn ordered(&mut self, left: &Expr<'a>, right: &Expr<'a>) {
        let zero = |expr: &Expr<'a>| matches!(expr, Expr::Const(constant) if constant.value.as_i64() == Some(0));
        for (one, other) in [(left, right), (right, left)] {
            self.require(!tail(one).is_some_and(|name| CONTENTS.contains(&name)) || matches!(one, Expr::Filter(_)));
            self.require(!self.is_length_of_text(one) || zero(other));
        }
    }
}

/// Whether a name is a function of the engine that is not listed above (`debug`, `lipsum`).
fn minijinja_has(name: &str) -> bool {
    matches!(name, "debug" | "lipsum" | "cycler" | "joiner")
}
