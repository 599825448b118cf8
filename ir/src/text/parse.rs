//! Reading: returns all diagnostics it can find, at most twenty, in text order.
#![expect(clippy::wildcard_enum_match_arm, reason = "any other token is an error, new ones too")]

use std::collections::BTreeMap;
use std::ops::Range;

use super::attrs::{Attr, Attrs, Item, Names};
use super::lex::{Lexeme, Token, lex};
use super::ops::{build_op, unknown_attribute};
use super::print::FROZEN;
use crate::diagnostic::shortened;
use crate::dim::Dim;
use crate::infer::infer;
use crate::library::check::faults;
use crate::module::{Function, Kind, Module, Node, Value, ValueId};
use crate::numbers;
use crate::types::TensorType;
use crate::{DType, Diagnostic, Span};

/// The most diagnostics that one reading reports.
const DIAGNOSTICS_MAX: usize = 20;

/// The most elements that the fixed dims of a type have: bytes of many such values must not
/// overflow. Chosen: a thousand times the weights of the largest models.
const ELEMENTS_MAX: i64 = 1 << 50;

/// Whether a tensor of these dims has no more than [`ELEMENTS_MAX`] elements for sizes of one.
fn is_storable(dims: &[Dim]) -> bool {
    let sizes = dims.iter().filter_map(Dim::as_constant);
    let count = sizes.filter(|n| *n > 0).try_fold(1_i64, |n, size| n.checked_mul(size));
    count.is_some_and(|count| count <= ELEMENTS_MAX)
}

/// Reads the text of a module. `source` names the text in diagnostics.
///
/// # Errors
/// `E1001` for text that is no module text, `E1002` for a name that is unknown or taken, `E1003`
/// for a type that does not follow from the operands.
pub fn parse_module(source: &str, text: &str) -> Result<Module, Vec<Diagnostic>> {
    let mut parser = Parser::new(source, text, Names::default());
    let module = parser.module();
    if parser.diagnostics.is_empty() { Ok(module) } else { Err(parser.diagnostics) }
}

/// Stops the reading of a line; the diagnostic is noted already.
pub(crate) struct Stop;

pub(crate) type Parsed<T> = Result<T, Stop>;

pub(crate) struct Parser<'t> {
    source: &'t str,
    lexemes: Vec<Lexeme<'t>>,
    at: usize,
    pub(crate) names: Names,
    pub(crate) diagnostics: Vec<Diagnostic>,
}

impl<'t> Parser<'t> {
    pub(crate) fn new(source: &'t str, text: &'t str, names: Names) -> Parser<'t> {
        Parser { source, lexemes: lex(text), at: 0, names, diagnostics: Vec::new() }
    }

    // Tokens.

    pub(crate) fn peek(&self) -> Token<'t> {
        self.lexemes[self.at.min(self.lexemes.len() - 1)].token
    }

    fn next(&mut self) {
        self.at = (self.at + 1).min(self.lexemes.len());
    }

    fn here(&self) -> Range<usize> {
        self.lexemes[self.at.min(self.lexemes.len() - 1)].span.clone()
    }

    pub(crate) fn done(&self) -> bool {
        self.at + 1 >= self.lexemes.len()
    }

    pub(crate) fn fail<T>(
        &mut self,
        code: &'static str,
        bytes: Range<usize>,
        headline: impl Into<String>,
    ) -> Parsed<T> {
        let span = Span { source: self.source.to_owned(), bytes };
        self.report(Diagnostic::error(code, span, shortened(headline.into())));
        Err(Stop)
    }

    fn report(&mut self, diagnostic: Diagnostic) {
        if self.diagnostics.len() < DIAGNOSTICS_MAX {
            self.diagnostics.push(diagnostic);
        }
    }

    pub(crate) fn expected<T>(&mut self, what: &str) -> Parsed<T> {
        self.fail("E1001", self.here(), format!("expected {what}"))
    }

    pub(crate) fn eat(&mut self, mark: char) -> bool {
        let found = self.peek() == Token::Mark(mark);
        if found {
            self.next();
        }
        found
    }

    pub(crate) fn mark(&mut self, mark: char) -> Parsed<()> {
        if self.eat(mark) { Ok(()) } else { self.expected(&format!("`{mark}`")) }
    }

    pub(crate) fn word(&mut self, what: &str) -> Parsed<String> {
        match self.peek() {
            Token::Word(word) => {
                self.next();
                Ok(word.to_owned())
            }
            _ => self.expected(what),
        }
    }

    pub(crate) fn value_name(&mut self) -> Parsed<String> {
        match self.peek() {
            Token::Value(name) if !name.is_empty() => {
                self.next();
                Ok(name.to_owned())
            }
            _ => self.expected("a value such as `%x`"),
        }
    }

    fn function_name(&mut self) -> Parsed<String> {
        match self.peek() {
            Token::Function(name) if !name.is_empty() => {
                self.next();
                Ok(name.to_owned())
            }
            _ => self.expected("a function such as `@block`"),
        }
    }

    pub(crate) fn skip_newlines(&mut self) {
        while !self.done() && self.peek() == Token::Newline {
            self.next();
        }
    }

    fn skip_line(&mut self) {
        while !self.done() && self.peek() != Token::Newline {
            self.next();
        }
    }

    // Numbers, sizes, types.

    /// A number, or a name that stands for one.
    fn number(&mut self) -> Parsed<f64> {
        let negative = self.eat('-');
        let value = match self.peek() {
            Token::Number(n) => n,
            Token::Word("inf") => f64::INFINITY,
            Token::Word(word) => match self.named_number(word) {
                Some(n) => n,
                None => return self.fail("E1002", self.here(), format!("`{word}` is no number")),
            },
            _ => return self.expected("a number"),
        };
        self.next();
        Ok(if negative { -value } else { value })
    }

    fn named_number(&self, word: &str) -> Option<f64> {
        let dim = || self.names.dims.get(word).and_then(Dim::as_constant).map(|c| c as f64);
        self.names.attributes.get(word).copied().or_else(dim)
    }

    /// A polynomial such as `2*B*S+1`.
    fn dim(&mut self) -> Parsed<Dim> {
        let mut sum = Dim::constant(0);
        let mut negative = self.eat('-');
        loop {
            let mut term = Dim::constant(if negative { -1 } else { 1 });
            loop {
                let factor = self.dim_factor()?;
                term = &term * &factor;
                if self.eat('/') {
                    term = self.dim_quotient(&term)?;
                }
                if !self.eat('*') {
                    break;
                }
            }
            sum = &sum + &term;
            negative = self.peek() == Token::Mark('-');
            if !negative && self.peek() != Token::Mark('+') {
                return Ok(sum);
            }
            self.next();
        }
    }

    fn dim_quotient(&mut self, dividend: &Dim) -> Parsed<Dim> {
        let here = self.here();
        let divisor = self.dim_factor()?;
        match divisor.as_constant().and_then(|d| dividend.divide(d)) {
            Some(quotient) => Ok(quotient),
            None => self.fail("E1001", here, format!("`{divisor}` does not divide `{dividend}`")),
        }
    }

    fn dim_factor(&mut self) -> Parsed<Dim> {
        match self.peek() {
            Token::Number(n) if n.fract() == 0.0 && n < 9e15 => {
                self.next();
                Ok(Dim::constant(n as i64))
            }
            Token::Word(word) => {
                let attribute = self.names.attributes.get(word).map(|a| Dim::constant(*a as i64));
                let dim = match self.names.dims.get(word).cloned().or(attribute) {
                    Some(dim) => dim,
                    None if self.names.template => {
                        return self.fail("E1002", self.here(), format!("`{word}` is no size"));
                    }
                    None => Dim::symbol(word),
                };
                self.next();
                Ok(dim)
            }
            _ => self.expected("a size"),
        }
    }

    pub(crate) fn dtype(&mut self) -> Parsed<DType> {
        let here = self.here();
        let word = self.word("an element type")?;
        match word.parse().ok().or_else(|| self.names.dtypes.get(&word).copied()) {
            Some(dtype) => Ok(dtype),
            None => self.fail("E1001", here, format!("`{word}` is no element type")),
        }
    }

    fn tensor_type(&mut self) -> Parsed<TensorType> {
        let start = self.here().start;
        let dtype = self.dtype()?;
        self.mark('[')?;
        let mut dims = Vec::new();
        while !self.eat(']') {
            if !dims.is_empty() || self.peek() == Token::Mark(',') {
                self.mark(',')?;
            }
            if self.peek() == Token::Pack {
                self.next();
                dims.extend(self.names.pack.clone());
                // A pack may be empty, and a comma follows it all the same.
                if self.names.pack.is_empty() {
                    self.eat(',');
                }
            } else {
                let here = self.here();
                let dim = self.dim()?;
                if !dim.is_size() {
                    return self.fail("E1001", here, format!("`{dim}` is negative or too large"));
                }
                dims.push(dim);
            }
        }
        if !is_storable(&dims) {
            let ty = TensorType { dtype, dims };
            let end = self.lexemes[self.at - 1].span.end;
            let headline = format!("`{ty}` has too many elements");
            return self.fail("E1001", start..end, headline);
        }
        Ok(TensorType { dtype, dims })
    }

    // Functions.

    fn module(&mut self) -> Module {
        self.skip_newlines();
        let mut module = Module::default();
        let header = (|| {
            if self.word("`module`")? != "module" {
                self.at -= 1;
                return self.expected("`module`");
            }
            self.word("the module's name")
        })();
        module.name = header.unwrap_or_default();
        self.skip_line();
        loop {
            self.skip_newlines();
            if self.done() || self.diagnostics.len() >= DIAGNOSTICS_MAX {
                return module;
            }
            let here = self.here();
            match self.function(&module) {
                Ok(function) if module.function(&function.name).is_some() => {
                    let headline = format!("a second function `@{}`", function.name);
                    let _: Parsed<()> = self.fail("E1002", here, headline);
                    self.skip_line();
                }
                Ok(function) => {
                    module.functions.push(function);
                    self.skip_line();
                }
                Err(Stop) => self.skip_function(),
            }
        }
    }

    /// Goes to the line that begins the next function.
    fn skip_function(&mut self) {
        loop {
            self.skip_line();
            self.skip_newlines();
            let begins = |word: &str| self.peek() == Token::Word(word);
            if self.done() || ["func", "composite", "kernel"].into_iter().any(begins) {
                return;
            }
        }
    }

    fn function(&mut self, module: &Module) -> Parsed<Function> {
        let here = self.here();
        let keyword = self.word("`func`, `composite` or `kernel`")?;
        let name = self.function_name()?;
        let mut places = BTreeMap::new();
        let kind = match keyword.as_str() {
            "func" => Kind::Layer,
            "kernel" => Kind::Kernel,
            "composite" => {
                self.mark('=')?;
                places.insert(None, self.here());
                let name = self.word("the composite's name")?;
                Kind::Composite { name, attributes: self.attribute_list(&mut places)? }
            }
            _ => return self.fail("E1001", here, "expected `func`, `composite` or `kernel`"),
        };
        let mut function = Function::new(name, kind);
        self.params(&mut function)?;
        self.check_attributes(&function, &places)?;
        self.body(module, &mut function)?;
        Ok(function)
    }

    /// Reports what the library does not take of the attributes of its composite, at the place of
    /// each or that of the composite's name.
    fn check_attributes(
        &mut self,
        function: &Function,
        places: &BTreeMap<Option<String>, Range<usize>>,
    ) -> Parsed<()> {
        let Kind::Composite { name, attributes } = &function.kind else { return Ok(()) };
        let faults = faults(name, attributes, &function.param_types());
        let is_fine = faults.is_empty();
        for fault in faults {
            let bytes = places.get(&fault.attribute).or(places.get(&None)).cloned();
            let bytes = bytes.unwrap_or_default();
            self.report(fault.at(Span { source: self.source.to_owned(), bytes }));
        }
        if is_fine { Ok(()) } else { Err(Stop) }
    }

    /// Reads `(key=number, …)`, and notes the place of each.
    fn attribute_list(
        &mut self,
        places: &mut BTreeMap<Option<String>, Range<usize>>,
    ) -> Parsed<BTreeMap<String, f64>> {
        let mut attributes = BTreeMap::new();
        self.mark('(')?;
        while !self.eat(')') {
            if !attributes.is_empty() {
                self.mark(',')?;
            }
            let here = self.here();
            let key = self.word("an attribute")?;
            self.mark('=')?;
            let number = self.number()?;
            let place = here.start..self.lexemes[self.at - 1].span.end;
            if attributes.insert(key.clone(), number).is_some() {
                return self.fail("E1002", place, format!("`{key}` is given twice"));
            }
            places.insert(Some(key), place);
        }
        Ok(attributes)
    }

    /// Reads `(%x: type, %w: frozen type, …)`, on one line or several.
    pub(crate) fn params(&mut self, function: &mut Function) -> Parsed<()> {
        self.mark('(')?;
        loop {
            self.skip_newlines();
            if self.eat(')') {
                return Ok(());
            }
            let here = self.here();
            let name = self.value_name()?;
            self.mark(':')?;
            let frozen = self.peek() == Token::Word(FROZEN);
            if frozen {
                self.next();
            }
            let ty = self.tensor_type()?;
            let param = self.define(function, here, name, ty)?;
            function.values[param.index()].frozen = frozen;
            function.param_count += 1;
            self.skip_newlines();
            if !self.eat(',') {
                return self.mark(')');
            }
        }
    }

    /// Reads `{ … return … }`. Lines that are wrong are reported and skipped.
    pub(crate) fn body(&mut self, module: &Module, function: &mut Function) -> Parsed<()> {
        self.mark('{')?;
        let mut wrong = false;
        loop {
            self.skip_newlines();
            if self.done() {
                return self.expected("`}`");
            }
            if self.peek() == Token::Word("return") {
                break;
            }
            if self.node(module, function).is_err() {
                wrong = true;
                self.skip_line();
                // What a skipped line defines is unknown from here on: only the first is told.
                break;
            }
        }
        if wrong {
            while !self.done() && self.peek() != Token::Mark('}') {
                self.next();
            }
            return Err(Stop);
        }
        self.next();
        while let Token::Value(_) = self.peek() {
            let result = self.operand(function)?;
            function.results.push(result);
            self.eat(',');
        }
        self.skip_newlines();
        self.mark('}')
    }

    fn define(
        &mut self,
        function: &mut Function,
        here: Range<usize>,
        name: String,
        ty: TensorType,
    ) -> Parsed<ValueId> {
        if function.find(&name).is_some() {
            return self.fail("E1002", here, format!("`%{name}` is defined twice"));
        }
        function.values.push(Value::new(name, ty));
        Ok(ValueId(function.values.len() as u32 - 1))
    }

    fn operand(&mut self, function: &Function) -> Parsed<ValueId> {
        let here = self.here();
        let name = self.value_name()?;
        match function.find(&name) {
            Some(id) => Ok(id),
            None => self.fail("E1002", here, format!("`%{name}` is not defined before it is used")),
        }
    }

    /// Reads `%a: type, %b: type = op attributes operands`. In a template types may be left out.
    pub(crate) fn node(&mut self, module: &Module, function: &mut Function) -> Parsed<()> {
        let mut declared = Vec::new();
        loop {
            let here = self.here();
            let name = self.value_name()?;
            let ty = if self.eat(':') { Some(self.tensor_type()?) } else { None };
            declared.push((here, name, ty));
            if !self.eat(',') {
                break;
            }
        }
        self.mark('=')?;
        let op_at = self.here();
        let head = self.word("an op")?;
        let attrs = self.attrs(&head)?;
        let mut operands = Vec::new();
        while let Token::Value(_) = self.peek() {
            operands.push(self.operand(function)?);
        }
        if self.peek() != Token::Newline && self.peek() != Token::Mark('}') {
            return self.expected("the end of the line");
        }
        if let Some(unknown) = unknown_attribute(&head, &attrs) {
            return self.fail("E1001", op_at, unknown);
        }
        if let (false, Some(name)) = (self.names.template, attrs.fraction()) {
            let headline = format!("`{name}` of `{head}` is no whole number, or a huge one");
            return self.fail("E1001", op_at, headline);
        }
        let types: Vec<&TensorType> = operands.iter().map(|o| function.ty(*o)).collect();
        let wanted = declared[0].2.as_ref();
        let Some(op) = build_op(&head, &attrs, &types, wanted, self.names.pack.len()) else {
            return self.fail(
                "E1001",
                op_at,
                format!("`{head}` is no op, or its attributes are off"),
            );
        };
        let inferred = match infer(&op, &types, module) {
            Ok(inferred) => inferred,
            Err(error) => return self.fail("E1003", op_at, error.to_string()),
        };
        // Those of the library follow from attributes, which keep to bounds of their own.
        if let (false, Err(error)) = (self.names.template, numbers::check(&op)) {
            return self.fail("E1003", op_at, error.to_string());
        }
        if let Some(large) = inferred.iter().find(|ty| !is_storable(&ty.dims)) {
            return self.fail("E1001", op_at, format!("`{large}` has too many elements"));
        }
        if inferred.len() != declared.len() {
            let found = format!("`{head}` has {} results, not {}", inferred.len(), declared.len());
            return self.fail("E1003", op_at, found);
        }
        let mut results = Vec::new();
        for ((here, name, ty), inferred) in declared.into_iter().zip(inferred) {
            if let Some(ty) = ty.filter(|ty| *ty != inferred) {
                let headline = format!("`%{name}` is {inferred}, not {ty}");
                return self.fail("E1003", here, headline);
            }
            results.push(self.define(function, here, name, inferred)?);
        }
        function.nodes.push(Node { op, operands, results });
        Ok(())
    }

    fn attrs(&mut self, head: &str) -> Parsed<Attrs> {
        let mut attrs = Attrs::default();
        loop {
            match self.peek() {
                Token::Word(word) => {
                    self.next();
                    if self.eat('=') {
                        let here = self.here();
                        let value = self.attr_value()?;
                        if attrs.named.insert(word.to_owned(), value).is_some() {
                            return self.fail("E1001", here, format!("`{word}` is said twice"));
                        }
                    } else if let Some(number) =
                        (head == "constant").then(|| self.named_number(word)).flatten()
                    {
                        attrs.bare.push(Attr::Number(number));
                    } else if word == "inf" {
                        attrs.bare.push(Attr::Number(f64::INFINITY));
                    } else {
                        attrs.bare.push(Attr::Word(word.to_owned()));
                    }
                }
                Token::Number(_) | Token::Mark('-') => {
                    let number = self.number()?;
                    attrs.bare.push(Attr::Number(number));
                }
                Token::Einsum(text) | Token::Function(text) => {
                    self.next();
                    attrs.bare.push(Attr::Word(text.to_owned()));
                }
                _ => return Ok(attrs),
            }
        }
    }

    fn attr_value(&mut self) -> Parsed<Attr> {
        if self.eat('[') {
            let mut items = Vec::new();
            while !self.eat(']') {
                if !items.is_empty() {
                    self.mark(',')?;
                }
                if self.peek() == Token::Pack {
                    self.next();
                    items.push(Item::Pack);
                } else {
                    items.push(Item::Dim(self.dim()?));
                }
            }
            return Ok(Attr::List(items));
        }
        match self.peek() {
            Token::Word(word) if self.named_number(word).is_none() => {
                self.next();
                Ok(Attr::Word(word.to_owned()))
            }
            Token::Word(word) if self.names.dims.contains_key(word) => {
                let here = self.here();
                match self.dim()?.as_constant() {
                    Some(size) => Ok(Attr::Number(size as f64)),
                    None => self.fail("E1001", here, format!("`{word}` is no fixed size")),
                }
            }
            _ => Ok(Attr::Number(self.number()?)),
        }
    }
}
