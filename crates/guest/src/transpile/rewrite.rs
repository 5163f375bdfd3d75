//! This module makes the changes that V8's REPL mode requires of a cell.
//!
//! REPL mode lets a later cell declare a name again, but only `let` and `class` after each other and `const` after
//! `const`, not `var` and `function`. It supports neither `import` nor `export`. Therefore:
//! - imports and `export … from` become `await __import(…)` at the head (`__named` finds their names in CommonJS
//!   packages), `import(…)` becomes `__import(…)`, and `export` is removed;
//! - `await X` at top level becomes `await __hold(X)`, which keeps the promise from being collected while the cell
//!   waits for it, and `for await (… of X)` becomes `for await (… of __holdEach(X))`;
//! - `var` becomes `let` in place if nothing refers to it earlier; otherwise it becomes `let` at the head and an
//!   assignment;
//! - `const` becomes `let`, unless the cell itself assigns to it, which must fail as usual;
//! - a function becomes `let f = function …`, in place or, if something refers to it earlier, at the head.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use oxc::allocator::Allocator;
use oxc::ast::ast::*;
use oxc::ast_visit::{Visit, walk};
use oxc::parser::Parser;
use oxc::semantic::{Semantic, SemanticBuilder};
use oxc::span::{GetSpan, SourceType, Span};
use oxc::syntax::scope::ScopeFlags;

use super::Fault;
use super::pieces::{Edit, Piece, append};
use super::strip::no_jsx;

pub(super) fn rewrite(code: &str) -> Result<Vec<Piece>, Fault> {
    let allocator = Allocator::default();
    let (program, semantic) = analyse(&allocator, code)?;
    let mut plan = Rewriter::new(code, names(&semantic));
    plan.find_hoisted(program);
    plan.visit_program(program);
    match plan.fault.take() {
        None => Ok(plan.done(program)),
        Some(fault) => Err(fault),
    }
}

/// Parses the cell as a module, because it may use `import` and `await`, but checks it against the rules of a sloppy
/// script, which it is going to be, unless it contains something that only a module may contain. Code that only a
/// script may contain (`with`, old octals) is parsed as a script.
fn analyse<'a>(allocator: &'a Allocator, code: &'a str) -> Result<(&'a Program<'a>, Semantic<'a>), Fault> {
    let (module, script) = (SourceType::mjs(), SourceType::script());
    let program = match parse(allocator, code, module) {
        Ok(program) => program,
        Err(fault) => match parse(allocator, code, script) {
            Ok(program) => return check(allocator, program, script),
            Err(_) if parse(allocator, code, SourceType::jsx()).is_ok() => return Err(no_jsx(fault)),
            Err(_) => return Err(fault),
        },
    };
    let is_module = program.body.iter().any(|statement| statement.is_module_declaration() || is_using(statement));
    check(allocator, program, if is_module { module } else { script })
}

fn is_using(statement: &Statement<'_>) -> bool {
    use VariableDeclarationKind::{AwaitUsing, Using};
    matches!(statement, Statement::VariableDeclaration(declaration) if matches!(declaration.kind, Using | AwaitUsing))
}

fn check<'a>(
    allocator: &'a Allocator,
    mut program: Program<'a>,
    rules: SourceType,
) -> Result<(&'a Program<'a>, Semantic<'a>), Fault> {
    program.source_type = rules;
    let program = allocator.alloc(program);
    let built = SemanticBuilder::new().with_check_syntax_error(true).with_build_nodes(true).build(program);
    match Fault::first_of(&built.diagnostics) {
        None => Ok((program, built.semantic)),
        Some(fault) => Err(fault),
    }
}

fn parse<'a>(allocator: &'a Allocator, code: &'a str, kind: SourceType) -> Result<Program<'a>, Fault> {
    let parsed = Parser::new(allocator, code, kind).parse();
    Fault::first_of(&parsed.diagnostics).map_or(Ok(parsed.program), Err)
}

/// Facts about a name that the cell declares at top level.
#[derive(Debug, Clone, Copy)]
struct Name {
    /// Position of the first reference to the name.
    first_use: usize,
    declared_once: bool,
    written: bool,
}

fn names(semantic: &Semantic<'_>) -> HashMap<String, Name> {
    let scoping = semantic.scoping();
    let describe = |symbol| {
        let uses =
            semantic.symbol_references(symbol).map(|reference| semantic.reference_span(reference).start as usize);
        let name = Name {
            first_use: uses.min().unwrap_or(usize::MAX),
            declared_once: scoping.symbol_redeclarations(symbol).len() <= 1,
            written: semantic.symbol_references(symbol).any(|reference| reference.is_write()),
        };
        (scoping.symbol_name(symbol).to_owned(), name)
    };
    scoping.iter_bindings_in(scoping.root_scope_id()).map(describe).collect()
}

/// A function that moves to the head of the cell.
struct Moved {
    name: String,
    range: Range<usize>,
    edits: Vec<Edit>,
}

struct Rewriter<'s> {
    source: &'s str,
    names: HashMap<String, Name>,
    /// Names that get a `let` at the head.
    hoisted: HashSet<String>,
    hoisted_order: Vec<String>,
    imports: Vec<String>,
    moved: Vec<Moved>,
    edits: Vec<Edit>,
    /// Number of functions and static blocks around the current position.
    depth: usize,
    /// Kind of the loop whose head is about to be visited, which may contain a declaration.
    loop_head: Option<LoopHead>,
    fault: Option<Fault>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoopHead {
    /// A loop of the form `for (…;…;…)`.
    Counting,
    /// A loop of the form `for (… in …)` or `for (… of …)`.
    Each,
}

impl<'s> Rewriter<'s> {
    fn new(source: &'s str, names: HashMap<String, Name>) -> Self {
        Self {
            source,
            names,
            hoisted: HashSet::new(),
            hoisted_order: Vec::new(),
            imports: Vec::new(),
            moved: Vec::new(),
            edits: Vec::new(),
            depth: 0,
            loop_head: None,
            fault: None,
        }
    }

    fn done(self, program: &Program<'_>) -> Vec<Piece> {
        let after_directives = program.directives.last().map(|directive| directive.span.end as usize);
        let after_hashbang = program.hashbang.as_ref().map(|hashbang| hashbang.span.end as usize);
        let start = after_hashbang.unwrap_or(0);
        let head = after_directives.unwrap_or(start);
        let mut pieces = vec![Piece::Source(start..head)];
        if after_directives.is_some() {
            pieces.push(Piece::New(";".to_owned()));
        }
        let functions: HashSet<&str> = self.moved.iter().map(|moved| moved.name.as_str()).collect();
        let lets: Vec<&str> =
            self.hoisted_order.iter().map(String::as_str).filter(|n| !functions.contains(n)).collect();
        if !lets.is_empty() {
            pieces.push(Piece::New(format!("let {}; ", lets.join(", "))));
        }
        let last: HashMap<String, usize> =
            self.moved.iter().enumerate().map(|(at, moved)| (moved.name.clone(), at)).collect();
        for (_, moved) in self.moved.into_iter().enumerate().filter(|(at, moved)| last[&moved.name] == *at) {
            pieces.push(Piece::New(format!("let {} = ", moved.name)));
            append(&mut pieces, moved.range, moved.edits);
            pieces.push(Piece::New("; ".to_owned()));
        }
        pieces.extend(self.imports.into_iter().map(Piece::New));
        append(&mut pieces, head..self.source.len(), self.edits);
        pieces
    }

    fn edit(&mut self, range: Range<usize>, text: impl Into<String>) {
        self.edits.push(Edit { range, text: text.into() });
    }

    fn insert(&mut self, at: usize, text: &str) {
        self.edit(at..at, text);
    }

    /// Removes a range but keeps its line ends, so that the following code stays on its lines.
    fn remove(&mut self, range: Range<usize>) {
        self.edit(range.clone(), self.line_ends(range));
    }

    /// Removes a whole statement like `remove`. The semicolon keeps the preceding statement, which may have none, from
    /// continuing into the following one.
    fn remove_statement(&mut self, range: Range<usize>) {
        self.edit(range.clone(), format!(";{}", self.line_ends(range)));
    }

    fn line_ends(&self, range: Range<usize>) -> String {
        "\n".repeat(self.source[range].matches('\n').count())
    }

    fn text(&self, span: Span) -> &'s str {
        &self.source[range(span)]
    }

    // ---- var

    /// Finds the names of `var` declarations that must move to the head. All names of one declaration are treated
    /// alike: in place, or at the head.
    fn find_hoisted(&mut self, program: &Program<'_>) {
        let mut found = Vars { direct: HashSet::new(), found: Vec::new() };
        for statement in &program.body {
            let declaration = match statement {
                Statement::VariableDeclaration(declaration) => declaration,
                Statement::ExportDeclaration(export) => match &export.declaration {
                    Declaration::VariableDeclaration(declaration) => declaration,
                    _ => continue,
                },
                _ => continue,
            };
            found.direct.insert(declaration.span.start);
        }
        found.visit_program(program);
        for var in found.found {
            let in_place = var.direct
                && var.names.iter().all(|name| {
                    self.names.get(name).is_some_and(|known| known.declared_once && known.first_use >= var.end)
                });
            if !in_place {
                for name in var.names {
                    if self.hoisted.insert(name.clone()) {
                        self.hoisted_order.push(name);
                    }
                }
            }
        }
    }

    fn is_hoisted(&self, declaration: &VariableDeclaration<'_>) -> bool {
        names_of(declaration).iter().any(|name| self.hoisted.contains(name))
    }

    fn assign_instead(&mut self, declaration: &VariableDeclaration<'_>, head: Option<LoopHead>) {
        let declared = range(declaration.span);
        let first = declaration.declarations.first().map_or(declared.end, |d| d.span.start as usize);
        let open = if head.is_some() { "" } else { "void (" };
        self.edit(declared.start..first, open);
        for declarator in &declaration.declarations {
            if declarator.init.is_none() && head != Some(LoopHead::Each) {
                self.edit(range(declarator.span), "0");
            } else {
                self.visit_variable_declarator(declarator);
            }
        }
        if head.is_none() {
            let end = declaration.declarations.last().map_or(declared.end, |d| d.span.end as usize);
            let has_semicolon = self.text(declaration.span).ends_with(';');
            self.insert(end, if has_semicolon { ")" } else { ");" });
        }
    }

    // ---- functions

    /// Rewrites a named function that is declared at top level.
    fn top_function(&mut self, function: &Function<'_>, name: &BindingIdentifier<'_>) {
        let whole = range(function.span);
        let known = self.names.get(name.name.as_str()).copied();
        let in_place = known.is_some_and(|known| known.declared_once && known.first_use >= whole.start)
            && !self.hoisted.contains(name.name.as_str());
        if in_place {
            self.insert(whole.start, &format!("let {} = ", name.name));
            self.edit(range(name.span), "");
            self.visit_function(function, ScopeFlags::Function);
            self.insert(whole.end, ";");
            return;
        }
        let outside = std::mem::take(&mut self.edits);
        self.edit(range(name.span), "");
        self.visit_function(function, ScopeFlags::Function);
        let edits = std::mem::replace(&mut self.edits, outside);
        self.moved.push(Moved { name: name.name.to_string(), range: whole.clone(), edits });
        self.remove_statement(whole);
    }

    // ---- modules

    fn import(&mut self, import: &ImportDeclaration<'_>) {
        if import.phase.is_some() {
            self.fault = Some(Fault {
                message: "`import defer` and `import source` are not supported in a cell".to_owned(),
                at: Some(import.span.start as usize),
            });
            return;
        }
        let call = self.import_call(&import.source, import.with_clause.as_deref());
        let mut namespace = None;
        let mut by_name = false;
        let mut named = Vec::new();
        for specifier in import.specifiers.iter().flatten() {
            match specifier {
                ImportDeclarationSpecifier::ImportDefaultSpecifier(s) => {
                    named.push(format!("default: {}", s.local.name))
                }
                ImportDeclarationSpecifier::ImportNamespaceSpecifier(s) => namespace = Some(s.local.name.to_string()),
                ImportDeclarationSpecifier::ImportSpecifier(s) => {
                    by_name = true;
                    named.push(format!("{}: {}", self.text(s.imported.span()), s.local.name));
                }
            }
        }
        let named = named.join(", ");
        self.imports.push(match namespace {
            Some(all) if named.is_empty() => format!("let {all} = {call}; "),
            Some(all) => format!("let {all} = {call}, {{ {named} }} = {all}; "),
            None if named.is_empty() => format!("void {call}; "),
            None if by_name => format!("let {{ {named} }} = __named({call}); "),
            None => format!("let {{ {named} }} = {call}; "),
        });
        self.remove_statement(range(import.span));
    }

    fn import_call(&self, source: &StringLiteral<'_>, with: Option<&WithClause<'_>>) -> String {
        let options = with.map(|with| {
            let entries: Vec<&str> = with.with_entries.iter().map(|entry| self.text(entry.span)).collect();
            format!(", {{ with: {{ {} }} }}", entries.join(", "))
        });
        format!("await __hold(__import({}{}))", self.text(source.span), options.unwrap_or_default())
    }

    fn import_for_effect(&mut self, source: &StringLiteral<'_>, with: Option<&WithClause<'_>>, span: Span) {
        let call = self.import_call(source, with);
        self.imports.push(format!("void {call}; "));
        self.remove_statement(range(span));
    }

    fn export_default(&mut self, export: &ExportDefaultDeclaration<'_>) {
        let declared = range(export.declaration.span());
        self.remove(export.span.start as usize..declared.start);
        match &export.declaration {
            ExportDefaultDeclarationKind::FunctionDeclaration(function) => {
                if let Some(name) = &function.id {
                    return self.top_function(function, name);
                }
            }
            ExportDefaultDeclarationKind::ClassDeclaration(class) if class.id.is_some() => {
                return self.visit_class(class);
            }
            _ => {}
        }
        // The semicolon is needed because the line before may have none.
        self.insert(declared.start, ";(");
        self.visit_export_default_declaration_kind(&export.declaration);
        self.insert(declared.end, ")");
    }

    fn top_statement<'a>(&mut self, statement: &Statement<'a>) {
        match statement {
            Statement::ImportDeclaration(import) => self.import(import),
            Statement::ExportAllDeclaration(export) => {
                self.import_for_effect(&export.source, export.with_clause.as_deref(), export.span);
            }
            Statement::ExportFromDeclaration(export) => {
                self.import_for_effect(&export.source, export.with_clause.as_deref(), export.span);
            }
            Statement::ExportNamedDeclaration(export) => self.remove_statement(range(export.span)),
            Statement::ExportDefaultDeclaration(export) => self.export_default(export),
            Statement::ExportDeclaration(export) => {
                self.remove(export.span.start as usize..export.declaration.span().start as usize);
                match &export.declaration {
                    Declaration::FunctionDeclaration(function) if function.id.is_some() => {
                        self.function_declaration(function);
                    }
                    Declaration::VariableDeclaration(declaration) => self.top_variables(declaration),
                    declaration => self.visit_declaration(declaration),
                }
            }
            Statement::FunctionDeclaration(function) => self.function_declaration(function),
            Statement::VariableDeclaration(declaration) => self.top_variables(declaration),
            statement => self.visit_statement(statement),
        }
    }

    fn top_variables(&mut self, declaration: &VariableDeclaration<'_>) {
        let written = |name: &String| self.names.get(name).is_none_or(|known| known.written);
        if declaration.kind == VariableDeclarationKind::Const && !names_of(declaration).iter().any(written) {
            let start = declaration.span.start as usize;
            // The replacement has the same length, so columns stay the same.
            self.edit(start..start + "const".len(), "let  ");
        }
        self.visit_variable_declaration(declaration);
    }

    fn function_declaration(&mut self, function: &Function<'_>) {
        if let Some(name) = &function.id {
            self.top_function(function, name);
        }
    }

    fn inside(&mut self, visit: impl FnOnce(&mut Self)) {
        self.depth += 1;
        visit(self);
        self.depth -= 1;
    }
}

impl<'a> Visit<'a> for Rewriter<'_> {
    fn visit_program(&mut self, program: &Program<'a>) {
        for statement in &program.body {
            self.top_statement(statement);
        }
    }

    fn visit_function(&mut self, function: &Function<'a>, flags: ScopeFlags) {
        self.inside(|this| walk::walk_function(this, function, flags));
    }

    fn visit_arrow_function_expression(&mut self, arrow: &ArrowFunctionExpression<'a>) {
        self.inside(|this| walk::walk_arrow_function_expression(this, arrow));
    }

    fn visit_static_block(&mut self, block: &StaticBlock<'a>) {
        self.inside(|this| walk::walk_static_block(this, block));
    }

    fn visit_await_expression(&mut self, expression: &AwaitExpression<'a>) {
        if self.depth > 0 {
            return walk::walk_await_expression(self, expression);
        }
        let argument = range(expression.argument.span());
        self.insert(argument.start, "__hold(");
        walk::walk_await_expression(self, expression);
        self.insert(argument.end, ")");
    }

    fn visit_import_expression(&mut self, expression: &ImportExpression<'a>) {
        let start = expression.span.start as usize;
        if expression.phase.is_none() {
            self.edit(start..start + "import".len(), "__import");
        }
        walk::walk_import_expression(self, expression);
    }

    fn visit_for_statement(&mut self, statement: &ForStatement<'a>) {
        self.loop_head = Some(LoopHead::Counting);
        if let Some(init) = &statement.init {
            self.visit_for_statement_init(init);
        }
        self.loop_head = None;
        statement.test.iter().chain(&statement.update).for_each(|expression| self.visit_expression(expression));
        self.visit_statement(&statement.body);
    }

    fn visit_for_in_statement(&mut self, statement: &ForInStatement<'a>) {
        self.loop_head = Some(LoopHead::Each);
        self.visit_for_statement_left(&statement.left);
        self.loop_head = None;
        self.visit_expression(&statement.right);
        self.visit_statement(&statement.body);
    }

    fn visit_for_of_statement(&mut self, statement: &ForOfStatement<'a>) {
        self.loop_head = Some(LoopHead::Each);
        self.visit_for_statement_left(&statement.left);
        self.loop_head = None;
        let waits = statement.r#await && self.depth == 0;
        let each = range(statement.right.span());
        if waits {
            self.insert(each.start, "__holdEach(");
        }
        self.visit_expression(&statement.right);
        if waits {
            self.insert(each.end, ")");
        }
        self.visit_statement(&statement.body);
    }

    fn visit_variable_declaration(&mut self, declaration: &VariableDeclaration<'a>) {
        // Code inside the declaration is no longer in the head of that loop.
        let head = self.loop_head.take();
        if self.depth > 0 || declaration.kind != VariableDeclarationKind::Var {
            return walk::walk_variable_declaration(self, declaration);
        }
        if self.is_hoisted(declaration) {
            return self.assign_instead(declaration, head);
        }
        let start = declaration.span.start as usize;
        self.edit(start..start + "var".len(), "let");
        walk::walk_variable_declaration(self, declaration);
    }
}

/// Finds each `var` that belongs to the cell itself, however deeply it is nested in blocks.
struct Vars {
    /// Start positions of the declarations that stand directly at top level.
    direct: HashSet<u32>,
    found: Vec<Var>,
}

struct Var {
    names: Vec<String>,
    direct: bool,
    end: usize,
}

impl<'a> Visit<'a> for Vars {
    fn visit_function(&mut self, _: &Function<'a>, _: ScopeFlags) {}

    fn visit_arrow_function_expression(&mut self, _: &ArrowFunctionExpression<'a>) {}

    fn visit_static_block(&mut self, _: &StaticBlock<'a>) {}

    fn visit_variable_declaration(&mut self, declaration: &VariableDeclaration<'a>) {
        if declaration.kind == VariableDeclarationKind::Var {
            self.found.push(Var {
                names: names_of(declaration),
                direct: self.direct.contains(&declaration.span.start),
                end: declaration.span.end as usize,
            });
        }
        walk::walk_variable_declaration(self, declaration);
    }
}

fn names_of(declaration: &VariableDeclaration<'_>) -> Vec<String> {
    let patterns = declaration.declarations.iter().map(|declarator| &declarator.id);
    patterns.flat_map(|pattern| pattern.get_binding_identifiers()).map(|name| name.name.to_string()).collect()
}

fn range(span: Span) -> Range<usize> {
    span.start as usize..span.end as usize
}
