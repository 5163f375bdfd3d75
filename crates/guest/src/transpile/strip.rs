//! This module converts TypeScript to JavaScript: it removes types, and turns enums, namespaces, parameter properties
//! and legacy decorators into code.

use std::path::Path;

use oxc::allocator::Allocator;
use oxc::ast::ast::{ClassElement, Declaration, Statement};
use oxc::codegen::{Codegen, CodegenOptions};
use oxc::parser::Parser;
use oxc::semantic::SemanticBuilder;
use oxc::span::SourceType;
use oxc::transformer::{HelperLoaderMode, TransformOptions, Transformer};

use super::Fault;

pub(super) struct Stripped {
    pub code: String,
    /// Pairs of a position in `code` and a position in the cell, sorted. Lines and columns start at 0; columns count
    /// UTF-16 units.
    positions: Vec<((u32, u32), (u32, u32))>,
}

impl Stripped {
    /// Returns the position in the cell from which the code at this position comes.
    pub(super) fn origin(&self, line: u32, column: u32) -> Option<(u32, u32)> {
        let after = self.positions.partition_point(|(position, _)| *position <= (line, column));
        let (position, origin) = self.positions.get(after.checked_sub(1)?)?;
        (position.0 == line).then_some(*origin)
    }
}

pub(super) fn strip(code: &str) -> Result<Stripped, Fault> {
    let allocator = Allocator::default();
    let parsed = Parser::new(&allocator, code, SourceType::ts().with_module(true)).parse();
    if let Some(fault) = Fault::first_of(&parsed.diagnostics) {
        return Err(if is_jsx(code) { no_jsx(fault) } else { fault });
    }
    let mut program = parsed.program;
    let built = SemanticBuilder::new()
        .with_check_syntax_error(true)
        .with_excess_capacity(2.0)
        .with_enum_eval(true)
        .build(&program);
    if let Some(fault) = Fault::first_of(&built.diagnostics) {
        return Err(fault);
    }
    let silent = program.body.last().is_some_and(becomes_an_expression);
    let scoping = built.semantic.into_scoping();
    let options = options();
    let done = Transformer::new(&allocator, Path::new("cell.ts"), &options).build_with_scoping(scoping, &mut program);
    if let Some(fault) = Fault::first_of(&done.diagnostics) {
        return Err(fault);
    }
    let printing = CodegenOptions { source_map_path: Some("cell.ts".into()), ..CodegenOptions::default() };
    let printed = Codegen::new().with_options(printing).build(&program);
    let tokens = printed.map.iter().flat_map(|map| map.get_tokens());
    let mut positions: Vec<_> =
        tokens.map(|t| ((t.get_dst_line(), t.get_dst_col()), (t.get_src_line(), t.get_src_col()))).collect();
    positions.sort_unstable();
    let mut code = printed.code;
    if silent {
        code.push_str("void 0;\n");
    }
    Ok(Stripped { code, positions })
}

/// Returns options that lower only TypeScript itself.
fn options() -> TransformOptions {
    let mut options = TransformOptions::default();
    // The next cell may need an import that this cell does not use.
    options.typescript.only_remove_type_imports = true;
    // Another cell may use a const enum of this cell without knowing its members.
    options.typescript.optimize_const_enums = false;
    options.decorator.legacy = true;
    // The driver provides the helpers under the global name `babelHelpers`.
    options.helper_loader.mode = HelperLoaderMode::External;
    options
}

/// Returns whether the last statement is a declaration that becomes an expression. A declaration at the end shows no
/// value, but the expression would.
fn becomes_an_expression(last: &Statement<'_>) -> bool {
    let class = match last {
        Statement::TSEnumDeclaration(_) => return true,
        Statement::ClassDeclaration(class) => class,
        Statement::ExportDeclaration(export) => match &export.declaration {
            Declaration::TSEnumDeclaration(_) => return true,
            Declaration::ClassDeclaration(class) => class,
            _ => return false,
        },
        _ => return false,
    };
    let in_members = class.body.body.iter().any(|member| match member {
        ClassElement::MethodDefinition(method) => {
            !method.decorators.is_empty() || method.value.params.items.iter().any(|p| !p.decorators.is_empty())
        }
        ClassElement::PropertyDefinition(property) => !property.decorators.is_empty(),
        ClassElement::AccessorProperty(property) => !property.decorators.is_empty(),
        ClassElement::StaticBlock(_) | ClassElement::TSIndexSignature(_) => false,
    });
    in_members || !class.decorators.is_empty()
}

fn is_jsx(code: &str) -> bool {
    let allocator = Allocator::default();
    let parsed = Parser::new(&allocator, code, SourceType::tsx()).parse();
    parsed.diagnostics.is_empty()
}

pub(super) fn no_jsx(fault: Fault) -> Fault {
    Fault { message: "JSX is not supported in a cell: call the functions it stands for".to_owned(), ..fault }
}
