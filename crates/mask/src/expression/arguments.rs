//! The values and options of a builder expression: split at commas and `=`, lists read from `@FILE`, every error with its place.

use super::ReadFile;
use crate::mask::MAX_SEQLEN;
use crate::{Documents, ExpressionFault as Fault, MaskError, MaskPreset};

/// What follows the colon of a builder expression, split but not yet understood.
pub(super) struct Arguments<'a> {
    builder: &'static str,
    /// The values before the first option.
    values: Vec<&'a str>,
    options: Vec<(&'a str, Vec<&'a str>)>,
    read: ReadFile<'a>,
}

/// A place in the arguments, as messages name it, for the values before the first option.
const SEQUENCE: &str = "sequence";

impl<'a> Arguments<'a> {
    /// Splits `text` and checks that every option is one of `known`, given once.
    pub(super) fn split(
        builder: &'static str,
        known: &[&'static str],
        text: &'a str,
        read: ReadFile<'a>,
    ) -> Result<Self, MaskError> {
        let mut arguments = Self { builder, values: Vec::new(), options: Vec::new(), read };
        if text.trim().is_empty() {
            return Ok(arguments);
        }
        for item in text.split(',') {
            let Some((name, value)) = item.split_once('=') else {
                match arguments.options.last_mut() {
                    Some((_, values)) => values.push(item.trim()),
                    None => arguments.values.push(item.trim()),
                }
                continue;
            };
            let name = name.trim();
            if !known.contains(&name) {
                let fault = Fault::UnknownOption { known: known.to_vec() };
                return Err(arguments.wrong(&name.escape_debug().to_string(), fault));
            }
            if arguments.option(name).is_some() {
                return Err(arguments.wrong(name, Fault::Twice));
            }
            arguments.options.push((name, vec![value.trim()]));
        }
        Ok(arguments)
    }

    /// An error at `field`.
    pub(super) fn wrong(&self, field: &str, problem: Fault) -> MaskError {
        MaskError::Expression { builder: self.builder, field: field.to_owned(), problem: Box::new(problem) }
    }

    /// The length of a plain sequence.
    pub(super) fn sequence(&self) -> Result<usize, MaskError> {
        match self.values[..] {
            [value] => self.number(SEQUENCE, value),
            [] => {
                let remedy = "the first value is its length, for example 4k";
                Err(self.wrong(SEQUENCE, Fault::Missing { remedy }))
            }
            _ => Err(self.wrong(SEQUENCE, Fault::OneLength { values: self.values.len() })),
        }
    }

    /// A mask of the comparison and its length.
    pub(super) fn preset(&self) -> Result<(MaskPreset, usize), MaskError> {
        let known = || MaskPreset::ALL.map(MaskPreset::name).to_vec();
        let [name, seqlen] = self.values[..] else {
            return Err(self.wrong("name", Fault::PresetForm { known: known() }));
        };
        let unknown = || self.wrong("name", Fault::NoPreset { name: name.to_owned(), known: known() });
        let preset = MaskPreset::named(name).ok_or_else(unknown)?;
        Ok((preset, self.number(SEQUENCE, seqlen)?))
    }

    /// The documents: cumulative starts, or `lengths=`.
    pub(super) fn documents(&self) -> Result<Documents, MaskError> {
        let starts = (!self.values.is_empty()).then_some(&self.values[..]);
        self.documents_of("starts", starts, "lengths")?.ok_or_else(|| {
            let remedy = "give cumulative starts such as 0,100,400, or lengths=100,300";
            self.wrong("starts", Fault::Missing { remedy })
        })
    }

    /// The keys' documents where they differ: `keys=` or `key-lengths=`.
    pub(super) fn key_documents(&self) -> Result<Option<Documents>, MaskError> {
        self.documents_of("keys", self.option("keys"), "key-lengths")
    }

    fn documents_of(
        &self,
        starts_field: &str,
        starts: Option<&[&str]>,
        lengths_field: &str,
    ) -> Result<Option<Documents>, MaskError> {
        let (field, documents) = match (starts, self.option(lengths_field)) {
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => {
                let (starts, lengths) = (starts_field.to_owned(), lengths_field.to_owned());
                return Err(self.wrong(lengths_field, Fault::StartsAndLengths { starts, lengths }));
            }
            (Some(starts), None) => {
                (starts_field, Documents::from_starts(self.numbers(starts_field, starts)?))
            }
            (None, Some(lengths)) => {
                (lengths_field, Documents::from_lengths(self.numbers(lengths_field, lengths)?))
            }
        };
        documents.map(Some).map_err(|error| self.wrong(field, Fault::Documents(error.into())))
    }

    /// The two parts of `shared-question`.
    pub(super) fn question_and_answers(&self) -> Result<(usize, Documents), MaskError> {
        let split = self.values.split_first().and_then(|(first, rest)| Some((first.split_once(';')?, rest)));
        let Some(((question, answer), answers)) = split else {
            let remedy = "write the question's length, a semicolon, the answers' lengths";
            return Err(self.wrong("answers", Fault::Missing { remedy }));
        };
        let question = self.number("question", question.trim())?;
        let answers: Vec<&str> = std::iter::once(answer.trim()).chain(answers.iter().copied()).collect();
        let lengths = self.numbers("answers", &answers)?;
        let answers = Documents::from_lengths(lengths)
            .map_err(|error| self.wrong("answers", Fault::Documents(error.into())))?;
        Ok((question, answers))
    }

    /// The blocks marked by `1` in the words of an option, as `(block row, block column)`. There must be `rows` words of
    /// `cols` digits each: a missing digit is more likely a slip than a block left out.
    pub(super) fn blocks(
        &self,
        field: &'static str,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<(usize, usize)>, MaskError> {
        let Some(values) = self.option(field) else {
            let remedy = "give one word of 0 and 1 for each block row, for example 11,01";
            return Err(self.wrong(field, Fault::Missing { remedy }));
        };
        let words = self.items(field, values)?;
        let mut blocks = Vec::new();
        for (row, (place, word)) in words.iter().enumerate() {
            for (col, digit) in word.chars().enumerate() {
                match digit {
                    '0' => {}
                    '1' => blocks.push((row, col)),
                    _ => return Err(self.wrong(place, Fault::BlockDigits { word: word.clone() })),
                }
            }
            // Only ASCII digits are left, so bytes are digits.
            if word.len() != cols {
                return Err(self.wrong(place, Fault::BlockColumns { cols, digits: word.len() }));
            }
        }
        if words.len() != rows {
            return Err(self.wrong(field, Fault::BlockRows { rows, words: words.len() }));
        }
        Ok(blocks)
    }

    /// A limit that must be given: a size, or `all` for none. `remedy` says how to write it.
    pub(super) fn limit(
        &self,
        field: &'static str,
        remedy: &'static str,
    ) -> Result<Option<usize>, MaskError> {
        match self.option(field) {
            None => Err(self.wrong(field, Fault::Missing { remedy })),
            Some(["all"]) => Ok(None),
            Some(_) => self.optional_size(field),
        }
    }

    /// The prefix of every document: one for all that have tokens, or one for each.
    pub(super) fn prefixes(&self, documents: &Documents) -> Result<Vec<usize>, MaskError> {
        let Some(values) = self.option("prefix") else {
            return Err(
                self.wrong("prefix", Fault::Missing { remedy: "write prefix=N, or one for each document" })
            );
        };
        Ok(match self.numbers("prefix", values)?[..] {
            [prefix] => documents.ranges().map(|range| if range.is_empty() { 0 } else { prefix }).collect(),
            ref prefixes => prefixes.to_vec(),
        })
    }

    /// A size that must be given.
    pub(super) fn size(&self, field: &'static str) -> Result<usize, MaskError> {
        self.optional_size(field)?.ok_or_else(|| self.wrong(field, Fault::MissingSize { field }))
    }

    /// A size that may be given.
    pub(super) fn optional_size(&self, field: &'static str) -> Result<Option<usize>, MaskError> {
        match self.option(field) {
            None => Ok(None),
            Some([value]) => self.number(field, value).map(Some),
            Some(values) => Err(self.wrong(field, Fault::OneNumber { values: values.len() })),
        }
    }

    fn option(&self, name: &str) -> Option<&[&'a str]> {
        self.options.iter().find(|(option, _)| *option == name).map(|(_, values)| &values[..])
    }

    fn numbers(&self, field: &str, values: &[&str]) -> Result<Vec<usize>, MaskError> {
        self.items(field, values)?.iter().map(|(place, item)| self.number(place, item)).collect()
    }

    /// The items of a list and the name of each one's place; `@FILE` stands for the items in a file. Either may be in brackets.
    fn items(&self, field: &str, values: &[&str]) -> Result<Vec<(String, String)>, MaskError> {
        let Some(path) = values.first().and_then(|value| value.strip_prefix('@')) else {
            let named = |(index, value): (usize, &&str)| (format!("{field}[{index}]"), (*value).to_owned());
            return self.without_brackets(field, values.iter().enumerate().map(named).collect());
        };
        if values.len() > 1 {
            return Err(self.wrong(field, Fault::BehindFile { path: path.to_owned() }));
        }
        let text = (self.read)(path)
            .map_err(|problem| self.wrong(field, Fault::Unreadable { path: path.to_owned(), problem }))?;
        // Some editors write a byte order mark in front.
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let mut items = Vec::new();
        for (index, line) in text.lines().map(str::trim).enumerate() {
            let place = format!("{field}: {path}:{}", index + 1);
            // A comma may end a line; two in a row leave something out.
            for part in line.strip_suffix(',').unwrap_or(line).split(',').filter(|_| !line.is_empty()) {
                let words = part.split_whitespace().map(str::to_owned);
                let before = items.len();
                items.extend(words.map(|word| (place.clone(), word)));
                if items.len() == before {
                    return Err(self.wrong(&place, Fault::NoValue));
                }
            }
        }
        self.without_brackets(field, items)
    }

    /// The items of a list that may stand in brackets, and these from its first and last item.
    fn without_brackets(
        &self,
        field: &str,
        mut items: Vec<(String, String)>,
    ) -> Result<Vec<(String, String)>, MaskError> {
        let bare = |item: &mut String, rest: Option<&str>| -> Option<bool> {
            let rest = rest?.trim().to_owned();
            *item = rest;
            Some(item.is_empty())
        };
        let opened = items.first_mut().and_then(|(_, item)| bare(item, item.clone().strip_prefix('[')));
        let closed = items.last_mut().and_then(|(_, item)| bare(item, item.clone().strip_suffix(']')));
        if opened.is_some() != closed.is_some() {
            return Err(self.wrong(field, Fault::Bracket));
        }
        // A bracket may stand alone, on a line of its own.
        if closed == Some(true) {
            items.pop();
        }
        if opened == Some(true) && !items.is_empty() {
            items.remove(0);
        }
        Ok(items)
    }

    /// Digits, with `k` or `M` behind them for 1024 or 1024 * 1024.
    fn number(&self, field: &str, text: &str) -> Result<usize, MaskError> {
        let (digits, unit) = match text.strip_suffix(['k', 'K']) {
            Some(digits) => (digits, 1024),
            None => match text.strip_suffix('M') {
                Some(digits) => (digits, 1024 * 1024),
                None => (text, 1),
            },
        };
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(self.wrong(field, Fault::NoNumber { text: text.to_owned() }));
        }
        // Only digits: what does not parse is too large.
        digits
            .parse::<usize>()
            .ok()
            .and_then(|number| number.checked_mul(unit))
            .filter(|&number| number <= MAX_SEQLEN)
            .ok_or_else(|| self.wrong(field, Fault::TooLarge { text: text.to_owned(), most: MAX_SEQLEN }))
    }
}
